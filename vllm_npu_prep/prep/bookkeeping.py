"""Compiled loops that write sampled tokens and drafts into the token table, for all requests."""

from vllm_npu_prep.prep.compiled import compiled

NO_TOKEN = -1
"""What the rejection sampler leaves in place of a token that it rejected."""


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
