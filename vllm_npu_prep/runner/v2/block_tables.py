"""Block tables by request row on the host, and in the order of the batch on the device."""

from collections.abc import Sequence
from itertools import compress
from typing import Any

import numpy as np
import torch

from vllm_npu_prep.prep.arrays import PADDING_ROWS

TOGETHER = 16
"""From this many requests on, numpy appends their blocks faster than a loop does. The loop's code
is in the processor's cache after its first request."""


class NPUBlockTables:
    """The block tables of all KV-cache groups; a stand-in for upstream's ``BlockTables``.

    Upstream keeps the device's tables by request row and gathers the rows of the batch in each
    step. Here the device's tables are in the order of the batch already, and the step's one copy
    changes them entry by entry (`vllm_npu_prep.prep.fused_pass.list_block_changes`). A whole row is
    sent only when another request takes its place: see `send_whole`.

    Parameters
    ----------
    block_sizes
        Block size of each group, in tokens.
    max_num_reqs
        Number of request rows, and of rows of a batch.
    max_num_batched_tokens
        Not used: slot mappings are among a step's arrays.
    max_num_blocks_per_group
        The largest number of blocks that a request can have in each group.
    blocks_per_chunk
        Row lengths are rounded up to a multiple of this, for layers that view a row as attention
        chunks.
    **unused
        Upstream's arguments for context parallelism, which the fused pass applies, and for the
        choice of groups that write slots.
    """

    redirect_writes_to_null_block = False

    def __init__(
        self,
        block_sizes: list[int],
        max_num_reqs: int,
        max_num_batched_tokens: int,
        max_num_blocks_per_group: list[int],
        device: torch.device,
        blocks_per_chunk: int = 1,
        **unused: Any,
    ) -> None:
        self.block_sizes = np.array(block_sizes, np.int32)
        chunks = [-(-width // blocks_per_chunk) for width in max_num_blocks_per_group]
        self.max_num_blocks = np.array(chunks, np.int32) * np.int32(blocks_per_chunk)
        shape = (len(block_sizes), max_num_reqs)
        # See `vllm_npu_prep.prep.tables.BatchTables` for these.
        self.num_blocks = np.zeros(shape, np.int32)
        self.num_synced_blocks = np.zeros(shape, np.int32)
        self.num_device_blocks = np.zeros(shape, np.int32)
        num_rows = max_num_reqs + PADDING_ROWS
        sizes = [num_rows * width for width in self.max_num_blocks.tolist()]
        self.block_table_flat_np = np.zeros(sum(sizes), np.int32)
        with torch.inference_mode(False):  # steps change it in place
            self.block_table_flat = torch.zeros(sum(sizes), dtype=torch.int32, device=device)
        borders = np.cumsum(sizes)[:-1]
        self._rows = [
            part.reshape(num_rows, width)
            for part, width in zip(
                np.split(self.block_table_flat_np, borders), self.max_num_blocks.tolist()
            )
        ]
        self._on_device = [part.view(num_rows, -1) for part in self.block_table_flat.split(sizes)]
        self._device_rows: dict[int, tuple[torch.Tensor, ...]] = {}

    def append_block_ids(
        self, req_index: int, new_block_ids: Sequence[Sequence[int]], overwrite: bool
    ) -> None:
        """Append blocks to a request row, or replace its blocks if the request is new.

        Raises
        ------
        ValueError
            If a request would have more blocks than its row can hold.
        """
        for group, block_ids in enumerate(new_block_ids):
            start = 0 if overwrite else int(self.num_blocks[group, req_index])
            end = start + len(block_ids)
            if end > self.max_num_blocks[group]:
                raise ValueError(
                    f"{end} blocks of group {group} in request row {req_index}: a request may have "
                    f"{self.max_num_blocks[group]}"
                )
            self._rows[group][req_index, start:end] = block_ids
            self.num_blocks[group, req_index] = end

    def append_each(
        self, request_rows: np.ndarray, new_block_ids: Sequence[Sequence[Sequence[int]] | None]
    ) -> None:
        """Append the blocks that requests in these rows get in a step; None for most of them.

        A decode gets one block at most, and those of several requests are appended together.
        """
        reqs = list(compress(range(len(new_block_ids)), new_block_ids))
        given: list[Any] = [new_block_ids[req] for req in reqs]
        are_many = len(given) >= TOGETHER and len(self._rows) == 1
        if are_many and all(len(ids) == 1 for (ids,) in given):
            rows = request_rows[reqs]
            places = self.num_blocks[0, rows]
            if places.max() < self.max_num_blocks[0]:
                self._rows[0][rows, places] = [ids[0] for (ids,) in given]
                self.num_blocks[0, rows] = places + 1
                return
        for req, block_ids in zip(reqs, given):
            self.append_block_ids(int(request_rows[req]), block_ids, overwrite=False)

    def apply_staged_writes(self) -> None:
        """Do nothing: the step's one copy carries the new entries."""

    def send_whole(self, places: Sequence[int]) -> None:
        """Mark rows of the device's tables, at these places of the batch, to be sent whole: another
        request has taken the place, or the request there has arrived again."""
        for place in places:
            self.num_synced_blocks[:, place] = 0

    def device_rows(self, num_reqs: int) -> tuple[torch.Tensor, ...]:
        """Return the leading rows of the device's tables, int32 ``[num_reqs, max_num_blocks]`` per
        group."""
        rows = self._device_rows.get(num_reqs)
        if rows is None:
            rows = tuple(table[:num_reqs] for table in self._on_device)
            self._device_rows[num_reqs] = rows
        return rows
