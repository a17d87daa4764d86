"""The runner's tables of its requests, which are kept from step to step and read by address."""

from collections import namedtuple
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Annotated, Any, get_args, get_origin

import numpy as np

from vllm_npu_prep.prep.arrays import PADDING_ROWS, ArrayType
from vllm_npu_prep.prep.compiled import ArrayTuple
from vllm_npu_prep.prep.mrope import NO_MROPE, MropeTables
from vllm_npu_prep.prep.shape import PLAIN_SHAPE, EngineShape


@dataclass(frozen=True)
class BatchTables:
    """The runner's tables, kept from step to step: they are views, and nothing is copied.

    The fused pass reads and writes them by address, so they are never replaced or resized.

    A row belongs to a request: request ``i`` of the batch has the request row ``request_rows[i]``.
    vLLM's V1 runner keeps its requests in the order of the batch, so `request_rows` counts up; in
    V2 a request keeps its row, and nothing moves. `num_synced_blocks` and `num_device_blocks` are
    about rows of the device's block tables, which are in the order of the batch for both runners.
    Rows without a request are undefined.

    In the shapes ``rows`` is ``max_num_reqs``, and ``entries`` is the sum over the groups of
    ``(rows + PADDING_ROWS) * max_num_blocks``.
    """

    num_computed_tokens: Annotated[np.ndarray, ArrayType(np.int32, "rows")]
    num_prompt_tokens: Annotated[np.ndarray, ArrayType(np.int32, "rows")]
    num_tokens: Annotated[
        np.ndarray, ArrayType(np.int32, "rows")
    ]  # tokens known of each request, drafts excluded
    token_ids: Annotated[np.ndarray, ArrayType(np.int32, "rows, max_model_len")]
    block_table_flat: Annotated[
        np.ndarray, ArrayType(np.int32, "entries")
    ]  # the groups' tables one after the other
    # The width of each group's table, the slots of a block, and the entries that a request owns
    max_num_blocks: Annotated[np.ndarray, ArrayType(np.int32, "groups")]
    block_sizes: Annotated[np.ndarray, ArrayType(np.int32, "groups")]
    num_blocks: Annotated[np.ndarray, ArrayType(np.int32, "groups, rows")]
    # What the device has of each row: the number of leading entries that are the same there, and
    # of leading entries that may differ from the null block there. `prepare_step` and code that
    # replaces a row keep both up to date.
    num_synced_blocks: Annotated[np.ndarray, ArrayType(np.int32, "groups, rows")]
    num_device_blocks: Annotated[np.ndarray, ArrayType(np.int32, "groups, rows")]
    # Request row of each request of the batch, in all tables but the last two. Entries past the
    # batch are left from earlier batches. By default rows count up.
    request_rows: Annotated[np.ndarray, ArrayType(np.int32, "rows")] = None  # type: ignore[assignment]
    # What compiled code reads of `shape.dcp`: world size, rank and interleave size
    dcp: Annotated[np.ndarray, ArrayType(np.int32, "3")] = field(init=False)
    # What compiled code reads of `shape.pcp`: world size, rank
    pcp: Annotated[np.ndarray, ArrayType(np.int32, "2")] = field(init=False)
    # Of each group of `shape.local`, in rows of one chunk: the first one of its block table, and
    # how many of them a request has
    first_local_rows: Annotated[np.ndarray, ArrayType(np.int32, "local_groups")] = field(init=False)
    chunks_per_req: Annotated[np.ndarray, ArrayType(np.int32, "local_groups")] = field(init=False)
    # The groups of `shape.states`, and the first entries of their block tables
    state_groups: Annotated[np.ndarray, ArrayType(np.int32, "state_groups")] = field(init=False)
    first_state_entries: Annotated[np.ndarray, ArrayType(np.int64, "state_groups")] = field(
        init=False
    )
    shape: EngineShape = PLAIN_SHAPE
    chunked_prefill: bool = True
    mrope: MropeTables = NO_MROPE

    def __post_init__(self) -> None:
        if self.request_rows is None:
            object.__setattr__(self, "request_rows", np.arange(len(self.token_ids), dtype=np.int32))
        dcp, pcp = self.shape.dcp, self.shape.pcp
        local, states = self.shape.local, self.shape.states
        num_entries = self.max_num_blocks * np.int64(len(self.token_ids) + PADDING_ROWS)
        firsts = np.cumsum(num_entries) - num_entries
        local_groups, state_groups = (np.array(each.groups, np.int32) for each in (local, states))
        derived = {
            "dcp": np.array((dcp.world_size, dcp.rank, dcp.interleave_size), np.int32),
            "pcp": np.array((pcp.world_size, pcp.rank), np.int32),
            "first_local_rows": (firsts[local_groups] // local.blocks_per_chunk).astype(np.int32),
            "chunks_per_req": self.max_num_blocks[local_groups] // np.int32(local.blocks_per_chunk),
            "state_groups": state_groups,
            "first_state_entries": firsts[state_groups],
        }
        for name, array in derived.items():
            object.__setattr__(self, name, array)
        for name in TABLES:
            array = getattr(self, name)
            if array.dtype != TABLES[name].dtype or not array.flags.c_contiguous:
                raise TypeError(f"{name} is {array.dtype}, not contiguous {TABLES[name].dtype}")
        given = len(self.block_sizes), self.mrope.num_dims
        if given != (self.shape.num_groups, self.shape.mrope_dims):
            raise ValueError(f"{given[0]} groups and {given[1]} M-RoPE dimensions: {self.shape}")
        if (self.block_sizes % dcp.interleave_size).any():
            raise ValueError("blocks are not whole runs of neighbouring tokens on one rank")
        if (self.max_num_blocks % local.blocks_per_chunk).any():
            raise ValueError("rows of block tables are not whole chunks")

    @property
    def max_model_len(self) -> int:
        return self.token_ids.shape[1]

    def tokens_per_block(self, group: int) -> int:
        """Return how many positions of a request one block of a group stands for."""
        return self.shape.dcp.tokens_per_block(int(self.block_sizes[group]))

    def block_table(self, group: int) -> np.ndarray:
        """Return a view of a group's block table, int32 ``[rows, max_num_blocks]``."""
        sizes = (len(self.token_ids) + PADDING_ROWS) * self.max_num_blocks
        table = np.split(self.block_table_flat, np.cumsum(sizes)[:-1])[group]
        return table.reshape(-1, self.max_num_blocks[group])[: len(self.token_ids)]

    def device_block_table_flat(self) -> np.ndarray:
        """Return a copy of `block_table_flat` with the device's rows: in the order of the batch."""
        copied, first = self.block_table_flat.copy(), 0
        num_rows = len(self.token_ids)
        for width in self.max_num_blocks.tolist():
            end = first + num_rows * width
            copied[first:end].reshape(num_rows, width)[:] = self.block_table_flat[
                first:end
            ].reshape(num_rows, width)[self.request_rows]
            first += (num_rows + PADDING_ROWS) * width
        return copied

    @cached_property
    def addresses(self) -> np.ndarray:
        """The sizes and addresses of the tables for compiled code (`tables_of`), int64.

        Raises
        ------
        ValueError
            If two tables don't agree on a size.
        """
        arrays: dict[str, np.ndarray] = {name: getattr(self, name) for name in TABLES}
        sizes: dict[str, int] = {}
        for name, array in arrays.items():
            for dim, size in zip(TABLES[name].dims, array.shape, strict=True):
                if sizes.setdefault(dim, size) != size:
                    raise ValueError(f"{name} is {list(array.shape)}, but {dim} is {sizes[dim]}")
        data = {name: array.ctypes.data for name, array in arrays.items()}
        return _TUPLE.pack(sizes, data, {})


TABLES: dict[str, ArrayType] = {
    item.name: get_args(item.type)[1]
    for item in fields(BatchTables)
    if get_origin(item.type) is Annotated
}
"""The arrays of `BatchTables` by name."""

TableViews = namedtuple("TableViews", list(TABLES))  # type: ignore[misc]
_TUPLE = ArrayTuple(TableViews, TABLES)
tables_of = _TUPLE.unpack
"""In compiled code, return the tables by name from `BatchTables.addresses`."""


def device_has_all(block_tables: Sequence[np.ndarray]) -> dict[str, Any]:
    """Return block tables for `BatchTables` that the device has already, so that none is sent.

    Parameters
    ----------
    block_tables
        One int32 ``[rows, max_num_blocks]`` for each group.
    """
    max_num_reqs = len(block_tables[0])
    nothing = np.zeros((len(block_tables), max_num_reqs), np.int32)
    return {
        "block_table_flat": np.concatenate(
            [np.pad(table, ((0, PADDING_ROWS), (0, 0))).reshape(-1) for table in block_tables]
        ),
        "max_num_blocks": np.array([table.shape[1] for table in block_tables], np.int32),
        "num_blocks": nothing,
        "num_synced_blocks": nothing.copy(),
        "num_device_blocks": nothing.copy(),
    }
