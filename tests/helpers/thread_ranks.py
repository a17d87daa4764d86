"""Ranks that are threads of one process, and a process group of them."""

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import torch

from tests.helpers.waiting import LIMIT


class Group:
    """The process group of ranks that are threads."""

    def __init__(self, rank: int, meet: Barrier, board: list[Any]) -> None:
        self.rank_in_group, self.world_size, self.meet, self.board = rank, len(board), meet, board

    def exchange(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        self.board[self.rank_in_group] = tensor
        self.meet.wait(LIMIT)
        got = [each.clone() for each in self.board]
        self.meet.wait(LIMIT)
        return got

    def all_gather(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        return torch.cat(self.exchange(tensor), dim)

    def all_gatherv(self, tensor: torch.Tensor, dim: int, sizes: list[int]) -> torch.Tensor:
        pieces = self.exchange(tensor)
        assert [piece.shape[dim] for piece in pieces] == sizes
        return torch.cat(pieces, dim)

    def reduce_scatter(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        total = sum(self.exchange(tensor))
        return total.chunk(self.world_size, dim)[self.rank_in_group]


def on_ranks(world_size: int, function: Any) -> list[Any]:
    """What a function returns on each rank, called with its group."""
    meet, board = Barrier(world_size), [None] * world_size
    with ThreadPoolExecutor(world_size) as pool:
        groups = [Group(rank, meet, board) for rank in range(world_size)]
        return list(pool.map(function, groups))
