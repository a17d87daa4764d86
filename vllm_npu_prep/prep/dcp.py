"""Decode context parallelism: several ranks share out the KV cache of each request.

The tokens of a request go round the ranks in runs of `DCPRank.interleave_size` neighbours:
the first run to rank 0, the next to rank 1, and after the last rank to rank 0 again. A rank keeps
its own tokens one after the other in the request's blocks. Every rank has the same block table, so
a block of B slots stands for ``B * world_size`` positions. The slot of a token that another rank
keeps is `vllm_npu_prep.prep.arrays.PAD_SLOT_ID`, which no cache writer writes.

The rule is that of vLLM's ``BlockTable.compute_slot_mapping`` and ``get_dcp_local_seq_lens``.
"""

from dataclasses import dataclass
from typing import TypeVar

import numpy as np

T = TypeVar("T", int, np.ndarray)


@dataclass(frozen=True)
class DCPRank:
    """The part of each request's context that one rank keeps.

    Attributes
    ----------
    world_size
        The number of ranks that share the context (vLLM's ``decode_context_parallel_size``).
    rank
        The rank that prepares the step.
    interleave_size
        The number of neighbouring tokens on one rank (vLLM's ``cp_kv_cache_interleave_size``);
        blocks consist of whole runs of this size.
    """

    world_size: int
    rank: int
    interleave_size: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size or self.interleave_size < 1:
            raise ValueError(
                f"rank {self.rank} of {self.world_size} with runs of {self.interleave_size} "
                "tokens: ranks count from 0, and a run has at least one token"
            )

    def __bool__(self) -> bool:
        return self.world_size > 1

    def owner(self, positions: T) -> T:
        """Return the rank that keeps the token at a position."""
        return positions // self.interleave_size % self.world_size

    def local_position(self, positions: T) -> T:
        """Return the place of a token among those that its rank keeps of the request."""
        size = self.interleave_size
        return positions // (size * self.world_size) * size + positions % size

    def tokens_per_block(self, block_size: int) -> int:
        """Return how many positions of a request a block of so many slots on each rank holds."""
        return block_size * self.world_size


NO_DCP = DCPRank(1, 0)
"""One rank keeps all tokens: there is no decode context parallelism. It is false."""
