"""Verification of randomly drawn drafts by the rule of Model Runner V2, in torch.

The source is ``vllm/v1/worker/gpu/spec_decode/rejection_sampler_utils.py``. Its kernels reduce the
vocabulary in blocks and draw one token for each request; here each draft's row gets its logits, and
the sampler draws from all rows at once. Nothing is read back.
"""

from typing import NamedTuple

import torch


class VerifiedDrafts(NamedTuple):
    """What verification makes of each draft."""

    # Bool [num_drafts]; False for greedy requests, whose drafts are verified by their tokens
    are_accepted: torch.Tensor
    # Float32 [num_drafts, vocab_size], from which the token in place of a rejected draft is drawn
    logits: torch.Tensor


def verify_drawn_drafts(
    target_logits: torch.Tensor,
    draft_logits: torch.Tensor,
    temperature: torch.Tensor,  # float32 [num_drafts]; 0 means greedy
    draft_token_ids: torch.Tensor,
    uniform: torch.Tensor,  # float32 [num_drafts], from 0 to 1
) -> VerifiedDrafts:
    """Accept each draft with the ratio of its probabilities (Leviathan et al., 2023).

    This is ``_compute_local_logits_stats_kernel``, ``_rejection_kernel`` and ``_resample_kernel``.
    A token in place of a rejected draft is drawn from the target's excess over the drafter's
    probabilities; where there was no draft (-1), from the target's probabilities.

    Parameters
    ----------
    target_logits
        float32 ``[num_drafts, vocab_size]``, divided by the temperature, without tokens that
        sampling parameters exclude.
    draft_logits
        ``[num_drafts, vocab_size]`` as the drafter computed them, not divided.
    draft_token_ids
        int ``[num_drafts]``; -1 means no draft, or one that a grammar forbids.

    Returns
    -------
    VerifiedDrafts
        The result for each draft; a greedy request's rows keep the target's logits.
    """
    are_greedy, is_none = temperature == 0, draft_token_ids < 0
    of_drafter = draft_logits.float() / temperature.masked_fill(are_greedy, 1)[:, None]
    of_drafter = of_drafter.log_softmax(-1)
    of_target = target_logits.log_softmax(-1)
    tokens = draft_token_ids.long().clamp(min=0)[:, None]
    # A difference of logarithms is 0 for equal probabilities, which have to reject nothing, because
    # no token has an excess
    of_drafts = of_target.gather(1, tokens) - of_drafter.gather(1, tokens)
    are_accepted = of_drafts[:, 0] > uniform.log()
    are_accepted.masked_fill_(is_none | are_greedy, False)
    ratio = of_drafter.sub_(of_target).exp_()  # NaN where neither has a chance
    has_no_excess = ~(ratio < 1)
    excess = of_target.add_(ratio.neg_().clamp_(min=-1).log1p_())
    excess.masked_fill_(has_no_excess, -torch.inf)
    as_it_is = (is_none | are_greedy)[:, None]
    return VerifiedDrafts(are_accepted, torch.where(as_it_is, target_logits, excess))
