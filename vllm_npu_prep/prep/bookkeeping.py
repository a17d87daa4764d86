"""Compiled loops that write counts, sampled tokens and drafts into the tables, for all requests."""

from vllm_npu_prep.prep.arrays import NO_PREVIOUS_ROW
from vllm_npu_prep.prep.compiled import compiled

NO_TOKEN = -1
"""What the rejection sampler leaves in place of a token that it rejected."""


@compiled
def enter_counts(
    request_rows,  # [n] int64
    counts,  # [n] int32
    prefill_len,  # [max_num_reqs] int32
    num_computed_tokens,  # [max_num_reqs] int32, updated
    num_computed_prefill_tokens,  # [max_num_reqs] int32, updated
    num_tokens,  # [max_num_reqs] int32, updated
):
    """Enter the computed tokens of requests, and what follows from them.

    A request past its prompt has one known token more: its last sample.

    Returns
    -------
    bool
        Whether any of the requests still computes its prompt.
    """
    some_prefill = False
    for index in range(request_rows.shape[0]):
        row = request_rows[index]
        computed, prefill = counts[index], prefill_len[row]
        num_computed_tokens[row] = computed
        num_computed_prefill_tokens[row] = min(computed, prefill)
        num_tokens[row] = max(prefill, computed + 1)
        some_prefill |= computed < prefill
    return some_prefill


@compiled
def take_back_drafts(
    request_rows,  # [n] int64
    counts,  # [n] int32, updated
    sample_rows,  # [max_num_reqs] int64: rows of samples, older ones first; negative: none
    num_older,
    num_drafts,  # [max_num_reqs] int32, of the last step
    ends,  # [max_num_reqs] int32: where the last step ended, drafts included
    num_valid_tokens,  # [rows of the last step] int32
):
    """Lower counts of computed tokens that include rejected drafts of the last step."""
    for index in range(request_rows.shape[0]):
        request_row = request_rows[index]
        row, drafts = sample_rows[request_row] - num_older, num_drafts[request_row]
        if row >= 0 and drafts > 0:
            rejected = drafts + 1 - num_valid_tokens[row]
            counts[index] = min(counts[index], ends[request_row] - rejected)


@compiled
def place_samples(
    request_rows,  # [num_reqs] int64
    discard,  # [num_reqs] bool
    sample_rows,  # [max_num_reqs] int64, updated
):
    """Give each request of a step the row of its sample, unless the step leaves out samples.

    Returns
    -------
    int
        The number of requests that have a sample and are not in the step. Their samples come
        first. So if the number is not 0, the step's requests get no row here.
    """
    for index in range(request_rows.shape[0]):
        sample_rows[request_rows[index]] = NO_PREVIOUS_ROW
    left_out = 0
    for row in range(sample_rows.shape[0]):
        left_out += sample_rows[row] >= 0
    if left_out == 0:
        for index in range(request_rows.shape[0]):
            if not discard[index]:
                sample_rows[request_rows[index]] = index
    return left_out


@compiled
def count_accepted_tokens(
    sampled_token_ids,  # [num_reqs, width] int64, -1 after a request's last token
    discard_request_mask,  # [num_reqs or more] bool
    num_draft_tokens,  # [num_reqs or more] int32
    backup_next_token_ids,  # [num_reqs or more] int32
    query_start_loc,  # [num_reqs + 1 or more] int32
    counted,  # [4, num_reqs] int32, written
):
    """Write each request's next token, the numbers of its accepted tokens and of its rejected
    drafts, and its last token of the step that was not rejected."""
    for req in range(sampled_token_ids.shape[0]):
        next_token, valid, rejected = backup_next_token_ids[req], 0, 0
        if not discard_request_mask[req]:
            while valid < sampled_token_ids.shape[1] and sampled_token_ids[req, valid] >= 0:
                next_token = sampled_token_ids[req, valid]
                valid += 1
        if num_draft_tokens[req] > 0:
            rejected = num_draft_tokens[req] + 1 - valid
        counted[0, req], counted[1, req], counted[2, req] = next_token, valid, rejected
        counted[3, req] = query_start_loc[req + 1] - 1 - rejected


@compiled
def append_sampled_tokens(
    sampled_token_ids,  # [num_reqs] int64
    discard_request_mask,  # [num_reqs] bool
    num_tokens,  # [max_num_reqs] int32, updated
    token_ids,  # [max_num_reqs, max_model_len] int32, updated
    is_token_ids,  # [max_num_reqs, max_model_len] bool, updated
):
    """Write one sampled token into the token table for each request that is not discarded.

    Returns
    -------
    int
        The first row that has no room for its token, -1 if all have room. Rows before it are
        written.
    """
    for req in range(sampled_token_ids.shape[0]):
        if discard_request_mask[req]:
            continue
        end = num_tokens[req]
        if end >= token_ids.shape[1]:
            return req
        token_ids[req, end] = sampled_token_ids[req]
        is_token_ids[req, end] = True
        num_tokens[req] = end + 1
    return -1


@compiled
def append_verified_tokens(
    sampled_token_ids,  # [num_reqs, width] int32
    discard_request_mask,  # [num_reqs] bool
    vocab_size,
    num_tokens,  # [max_num_reqs] int32, updated
    token_ids,  # [max_num_reqs, max_model_len] int32, updated
    is_token_ids,  # [max_num_reqs, max_model_len] bool, updated
    kept_token_ids,  # [num_reqs * width] int32, written
    kept_ends,  # [num_reqs + 1] int32, written
):
    """Append the tokens that verification kept, which are those of the vocabulary.

    They are also listed in `kept_token_ids`: the tokens of a request begin at its entry of
    `kept_ends` and end at the next entry.

    Returns
    -------
    int
        The first row that has no room for its tokens, -1 if all have room. Rows before it are
        written.
    """
    kept = 0
    kept_ends[0] = 0
    for req in range(sampled_token_ids.shape[0]):
        end = num_tokens[req]
        if not discard_request_mask[req]:
            for index in range(sampled_token_ids.shape[1]):
                token = sampled_token_ids[req, index]
                if token == NO_TOKEN or token >= vocab_size:
                    continue
                if end >= token_ids.shape[1]:
                    return req
                token_ids[req, end] = token
                is_token_ids[req, end] = True
                kept_token_ids[kept] = token
                end += 1
                kept += 1
            num_tokens[req] = end
        kept_ends[req + 1] = kept
    return -1


@compiled
def write_draft_tokens(
    rows,  # [num_reqs] int64
    num_draft_tokens,  # [num_reqs] int32
    draft_token_ids,  # [sum of num_draft_tokens] int32
    num_tokens,  # [max_num_reqs] int32
    token_ids,  # [max_num_reqs, max_model_len] int32, updated
    is_token_ids,  # [max_num_reqs, max_model_len] bool, updated
):
    """Write each request's drafts into its row, after its tokens.

    Returns
    -------
    int
        The first request that has no room for its drafts, -1 if all have room. Requests before it
        are written.
    """
    first = 0
    for req in range(rows.shape[0]):
        row = rows[req]
        end = num_tokens[row]
        if end + num_draft_tokens[req] > token_ids.shape[1]:
            return req
        for draft in range(num_draft_tokens[req]):
            token_ids[row, end + draft] = draft_token_ids[first + draft]
            is_token_ids[row, end + draft] = True
        first += num_draft_tokens[req]
    return -1
