"""Blocks of the KV cache as attention kernels see them, where recurrent states make blocks large.

A recurrent state of a large model takes as many bytes as the K of 512 to 2048 tokens, and blocks of
the cache are that large. Fused attention takes blocks of at most 128 to 1024 tokens, depending on
the head size and on the release of CANN. So its kernels see a block as several blocks, which are
neighbours in each plane.
"""

import torch
from vllm.config import VllmConfig

from vllm_npu_prep.attention.families import DEFAULT_BLOCK_SIZE
from vllm_npu_prep.config import decisions_of
from vllm_npu_prep.prep.arrays import PADDING_ROWS

MULTIPLE = 16
"""Kernel blocks are multiples of this many tokens where the block size allows it."""


def kernel_block_size(block_size: int) -> int:
    """Return the tokens of a kernel block: the block size's largest divisor that kernels take."""
    sizes = range(min(block_size, DEFAULT_BLOCK_SIZE), 0, -1)
    divisors = [size for size in sizes if block_size % size == 0]
    return next((size for size in divisors if size % MULTIPLE == 0), divisors[0])


def blocks_per_block(vllm_config: VllmConfig, block_size: int) -> int:
    """Return how many kernel blocks a block has: 1, except for models with states on NPUs."""
    if not vllm_config.model_config.is_hybrid or decisions_of(vllm_config).attention != "fia":
        return 1
    return block_size // kernel_block_size(block_size)


class KernelBlockTables:
    """The block tables of one group, counted in kernel blocks and kept at one address.

    A block is `count` kernel blocks.
    """

    def __init__(self, count: int, max_num_reqs: int, device: torch.device) -> None:
        self.count, self._num_rows = count, max_num_reqs + PADDING_ROWS
        self._offsets = torch.arange(count, dtype=torch.int32, device=device)
        self._tables: torch.Tensor | None = None  # int32 [num_rows, max_num_blocks, count]

    def of(self, block_table: torch.Tensor) -> torch.Tensor:
        """Return int32 ``[num_reqs, max_num_blocks]`` rows of a block table in kernel blocks.

        The result is int32 ``[num_reqs, max_num_blocks * count]``, overwritten by the next call. It
        takes one launch per step.
        """
        num_reqs, width = block_table.shape
        if self._tables is None:
            self._tables = block_table.new_zeros(self._num_rows, width, self.count)
        rows = self._tables[:num_reqs]
        torch.add(self._offsets, block_table.unsqueeze(-1), alpha=self.count, out=rows)
        return rows.flatten(1)
