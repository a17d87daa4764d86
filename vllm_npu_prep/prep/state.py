"""The attention state of a step and the rule that decides it."""

from enum import IntEnum

import numpy as np


class AttentionState(IntEnum):
    """What a step asks of attention. The name is the value that users see.

    ===============  ==================================================================
    state            when (first match wins)
    ===============  ==================================================================
    PrefillNoCache   every request has ``num_computed_tokens == 0``
    SpecDecoding     some request has draft tokens and, for all, scheduled - drafts == 1
    DecodeOnly       every request has one scheduled token
    PrefillCacheHit  chunked prefill is off and every request is still in its prompt
    ChunkedPrefill   anything else
    ===============  ==================================================================

    Notes
    -----
    A one-token prompt among decodes counts as a decode: its token sees itself.
    """

    PrefillNoCache = 0
    SpecDecoding = 1
    DecodeOnly = 2
    PrefillCacheHit = 3
    ChunkedPrefill = 4


def attention_state(
    num_computed_tokens: np.ndarray,  # [num_reqs]
    num_scheduled_tokens: np.ndarray,  # [num_reqs]
    num_draft_tokens: np.ndarray,  # [num_reqs]
    num_prompt_tokens: np.ndarray,  # [num_reqs]
    chunked_prefill: bool,
) -> AttentionState:
    """Decide the attention state of a step.

    Parameters
    ----------
    num_computed_tokens, num_scheduled_tokens, num_draft_tokens, num_prompt_tokens
        Integers of shape ``[num_reqs]``, one entry for each request of the batch.
    chunked_prefill
        Whether the scheduler may split a prompt over several steps.

    Returns
    -------
    AttentionState
        The first state of the table in `AttentionState` whose condition holds.
    """
    if not num_computed_tokens.any():
        return AttentionState.PrefillNoCache
    if num_draft_tokens.any() and (num_scheduled_tokens - num_draft_tokens == 1).all():
        return AttentionState.SpecDecoding
    if (num_scheduled_tokens == 1).all():
        return AttentionState.DecodeOnly
    if not chunked_prefill and (num_computed_tokens < num_prompt_tokens).all():
        return AttentionState.PrefillCacheHit
    return AttentionState.ChunkedPrefill
