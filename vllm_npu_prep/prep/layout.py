"""StepLayout: where every per-step array lives in the one buffer that travels to the device."""

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from vllm_npu_prep.prep.kernels import PADDING_ROWS
from vllm_npu_prep.prep.local_attention import LocalGroups, max_local_reqs

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


@dataclass(frozen=True, eq=False)
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
    max_logits
        Most tokens whose logits are wanted.
    max_drafts
        Most draft tokens; 0 in an engine without speculation.
    mrope_dims
        Dimensions of M-RoPE positions; 0 for a model without them.
    local
        Groups with chunked local attention; None in an engine without any.

    Notes
    -----
    Behind the arrays comes a tail for what has another length in every step and is placed by a
    launch of its own, before any graph runs:

    ======================  ======  ========================================================
    part                    dtype   length
    ======================  ======  ========================================================
    sampled_token_targets   int64   places of the last step's samples, none unless these are
                                    still on the device (async scheduling); for each row of
                                    them its next token's among the input ids, then its
                                    drafts', then its drafts' among `draft_token_ids`
    block_change_indices    int64   entries that the device's block tables don't have yet
    block_change_ids        int32   the same
    ======================  ======  ========================================================
    """

    num_input_tokens: int
    num_reqs_padded: int
    num_groups: int
    max_logits: int
    max_drafts: int = 0
    mrope_dims: int = 0
    local: LocalGroups | None = None

    @property
    def local_sizes(self) -> tuple[int, int]:
        """Most virtual requests, and groups whose layers see them (`prep.local_attention`)."""
        if self.local is None:
            return 0, 0
        sizes = self.num_input_tokens, self.num_reqs_padded, self.local.attention_chunk_size
        return max_local_reqs(*sizes), len(self.local.groups)

    @cached_property
    def arrays(self) -> dict[str, ArraySpec]:
        """Name to place of every array, in the order of the buffer.

        What has a length in tokens comes first: its place follows from ``num_input_tokens`` alone,
        because a piecewise graph serves any number of requests.
        """
        num_tokens, num_reqs = self.num_input_tokens, self.num_reqs_padded
        num_drafters = num_reqs if self.max_drafts else 0  # requests that may have drafts
        num_local, num_local_groups = self.local_sizes
        shapes: dict[str, tuple[tuple[int, ...], type]] = {
            "positions": ((num_tokens,), np.int64),
            "mrope_positions": ((self.mrope_dims, num_tokens), np.int64),
            # One more place behind the tokens: samples of the last step that no request of this
            # one waits for are put there.
            "input_ids_and_spare": ((num_tokens + 1,), np.int32),
            "slot_mapping": ((self.num_groups, num_tokens), np.int32),
            "is_padding": ((num_tokens,), np.bool_),
            "query_start_loc": ((num_reqs + 1,), np.int32),
            "seq_lens": ((num_reqs,), np.int32),
            "num_computed_tokens": ((num_reqs,), np.int32),
            "logits_indices": ((self.max_logits,), np.int32),
            "target_logits_indices": ((self.max_drafts,), np.int32),
            "draft_token_ids": ((self.max_drafts,), np.int32),
            "bonus_logits_indices": ((num_drafters,), np.int32),
            "cu_num_draft_tokens": ((num_drafters,), np.int32),
            "cu_num_sampled_tokens": ((num_drafters,), np.int32),
            "backup_next_token_ids": ((num_drafters,), np.int32),
            "local_query_start_loc": ((num_local + 1 if num_local else 0,), np.int32),
            "local_seq_lens": ((num_local,), np.int32),
            "local_num_computed_tokens": ((num_local,), np.int32),
            "local_table_rows": ((num_local_groups, num_local), np.int32),
            "discard_request_mask": ((num_reqs,), np.bool_),
        }
        arrays, offset = {}, 0
        for name, (shape, dtype) in shapes.items():
            arrays[name] = ArraySpec(offset, shape, np.dtype(dtype))
            offset = -(-arrays[name].end // ALIGNMENT) * ALIGNMENT
        return arrays

    @cached_property
    def tail_offset(self) -> int:
        """First byte of the tail."""
        return -(-self.arrays["discard_request_mask"].end // ALIGNMENT) * ALIGNMENT

    def place(self, name: str) -> int:
        """First element of an int32 array in the buffer seen as int32."""
        return self.arrays[name].offset // 4

    def nbytes(self, num_targets: int = 0, num_block_changes: int = 0) -> int:
        """Bytes of a step: the arrays and what it has in its tail."""
        return self.tail_offset + 8 * num_targets + 12 * num_block_changes

    def tail(self, num_targets: int, num_block_changes: int) -> tuple[slice, slice, slice]:
        """Place of the tail's parts.

        Returns
        -------
        sampled_token_targets, block_change_indices, block_change_ids
            As slices of the buffer seen as int64, int64 and int32.
        """
        targets = self.tail_offset // 8
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
            uint8 of at least `nbytes`, a multiple of 8, aligned to `ALIGNMENT` or wherever numpy
            put it.

        Raises
        ------
        ValueError
            If the buffer is too small.
        """
        if buffer.nbytes < self.nbytes():
            raise ValueError(
                f"the staging buffer has {buffer.nbytes} bytes, this step needs {self.nbytes()}"
            )
        views = {
            name: buffer[spec.offset : spec.end].view(spec.dtype).reshape(spec.shape)
            for name, spec in self.arrays.items()
        }
        tail = buffer[self.tail_offset :]
        return StepArrays(
            input_ids=views["input_ids_and_spare"][:-1],
            tail_int64=tail.view(np.int64),
            tail_int32=tail.view(np.int32),
            places=(self.place("input_ids_and_spare"), self.place("draft_token_ids")),
            **views,
        )


