"""StepLayout: where every per-step array lives in the one buffer that travels to the device."""

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from vllm_npu_prep.prep.arrays import PADDING_ROWS, STEP_ARRAYS, Arrays
from vllm_npu_prep.prep.compiled import STEP
from vllm_npu_prep.prep.context_shards import ContextShards
from vllm_npu_prep.prep.latent import LatentSplit
from vllm_npu_prep.prep.local_attention import LocalGroups, max_local_reqs
from vllm_npu_prep.prep.states import StateGroups

ALIGNMENT = 64
"""Bytes to which every array of a layout is aligned (a cache line; a multiple of 32, which Ascend
vector units load)."""


@dataclass(frozen=True)
class ArraySpec:
    """Where one array is in the buffer."""

    offset: int  # bytes from the start of the buffer
    shape: tuple[int, ...]
    dtype: np.dtype
    spare: int = 0  # unused elements after the array

    @property
    def nbytes(self) -> int:
        """Size in bytes, without spare elements."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def end(self) -> int:
        """First byte past the array and its spare elements."""
        return self.offset + self.nbytes + self.spare * self.dtype.itemsize

    @property
    def elements(self) -> slice:
        """Where the array is in a buffer viewed as its dtype."""
        first = self.offset // self.dtype.itemsize
        return slice(first, first + math.prod(self.shape))


@dataclass(frozen=True, eq=False)
class StepLayout:
    """Offsets of the per-step arrays, a function of the padded sizes only.

    In two steps of the same padded size every array has the same address; captured graphs rely on
    that.

    Attributes
    ----------
    num_input_tokens
        Tokens after padding.
    num_reqs_padded
        Requests after padding.
    num_groups
        KV-cache groups; each has its own slots.
    max_logits
        Most tokens whose logits are wanted.
    max_drafts
        Most draft tokens; 0 in an engine without speculation.
    mrope_dims
        Dimensions of M-RoPE positions; 0 for a model without them.
    local
        Groups with chunked local attention; None in an engine without any.
    latent
        How steps are split for latent attention; None in an engine without it.
    states
        Groups that hold states; None in an engine without any.
    has_slots
        Whether steps tell the device the slots of their requests.
    dcp
        The part of each context that this rank keeps; None without decode context parallelism.

    Notes
    -----
    After the fixed arrays comes a variable-length part, which is scattered by a launch of its own
    before any graph runs:

    ======================  ======  ========================================================
    part                    dtype   length
    ======================  ======  ========================================================
    sampled_token_targets   int64   where the last step's samples go, if they are still on
                                    the device (async scheduling), else empty. For each row:
                                    its next token's place in `input_ids`, its drafts' there,
                                    and its drafts' in `draft_token_ids`
    block_change_indices    int64   entries that the device's block tables don't have yet
    block_change_ids        int32   the block ids of these entries
    ======================  ======  ========================================================
    """

    num_input_tokens: int
    num_reqs_padded: int
    num_groups: int
    max_logits: int
    max_drafts: int = 0
    mrope_dims: int = 0
    local: LocalGroups | None = None
    latent: LatentSplit | None = None
    states: StateGroups | None = None
    has_slots: bool = False
    dcp: ContextShards | None = None

    @property
    def local_sizes(self) -> tuple[int, int]:
        """Most virtual requests, and groups whose layers see them (`prep.local_attention`)."""
        if self.local is None:
            return 0, 0
        sizes = self.num_input_tokens, self.num_reqs_padded, self.local.attention_chunk_size
        return max_local_reqs(*sizes), len(self.local.groups)

    @property
    def dims(self) -> dict[str, int]:
        """Size of each dimension that `vllm_npu_prep.prep.arrays` names."""
        num_reqs = self.num_reqs_padded
        num_local, num_local_groups = self.local_sizes
        num_pieces, latent = 0, self.latent
        if latent is not None:
            num_pieces = latent.max_pieces(self.num_input_tokens, num_reqs)
        num_states = 0 if self.states is None else num_reqs
        has_drafts = self.states is not None and self.states.num_drafts > 0
        num_halved = num_reqs if latent is not None else num_states
        return {
            "T": self.num_input_tokens,
            "R": num_reqs,
            "R + 1": num_reqs + 1,
            "G": self.num_groups,
            "P": self.mrope_dims,
            "K": self.max_logits,
            "D": self.max_drafts,
            "S": num_reqs if self.max_drafts else 0,
            "V": num_local,
            "V + 1": num_local + 1 if num_local else 0,
            "L": num_local_groups,
            "N": 0 if self.states is None else len(self.states.groups),
            "Z": num_states,
            "H": len(self.states.groups) if self.states is not None and has_drafts else 0,
            "A": num_reqs if has_drafts else 0,
            "Q": num_halved,
            "Q + 1": num_halved + 1 if num_halved else 0,
            "C": num_pieces,
            "W": num_reqs if self.has_slots else 0,
            "X": 0 if self.dcp is None else num_reqs,
        }

    @cached_property
    def arrays(self) -> dict[str, ArraySpec]:
        """Place of every array by name, in the order of the buffer."""
        dims, arrays, end = self.dims, {}, 0
        for name, line in STEP_ARRAYS.items():
            shape = tuple(dims[dim] for dim in line.dims)
            spec = arrays[name] = ArraySpec(_aligned(end), shape, line.dtype, line.spare)
            end = spec.end
        return arrays

    @cached_property
    def variable_offset(self) -> int:
        """First byte of the variable part."""
        return _aligned(next(reversed(self.arrays.values())).end)

    def offset_int32(self, name: str) -> int:
        """First element of an int32 array in the buffer viewed as int32."""
        return self.arrays[name].elements.start

    def nbytes(self, num_targets: int = 0, num_block_changes: int = 0) -> int:
        """Bytes of a step: the arrays and the variable part."""
        return self.variable_offset + 8 * num_targets + 12 * num_block_changes

    def variable_part(self, num_targets: int, num_block_changes: int) -> tuple[slice, slice, slice]:
        """Where the variable part's arrays are.

        Returns
        -------
        sampled_token_targets, block_change_indices, block_change_ids
            As slices of the buffer viewed as int64, int64 and int32.
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
        """Every array as a view of `buffer`.

        Parameters
        ----------
        buffer
            uint8, at least `nbytes` long and a multiple of 8; aligned to `ALIGNMENT`, or any memory
            that numpy allocated.

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


def _aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT


class StepArrays(Arrays[np.ndarray]):
    """The arrays of one layout, all views of one buffer; padding included.

    Attributes
    ----------
    layout, buffer
        Offsets of the arrays, and the memory that holds them: uint8.
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
        """Sizes and addresses for compiled code (`prep.compiled.arrays_of`), int64."""
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


