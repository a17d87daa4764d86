"""The rejection sampler's Triton kernels in torch, vectorised over requests and drafts.

Arguments stand in the order of the Triton kernels (``vllm.v1.sample.rejection_sampler``), whose
launches are routed here by vLLM's dispatcher.
"""

import torch


def _draft_grid(
    cu_num_draft_tokens: torch.Tensor,  # [num_reqs]
    max_spec_len: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Each request's drafts as a row of a rectangle.

    Returns
    -------
    index
        int64 ``[num_reqs, max_spec_len]`` into the flat draft arrays, clamped where there is none.
    is_draft
        bool of the same shape.
    num_draft_tokens
        int64 ``[num_reqs]``.
    """
    ends = cu_num_draft_tokens.long()
    num_draft_tokens = torch.diff(ends, prepend=ends.new_zeros(1))
    columns = torch.arange(max_spec_len, device=ends.device)[None, :]
    is_draft = columns < num_draft_tokens[:, None]
    index = (ends - num_draft_tokens)[:, None] + columns
    return index.clamp_(max=max(int(ends[-1]) - 1, 0)), is_draft, num_draft_tokens


def _write_accepted(
    output: torch.Tensor,  # [num_reqs, max_spec_len + 1]
    tokens: torch.Tensor,  # [num_reqs, max_spec_len]
    accepted: torch.Tensor,  # [num_reqs, max_spec_len] bool, False beyond a request's drafts
    is_draft: torch.Tensor,  # [num_reqs, max_spec_len] bool
    num_draft_tokens: torch.Tensor,  # [num_reqs]
    bonus_token_ids: torch.Tensor,  # [num_reqs, 1] or [num_reqs]
    requests: torch.Tensor,  # [num_reqs] bool, the requests to write
) -> None:
    """Write drafts up to and including the first rejected one, and the bonus if none was."""
    num_accepted = accepted.long().cumprod(1).sum(1)
    columns = torch.arange(tokens.shape[1], device=tokens.device)[None, :]
    write = is_draft & (columns <= num_accepted[:, None]) & requests[:, None]
    output[:, :-1][write] = tokens[write].to(output.dtype)
    whole = (num_accepted == num_draft_tokens) & requests
    rows = whole.nonzero().squeeze(1)
    output[rows, num_draft_tokens[rows]] = bonus_token_ids.flatten()[rows].to(output.dtype)


def rejection_greedy_sample(
    output_token_ids: torch.Tensor,  # [num_reqs, max_spec_len + 1] int32, written
    cu_num_draft_tokens: torch.Tensor,  # [num_reqs]
    draft_token_ids: torch.Tensor,  # [num_drafts]
    target_argmax: torch.Tensor,  # [num_drafts]
    bonus_token_ids: torch.Tensor,  # [num_reqs]
    is_greedy: torch.Tensor | None,  # [num_reqs] bool; None: all
    max_spec_len: int,
    uniform_probs: torch.Tensor | None,
    synthetic_conditional_rates: torch.Tensor | None,
    SYNTHETIC_MODE: bool,  # noqa: N803 (the Triton kernel's name)
) -> None:
    """``rejection_greedy_sample_kernel``: accept drafts while they equal the target's argmax."""
    del uniform_probs, synthetic_conditional_rates
    assert not SYNTHETIC_MODE, "synthetic acceptance is not supported"
    index, is_draft, num_draft_tokens = _draft_grid(cu_num_draft_tokens, max_spec_len)
    greedy = torch.ones_like(num_draft_tokens, dtype=torch.bool) if is_greedy is None else is_greedy
    if not len(draft_token_ids):  # nothing to verify: every request gets its bonus
        output_token_ids[greedy, 0] = bonus_token_ids.flatten()[greedy].to(output_token_ids.dtype)
        return
    target = target_argmax[index]
    _write_accepted(
        output_token_ids,
        target,
        (draft_token_ids[index] == target) & is_draft,
        is_draft,
        num_draft_tokens,
        bonus_token_ids,
        greedy,
    )


def rejection_random_sample(
    output_token_ids: torch.Tensor,  # [num_reqs, max_spec_len + 1] int32, written
    cu_num_draft_tokens: torch.Tensor,  # [num_reqs]
    draft_token_ids: torch.Tensor,  # [num_drafts]
    draft_probs: torch.Tensor | None,  # [num_drafts, vocab_size]
    target_probs: torch.Tensor,  # [num_drafts, vocab_size]
    bonus_token_ids: torch.Tensor,  # [num_reqs]
    recovered_token_ids: torch.Tensor,  # [num_drafts]
    uniform_probs: torch.Tensor,  # [num_drafts]
    is_greedy: torch.Tensor,  # [num_reqs] bool
    max_spec_len: int,
    vocab_size: int,
    synthetic_conditional_rates: torch.Tensor | None,
    NO_DRAFT_PROBS: bool,  # noqa: N803
    SYNTHETIC_MODE: bool,  # noqa: N803
) -> None:
    """``rejection_random_sample_kernel``: accept a draft with probability target / draft."""
    del synthetic_conditional_rates
    assert not SYNTHETIC_MODE, "synthetic acceptance is not supported"
    index, is_draft, num_draft_tokens = _draft_grid(cu_num_draft_tokens, max_spec_len)
    drafts = draft_token_ids[index].long()
    wanted = drafts.clamp(min=0)  # -1 pads drafts and is always rejected
    target = target_probs[index, wanted]
    draft = torch.ones_like(target)
    if not NO_DRAFT_PROBS:
        assert draft_probs is not None
        draft = draft_probs[index, wanted]
    accepted = (drafts >= 0) & (draft > 0) & (target / draft >= uniform_probs[index]) & is_draft
    tokens = torch.where(accepted, drafts, recovered_token_ids[index].long())
    _write_accepted(
        output_token_ids,
        tokens,
        accepted,
        is_draft,
        num_draft_tokens,
        bonus_token_ids,
        ~is_greedy,
    )


def expand(
    output: torch.Tensor,  # [num_tokens], written
    input: torch.Tensor,  # [num_reqs]
    cu_num_tokens: torch.Tensor,  # [num_reqs]
    replace_from: int,
    replace_to: int,
    MAX_NUM_TOKENS: int,  # noqa: N803
) -> None:
    """``expand_kernel``: repeat each request's value for each of its tokens."""
    del MAX_NUM_TOKENS
    ends = cu_num_tokens.long()
    values = torch.where(input == replace_from, replace_to, input)
    repeats = torch.diff(ends, prepend=ends.new_zeros(1))
    output[: int(ends[-1])] = values.repeat_interleave(repeats).to(output.dtype)


def sample_recovered_tokens(
    output_token_ids: torch.Tensor,  # [num_drafts], written
    cu_num_draft_tokens: torch.Tensor,  # [num_reqs]
    draft_token_ids: torch.Tensor,  # [num_drafts]
    draft_probs: torch.Tensor | None,  # [num_drafts, vocab_size]
    target_probs: torch.Tensor,  # [num_drafts, vocab_size]
    inv_q: torch.Tensor,  # [num_reqs, vocab_size]
    vocab_size: int,
    BLOCK_SIZE: int,  # noqa: N803
    NO_DRAFT_PROBS: bool,  # noqa: N803
    USE_FP64_GUMBEL: bool,  # noqa: N803
) -> None:
    """``sample_recovered_tokens_kernel``: a token of the target's excess over the draft."""
    del BLOCK_SIZE, USE_FP64_GUMBEL, vocab_size
    ends = cu_num_draft_tokens.long()
    num_drafts = int(ends[-1])
    repeats = torch.diff(ends, prepend=ends.new_zeros(1))
    req_indices = torch.arange(len(ends), device=ends.device).repeat_interleave(repeats)
    if NO_DRAFT_PROBS:
        excess = target_probs[:num_drafts].clone()
        rows = (draft_token_ids[:num_drafts] >= 0).nonzero().squeeze(1)  # -1 pads drafts
        excess[rows, draft_token_ids[rows].long()] = 0.0
    else:
        assert draft_probs is not None
        excess = (target_probs[:num_drafts] - draft_probs[:num_drafts]).clamp_(min=0.0)
    output_token_ids[:num_drafts] = (
        (excess * inv_q[req_indices]).argmax(-1).to(output_token_ids.dtype)
    )
