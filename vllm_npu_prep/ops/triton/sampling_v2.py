"""The Triton kernels of the V2 runner's sampler in torch, vectorised over rows of logits.

Arguments have the order of the Triton kernels (``vllm/v1/worker/gpu/sample/``,
``vllm/v1/worker/gpu/structured_outputs.py``); vLLM's dispatcher routes their launches here. Shapes
follow from sizes that the host knows, so nothing is read back. `tests/ops/test_sampling_v2.py`
holds each against the source of its kernel.

Sizes in comments: rows of logits R, request rows S, vocabulary V.
"""

from typing import Any

import torch

INFINITY = float("inf")
BITS = 32
"""Number of bits in a word of a packed mask."""


def scale_by_temperature(
    logits: torch.Tensor,  # [R, V], changed
    logits_stride: int,
    expanded_idx_mapping: torch.Tensor,  # [R] int64
    temperature: torch.Tensor,  # [S] float32
    vocab_size: int,
    **_: Any,
) -> None:
    """Divide by the temperature, unless it is 0: ``_temperature_kernel`` of ``gumbel.py``."""
    chosen = temperature[expanded_idx_mapping]
    logits.div_(torch.where(chosen == 0, 1.0, chosen)[:, None])


def limit_by_min_p(
    logits: torch.Tensor,  # [R, V], changed
    logits_stride: int,
    expanded_idx_mapping: torch.Tensor,  # [R] int64
    min_p: torch.Tensor,  # [S] float32
    vocab_size: int,
    **_: Any,
) -> None:
    """Leave out tokens less likely than a share of the best: ``_min_p_kernel`` of ``min_p.py``."""
    least = logits.amax(-1).float() + min_p[expanded_idx_mapping].log()  # log(0) limits nothing
    logits.masked_fill_(logits < least[:, None], -INFINITY)


def count_tokens(
    expanded_idx_mapping: torch.Tensor,  # [N] int64, new requests
    all_token_ids: torch.Tensor,  # [S, max_model_len] int32
    all_token_ids_stride: int,
    prompt_len: torch.Tensor,  # [S] int32
    prefill_len: torch.Tensor,  # [S] int32
    prompt_bin_mask: torch.Tensor,  # [S, ceil(V / 32)] int32, rows cleared before, written
    prompt_bin_mask_stride: int,
    output_bin_counts: torch.Tensor,  # [S, V] int32, rows cleared before, written
    output_bin_counts_stride: int,
    **_: Any,
) -> None:
    """Note which tokens a prompt has, and count the tokens that came after it.

    This is ``_bincount_kernel`` of ``penalties.py``.
    """
    vocab_size = output_bin_counts.shape[1]
    num_words = prompt_bin_mask.shape[1]
    tokens = all_token_ids[expanded_idx_mapping].long()
    places = torch.arange(tokens.shape[1], device=tokens.device)
    in_prompt = places < prompt_len[expanded_idx_mapping][:, None]
    is_known = places < prefill_len[expanded_idx_mapping][:, None]
    is_known &= tokens >= 0  # an embedding of a prompt is no token
    tokens = tokens.where(is_known, 0)  # past a request's tokens, a row holds what was there before
    counts = torch.zeros(
        (len(tokens), 2, num_words * BITS), dtype=torch.int32, device=tokens.device
    )
    counts[:, 0].scatter_add_(1, tokens, (in_prompt & is_known).int())
    counts[:, 1].scatter_add_(1, tokens, (is_known & ~in_prompt).int())
    output_bin_counts.index_copy_(0, expanded_idx_mapping, counts[:, 1, :vocab_size])
    bits = (counts[:, 0] > 0).view(len(tokens), num_words, BITS).long()
    words = (bits << torch.arange(BITS, device=tokens.device)).sum(-1)
    words = torch.where(words >= 1 << (BITS - 1), words - (1 << BITS), words)  # as int32 has it
    prompt_bin_mask.index_copy_(0, expanded_idx_mapping, words.int())


