"""V1's block tables with a copy on the device, to which each step sends only new entries."""

import numpy as np
import torch
from vllm.v1.worker.block_table import MultiGroupBlockTable

from vllm_npu_prep.prep.arrays import NO_PREVIOUS_ROW, PADDING_ROWS


class DeviceBlockTables(MultiGroupBlockTable):
    """The block tables of all KV-cache groups, whose device copy is changed entry by entry.

    Upstream copies each row of the batch in full width (``max_model_len``) in every step. Here the
    tables are flat, one after the other, on the host and on the device. The step's one copy
    includes the entries that the device doesn't have yet (`list_block_changes`): those past
    `num_synced_blocks`, which is reset when a row is replaced. The rows of requests are followed by
    `PADDING_ROWS`, which are never written.

    Parameters
    ----------
    upstream
        The tables that vLLM's input batch made, still empty; their memory is replaced. A model
        without a KV cache has none.
    max_num_reqs
        Number of rows of each table.
    blocks_per_chunk
        Row lengths are rounded up to a multiple of this, for layers that view a row as attention
        chunks.
    """

    def __init__(
        self,
        upstream: MultiGroupBlockTable,
        max_num_reqs: int,
        device: torch.device,
        blocks_per_chunk: int = 1,
    ) -> None:
        self.block_tables = upstream.block_tables
        self.block_sizes = np.array([table.block_size for table in self.block_tables], np.int32)
        shape = (len(self.block_tables), max_num_reqs)
        # See `BatchTables` for these.
        self.num_blocks = np.zeros(shape, np.int32)
        self.num_synced_blocks = np.zeros(shape, np.int32)
        self.num_device_blocks = np.zeros(shape, np.int32)
        widths = [table.max_num_blocks_per_req for table in self.block_tables]
        chunks = [-(-width // blocks_per_chunk) for width in widths]
        self.max_num_blocks = np.array(chunks, np.int32) * np.int32(blocks_per_chunk)
        num_rows = max_num_reqs + PADDING_ROWS
        sizes = [num_rows * width for width in self.max_num_blocks.tolist()]
        # The runner changes it in place, so it must not be an inference tensor.
        with torch.inference_mode(False):
            self.block_table_flat_cpu = torch.zeros(sum(sizes), dtype=torch.int32)
            self.block_table_flat = torch.zeros(sum(sizes), dtype=torch.int32, device=device)
        self.block_table_flat_np = self.block_table_flat_cpu.numpy()
        views = zip(
            self.block_table_flat_cpu.split(sizes),
            self.block_table_flat.split(sizes),
            self.num_blocks,
        )
        for table, (host, on_device, num_blocks) in zip(self.block_tables, views):
            buffer = table.block_table
            buffer.cpu = host.view(num_rows, -1)
            buffer.np = buffer.cpu.numpy()
            buffer.gpu = on_device.view(num_rows, -1)
            table.num_blocks_per_row = num_blocks
        # The row of each request at the last call of `mark_rows`; -1 for those it left out
        self.previous_rows = np.full(max_num_reqs, NO_PREVIOUS_ROW, np.int64)  # [max_num_reqs]
        self._rows = np.arange(max_num_reqs)
        self.is_prepared = False  # True: the device's rows belong to a prepared dummy run
        self._device_rows: dict[int, tuple[torch.Tensor, ...]] = {}

    def device_rows(self, num_reqs: int) -> tuple[torch.Tensor, ...]:
        """Return the leading rows of the device's tables, int32 ``[num_reqs, max_num_blocks]`` per
        group."""
        rows = self._device_rows.get(num_reqs)
        if rows is None:
            rows = tuple(table.get_device_tensor(num_reqs) for table in self.block_tables)
            self._device_rows[num_reqs] = rows
        return rows

    def mark_rows(self, left_out: np.ndarray) -> None:
        """Remember the current rows as previous rows, which follow their requests from then on.

        `left_out`, bool ``[num_reqs]``, marks requests that get no previous row.
        """
        num_reqs = len(left_out)
        self.previous_rows[:num_reqs] = self._rows[:num_reqs]
        self.previous_rows[:num_reqs][left_out] = NO_PREVIOUS_ROW

    def forget(self) -> None:
        """Let every row be sent again, because the device's tables may hold anything."""
        self.num_synced_blocks[:] = 0
        self.num_device_blocks[:] = self.max_num_blocks[:, None]

    def add_row(self, block_ids: tuple[list[int], ...], row_idx: int) -> None:
        """Give a row to another request, of which the device has nothing.

        A request that comes back was removed before, and upstream then forgets its sample, too.
        """
        super().add_row(block_ids, row_idx)
        self.num_synced_blocks[:, row_idx] = 0
        self.previous_rows[row_idx] = NO_PREVIOUS_ROW

    def clear_row(self, row_idx: int) -> None:
        super().clear_row(row_idx)
        self.num_synced_blocks[:, row_idx] = 0

    def move_row(self, src: int, tgt: int) -> None:
        super().move_row(src, tgt)
        self.num_synced_blocks[:, [src, tgt]] = 0
        self.previous_rows[tgt] = self.previous_rows[src]

    def swap_row(self, src: int, tgt: int) -> None:
        super().swap_row(src, tgt)
        self.num_synced_blocks[:, [src, tgt]] = 0
        self.previous_rows[[src, tgt]] = self.previous_rows[[tgt, src]]

    def commit_block_table(self, num_reqs: int) -> None:
        """Copy whole rows for a dummy run, unless its rows were prepared already."""
        if self.is_prepared:
            return
        super().commit_block_table(num_reqs)
        self.forget()

    def clear(self) -> None:
        super().clear()
        self.forget()
