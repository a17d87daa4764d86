"""Ranks of a process group, forked from a script that runs under the emulator."""

import json
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

SECONDS = 240
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
        pids = []
        for rank in range(count):
            if not (pid := os.fork()):
                _run_rank(function, rank, count, Path(folder), group)
            pids.append(pid)
        found = _wait(pids)
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


def _wait(pids: list[int]) -> list[int]:
    codes: dict[int, int] = {}
    end = time.monotonic() + SECONDS
    while len(codes) < len(pids):
        for pid in pids:
            if pid in codes:
                continue
            if time.monotonic() > end:
                os.kill(pid, signal.SIGKILL)
                codes[pid] = 999
                os.waitpid(pid, 0)
            elif (done := os.waitpid(pid, os.WNOHANG))[0]:
                codes[pid] = os.waitstatus_to_exitcode(done[1])
                if codes[pid] == 1:
                    end = min(end, time.monotonic() + SECONDS_AFTER_FAILURE)
        time.sleep(0.005)
    return [codes[pid] for pid in pids]