def apply_penalties(
    logits: torch.Tensor,  # [R, V] float32, changed
    logits_stride: int,
    expanded_idx_mapping: torch.Tensor,  # [R] int64
    token_ids: torch.Tensor,  # [R] int32, the input of each row
    expanded_local_pos: torch.Tensor,  # [R] int32, place of each row among its request's
    repetition_penalty: torch.Tensor,  # [S] float32
    frequency_penalty: torch.Tensor,  # [S] float32
    presence_penalty: torch.Tensor,  # [S] float32
    prompt_bin_mask: torch.Tensor,  # [S, ceil(V / 32)] int32
    prompt_bin_mask_stride: int,
    output_bin_counts: torch.Tensor,  # [S, V] int32
    output_bin_counts_stride: int,
    vocab_size: int,
    **_: Any,
) -> None:
    """Apply penalties; a row counts the drafts before it, too: ``_penalties_kernel``."""
    counts = output_bin_counts[expanded_idx_mapping]
    if expanded_local_pos.stride(0):  # else the one value is 0: no row has drafts before it
        counts = counts + _draft_counts(token_ids, expanded_local_pos, vocab_size)
    is_in_output = counts > 0
    in_prompt = _unpacked(prompt_bin_mask[expanded_idx_mapping], vocab_size)
    repetition = repetition_penalty[expanded_idx_mapping][:, None]
    scale = torch.where(in_prompt | is_in_output, repetition, 1.0)
    logits.mul_(torch.where(logits > 0, 1.0 / scale, scale))
    logits.sub_(frequency_penalty[expanded_idx_mapping][:, None] * counts)
    logits.sub_(presence_penalty[expanded_idx_mapping][:, None] * is_in_output)


def apply_logit_bias(
    logits: torch.Tensor,  # [R, V] float32, changed
    logits_stride: int,
    vocab_size: int,
    expanded_idx_mapping: torch.Tensor,  # [R] int64
    num_allowed_token_ids: torch.Tensor,  # [S] int32
    allowed_token_ids: torch.Tensor,  # [S, A] int32
    allowed_token_ids_stride: int,
    num_logit_bias: torch.Tensor,  # [S] int32
    bias_token_ids: torch.Tensor,  # [S, B] int32
    bias_token_ids_stride: int,
    bias: torch.Tensor,  # [S, B] float32
    bias_stride: int,
    pos: torch.Tensor,  # [R] int64
    min_lens: torch.Tensor,  # [S] int32
    num_stop_token_ids: torch.Tensor,  # [S] int32
    restore_when_all_masked: torch.Tensor,  # [S] int32
    stop_token_ids: torch.Tensor,  # [S, C] int32
    stop_token_ids_stride: int,
    **constants: Any,
) -> None:
    """Apply allowed tokens, then bias, then minimal lengths.

    This is ``_bias_kernel`` of ``logit_bias.py``.
    """
    request_rows = expanded_idx_mapping
    num_allowed = num_allowed_token_ids[request_rows]
    allowed = _marked(allowed_token_ids[request_rows], num_allowed, vocab_size)
    logits.masked_fill_(~allowed & (num_allowed > 0)[:, None], -INFINITY)
    tokens, has_bias = _listed(bias_token_ids[request_rows], num_logit_bias[request_rows])
    logits.scatter_add_(1, tokens, torch.where(has_bias, bias[request_rows], 0.0).to(logits.dtype))
    num_stops = num_stop_token_ids[request_rows]
    is_short = (num_stops > 0) & (pos + 1 < min_lens[request_rows])
    stops = _marked(stop_token_ids[request_rows], num_stops, vocab_size) & is_short[:, None]
    may_restore = None
    if constants["CHECK_ALL_MASKED_ROWS"]:
        may_restore = restore_when_all_masked[request_rows] != 0
    forbid_stops(logits, stops, may_restore)


def forbid_stops(
    logits: torch.Tensor, stops: torch.Tensor, may_restore: torch.Tensor | None
) -> None:
    """Forbid stop tokens, bool ``[R, V]``, in float32 ``[R, V]`` logits.

    Rows of `may_restore`, bool ``[R]``, keep theirs if no other token is left.
    """
    if may_restore is None:
        logits.masked_fill_(stops, -INFINITY)
        return
    without_stops = logits.masked_fill(stops, -INFINITY)
    restored = (without_stops.amax(-1) == -INFINITY) & may_restore
    kept = restored[:, None] & (logits.abs() < INFINITY)
    logits.copy_(torch.where(stops & ~kept, -INFINITY, logits))


