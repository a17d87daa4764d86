"""Sparse attention: how many positions each token attends to, and which choices can't be right.

An indexer chooses up to ``index_topk`` of the positions that a token may see: all up to its own.
vLLM's `DeepseekV32IndexerMetadataBuilder` has the same bounds, as ``cu_seqlen_ke - cu_seqlen_ks``
of prefills' tokens and as ``decode.seq_lens`` of those of decodes.
"""

from typing import NamedTuple

import numpy as np

NOTHING = -1
"""What stands behind the positions that a token has chosen."""


def num_chosen(positions: np.ndarray, index_topk: int) -> np.ndarray:
    """Return how many positions each token attends to, of the dtype and shape of `positions`."""
    return np.minimum(positions + 1, index_topk)


class WrongChoice(NamedTuple):
    """The first token whose choice can't be right."""

    token: int  # its place in the step
    rule: str  # what is given and allowed
    given: int
    allowed: int


def wrong_choice(
    chosen: np.ndarray,  # [num_tokens, index_topk] int32
    positions: np.ndarray,  # [num_tokens], of the tokens themselves
) -> WrongChoice | None:
    """Return the first choice that can't be right; None if all may be.

    A choice has as many positions as `num_chosen` says, each once and none behind the token's own,
    in any order, and `NOTHING` behind them.
    """
    counts, own = num_chosen(positions, chosen.shape[1]), np.asarray(positions)
    is_inside = np.arange(chosen.shape[1]) < counts[:, None]
    in_order = np.sort(chosen, 1)
    is_twice = (np.diff(in_order, axis=1) == 0) & (in_order[:, 1:] > NOTHING)
    is_elsewhere = (chosen > NOTHING) != is_inside
    is_wrong = (is_elsewhere | (chosen > own[:, None])).any(1) | is_twice.any(1)
    if not is_wrong.any():
        return None
    token = int(np.argmax(is_wrong))
    count, last = int((chosen[token, : counts[token]] > NOTHING).sum()), int(chosen[token].max())
    if last > own[token]:
        return WrongChoice(token, "last position chosen", last, int(own[token]))
    if is_twice[token].any():
        count = len(set(chosen[token].tolist()) - {NOTHING})
        return WrongChoice(token, "different positions chosen", count, int(counts[token]))
    return WrongChoice(token, "positions chosen", count, int(counts[token]))