@dataclass(frozen=True)
class StepArrays:
    """The arrays of one layout, all views of one buffer; padding included.

    ``T`` is ``num_input_tokens``, ``R`` is ``num_reqs_padded``, ``G`` the number of groups, ``D``
    is ``max_drafts`` and ``S`` is ``R`` where there can be drafts, else 0; ``P`` is ``mrope_dims``,
    and ``V`` virtual requests and ``L`` groups that see them are `StepLayout.local_sizes`.
    """

    input_ids: np.ndarray  # [T] int32
    input_ids_and_spare: np.ndarray  # [T + 1] int32
    positions: np.ndarray  # [T] int64
    mrope_positions: np.ndarray  # [P, T] int64, time, height and width
    slot_mapping: np.ndarray  # [G, T] int32
    query_start_loc: np.ndarray  # [R + 1] int32
    seq_lens: np.ndarray  # [R] int32
    num_computed_tokens: np.ndarray  # [R] int32
    logits_indices: np.ndarray  # [max_logits] int32
    target_logits_indices: np.ndarray  # [D] int32, logits that verify each draft
    draft_token_ids: np.ndarray  # [D] int32, -1 where the scheduler kept a place only
    bonus_logits_indices: np.ndarray  # [S] int32, logits behind each request's last draft
    cu_num_draft_tokens: np.ndarray  # [S] int32
    cu_num_sampled_tokens: np.ndarray  # [S] int32
    backup_next_token_ids: np.ndarray  # [S] int32, what drafters go on from without a sample
    local_query_start_loc: np.ndarray  # [V + 1] int32, empty without chunked local attention
    local_seq_lens: np.ndarray  # [V] int32
    local_num_computed_tokens: np.ndarray  # [V] int32
    # [L, V] int32, rows of the device's block tables, all seen as rows of one chunk
    local_table_rows: np.ndarray
    discard_request_mask: np.ndarray  # [R] bool
    is_padding: np.ndarray  # [T] bool
    tail_int64: np.ndarray  # [bytes of the tail / 8] int64
    tail_int32: np.ndarray  # [bytes of the tail / 4] int32, the same memory
    places: tuple[int, int]  # of `input_ids` and `draft_token_ids` (`StepLayout.place`)

    @cached_property
    def addresses(self) -> np.ndarray:
        """Sizes and addresses for `vllm_npu_prep.prep.kernels.fill_step_at`, int64."""
        sizes = (
            len(self.positions),
            len(self.seq_lens),
            len(self.logits_indices),
            len(self.draft_token_ids),
            len(self.tail_int64),
            *self.places,
        )
        arrays = (
            self.input_ids_and_spare,
            self.positions,
            self.slot_mapping,
            self.query_start_loc,
            self.seq_lens,
            self.num_computed_tokens,
            self.logits_indices,
            self.target_logits_indices,
            self.draft_token_ids,
            self.bonus_logits_indices,
            self.cu_num_draft_tokens,
            self.cu_num_sampled_tokens,
            self.backup_next_token_ids,
            self.discard_request_mask,
            self.is_padding,
            self.tail_int64,
        )
        return np.array([*sizes, *(array.ctypes.data for array in arrays)], np.int64)


@lru_cache(maxsize=1024)
def step_layout(
    num_input_tokens: int,
    num_reqs_padded: int,
    num_groups: int,
    max_logits_per_req: int = 1,
    mrope_dims: int = 0,
    local: LocalGroups | None = None,
) -> StepLayout:
    """The layout of these sizes: the same object each time, its offsets worked out once.

    Parameters
    ----------
    num_input_tokens, num_reqs_padded, num_groups, mrope_dims, local
        See `StepLayout`.
    max_logits_per_req
        Most logits that one request wants: one, and one for each draft.
    """
    # Each request has at least one token and each draft is a token: never more logits than tokens.
    max_logits = min(num_input_tokens, num_reqs_padded * max_logits_per_req)
    max_drafts = min(num_input_tokens, num_reqs_padded * (max_logits_per_req - 1))
    return StepLayout(
        num_input_tokens, num_reqs_padded, num_groups, max_logits, max_drafts, mrope_dims, local
    )


def targets_per_row(num_drafts: int) -> int:
    """Places of one row of the last step's samples: its next token and, twice, its drafts."""
    return 1 + 2 * num_drafts


def largest_step(
    max_num_tokens: int,
    max_num_reqs: int,
    num_groups: int,
    max_logits_per_req: int,
    num_block_table_entries: int,
    mrope_dims: int = 0,
    local: LocalGroups | None = None,
) -> int:
    """Bytes that every step's buffer has to hold, a multiple of `ALIGNMENT`.

    A mixed batch in a full graph has one row more than requests. A step can change every entry of
    the block tables: the first one after a dummy run does.
    """
    num_rows = max_num_reqs + PADDING_ROWS
    layout = step_layout(
        max_num_tokens, num_rows, num_groups, max_logits_per_req, mrope_dims, local
    )
    num_targets = max_num_reqs * targets_per_row(max_logits_per_req - 1)
    nbytes = layout.nbytes(num_targets, num_block_table_entries)
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
