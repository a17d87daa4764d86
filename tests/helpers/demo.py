"""The demo model and its drafters, made once for all processes of a test run."""

import fcntl
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
CACHE = ROOT / ".cache"


def make_demo(script: str, folder: str) -> Path:
    """Run a script of examples/ that keeps its result in a folder of the cache.

    In a process of its own: training switches torch to deterministic algorithms and seeds it.
    """
    CACHE.mkdir(exist_ok=True)
    with (CACHE / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # let one process train; the others find its result
        command = [sys.executable, ROOT / "examples" / script, "--out", CACHE / folder]
        subprocess.run(command, cwd=ROOT, check=True)
    return CACHE / folder
