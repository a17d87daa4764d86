"""A process whose parent is killed ends; one that was started by somebody else is left alone."""

import importlib.util
import multiprocessing
import os
import re
import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from unittest.mock import Mock

import psutil
import pytest
from vllm.v1 import utils as upstream_utils
from vllm.v1.engine import utils
from vllm.v1.utils import shutdown as upstream_shutdown

from tests.helpers.waiting import LIMIT
from vllm_npu_prep.compat.processes import let_engines_end_by_themselves
from vllm_npu_prep.server.processes import STARTED_BY_VLLM

SCRIPT = """
import multiprocessing, os, signal, sys, threading
from vllm_npu_prep.server import processes

name, manner, method = sys.argv[1:]

def work():
    if manner == "stubborn":
        signal.signal(signal.SIGTERM, lambda *_: None)
    elif manner == "orderly":
        # print may be interrupted, and can't be called again then
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(os.write(1, b"orderly\\n") and 0))
    watches = processes.THREAD in [each.name for each in threading.enumerate()]
    print(os.getpid(), watches, flush=True)
    while True:
        signal.pause()

processes.END_SECONDS = 1.0 if manner == "stubborn" else 300.0
processes.look_after_processes()
if __name__ == "__main__":
    multiprocessing.get_context(method).Process(target=work, name=name).start()
    signal.pause()
"""


@pytest.fixture
def start(tmp_path):
    """Function of a name, a manner and a method: a parent, its child and what that says first."""
    (tmp_path / "script.py").write_text(SCRIPT)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with ExitStack() as stack:

        def started(*words):
            command = [sys.executable, tmp_path / "script.py", *words]
            parent = stack.enter_context(subprocess.Popen(command, **pipes))
            pid, watches = parent.stdout.readline().split()
            child = psutil.Process(int(pid))
            stack.callback(lambda: child.is_running() and child.kill())
            return parent, child, watches == "True"

        yield started


@pytest.mark.parametrize(
    ("name", "manner", "method"),
    [
        ("EngineCore", "orderly", "fork"),
        ("VllmWorker-1", "orderly", "spawn"),
        ("EngineCore_DP3", "stubborn", "fork"),
    ],
)
def test_a_process_of_vllm_s_ends_soon_after_its_parent(start, name, manner, method):
    parent, child, watches = start(name, manner, method)
    assert watches
    child.send_signal(signal.SIGUSR1)  # which asked earlier releases for records
    parent.kill()
    child.wait(LIMIT)
    said = parent.stdout.read()
    why = f"{name} stops: the process that started it (pid {parent.pid}) is gone."
    assert why in said
    assert ("orderly" in said) == (manner == "orderly")
    assert (f"{name} did not stop within 1 s: it exits now." in said) == (manner == "stubborn")


def test_somebody_s_process_is_left_alone(start):
    parent, child, watches = start("somebody's", "orderly", "fork")
    assert not watches
    parent.kill()
    parent.wait()
    child.terminate()  # which nobody else does
    child.wait(LIMIT)
    assert parent.stdout.read() == "orderly\n"


ENDING = """
import gc, sys, types
from vllm_npu_prep.compat import processes

class Garbage:
    def __init__(self):
        self.me = self
    def __del__(self):
        print("collected")

class Process:
    def handle_output(self, output):
        pass
    def shutdown(self):  # as vLLM's
        gc.unfreeze()
        gc.collect()
        print("shut down")
    @classmethod
    def run_engine_core(cls):
        gc.disable()
        Garbage()
        cls().shutdown()
    worker_main = run_engine_core

core = types.ModuleType("vllm.v1.engine.core")
core.EngineCore = core.EngineCoreProc = type("Engine", (Process,), {})
executor = types.ModuleType("vllm.v1.executor.multiproc_executor")
executor.WorkerProc = type("Rank", (Process,), {})
sys.modules |= {core.__name__: core, executor.__name__: executor}
engine, rank = processes.run_engine_core, processes.run_worker
{"other": Process.worker_main, "engine": engine, "rank": rank}[sys.argv[1]]()
"""


@pytest.mark.parametrize("which", ["other", "engine", "rank"])
def test_an_engine_s_processes_end_without_looking_for_garbage(which):
    """Among a million objects, which took longer than vLLM waits on a busy host."""
    command = [sys.executable, "-c", ENDING, which]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "collected\n" * (which == "other") + "shut down\n"


def test_processes_have_the_names_that_vllm_gives_them():
    """All that it starts for a server, read from its source."""
    (folder,) = importlib.util.find_spec("vllm").submodule_search_locations
    starts = re.compile(r"\.Process\(\s*target=.*?\bname=(.*?),\n", re.DOTALL)
    files = ("v1/engine/utils.py", "v1/engine/coordinator.py", "v1/executor/multiproc_executor.py")
    files += ("v1/utils.py", "entrypoints/launchers/dp_supervisor.py")
    for file in files:
        text = (Path(folder) / file).read_text()
        expressions = starts.findall(text)
        assert len(expressions) == text.count(".Process(\n") == 1, file
        for name in re.findall(r'"(.+?)"', expressions[0]):
            assert STARTED_BY_VLLM.fullmatch(re.sub(r"{.*?}", "1", name)), (file, name)


def test_an_engine_that_ended_in_time_is_not_killed(monkeypatch):
    """Its end was told to whoever asked first, and `multiprocessing` has not heard of it."""
    monkeypatch.setattr(utils, "shutdown", upstream_shutdown)
    let_engines_end_by_themselves()
    said = []
    monkeypatch.setattr(upstream_utils, "logger", Mock(warning=lambda *words: said.append(words)))
    monkeypatch.setattr(upstream_utils, "kill_process_tree", said.append)
    engine = multiprocessing.get_context("fork").Process(target=signal.pause)
    engine.start()
    monkeypatch.setattr(engine, "join", lambda timeout: os.waitpid(engine.pid, 0))
    utils.shutdown([engine], timeout=LIMIT)
    assert engine.is_alive()  # what multiprocessing says
    assert said == []
