"""Block tables that the device keeps: upstream's, and what the device has of them."""

import numpy as np
import torch
from vllm.v1.worker.block_table import MultiGroupBlockTable

from vllm_npu_prep.prep.arrays import NO_PREVIOUS_ROW, PADDING_ROWS


class DeviceBlockTables(MultiGroupBlockTable):
    """The block tables of all KV-cache groups, with the device's copy changed entry by entry.

    Upstream copies every row of the batch, as wide as ``max_model_len`` makes it, in every step.
    Here the tables are flat, one after the other, on the host and on the device, and only entries
    that the device doesn't have are sent, with everything else of the step (`list_block_changes`).
    A row that grows needs no note: what is past `num_synced_blocks` is new. A row that is replaced
    forgets. After the rows of requests come `PADDING_ROWS`, which nothing writes.

    Parameters
    ----------
    upstream
        The tables as vLLM's input batch made them, still empty. They get other memory. There are
        none for a model without a KV cache.
    max_num_reqs
        Rows of each table.
    device
        Where the device's tables are.
    blocks_per_chunk
        Rows are multiples of this many entries, for layers that see rows of one chunk.
    """

    def __init__(
        self,
        upstream: MultiGroupBlockTable,
        max_num_reqs: int,
        device: torch.device,
        blocks_per_chunk: int = 1,
    ) -> None:
        self.block_tables = upstream.block_tables
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
        # Mutable state of the runner: not an inference tensor, whatever mode the caller is in.
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
        # Row of each request when `mark_rows` was last called, -1 for those it left out.
        self.previous_rows = np.full(max_num_reqs, NO_PREVIOUS_ROW, np.int64)  # [max_num_reqs]
        self._rows = np.arange(max_num_reqs)
        self.is_prepared = False  # the device's rows belong to a dummy run that was prepared
        self._device_rows: dict[int, tuple[torch.Tensor, ...]] = {}

    def device_rows(self, num_reqs: int) -> tuple[torch.Tensor, ...]:
        """Leading rows on the device, int32 ``[num_reqs, max_num_blocks]`` for each group."""
        rows = self._device_rows.get(num_reqs)
        if rows is None:
            rows = tuple(table.get_device_tensor(num_reqs) for table in self.block_tables)
            self._device_rows[num_reqs] = rows
        return rows

    def mark_rows(self, left_out: np.ndarray) -> None:
        """Call the present rows the previous ones; they then follow their requests.

        Parameters
        ----------
        left_out
            bool ``[num_reqs]``: requests to leave out.
        """
        num_reqs = len(left_out)
        self.previous_rows[:num_reqs] = self._rows[:num_reqs]
        self.previous_rows[:num_reqs][left_out] = NO_PREVIOUS_ROW

    def forget(self) -> None:
        """The device's tables may hold anything: send every row again."""
        self.num_synced_blocks[:] = 0
        self.num_device_blocks[:] = self.max_num_blocks[:, None]

    def add_row(self, block_ids: tuple[list[int], ...], row_idx: int) -> None:
        """A row gets another request.

        Requests that come back were taken out first, and upstream then forgets their sample too.
        """
        super().add_row(block_ids, row_idx)
        self.num_synced_blocks[:, row_idx] = 0
        self.previous_rows[row_idx] = NO_PREVIOUS_ROW

    def clear_row(self, row_idx: int) -> None:
        """A row loses its request."""
        super().clear_row(row_idx)
        self.num_synced_blocks[:, row_idx] = 0

    def move_row(self, src: int, tgt: int) -> None:
        """A request moves to a free row."""
        super().move_row(src, tgt)
        self.num_synced_blocks[:, [src, tgt]] = 0
        self.previous_rows[tgt] = self.previous_rows[src]

    def swap_row(self, src: int, tgt: int) -> None:
        """Two requests change places."""
        super().swap_row(src, tgt)
        self.num_synced_blocks[:, [src, tgt]] = 0
        self.previous_rows[[src, tgt]] = self.previous_rows[[tgt, src]]

    def commit_block_table(self, num_reqs: int) -> None:
        """Copy whole rows, as dummy runs do; not over what was prepared for one."""
        if self.is_prepared:
            return
        super().commit_block_table(num_reqs)
        self.forget()

    def clear(self) -> None:
        """Empty the tables on both sides."""
        super().clear()
        self.forget()