def forbid_bad_words(
    logits: torch.Tensor,  # [R, V] float32, changed
    logits_stride: int,
    expanded_idx_mapping: torch.Tensor,  # [R] int64
    bad_word_token_ids: torch.Tensor,  # [S, W] int32, the words of a request one after the other
    bad_word_token_ids_stride: int,
    bad_word_offsets: torch.Tensor,  # [S, words + 1] int32
    bad_word_offsets_stride: int,
    num_bad_words: torch.Tensor,  # [S] int32
    all_token_ids: torch.Tensor,  # [S, max_model_len] int32
    all_token_ids_stride: int,
    prompt_len: torch.Tensor,  # [S] int32
    total_len: torch.Tensor,  # [S] int32
    input_ids: torch.Tensor,  # [R] int32, the input of each row
    expanded_local_pos: torch.Tensor,  # [R] int32, place of each row among its request's
    **_: Any,
) -> None:
    """Forbid the last token of a bad word whose other tokens have just been generated.

    This is ``_bad_words_kernel`` of ``bad_words.py``: the drafts before a row count as output. Each
    token of each word is compared with its place in the output, all at once. A word whose last
    token has no logit forbids nothing, as on V1: a tokenizer may have more tokens than a model has.
    """
    request_rows = expanded_idx_mapping
    words, offsets = bad_word_token_ids[request_rows].long(), bad_word_offsets[request_rows].long()
    place = torch.arange(words.shape[1], device=words.device)
    count = num_bad_words[request_rows].long()[:, None]
    # Word of each token: how many words end at or before it
    index = torch.arange(offsets.shape[1] - 1, device=words.device)
    ends = torch.where(index < count, offsets[:, 1:], words.shape[1] + 1)
    word = (ends[:, None, :] <= place[None, :, None]).sum(-1)
    in_word = word < count
    word = word.clamp(max=offsets.shape[1] - 2)
    start, end = offsets.gather(1, word), offsets.gather(1, word + 1)
    is_last = in_word & (place == end - 1) & (words < logits.shape[1])
    known, prompt = (
        total_len[request_rows].long()[:, None],
        prompt_len[request_rows].long()[:, None],
    )
    # The tokens before a word's last one have to be the end of the output
    local_pos = expanded_local_pos.long()[:, None]
    at = known + local_pos - (end - 1 - start) + (place - start)
    output = all_token_ids[request_rows].gather(1, at.clamp(0, all_token_ids.shape[1] - 1)).long()
    if expanded_local_pos.stride(0):  # else no row has drafts before it
        rows = torch.arange(len(request_rows), device=words.device)[:, None]
        drafts = rows - local_pos + at - known + 1
        of_drafts = input_ids[drafts.clamp(0, len(input_ids) - 1)].long()
        output = torch.where(at >= known, of_drafts, output)
    fits = at - (place - start) >= prompt  # the same for all tokens of a word
    differs = in_word & ~is_last & (output != words)
    faults = torch.zeros_like(offsets).scatter_add_(1, word, differs.long())
    matches = is_last & fits & (faults.gather(1, word) == 0)
    hits = torch.zeros(logits.shape, dtype=torch.int32, device=logits.device)
    hits.scatter_add_(1, torch.where(matches, words, 0), matches.int())
    logits.masked_fill_(hits > 0, -INFINITY)


def log_softmax_of(
    output: torch.Tensor,  # [R, K] float32, written
    logits: torch.Tensor,  # [R, V]
    logits_stride: int,
    topk_ids: torch.Tensor,  # [R, K] int64
    topk_ids_stride: int,
    topk: int,
    vocab_size: int,
    **_: Any,
) -> None:
    """Compute log-probabilities of some tokens: ``_topk_log_softmax_kernel`` of ``logprob.py``."""
    wide = logits.float()
    output.copy_(wide.gather(1, topk_ids) - wide.logsumexp(-1, keepdim=True))


