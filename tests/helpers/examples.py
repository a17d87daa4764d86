"""Running scripts of examples/ as a user does."""

import os
import runpy
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.helpers.ranks import in_a_fresh_process
from tests.helpers.waiting import LIMIT

EXAMPLES = Path(__file__).parents[2] / "examples"


def run_example(name: str, *args: str) -> str:
    """What a script prints, log included; in a process that has imported vLLM before."""
    return in_a_fresh_process(_run, name, args)


def _run(name: str, args: tuple[str, ...]) -> str:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"  # as it is unless a test wants otherwise
    sys.argv = [str(EXAMPLES / name), *args]
    sys.path.insert(0, str(EXAMPLES))
    with tempfile.TemporaryFile("w+") as file:
        for descriptor in (1, 2):  # of engines and commands, too
            os.dup2(file.fileno(), descriptor)
        try:
            runpy.run_path(sys.argv[0], run_name="__main__")
        except BaseException as error:
            raise AssertionError(f"{name}: {error!r}\n{_read(file)[-5000:]}") from error
        return _read(file)


def _read(file) -> str:
    sys.stdout.flush()
    file.seek(0)
    return file.read()


def run_client(name: str, port: int, *args: str) -> str:
    """What a script prints that talks to a server."""
    command = [sys.executable, EXAMPLES / name, "--url", f"http://127.0.0.1:{port}/v1", *args]
    environment = {**os.environ, "PYTHONPATH": str(EXAMPLES.parent)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 0, done.stderr
    return done.stdout
