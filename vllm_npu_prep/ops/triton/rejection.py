"""The rejection sampler's Triton kernels in torch, vectorised over requests and drafts.

Arguments have the order of the Triton kernels (``vllm.v1.sample.rejection_sampler``); vLLM's
dispatcher routes their launches here. Shapes follow from sizes that the host knows, so nothing is
read back.
"""

import torch
from torch.nn import functional

PLACEHOLDER = -1
"""Token with which vLLM fills the output; it stays in places to which nothing is written."""


def lengths_of(
    ends: torch.Tensor,  # [num_reqs], cumulative
) -> torch.Tensor:
    lengths = ends.clone()
    lengths[1:].sub_(ends[:-1])
    return lengths


def rows_until_rejected(
    tokens: torch.Tensor,  # [num_drafts], what to write in each draft's place
    rejected: torch.Tensor,  # [num_drafts] bool
    bonus_token_ids: torch.Tensor,  # [num_reqs, 1] or [num_reqs]
    cu_num_draft_tokens: torch.Tensor,  # [num_reqs]
    width: int,
) -> torch.Tensor:
    """Take each request's tokens up to and including the first rejected draft's place.

    If no draft was rejected, the bonus token follows. The result is ``[num_reqs, width]``, with
    `PLACEHOLDER` after a request's last token.
    """
    num_reqs = len(cu_num_draft_tokens)
    bonus = bonus_token_ids.view(num_reqs, 1)
    if not len(tokens):
        return functional.pad(bonus, (0, width - 1), value=PLACEHOLDER)
    if len(tokens) == num_reqs * (width - 1):  # as many drafts for each request, the usual case
        rows = torch.cat((tokens.view(num_reqs, width - 1), bonus), 1)
        ends = functional.pad(rejected.view(num_reqs, width - 1), (0, 1))
    else:
        starts = functional.pad(cu_num_draft_tokens[:-1], (1, 0))
        index = starts[:, None] + torch.arange(width, dtype=starts.dtype, device=starts.device)
        is_past = index >= cu_num_draft_tokens[:, None]  # the bonus, and places after it
        index.clamp_(max=len(tokens) - 1)
        rows = torch.where(is_past, bonus, tokens[index])
        ends = rejected[index].logical_or_(is_past)
    # An end lies before a place if there are more ends up to the place than at it. They are counted
    # by a sum of int8, because NPUs compute `cumprod` on their AI CPU, which is slow, and
    # `aclnnCumsum` takes no bool.
    num_ends = ends.view(torch.int8).cumsum(1, dtype=torch.int32)
    return rows.masked_fill_(num_ends > ends, PLACEHOLDER)


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
    """Accept drafts while they equal the target's argmax: ``rejection_greedy_sample_kernel``."""
    del uniform_probs, synthetic_conditional_rates
    assert not SYNTHETIC_MODE, "synthetic acceptance is not supported"
    rejected = draft_token_ids != target_argmax
    rows = rows_until_rejected(
        target_argmax, rejected, bonus_token_ids, cu_num_draft_tokens, max_spec_len + 1
    )
    if is_greedy is not None:
        rows = torch.where(is_greedy[:, None], rows, output_token_ids)
    output_token_ids.copy_(rows)


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
    """Accept each draft with probability target / draft: ``rejection_random_sample_kernel``."""
    del synthetic_conditional_rates, vocab_size
    assert not SYNTHETIC_MODE, "synthetic acceptance is not supported"
    wanted = draft_token_ids.long().clamp_(min=0)[:, None]  # -1 pads drafts: always rejected
    ratio = target_probs.gather(1, wanted)[:, 0]
    accepted = draft_token_ids >= 0
    if not NO_DRAFT_PROBS:
        assert draft_probs is not None
        draft = draft_probs.gather(1, wanted)[:, 0]
        accepted = accepted.logical_and(draft)  # a draft that had no chance is rejected
        ratio.div_(draft)
    accepted.logical_and_(ratio >= uniform_probs)
    tokens = torch.where(accepted, draft_token_ids, recovered_token_ids)
    rows = rows_until_rejected(
        tokens, ~accepted, bonus_token_ids, cu_num_draft_tokens, max_spec_len + 1
    )
    output_token_ids.copy_(torch.where(is_greedy[:, None], output_token_ids, rows))


def expand(
    output: torch.Tensor,  # [num_tokens], written
    input: torch.Tensor,  # [num_reqs]
    cu_num_tokens: torch.Tensor,  # [num_reqs]
    replace_from: int,
    replace_to: int,
    MAX_NUM_TOKENS: int,  # noqa: N803
) -> None:
    """Repeat each request's value for each of its tokens: ``expand_kernel``."""
    del MAX_NUM_TOKENS
    output.copy_(input.repeat_interleave(lengths_of(cu_num_tokens), output_size=len(output)))
    if replace_from != replace_to:
        output.masked_fill_(output == replace_from, replace_to)


def sample_recovered_tokens(
    output_token_ids: torch.Tensor,  # [num_drafts] or [num_drafts, 1], written
    cu_num_draft_tokens: torch.Tensor,  # [num_reqs]
    draft_token_ids: torch.Tensor,  # [num_drafts] or [num_drafts, 1]
    draft_probs: torch.Tensor | None,  # [num_drafts, vocab_size]
    target_probs: torch.Tensor,  # [num_drafts, vocab_size]
    inv_q: torch.Tensor,  # [num_reqs, vocab_size]
    vocab_size: int,
    BLOCK_SIZE: int,  # noqa: N803
    NO_DRAFT_PROBS: bool,  # noqa: N803
    USE_FP64_GUMBEL: bool,  # noqa: N803
) -> None:
    """Draw a token of the target's excess over the draft: ``sample_recovered_tokens_kernel``."""
    del BLOCK_SIZE, USE_FP64_GUMBEL
    lengths = lengths_of(cu_num_draft_tokens)
    scores = inv_q.repeat_interleave(lengths, dim=0, output_size=len(draft_token_ids))
    if NO_DRAFT_PROBS:
        scores = scores.mul_(target_probs)
        tokens = torch.arange(vocab_size, dtype=draft_token_ids.dtype, device=scores.device)
        scores.masked_fill_(draft_token_ids.view(-1, 1) == tokens, 0)  # -1 is padding: no token
    else:
        assert draft_probs is not None
        scores = scores.mul_((target_probs - draft_probs).clamp_(min=0))
    output_token_ids.view(-1).copy_(scores.argmax(-1))
