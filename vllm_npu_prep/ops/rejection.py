"""The rejection sampler's Triton kernels in torch, vectorised over requests and drafts.

Arguments have the order of the Triton kernels (``vllm.v1.sample.rejection_sampler``); vLLM's
dispatcher routes their launches here. Shapes follow from sizes that the host knows, so nothing is
read back.
"""

import torch


def _lengths(
    ends: torch.Tensor,  # [num_reqs], cumulative
) -> torch.Tensor:
    """Each request's number of tokens, int64 ``[num_reqs]``."""
    lengths = ends.to(torch.int64, copy=True)
    lengths[1:].sub_(ends[:-1])
    return lengths


def _draft_grid(
    cu_num_draft_tokens: torch.Tensor,  # [num_reqs]
    num_drafts: int,
    max_spec_len: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Each request's drafts as a row of one rectangular array, with room for the bonus token.

    Returns
    -------
    index
        int64 ``[num_reqs, max_spec_len + 1]`` into the flat draft arrays, clamped where there is no
        draft.
    is_draft
        bool of the same shape.
    """
    num_draft_tokens = _lengths(cu_num_draft_tokens)[:, None]
    columns = torch.arange(max_spec_len + 1, device=num_draft_tokens.device)
    index = cu_num_draft_tokens[:, None] - num_draft_tokens + columns
    return index.clamp_(max=num_drafts - 1), columns < num_draft_tokens


def _write_bonus(
    output: torch.Tensor,  # [num_reqs, max_spec_len + 1], written
    bonus_token_ids: torch.Tensor,  # [num_reqs, 1] or [num_reqs]
    requests: torch.Tensor | None,  # [num_reqs] bool, the requests to write; None: all
) -> None:
    """Write the bonus of a batch in which nothing was drafted."""
    nowhere = torch.zeros_like(output, dtype=torch.bool)
    _write_accepted(output, output, nowhere, nowhere, bonus_token_ids, requests)


def _write_accepted(
    output: torch.Tensor,  # [num_reqs, max_spec_len + 1], written
    tokens: torch.Tensor,  # [num_reqs, max_spec_len + 1]
    accepted: torch.Tensor,  # [num_reqs, max_spec_len + 1] bool, False where there is no draft
    is_draft: torch.Tensor,  # [num_reqs, max_spec_len + 1] bool
    bonus_token_ids: torch.Tensor,  # [num_reqs, 1] or [num_reqs]
    requests: torch.Tensor | None,  # [num_reqs] bool, the requests to write; None: all
) -> None:
    """Write drafts up to and including the first rejected one, or the bonus if none was."""
    num_accepted = accepted.long().cumprod(1).sum(1, keepdim=True)  # [num_reqs, 1]
    write = torch.arange(output.shape[1], device=output.device) <= num_accepted
    if requests is not None:
        write &= requests[:, None]
    values = torch.where(is_draft, tokens, bonus_token_ids.view(-1, 1))
    output.copy_(torch.where(write, values, output))


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
    if not len(draft_token_ids):
        _write_bonus(output_token_ids, bonus_token_ids, is_greedy)
        return
    index, is_draft = _draft_grid(cu_num_draft_tokens, len(draft_token_ids), max_spec_len)
    target = target_argmax[index]
    accepted = (draft_token_ids[index] == target) & is_draft
    _write_accepted(output_token_ids, target, accepted, is_draft, bonus_token_ids, is_greedy)


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
    if not len(draft_token_ids):
        _write_bonus(output_token_ids, bonus_token_ids, ~is_greedy)
        return
    index, is_draft = _draft_grid(cu_num_draft_tokens, len(draft_token_ids), max_spec_len)
    drafts = draft_token_ids[index].long()
    wanted = drafts.clamp(min=0)  # -1 pads drafts and is always rejected
    accepted = is_draft & (drafts >= 0)
    ratio = target_probs[index, wanted]
    if not NO_DRAFT_PROBS:
        assert draft_probs is not None
        draft = draft_probs[index, wanted]
        accepted &= draft > 0
        ratio = ratio / draft
    accepted &= ratio >= uniform_probs[index]
    tokens = torch.where(accepted, drafts, recovered_token_ids[index].long())
    _write_accepted(output_token_ids, tokens, accepted, is_draft, bonus_token_ids, ~is_greedy)


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
    values = input.masked_fill(input == replace_from, replace_to)
    output.copy_(values.repeat_interleave(_lengths(cu_num_tokens), output_size=len(output)))


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
    if NO_DRAFT_PROBS:
        drafts = draft_token_ids[:, None].long()
        wanted = drafts.clamp(min=0)  # -1 is padding, and subtracts nothing
        left = target_probs.gather(1, wanted).masked_fill_(drafts >= 0, 0.0)
        excess = target_probs.scatter(1, wanted, left)
    else:
        assert draft_probs is not None
        excess = (target_probs - draft_probs).clamp_(min=0.0)
    lengths = _lengths(cu_num_draft_tokens)
    inv_q = inv_q.repeat_interleave(lengths, dim=0, output_size=len(draft_token_ids))
    output_token_ids.copy_((excess * inv_q).argmax(-1))