def ranks_of(
    output: torch.Tensor,  # [R] int64, written
    logits: torch.Tensor,  # [R, V]
    logits_stride: int,
    token_ids: torch.Tensor,  # [R] int64
    vocab_size: int,
    **_: Any,
) -> None:
    """Count the tokens that are at least as likely: ``_ranks_kernel`` of ``logprob.py``."""
    chosen = logits.gather(1, token_ids.long()[:, None])
    output.copy_((logits >= chosen).sum(-1))


def fill_logprob_token_ids(
    out_token_ids: torch.Tensor,  # [R, 1 + columns] int64, written
    out_token_ids_stride: int,
    out_valid_mask: torch.Tensor,  # [R, 1 + columns] bool, written
    out_valid_mask_stride: int,
    sampled_token_ids: torch.Tensor,  # [R] int64
    topk_indices: torch.Tensor,  # [R, NUM_TOPK] int32, not read if NUM_TOPK is 0
    topk_indices_stride: int,
    expanded_idx_mapping: torch.Tensor,  # [R] int64
    num_per_req_token_ids: torch.Tensor,  # [S] int32
    per_req_token_ids: torch.Tensor,  # [S, most] int32
    per_req_token_ids_stride: int,
    **constants: Any,
) -> None:
    """List the sampled token and, after it, the tokens that a request asked for or the best ones.

    This is ``_fill_logprob_token_ids_kernel`` of ``logprob.py``.
    """
    columns, num_topk = out_token_ids.shape[1] - 1, constants["NUM_TOPK"]
    out_token_ids[:, 0] = sampled_token_ids
    out_valid_mask[:, 0] = True
    count = num_per_req_token_ids[expanded_idx_mapping][:, None]
    custom = per_req_token_ids[expanded_idx_mapping][:, :columns].long()
    custom = torch.nn.functional.pad(custom, (0, columns - custom.shape[1]))
    best = torch.zeros_like(custom)
    if num_topk:
        best[:, :num_topk] = topk_indices[:, :num_topk].long()
    place = torch.arange(columns, device=custom.device)
    is_custom = count > 0
    valid = place < torch.where(is_custom, count, num_topk)
    chosen = torch.where(is_custom, custom, best)
    out_token_ids[:, 1:] = torch.where(valid, chosen, out_token_ids[:, 1:])
    out_valid_mask[:, 1:] |= valid


def list_prompt_tokens(
    prompt_logprobs_token_ids: torch.Tensor,  # [T] int64, written
    query_start_loc: torch.Tensor,  # [R + 1] int32
    idx_mapping: torch.Tensor,  # [R] int64
    num_computed_tokens: torch.Tensor,  # [S] int32
    all_token_ids: torch.Tensor,  # [S, max_model_len] int32
    all_token_ids_stride: int,
    **_: Any,
) -> None:
    """Write the token that follows each token of a prompt.

    This is ``_prompt_logprobs_token_ids_kernel`` of ``prompt_logprob.py``.
    """
    num_tokens = len(prompt_logprobs_token_ids)
    places = torch.arange(num_tokens, device=idx_mapping.device, dtype=torch.int32)
    reqs = torch.searchsorted(query_start_loc[1:], places, right=True)
    request_rows = idx_mapping[reqs]
    after = num_computed_tokens[request_rows] + 1 + places - query_start_loc[reqs]
    after.clamp_(max=all_token_ids.shape[1] - 1)  # after the last of all tokens, nothing is read
    tokens = all_token_ids[request_rows, after.long()]
    prompt_logprobs_token_ids.copy_(tokens.clamp(min=0))  # an embedding is no token; nobody asks