@lru_cache(maxsize=1024)
def step_layout(
    num_input_tokens: int,
    num_reqs_padded: int,
    num_groups: int,
    max_logits_per_req: int = 1,
    mrope_dims: int = 0,
    local: LocalGroups | None = None,
    latent: LatentSplit | None = None,
    states: StateGroups | None = None,
    has_slots: bool = False,
    dcp: ContextShards | None = None,
) -> StepLayout:
    """The layout of these sizes: cached, so that its offsets are computed once.

    Parameters
    ----------
    num_input_tokens, num_reqs_padded, num_groups, mrope_dims, local, latent, states, has_slots, dcp
        See `StepLayout`.
    max_logits_per_req
        Most rows of logits of one request: one for each draft, and one after them.
    """
    # Each row of logits belongs to a token of the step: never more logits than tokens.
    max_logits = min(num_input_tokens, num_reqs_padded * max_logits_per_req)
    max_drafts = min(num_input_tokens, num_reqs_padded * (max_logits_per_req - 1))
    sizes = num_input_tokens, num_reqs_padded, num_groups, max_logits, max_drafts, mrope_dims
    return StepLayout(*sizes, local, latent, states, has_slots, dcp)


def targets_per_row(num_drafts: int) -> int:
    """Targets of one row of the last step's samples: its next token and, twice, its drafts."""
    return 1 + 2 * num_drafts


def largest_step(
    max_num_tokens: int,
    max_num_reqs: int,
    num_groups: int,
    max_logits_per_req: int,
    num_block_table_entries: int,
    mrope_dims: int = 0,
    local: LocalGroups | None = None,
    latent: LatentSplit | None = None,
    states: StateGroups | None = None,
    has_slots: bool = False,
    dcp: ContextShards | None = None,
) -> int:
    """Bytes of a buffer that has room for every step, a multiple of `ALIGNMENT`.

    A mixed batch in a full graph has one row more than requests. The first step after a dummy run
    changes every entry of the block tables.
    """
    num_rows = max_num_reqs + PADDING_ROWS
    sizes = max_num_tokens, num_rows, num_groups, max_logits_per_req, mrope_dims
    layout = step_layout(*sizes, local, latent, states, has_slots, dcp)
    num_targets = max_num_reqs * targets_per_row(max_logits_per_req - 1)
    nbytes = layout.nbytes(num_targets, num_block_table_entries)
    return _aligned(nbytes)
