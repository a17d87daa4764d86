"""A process whose parent is killed ends; one that was started by somebody else is left alone."""

import signal
import subprocess
import sys

import psutil
import pytest

SCRIPT = """
import multiprocessing, os, signal, sys, time
from vllm_npu_prep.server import processes

name, manner, method = sys.argv[1:]

def work():
    if manner == "stubborn":
        signal.signal(signal.SIGTERM, lambda *_: None)
    elif manner == "orderly":
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(print("orderly", flush=True)))
    print(os.getpid(), flush=True)
    while True:
        time.sleep(0.1)

processes.END_SECONDS = 1.0
processes.look_after_processes()
if __name__ == "__main__":
    multiprocessing.get_context(method).Process(target=work, name=name).start()
    signal.pause()
"""


@pytest.mark.parametrize(
    ("name", "manner", "method"),
    [
        ("EngineCore", "orderly", "fork"),
        ("VllmWorker-1", "orderly", "spawn"),
        ("EngineCore_DP3", "stubborn", "fork"),
        ("somebody's", "orderly", "fork"),
    ],
)
def test_a_process_of_vllm_s_outlives_its_parent_by_seconds_at_most(tmp_path, name, manner, method):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    with subprocess.Popen(
        [sys.executable, str(script), name, manner, method],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as parent:
        child = psutil.Process(int(parent.stdout.readline()))
        try:
            # The signal that asks for records ends neither of them, if they are vLLM's.
            if name != "somebody's":
                child.send_signal(signal.SIGUSR1)
            parent.kill()
            parent.wait()
            if name == "somebody's":
                with pytest.raises(psutil.TimeoutExpired):
                    child.wait(2)
                return
            child.wait(10)
        finally:
            if child.is_running():
                child.kill()
        said = parent.stdout.read()
    why = f"The process that started it (pid {parent.pid}) is gone: {name} ends."
    assert why in said
    assert ("orderly" in said) == (manner == "orderly")
    assert (f"{name} did not end within 1 s: it exits now." in said) == (manner == "stubborn")
