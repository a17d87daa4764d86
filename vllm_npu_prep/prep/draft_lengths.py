"""The lengths and positions that drafters see after a step's drafts have been verified."""

from collections.abc import Sequence

import numpy as np


def num_rejected_tokens(
    num_draft_tokens: Sequence[int], num_valid_tokens: np.ndarray
) -> np.ndarray:
    """Return how many scheduled tokens of each request verification rejected.

    Parameters
    ----------
    num_draft_tokens
        The drafts of each request in the step, ``[num_reqs]``.
    num_valid_tokens
        The sampled tokens that count, ``[num_reqs]``: accepted drafts and the token after them; 0
        for a request whose sample is discarded.

    Returns
    -------
    numpy.ndarray
        int32 ``[num_reqs]``, 0 for requests without drafts (vLLM's
        ``eagle_prepare_inputs_padded_kernel``).
    """
    drafts = np.asarray(num_draft_tokens, np.int32)
    return np.where(drafts > 0, drafts + 1 - num_valid_tokens, 0).astype(np.int32)


def token_positions(
    query_start_loc: np.ndarray,  # int32 [num_reqs + 1]
    seq_lens: np.ndarray,  # int32 [num_reqs], including the tokens of this pass
) -> np.ndarray:
    """Return the positions of a draft pass's tokens in their sequences, int64 ``[num_tokens]``."""
    last = query_start_loc[1:]
    tokens = np.arange(last[-1], dtype=np.int64)
    return tokens + np.repeat(seq_lens - last, np.diff(query_start_loc))


def next_draft_seq_lens(seq_lens: np.ndarray, max_model_len: int) -> np.ndarray:
    """Return the sequence lengths of the next draft pass, which is one token later.

    Parameters
    ----------
    seq_lens
        int32 ``[num_reqs]`` of the pass before, without rejected tokens.
    max_model_len
        The longest sequence. A request that has reached it starts over with one token without a
        slot (vLLM's ``eagle_step_slot_mapping_metadata_kernel``).

    Returns
    -------
    numpy.ndarray
        int32 ``[num_reqs]``, fresh memory.
    """
    return np.where(seq_lens >= max_model_len, 1, seq_lens + 1).astype(np.int32)
