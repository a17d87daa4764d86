"""The layout of a step: where each array is in the one buffer that travels to the device."""

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from vllm_npu_prep.prep.arrays import PADDING_ROWS, STEP_ARRAYS, Arrays
from vllm_npu_prep.prep.compiled import STEP
from vllm_npu_prep.prep.shape import PLAIN_SHAPE, EngineShape

ALIGNMENT = 64
"""The alignment of every array of a layout in bytes: a cache line, and a multiple of the 32 bytes
that Ascend vector units load."""


@dataclass(frozen=True)
class ArraySpec:
    """The place of one array in the buffer."""

    offset: int  # bytes from the start of the buffer
    shape: tuple[int, ...]
    dtype: np.dtype
    spare: int = 0  # unused elements after the array

    @property
    def nbytes(self) -> int:
        """The size in bytes, without the spare elements."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def end(self) -> int:
        """The first byte past the array and its spare elements."""
        return self.offset + self.nbytes + self.spare * self.dtype.itemsize

    @property
    def elements(self) -> slice:
        """The place of the array in a buffer viewed as its dtype."""
        first = self.offset // self.dtype.itemsize
        return slice(first, first + math.prod(self.shape))


@dataclass(frozen=True, eq=False)
class StepLayout:
    """The offsets of the per-step arrays, a function of the engine and the padded sizes only.

    In two steps of the same padded size every array has the same address. Captured graphs rely on
    this.

    Notes
    -----
    After the fixed arrays comes a part of variable length, which is scattered by a launch of its
    own before any graph runs:

    ======================  ======  ========================================================
    part                    dtype   length
    ======================  ======  ========================================================
    sampled_token_targets   int64   where the last step's samples go, if only the device has
                                    them (asynchronous scheduling, or speculation on V2),
                                    else empty. Each row has the place of its next token in
                                    `input_ids`, the places of its drafts there, and those
                                    of its drafts in `draft_token_ids`
    block_change_indices    int64   entries that the device's block tables don't have yet
    block_change_ids        int32   the block ids of these entries
    ======================  ======  ========================================================
    """

    num_input_tokens: int  # the number of tokens after padding
    num_reqs_padded: int  # the number of requests after padding
    shape: EngineShape = PLAIN_SHAPE  # the engine's

    @cached_property
    def max_logits(self) -> int:
        """The most tokens whose logits are wanted: each of them is a token of the step."""
        return min(self.num_input_tokens, self.num_reqs_padded * self.shape.max_logits_per_req)

    @cached_property
    def max_drafts(self) -> int:
        """The most draft tokens; 0 in an engine without speculation."""
        max_drafts_per_req = self.shape.max_logits_per_req - 1
        return min(self.num_input_tokens, self.num_reqs_padded * max_drafts_per_req)

    @property
    def dims(self) -> dict[str, int]:
        """The size of each dimension that `vllm_npu_prep.prep.arrays` names."""
        shape, num_reqs = self.shape, self.num_reqs_padded
        states, sizes = shape.states, (self.num_input_tokens, num_reqs)
        num_local, num_state_groups = shape.local.max_reqs(*sizes), len(states.groups)
        num_rank_tokens = shape.pcp.rank_tokens(self.num_input_tokens) if shape.pcp else 0
        num_rank_rows = min(num_rank_tokens, shape.pcp.most_rows)  # each row has a token
        sizes_seen = (num_rank_tokens, num_rank_rows) if shape.pcp else sizes
        num_halved = sizes_seen[1] if shape.latent or states else 0
        return {
            "tokens": self.num_input_tokens,
            "reqs": num_reqs,
            "reqs + 1": num_reqs + 1,
            "groups": shape.num_groups,
            "mrope_dims": shape.mrope_dims,
            "logits": self.max_logits,
            "drafts": self.max_drafts,
            "drafting_reqs": num_reqs if self.max_drafts else 0,
            "local_reqs": num_local,
            "local_reqs + 1": num_local + 1 if num_local else 0,
            "local_groups": len(shape.local.groups),
            "state_groups": num_state_groups,
            "state_reqs": num_reqs if states else 0,
            "token_state_groups": num_state_groups if states.num_drafts else 0,
            "counted_reqs": num_reqs if states.num_drafts else 0,
            "split_reqs": num_halved,
            "split_reqs + 1": num_halved + 1 if num_halved else 0,
            "context_pieces": shape.latent.max_pieces(*sizes_seen),
            "row_reqs": num_reqs if shape.has_request_rows else 0,
            "sharded_reqs": num_reqs if shape.dcp else 0,
            "rank_tokens": num_rank_tokens,
            "gathered_tokens": num_rank_tokens * shape.pcp.world_size,
            "rank_rows": num_rank_rows,
            "rank_rows + 1": num_rank_rows + 1 if num_rank_rows else 0,
            "rank_reqs": num_reqs if shape.pcp else 0,
        }

    @cached_property
    def arrays(self) -> dict[str, ArraySpec]:
        """The place of every array by name, in the order of the buffer."""
        dims, arrays, end = self.dims, {}, 0
        for name, line in STEP_ARRAYS.items():
            shape = tuple(dims[dim] for dim in line.dims)
            spare = line.spare if math.prod(shape) else 0  # the engine may lack the array
            spec = arrays[name] = ArraySpec(_aligned(end), shape, line.dtype, spare)
            end = spec.end
        return arrays

    @cached_property
    def variable_offset(self) -> int:
        """The first byte of the variable part."""
        return _aligned(next(reversed(self.arrays.values())).end)

    def offset_int32(self, name: str) -> int:
        """Return the place of an int32 array's first element in the buffer viewed as int32."""
        return self.arrays[name].elements.start

    def nbytes(self, num_targets: int = 0, num_block_changes: int = 0) -> int:
        """Return the bytes of a step: those of the arrays and of the variable part."""
        return self.variable_offset + 8 * num_targets + 12 * num_block_changes

    def variable_part(self, num_targets: int, num_block_changes: int) -> tuple[slice, slice, slice]:
        """Return where the arrays of the variable part are.

        Returns
        -------
        sampled_token_targets, block_change_indices, block_change_ids
            Slices of the buffer viewed as int64, int64 and int32.
        """
        targets = self.variable_offset // 8
        indices = targets + num_targets
        end = indices + num_block_changes
        return (
            slice(targets, indices),
            slice(indices, end),
            slice(2 * end, 2 * end + num_block_changes),
        )

    def views(self, buffer: np.ndarray) -> "StepArrays":
        """Return every array as a view of `buffer`.

        Parameters
        ----------
        buffer
            uint8, at least `nbytes` long and a multiple of 8. It is aligned to `ALIGNMENT`, or any
            memory that numpy allocated.

        Raises
        ------
        ValueError
            If the buffer is too small.
        """
        if buffer.nbytes < self.nbytes():
            raise ValueError(
                f"the staging buffer has {buffer.nbytes} bytes, this step needs {self.nbytes()}"
            )
        return StepArrays(self, buffer)

    def allocate(self, num_targets: int, num_block_changes: int = 0) -> "StepArrays":
        """Return arrays of zeros in memory of their own, with room for such a variable part."""
        nbytes = _aligned(self.nbytes(num_targets, num_block_changes))
        return StepArrays(self, np.zeros(nbytes, np.uint8))


