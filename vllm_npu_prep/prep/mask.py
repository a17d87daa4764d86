"""The attention mask of a step, defined in numpy.

True means *masked*: the token of that row may not attend to the position of that column. These
arrays are not sent to the device, which keeps a causal matrix and gathers rows from it
(`vllm_npu_prep.attention.mask_cache`) with the same result.

=================================================  ==========================  =================
state                                              dense                       compressed
=================================================  ==========================  =================
PrefillNoCache                                     one matrix for all requests the constant
DecodeOnly                                         none                        none
DecodeOnly with a window                           one row for each token      the constant
ChunkedPrefill, SpecDecoding, PrefillCacheHit      one row for each token      the constant
encoder-only groups (always PrefillNoCache)        none                        none
those with a window                                none                        the constant
=================================================  ==========================  =================

The dense forms are those of the reference documents. The constant is what the fused Ascend
attention kernels document for their sparse modes 2, 3 and 4.
"""

from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from vllm_npu_prep.prep.state import AttentionState

COMPRESSED_MASK_SIZE = 2048
"""The side of the constant mask of the compressed form, which the Ascend kernels fix."""


class MaskForm(StrEnum):
    """The form in which a kernel family takes its mask."""

    DENSE = "dense"
    COMPRESSED = "compressed"


class MaskKind(StrEnum):
    """What the mask tensor of a step holds."""

    NONE = "none"
    MATRIX = "matrix"  # [max_seq_len, max_seq_len], shared by all requests
    ROWS = "rows"  # [num_input_tokens, max_seq_len], one row for each token
    COMPRESSED = "compressed"  # [2048, 2048], a constant


@dataclass(frozen=True)
class MaskPlan:
    """The mask that a step needs, which `build_mask` or a device's mask cache makes.

    Attributes
    ----------
    sliding_window
        Token p sees positions p - sliding_window + 1 to p, and without causality also up to p +
        sliding_window - 1. None: it sees all positions up to p; without causality, all positions.
    attention_chunk_size
        If given, rows and columns are positions in a chunk of this size; None: they are positions
        in a request.
    """

    kind: MaskKind  # what the tensor holds
    shape: tuple[int, int] | None  # the shape of the tensor; None if there is none
    sliding_window: int | None = None
    attention_chunk_size: int | None = None


def plan_mask(
    state: AttentionState,
    form: MaskForm,
    num_input_tokens: int,  # the tokens of the step after graph padding
    max_seq_len: int,  # the longest sequence of the step, this step's tokens included
    *,
    sliding_window: int | None = None,  # the window of the group in tokens; None without one
    attention_chunk_size: int | None = None,
    causal: bool = True,
) -> MaskPlan:
    """Decide the mask of a step: a function of state, form and the group's attention kind.

    Parameters
    ----------
    attention_chunk_size
        The chunk size of the group in tokens; None without chunks. With chunks, `max_seq_len` is
        that of virtual requests.
    causal
        False for encoder-only groups: tokens see each other both ways, with a window up to
        ``sliding_window - 1`` positions away. Families of the dense form apply it themselves.
    """
    if not causal and (form == MaskForm.DENSE or sliding_window is None):
        return MaskPlan(MaskKind.NONE, None, sliding_window)
    if state == AttentionState.DecodeOnly and sliding_window is None:
        # The newest token sees everything before it; only a window needs a mask here.
        return MaskPlan(MaskKind.NONE, None)
    if form == MaskForm.COMPRESSED:
        shape = (COMPRESSED_MASK_SIZE, COMPRESSED_MASK_SIZE)
        return MaskPlan(MaskKind.COMPRESSED, shape, sliding_window)
    if state == AttentionState.PrefillNoCache:
        return MaskPlan(MaskKind.MATRIX, (max_seq_len, max_seq_len), sliding_window)
    shape = (num_input_tokens, max_seq_len)
    return MaskPlan(MaskKind.ROWS, shape, sliding_window, attention_chunk_size)


def mask_rows(
    positions: np.ndarray,  # [num_rows]
    max_seq_len: int,
    sliding_window: int | None = None,
) -> np.ndarray:
    """Return the mask rows of tokens at `positions`, bool ``[num_rows, max_seq_len]``."""
    rows = np.asarray(positions, dtype=np.int64)[:, None]
    columns = np.arange(max_seq_len)[None, :]
    masked = columns > rows
    if sliding_window is not None:
        masked |= columns <= rows - sliding_window
    return masked


def causal_mask(size: int, sliding_window: int | None = None) -> np.ndarray:
    """Return a causal matrix, bool ``[size, size]``: row p is the mask of a token at position p."""
    return mask_rows(np.arange(size), size, sliding_window)


def compressed_mask() -> np.ndarray:
    """Return the constant of the compressed form: int8 ``[2048, 2048]``, 1 above the diagonal."""
    return causal_mask(COMPRESSED_MASK_SIZE).astype(np.int8)


def build_mask(
    plan: MaskPlan,
    positions: np.ndarray,  # [total_num_scheduled_tokens]
) -> np.ndarray | None:
    """Make the mask of `plan`; None if it needs none.

    Padding rows mask nothing, so that their softmax stays finite.

    Returns
    -------
    numpy.ndarray or None
        An array of ``plan.shape``: bool for the dense kinds, int8 for the compressed one.
    """
    if plan.shape is None:
        return None
    if plan.kind == MaskKind.COMPRESSED:
        return compressed_mask()
    num_rows, max_seq_len = plan.shape
    if plan.kind == MaskKind.MATRIX:
        return causal_mask(max_seq_len, plan.sliding_window)
    if plan.attention_chunk_size is not None:
        positions = positions % plan.attention_chunk_size
    masked = np.zeros((num_rows, max_seq_len), dtype=bool)
    masked[: len(positions)] = mask_rows(positions, max_seq_len, plan.sliding_window)
    return masked


def dense_mask_bytes(max_num_batched_tokens: int, max_model_len: int, itemsize: int) -> int:
    """Return the most memory that dense masks can take, in bytes.

    This counts the cached causal matrix (``max_model_len`` squared) and the rows of one step (at
    most ``max_num_batched_tokens``).
    """
    return (max_model_len + max_num_batched_tokens) * max_model_len * itemsize
