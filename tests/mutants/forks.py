"""A process that has imported what tests import anyway, and forks a child for each run of tests.

    python -m tests.mutants.forks light|bare|warm   (started by tests/mutants/bench.py, in its tree)

Reads one JSON object a line, answers with one. Only the child imports tests, and whatever of the
package tests import: it sees the files as they are when it is forked.
"""

import gc
import importlib
import json
import os
import select
import signal
import sys
import tempfile
from typing import Any

BARE = ("pytest", "hypothesis", "numba", "torch", "transformers", "vllm")
"""Modules that do not ask for vLLM's platform, and so do not import the plugin."""
WARM = (
    *BARE,
    "vllm.entrypoints.llm",
    "vllm.v1.engine.core",
    "vllm.v1.worker.gpu_model_runner",
    "vllm.v1.executor.uniproc_executor",
)
"""These do: parts of the plugin are imported with them, and can't be changed afterwards."""
IMPORTED = {"light": ("pytest",), "bare": BARE, "warm": WARM}
PACKAGE = "vllm_npu_prep"


def start(names: tuple[str, ...]) -> dict[str, Any]:
    """Import modules; tell which files of the package came with them, and how many threads run."""
    for name in names:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # children leave these objects to the memory that they share
    files = [
        module.__file__
        for name, module in sys.modules.items()
        if name.partition(".")[0] == PACKAGE and getattr(module, "__file__", None)
    ]
    # A thread does not live on in a child, and what it held stays locked there.
    return {"files": files, "threads": len(os.listdir("/proc/self/task"))}


def play(words: list[str], output: str, environment: dict[str, str]) -> int:
    """In a child: run pytest, as a process of its own would."""
    os.setsid()  # with all that its tests start, it can be ended
    with open(output, "wb") as file, open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ.update(environment)
    tempfile.tempdir = None
    if "numba" in sys.modules:  # which has read its environment
        from numba.core import config

        config.CACHE_DIR = environment.get("NUMBA_CACHE_DIR", config.CACHE_DIR)
    sys.argv = ["pytest", *words]
    import pytest

    return int(pytest.main(words))


def fork(order: dict[str, Any]) -> int | None:
    """Run tests in a child; its exit code, negative for a signal, None if it did not end."""
    pid = os.fork()
    if not pid:
        code = 70
        try:
            code = play(order["words"], order["output"], order["environment"])
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    poll = select.poll()
    descriptor = os.pidfd_open(pid)
    poll.register(descriptor, select.POLLIN)
    ended = bool(poll.poll(1000 * order["limit"]))
    os.close(descriptor)
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:  # it left no process behind, or had not come to its own session yet
        os.kill(pid, signal.SIGKILL)
    status = os.waitpid(pid, 0)[1]
    return os.waitstatus_to_exitcode(status) if ended else None


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what imports print is no answer
    answers.write(json.dumps(start(IMPORTED[sys.argv[1]])) + "\n")
    answers.flush()
    for line in sys.stdin:
        answers.write(json.dumps({"code": fork(json.loads(line))}) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
