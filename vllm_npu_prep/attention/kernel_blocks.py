"""Blocks of the KV cache as kernels of attention see them, where states make blocks large.

A state of a large model fills the K of 512 to 2048 tokens, and a block of the cache is as large.
Fused attention takes blocks of up to 128 to 1024 tokens, by head size and release of CANN. So its
kernels see a block as several, which are neighbours in either plane.
"""

import torch
from vllm.config import VllmConfig

from vllm_npu_prep.attention.families import DEFAULT_BLOCK_SIZE
from vllm_npu_prep.config import decisions_of
from vllm_npu_prep.prep.arrays import PADDING_ROWS

MULTIPLE = 16
"""Kernel blocks are multiples of this, if they can be."""


def kernel_block_size(block_size: int) -> int:
    """Tokens of a kernel block: the largest divisor of a block that fused attention always takes.

    Parameters
    ----------
    block_size
        Of the KV cache, in tokens.
    """
    sizes = range(min(block_size, DEFAULT_BLOCK_SIZE), 0, -1)
    divisors = [size for size in sizes if block_size % size == 0]
    return next((size for size in divisors if size % MULTIPLE == 0), divisors[0])


def blocks_per_block(vllm_config: VllmConfig, block_size: int) -> int:
    """Kernel blocks of a block: 1, but for models with states on NPUs.

    Parameters
    ----------
    vllm_config
        The engine's config.
    block_size
        Of the KV cache, in tokens.
    """
    if not vllm_config.model_config.is_hybrid or decisions_of(vllm_config).attention != "fia":
        return 1
    return block_size // kernel_block_size(block_size)


class KernelBlockTables:
    """Block tables of one group in kernel blocks, at one address.

    Parameters
    ----------
    count
        Kernel blocks of a block.
    max_num_reqs
        Rows, but for padding.
    device
        Where they are.
    """

    def __init__(self, count: int, max_num_reqs: int, device: torch.device) -> None:
        self.count, self._num_rows = count, max_num_reqs + PADDING_ROWS
        self._offsets = torch.arange(count, dtype=torch.int32, device=device)
        self._tables: torch.Tensor | None = None  # int32 [num_rows, max_num_blocks, count]

    def of(self, block_table: torch.Tensor) -> torch.Tensor:
        """Rows of a block table in kernel blocks: one launch, once a step.

        Parameters
        ----------
        block_table
            int32 ``[num_reqs, max_num_blocks]``.

        Returns
        -------
        torch.Tensor
            int32 ``[num_reqs, max_num_blocks * count]``.
        """
        num_reqs, width = block_table.shape
        if self._tables is None:
            self._tables = block_table.new_zeros(self._num_rows, width, self.count)
        rows = self._tables[:num_reqs]
        torch.add(self._offsets, block_table.unsqueeze(-1), alpha=self.count, out=rows)
        return rows.flatten(1)
