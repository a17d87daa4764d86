"""Exchanges between ranks, for references of operators that send rows to other ranks themselves.

Ranks meet by the name of their communicator, over the emulated HCCL. Without the runtime, where a
reference is called by hand, the other ranks do what this one does.
"""

import ctypes
import functools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ascend_emulator.build import HCCL_LIBRARY
from ascend_emulator.options import LIBRARIES


class ExchangeError(RuntimeError):
    """Ranks could not exchange rows; the runtime has reported why on each of them."""


def place(group: str) -> tuple[int, int] | None:
    """Return this rank and the number of ranks of a communicator of this process.

    None if there is no such communicator, and without the runtime.
    """
    rank = ctypes.c_int()
    count = _hccl().emulator_hccl_place(group.encode(), ctypes.byref(rank)) if _has_runtime() else 0
    return (rank.value, count) if count else None


def gather(group: str, kernel: str, row: torch.Tensor, count: int) -> torch.Tensor:
    """Return the rows of all `count` ranks, ``[count, *row.shape]``.

    `kernel` is what messages call it; ranks that call something else are refused.
    """
    row = row.contiguous()
    if not _has_runtime():
        return row.expand(count, *row.shape)
    rows = torch.empty(count, *row.shape, dtype=row.dtype)
    size = ctypes.c_uint64(row.numel() * row.element_size())
    _check(_hccl().emulator_hccl_gather(group.encode(), kernel.encode(), _at(row), size, _at(rows)))
    return rows


def exchange(
    group: str, kernel: str, rank: int, parts: Sequence[torch.Tensor], receives: Sequence[int]
) -> list[torch.Tensor]:
    """Send each rank its part, and return what each rank sent here.

    Parameters
    ----------
    parts
        Rows for each rank, ``[n, width]`` in one dtype.
    receives
        Number of rows that each rank sends here.
    """
    if not _has_runtime():
        return [parts[rank][:rows] for rows in receives]
    rows = torch.cat(list(parts)).contiguous()
    width = rows.shape[1] * rows.element_size()
    received = torch.empty(sum(receives), rows.shape[1], dtype=rows.dtype)
    sizes = [_sizes([len(part) * width for part in parts]), _sizes([n * width for n in receives])]
    name = group.encode(), kernel.encode()
    _check(_hccl().emulator_hccl_exchange(*name, _at(rows), sizes[0], _at(received), sizes[1]))
    return list(received.split(list(receives)))


def _sizes(values: Sequence[int]) -> Any:
    return (ctypes.c_uint64 * len(values))(*values)


def _at(tensor: torch.Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())


def _check(status: int) -> None:
    if status:
        raise ExchangeError("ranks could not exchange rows")


def _has_runtime() -> bool:
    return LIBRARIES in os.environ


@functools.cache
def _hccl() -> ctypes.CDLL:
    """Load the library whose calls let other threads run Python while they wait."""
    return ctypes.CDLL(str(Path(os.environ[LIBRARIES]) / HCCL_LIBRARY))
