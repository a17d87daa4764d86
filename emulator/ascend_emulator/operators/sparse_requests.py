"""What both operators of sparse attention are told of requests: layouts, lengths, blocks."""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from ascend_emulator import faults
from ascend_emulator.api import touch
from ascend_emulator.operators.constraint import Call, shape_of

DTYPES = (torch.float16, torch.bfloat16)
NO_LIMIT = 2**63 - 1
"""The only value of ``pre_tokens`` and ``next_tokens``."""

CAUSAL = 3
"""The sparse mode in which a token sees nothing behind itself; 0 is the other one."""

ROWS_AT_ONCE = 1 << 22
"""How many numbers are held at once at most, which bounds the memory of long prompts."""


@dataclass(frozen=True)
class Requests:
    """Queries, keys and how both are divided into requests.

    `lengths` and `key_lengths` are int32 tensors of the device, whose values are read when the
    kernel runs: a replayed graph takes those of its replay.
    """

    call: Call
    query: torch.Tensor
    key: torch.Tensor
    lengths: torch.Tensor | None
    key_lengths: torch.Tensor | None
    block_table: torch.Tensor | None  # [B, width] int32
    layout_query: str
    layout_key: str
    sparse_mode: int

    @property
    def is_packed(self) -> bool:
        """Whether requests are concatenated instead of padded side by side."""
        return self.layout_query == "TND"

    @property
    def is_paged(self) -> bool:
        return self.layout_key == "PA_BSND"

    @property
    def num_requests(self) -> int:
        return len(self.query) if not self.is_packed or self.lengths is None else len(self.lengths)

    def check(self, pre_tokens: int, next_tokens: int) -> None:
        """Refuse what is alike in both operators.

        Raises
        ------
        KernelRefusalError
            If a demand is not met; it names the constraint.
        """
        demand = self.call.demand
        layouts = self.layout_query, self.layout_key
        fits = layouts[0] in ("BSND", "TND") and layouts[1] in ("PA_BSND", layouts[0])
        demand("layouts", fits, layouts)
        demand("sparse_mode", self.sparse_mode in (0, CAUSAL), self.sparse_mode)
        limits = pre_tokens, next_tokens
        demand("limits", limits == (NO_LIMIT, NO_LIMIT), limits)
        ranks = 4 - self.is_packed, 3 if self.layout_key == "TND" else 4
        fits = ranks == (self.query.dim(), self.key.dim())
        given = f"{shape_of(self.query)} and {shape_of(self.key)}"
        demand("ranks", fits and self.query.numel() and self.key.numel(), given)
        demand("one head of keys", self.key.shape[-2] == 1, shape_of(self.key))
        for argument, each in (("query", self.query), ("key", self.key)):
            fits = each.dtype in DTYPES and each.dtype == self.query.dtype
            demand("dtype", fits, each.dtype, argument)
        demand("contiguous keys", self.key.is_contiguous(), f"strides {self.key.stride()}")
        self._check_lengths()
        if self.is_paged:
            self._check_blocks()

    def _check_lengths(self) -> None:
        demand = self.call.demand
        demand("lengths of queries required", self.lengths is not None or not self.is_packed, None)
        fits = self.key_lengths is not None or self.layout_key == "BSND"
        demand("lengths of keys required", fits, None)
        fits = (self.block_table is not None) == self.is_paged
        demand("block table for blocks", fits, f"layout {self.layout_key}")
        for each in (self.lengths, self.key_lengths):
            if each is not None:
                fits = each.dtype == torch.int32 and shape_of(each) == (self.num_requests,)
                demand("integers", fits and len(each), f"{shape_of(each)} {each.dtype}")
        if self.layout_key == "BSND":
            demand("batch of keys", len(self.key) == self.num_requests, shape_of(self.key))
        room = len(self.query) if self.is_packed else self.query.shape[1]
        given = [] if self.lengths is None else self.lengths.tolist()
        demand("lengths of queries", _fit(given, room, self.is_packed), f"{given} of {room}")
        if not self.is_paged:
            room = self.key.shape[0 if self.layout_key == "TND" else 1]
            given = [] if self.key_lengths is None else self.key_lengths.tolist()
            fits = _fit(given, room, self.layout_key == "TND")
            demand("lengths of keys", fits, f"{given} of {room}")

    def _check_blocks(self) -> None:
        demand, table, size = self.call.demand, self.block_table, self.key.shape[1]
        assert table is not None and self.key_lengths is not None
        fits = table.dtype == torch.int32 and table.dim() == 2 and table.numel()
        fits = fits and len(table) == self.num_requests
        demand("block table", fits, f"{shape_of(table)} {table.dtype}")
        demand("block size", size % 16 == 0 and size <= 1024, size)
        room = table.shape[1] * size
        lengths = self.key_lengths.tolist()
        demand("lengths of keys", _fit(lengths, room, False), f"{lengths}, room for {room}")
        used = torch.cat([row[: -(-length // size)] for row, length in zip(table, lengths)])
        inside = ((used >= 0) & (used < len(self.key))).all()
        demand("block ids", inside, f"{used.tolist()} of {len(self.key)} blocks")

    def each(self) -> list[tuple[Any, int, int]]:
        """Return each request's place in the query, and its numbers of tokens and of keys."""
        key_lengths = self._key_lengths()
        if self.is_packed:
            assert self.lengths is not None
            ends = pairwise([0, *self.lengths.tolist()])
            return [(slice(a, b), b - a, n) for (a, b), n in zip(ends, key_lengths)]
        width = self.query.shape[1]
        lengths = [width] * len(key_lengths) if self.lengths is None else self.lengths.tolist()
        return [((i, slice(0, q)), q, n) for i, (q, n) in enumerate(zip(lengths, key_lengths))]

    def _key_lengths(self) -> list[int]:
        if self.key_lengths is None:
            return [self.key.shape[1]] * self.num_requests
        lengths = self.key_lengths.tolist()
        return [b - a for a, b in pairwise([0, *lengths])] if self.layout_key == "TND" else lengths

    def limits(self, num_tokens: int, num_keys: int) -> torch.Tensor:
        """Return for each token of a request how many keys it may see, int64; 0 for none."""
        if self.sparse_mode != CAUSAL:
            return torch.full((num_tokens,), num_keys)
        ends = torch.arange(num_keys - num_tokens + 1, num_keys + 1)
        return ends.clamp(min=0)

    def rows(self, plane: torch.Tensor, request: int, positions: torch.Tensor) -> torch.Tensor:
        """Return a request's rows of a plane like `key` at some positions: ``[..., D]``."""
        if not self.is_paged:
            start = 0
            if self.layout_key == "BSND":
                plane = plane[request]
            elif request:
                assert self.key_lengths is not None
                start = int(self.key_lengths[request - 1])
            return plane[positions + start, 0]
        assert self.block_table is not None
        size = plane.shape[1]
        row = faults.apply("table row", request)
        blocks = self.block_table[row][positions // size].long()
        touch(plane, blocks)
        return plane[blocks, positions % size, 0]


def _fit(lengths: list[int], room: int, are_sums: bool) -> bool:
    inside = all(0 <= each <= room for each in lengths)
    return inside and (not are_sums or all(a <= b for a, b in pairwise(lengths)))
