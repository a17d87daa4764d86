"""Ranks of a process group, forked from a script that runs under the emulator."""

import json
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.helpers.waiting import LIMIT

FORKS = multiprocessing.get_context("fork")
SECONDS_AFTER_FAILURE = 15
"""How long other ranks may go on after one has failed."""


def run_ranks(
    function: Callable[[int], Any], count: int = 2, *, group: bool = True, codes: Any = 0
) -> list[Any]:
    """What a function of the rank returns as JSON in a process for each; None for a killed one.

    Each rank has the device of its number, and a process group unless `group` is False. `codes` is
    the exit code of all ranks, or of each; a negative one is the signal that ended the rank.
    """
    with tempfile.TemporaryDirectory() as folder:
        starts = [(function, rank, count, Path(folder), group) for rank in range(count)]
        processes = [FORKS.Process(target=_run_rank, args=each) for each in starts]
        for each in processes:
            each.start()
        found = _wait(processes)
        results = [Path(folder, f"result-{rank}") for rank in range(count)]
        expected = [codes] * count if isinstance(codes, int) else codes
        assert found == expected, f"exit codes {found}, expected {expected}"
        return [json.loads(path.read_text()) if path.exists() else None for path in results]


def _run_rank(
    function: Callable[[int], Any], rank: int, count: int, folder: Path, group: bool
) -> None:
    code = 1
    try:
        torch.npu.set_device(rank)
        if group:
            store = dist.FileStore(str(folder / "store"), count)
            dist.init_process_group("hccl", store=store, rank=rank, world_size=count)
        result = function(rank)
        (folder / f"result-{rank}").write_text(json.dumps(result))
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # what the parent does at its exit is not this process's


def _wait(processes: list[Any]) -> list[int | None]:
    """Exit codes; None of a process that had to be killed."""
    end, failed = time.monotonic() + LIMIT, False
    while (codes := [each.exitcode for each in processes]).count(None) and time.monotonic() < end:
        if 1 in codes and not failed:
            end, failed = min(end, time.monotonic() + SECONDS_AFTER_FAILURE), True
        time.sleep(0.005)
    for each in processes:
        each.kill()
        each.join()
    return codes
