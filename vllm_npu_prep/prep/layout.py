"""StepLayout: where every per-step array lives in the one buffer that travels to the device."""

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

ALIGNMENT = 64
"""Bytes to which every array of a layout is aligned (a cache line; a multiple of 32, which Ascend
vector units load)."""


@dataclass(frozen=True)
class ArraySpec:
    """Place of one array in the buffer."""

    offset: int  # bytes from the start of the buffer
    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def end(self) -> int:
        """First byte behind the array."""
        return self.offset + self.nbytes


@dataclass(frozen=True)
class StepLayout:
    """Offsets of the per-step arrays, a function of the padded sizes only.

    Two steps of the same padded size find every array at the same address, which is what a
    captured graph relies on.

    Attributes
    ----------
    num_input_tokens
        Tokens after padding.
    num_reqs_padded
        Requests after padding.
    num_groups
        KV-cache groups; each has its own slots.

    Notes
    -----
    The arrays whose used length varies at a given size come last, so that a step copies only the
    prefix that it uses (see `used_bytes`).
    """

    num_input_tokens: int
    num_reqs_padded: int
    num_groups: int

    @cached_property
    def arrays(self) -> dict[str, ArraySpec]:
        """Name to place of every array, in the order of the buffer."""
        num_tokens, num_reqs = self.num_input_tokens, self.num_reqs_padded
        shapes: dict[str, tuple[tuple[int, ...], type]] = {
            "input_ids": ((num_tokens,), np.int32),
            "positions": ((num_tokens,), np.int64),
            "slot_mapping": ((self.num_groups, num_tokens), np.int32),
            "query_start_loc": ((num_reqs + 1,), np.int32),
            "seq_lens": ((num_reqs,), np.int32),
            "num_computed_tokens": ((num_reqs,), np.int32),
            "discard_request_mask": ((num_reqs,), np.bool_),
            # Where the tokens that the last step sampled go, and from which row they come.
            "sampled_token_indices": ((num_reqs,), np.int64),
            "sampled_token_rows": ((num_reqs,), np.int64),
            # Each request has at least one token and each draft is a token: never more logits.
            "logits_indices": ((num_tokens,), np.int32),
        }
        arrays, offset = {}, 0
        for name, (shape, dtype) in shapes.items():
            arrays[name] = ArraySpec(offset, shape, np.dtype(dtype))
            offset = -(-arrays[name].end // ALIGNMENT) * ALIGNMENT
        return arrays

    @property
    def nbytes(self) -> int:
        """Size of the buffer in bytes."""
        return self.arrays["logits_indices"].end

    def used_bytes(self, num_logits: int) -> int:
        """Bytes that a step with `num_logits` logits has to copy."""
        logits = self.arrays["logits_indices"]
        return logits.offset + num_logits * logits.dtype.itemsize

    def views(self, buffer: np.ndarray) -> "StepArrays":
        """Every array as a view of `buffer`.

        Parameters
        ----------
        buffer
            uint8 of at least `nbytes`, aligned to `ALIGNMENT` or wherever numpy put it.

        Raises
        ------
        ValueError
            If the buffer is too small.
        """
        if buffer.nbytes < self.nbytes:
            raise ValueError(
                f"the staging buffer has {buffer.nbytes} bytes, this step needs {self.nbytes}"
            )
        return StepArrays(
            **{
                name: buffer[spec.offset : spec.end].view(spec.dtype).reshape(spec.shape)
                for name, spec in self.arrays.items()
            }
        )


@dataclass(frozen=True)
class StepArrays:
    """The arrays of one layout, all views of one buffer; padding included.

    ``T`` is ``num_input_tokens``, ``R`` is ``num_reqs_padded``, ``G`` the number of groups.
    """

    input_ids: np.ndarray  # [T] int32
    positions: np.ndarray  # [T] int64
    slot_mapping: np.ndarray  # [G, T] int32
    query_start_loc: np.ndarray  # [R + 1] int32
    seq_lens: np.ndarray  # [R] int32
    num_computed_tokens: np.ndarray  # [R] int32
    discard_request_mask: np.ndarray  # [R] bool
    sampled_token_indices: np.ndarray  # [R] int64
    sampled_token_rows: np.ndarray  # [R] int64
    logits_indices: np.ndarray  # [T] int32


@lru_cache(maxsize=1024)
def step_layout(num_input_tokens: int, num_reqs_padded: int, num_groups: int) -> StepLayout:
    """The layout of these sizes: the same object each time, its offsets worked out once.

    Returns
    -------
    StepLayout
        See there for the parameters.
    """
    return StepLayout(num_input_tokens, num_reqs_padded, num_groups)


def largest_layout(max_num_tokens: int, max_num_reqs: int, num_groups: int) -> StepLayout:
    """The layout that every step's buffer has to hold.

    Two more rows than requests: a mixed batch in a full graph gets one dummy request, and rows of
    zero length may follow it (vllm-project/vllm-ascend 7144).
    """
    return StepLayout(max_num_tokens, max_num_reqs + 2, num_groups)
