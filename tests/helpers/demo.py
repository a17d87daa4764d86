"""Folders of models: the demo model and its drafters are made once for all processes of a test run,
others in a folder of the process that needs them.
"""

import atexit
import fcntl
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from vllm_npu_prep.progress import log_while_waiting

ROOT = Path(__file__).parents[2]
CACHE = ROOT / ".cache"


def make_demo(script: str, folder: str, log: Callable[[str], object] = print) -> Path:
    """Run a script of examples/ that keeps its result in a folder of the cache.

    In a process of its own: training switches torch to deterministic algorithms and seeds it.

    Parameters
    ----------
    script
        Its name.
    folder
        In the cache.
    log
        Takes a line at a time while the result is made, or waited for; none if it is there.
    """
    CACHE.mkdir(exist_ok=True)
    with (CACHE / "lock").open("w") as lock:
        with log_while_waiting(f"{folder}: waiting for a process that makes a demo model", log):
            fcntl.flock(lock, fcntl.LOCK_EX)  # let one process train; the others find its result
        command = [sys.executable, ROOT / "examples" / script, "--out", CACHE / folder]
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as making:
            assert making.stdout is not None
            for line in making.stdout:
                if "is up to date" not in line:
                    log(line.rstrip())
        if making.returncode:
            raise subprocess.CalledProcessError(making.returncode, command)
    return CACHE / folder


def new_folder(what: str) -> Path:
    """Make a temporary folder, which is removed when this process ends."""
    folder = tempfile.mkdtemp(prefix=f"npu-prep-{what}-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)
