"""Processes for scripts: importing torch and torch_npu takes ten times as long as most scripts.

Started by `ascend-emulator`. It takes jobs as JSON lines on its standard input: the environment of
a card, a script, and files for standard output and error. For each environment it forks a process
that imports torch_npu, which reads the card's options, and this one forks for each script. The
answer is a JSON line: the exit code, and the reports that the script's processes left.
"""

import atexit
import ctypes
import gc
import importlib
import json
import multiprocessing
import os
import runpy
import sys
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

REPORTS = Path(os.environ["NPU_EMULATOR_REPORT"])
# What torch_npu imports, or its first kernel: cards need not do so again.
IMPORTED_LATER = ("torch._dynamo", "torch.distributed.checkpoint", "ascend_emulator.operators")


def become(job: dict[str, Any]) -> None:
    """Turn this process, a fork, into one that was started for the script."""
    for name, flags, number in (
        (os.devnull, os.O_RDONLY, 0),
        (job["out"], os.O_WRONLY | os.O_CREAT, 1),
        (job["err"], os.O_WRONLY | os.O_CREAT, 2),
    ):
        os.dup2(os.open(name, flags), number)
    sys.argv[:] = [job["script"]]
    code = 0
    try:
        runpy.run_path(job["script"], run_name="__main__")
    except BaseException:
        traceback.print_exc()
        code = 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    ctypes.CDLL(None).fflush(None)  # what libraries have printed
    os._exit(code)  # to tear down what was imported takes longer than most scripts


def be_a_card(environment: dict[str, str], jobs: Connection) -> None:
    """Run the scripts that come."""
    os.environ.update(environment)
    importlib.import_module("torch_npu")
    gc.collect()
    gc.freeze()  # what is imported need not be looked at in each fork
    while job := jobs.recv():
        before = set(REPORTS.iterdir())
        if not (pid := os.fork()):
            become(job)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        jobs.send((code, [str(path) for path in sorted(set(REPORTS.iterdir()) - before)]))
    os._exit(0)


def main() -> None:
    for name in IMPORTED_LATER:
        importlib.import_module(name)
    assert not hasattr(torch, "npu"), "the options of a card are read when torch_npu is imported"
    os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "1"  # for processes that a script spawns
    cards: dict[str, Connection] = {}
    print("ready", flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        key = json.dumps(job["environment"])
        if key not in cards:
            cards[key], theirs = multiprocessing.Pipe()
            if not os.fork():
                be_a_card(job["environment"], theirs)
        cards[key].send(job)
        print(json.dumps(cards[key].recv()), flush=True)
    for card in cards.values():
        card.send(None)
        os.wait()
    os._exit(0)  # there is nothing to tear down


if __name__ == "__main__":
    main()
