"""The attention state of a step, and the rules that decide it."""

from enum import IntEnum

import numpy as np

SOME_COMPUTED = 1
SOME_DRAFTS = 2
SOME_NOT_VERIFYING = 4
SOME_SEVERAL_TOKENS = 8
SOME_PAST_PROMPT = 16
"""The flags of a batch that decide its state; `batch_flags` defines them."""


class AttentionState(IntEnum):
    """The kind of attention that a step needs, by the name that users see.

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
    A prompt of one token among decodes counts as a decode: its token sees itself.

    A full graph contains attention, which was captured for one state; every step that replays the
    graph has that state (`captured_state`).
    """

    PrefillNoCache = 0
    SpecDecoding = 1
    DecodeOnly = 2
    PrefillCacheHit = 3
    ChunkedPrefill = 4


def batch_flags(
    num_computed_tokens: np.ndarray,  # [num_reqs]
    num_scheduled_tokens: np.ndarray,  # [num_reqs]
    num_draft_tokens: np.ndarray,  # [num_reqs]
    num_prompt_tokens: np.ndarray,  # [num_reqs]
) -> int:
    """Return the flags of a batch that decide its state, as bits of one number.

    A bit is set if at least one request meets its condition. The fused pass computes the same flags
    (`vllm_npu_prep.prep.fused_pass.fill_step`).
    """
    some_request = {
        SOME_COMPUTED: num_computed_tokens > 0,
        SOME_DRAFTS: num_draft_tokens > 0,
        SOME_NOT_VERIFYING: num_scheduled_tokens - num_draft_tokens != 1,
        SOME_SEVERAL_TOKENS: num_scheduled_tokens != 1,
        SOME_PAST_PROMPT: num_computed_tokens >= num_prompt_tokens,
    }
    return sum(bit for bit, holds in some_request.items() if holds.any())


def attention_state(
    flags: int,  # the result of `batch_flags`
    chunked_prefill: bool,  # whether the scheduler may split a prompt over several steps
) -> AttentionState:
    """Return the first state of the table in `AttentionState` whose condition holds."""
    if not flags & SOME_COMPUTED:
        return AttentionState.PrefillNoCache
    if flags & SOME_DRAFTS and not flags & SOME_NOT_VERIFYING:
        return AttentionState.SpecDecoding
    if not flags & SOME_SEVERAL_TOKENS:
        return AttentionState.DecodeOnly
    if not chunked_prefill and not flags & SOME_PAST_PROMPT:
        return AttentionState.PrefillCacheHit
    return AttentionState.ChunkedPrefill


def captured_state(decode_query_len: int) -> AttentionState:
    """Return the state of every step that replays a full graph.

    This state gives correct results for every step that vLLM's dispatcher sends to such a graph: K
    and V are read from the cache after the step's own were written there, and a prompt as short as
    a decode is masked as a decode is.

    Parameters
    ----------
    decode_query_len
        The tokens of each request in a graph of uniform batches; 0 for mixed batches.
    """
    if decode_query_len == 0:
        return AttentionState.ChunkedPrefill
    return AttentionState.DecodeOnly if decode_query_len == 1 else AttentionState.SpecDecoding
