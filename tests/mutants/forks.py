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
from contextlib import suppress
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
BUSY, WAITING = 240, 1800
"""Seconds of a test with its fixtures, of a processor and by the clock."""
FIRST = "first failure: "
"""Begins the line that names the test which failed first."""


class Planted:
    """Plugin of pytest for planted bugs: the time of each test, and which one failed.

    A test that does not end, even in compiled code, ends the process: a loop by its processor time,
    as others may use the machine, and what waits by the clock.
    """

    failed = ""

    def pytest_configure(self) -> None:
        """Take any example that fails: to look for the smallest would take longer than all else."""
        from hypothesis import Phase, settings

        phases = [Phase.explicit, Phase.generate]
        settings.register_profile("npu_prep_planted", settings(), phases=phases)
        settings.load_profile("npu_prep_planted")

    def pytest_runtest_logstart(self) -> None:
        signal.setitimer(signal.ITIMER_PROF, BUSY)  # nobody handles these: the process ends
        signal.alarm(WAITING)

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            self.failed = self.failed or report.nodeid

    pytest_collectreport = pytest_runtest_logreport


def play(words: list[str], output: str, environment: dict[str, str]) -> int:
    """In a child: run pytest, as a process of its own would."""
    os.setsid()  # with all that its tests start, it can be ended
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
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

    planted = Planted()
    code = int(pytest.main(words, plugins=[planted]))
    if planted.failed:
        print(f"\n{FIRST}{planted.failed}", flush=True)
    return code


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
    ended = []
    try:
        descriptor = os.pidfd_open(pid)
        ended = select.select([descriptor], [], [], order["limit"])[0]
        os.close(descriptor)
    finally:
        for end in (os.kill, os.killpg):  # it may not have come to its own session yet
            with suppress(ProcessLookupError):
                end(pid, signal.SIGKILL)
        status = os.waitpid(pid, 0)[1]
    return os.waitstatus_to_exitcode(status) if ended else None


def main() -> None:
    """Import modules; answer with the files of the package that came with them, then with codes."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what imports print is no answer
    for name in IMPORTED[sys.argv[1]]:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # children leave these objects to the memory that they share
    # A thread does not live on in a child, and what it held stays locked there.
    assert len(os.listdir("/proc/self/task")) == 1, "threads run after imports: none can be forked"
    files = [getattr(module, "__file__", None) for module in list(sys.modules.values())]
    answers.write(json.dumps([file for file in files if file]) + "\n")
    for line in sys.stdin:
        answers.write(json.dumps(fork(json.loads(line))) + "\n")


if __name__ == "__main__":
    main()