def apply_grammar_bitmask(
    logits: torch.Tensor,  # [rows, V], changed
    logits_stride: int,
    logits_indices: torch.Tensor,  # [M] int32: request * MASK_STRIDE + place among its rows
    cu_num_logits: torch.Tensor,  # [R + 1] int32
    bitmask: torch.Tensor,  # [M, ceil(V / 32)] int32
    bitmask_stride: int,
    vocab_size: int,
    **constants: Any,
) -> None:
    """Forbid tokens that a grammar excludes.

    This is ``_apply_grammar_bitmask_kernel`` of ``structured_outputs.py``.
    """
    stride = constants["MASK_STRIDE"]
    reqs, place = logits_indices // stride, logits_indices % stride
    first = cu_num_logits[reqs]
    is_there = place < cu_num_logits[reqs + 1] - first
    rows = torch.where(is_there, first + place, 0).long()
    forbidden = ~_unpacked(bitmask, vocab_size) & is_there[:, None]
    # By addition, so that a row that isn't there changes nothing in row 0
    logits.index_add_(0, rows, torch.where(forbidden, -INFINITY, 0.0).to(logits.dtype))


def list_kept_tokens(
    logits: torch.Tensor,  # [R, V]
    logits_row_stride: int,
    logits_col_stride: int,
    cu_num_logits: torch.Tensor,  # [N + 1] int
    num_sampled_tokens: torch.Tensor,  # [N] int
    token_ids: torch.Tensor,  # [N * ROWS_PER_REQUEST, max_num_kept] int32, written
    token_ids_stride: int,
    packed_mask: torch.Tensor,  # [N * ROWS_PER_REQUEST, ceil(V / 8)] uint8, written
    packed_mask_stride: int,
    counts: torch.Tensor,  # [N * ROWS_PER_REQUEST] int32, written
    vocab_size: int,
    max_num_kept: int,
    **constants: Any,
) -> None:
    """List the tokens of finite logits: the first of them, their number, and a bit for each.

    This is ``_compact_sampling_mask_kernel`` of ``output.py``. Rows past a request's samples count
    none; what else the kernel leaves unwritten is zero here.
    """
    place = torch.arange(constants["ROWS_PER_REQUEST"], device=logits.device)
    is_there = (place < num_sampled_tokens[:, None]).flatten()
    rows = (cu_num_logits[:-1, None] + place).flatten().clamp(max=len(logits) - 1)
    keep = logits[rows].isfinite() & is_there[:, None]
    counts.copy_(keep.sum(1))
    found = torch.where(keep, keep.cumsum(1) - 1, max_num_kept).clamp(max=max_num_kept)
    tokens = torch.arange(vocab_size, dtype=torch.int32, device=logits.device).expand_as(found)
    listed = token_ids.new_zeros(len(keep), max_num_kept + 1).scatter_(1, found, tokens)
    token_ids.copy_(listed[:, :max_num_kept])
    bits = torch.nn.functional.pad(keep.to(torch.uint8), (0, -vocab_size % 8))
    weights = 2 ** torch.arange(8, device=logits.device)
    packed_mask.copy_((bits.view(len(keep), -1, 8) * weights).sum(-1))


def _draft_counts(
    token_ids: torch.Tensor, local_pos: torch.Tensor, vocab_size: int
) -> torch.Tensor:
    """Count each token among the drafts before a row's logits, int32 ``[R, V]``.

    A row's own input is the last of them; the first row of a request has none.
    """
    ones = torch.zeros((len(token_ids), vocab_size), dtype=torch.int32, device=token_ids.device)
    ones.scatter_(1, token_ids.long()[:, None], 1)
    sums = ones.cumsum(0, dtype=torch.int32)
    first = torch.arange(len(token_ids), device=token_ids.device) - local_pos
    return sums - sums[first.long()]


def _unpacked(words: torch.Tensor, size: int) -> torch.Tensor:
    bits = (words[:, :, None] >> torch.arange(BITS, dtype=words.dtype, device=words.device)) & 1
    return bits.view(len(words), -1)[:, :size].bool()


def _listed(tokens: torch.Tensor, counts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens of lists as indices, 0 past each list's end, and which belong to the list."""
    is_listed = torch.arange(tokens.shape[1], device=tokens.device) < counts[:, None]
    return torch.where(is_listed, tokens.long(), 0), is_listed


def _marked(tokens: torch.Tensor, counts: torch.Tensor, vocab_size: int) -> torch.Tensor:
    listed, is_listed = _listed(tokens, counts)
    marks = torch.zeros((len(tokens), vocab_size), dtype=torch.int32, device=tokens.device)
    return marks.scatter_add_(1, listed, is_listed.int()) > 0