def _aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT


class StepArrays(Arrays[np.ndarray]):
    """The arrays of one layout with their padding, all of them views of one buffer.

    Attributes
    ----------
    layout, buffer
        The offsets of the arrays, and the memory that holds them, uint8.
    variable_int64, variable_int32
        Two views of the memory from the variable part to the buffer's end.
    """

    def __init__(self, layout: StepLayout, buffer: np.ndarray) -> None:
        self.layout, self.buffer = layout, buffer
        for name, spec in layout.arrays.items():
            elements = buffer[spec.offset : spec.offset + spec.nbytes].view(spec.dtype)
            setattr(self, name, elements.reshape(spec.shape))
        variable = buffer[layout.variable_offset :]
        self.variable_int64, self.variable_int32 = variable.view(np.int64), variable.view(np.int32)

    @cached_property
    def addresses(self) -> np.ndarray:
        """The sizes and addresses for compiled code (`prep.compiled.arrays_of`), int64."""
        layout, first = self.layout, self.buffer.ctypes.data
        variable = first + layout.variable_offset
        num_words = len(self.variable_int64)
        return STEP.pack(
            layout.dims
            | {"buffer / 4": self.buffer.nbytes // 4}
            | {"variable / 8": num_words, "variable / 4": 2 * num_words},
            {name: first + spec.offset for name, spec in layout.arrays.items()}
            | {"buffer_int32": first, "variable_int64": variable, "variable_int32": variable},
            {
                f"{name}_offset": layout.offset_int32(name)
                for name, line in STEP_ARRAYS.items()
                if line.sampled
            },
        )


def targets_per_row(num_drafts: int) -> int:
    """Return the targets of one row of samples: its next token and, twice, its drafts."""
    return 1 + 2 * num_drafts


def largest_step(
    shape: EngineShape, max_num_tokens: int, max_num_reqs: int, num_block_table_entries: int
) -> int:
    """Return the bytes of a buffer that has room for every step, a multiple of `ALIGNMENT`.

    A mixed batch in a full graph has one row more than requests. The first step after a dummy run
    changes every entry of the block tables. With prefill context parallelism all ranks are padded
    as one that has all tokens.
    """
    num_tokens = max_num_tokens * shape.pcp.world_size
    layout = StepLayout(num_tokens, max_num_reqs + PADDING_ROWS, shape)
    num_targets = max_num_reqs * targets_per_row(shape.max_logits_per_req - 1)
    return _aligned(layout.nbytes(num_targets, num_block_table_entries))
