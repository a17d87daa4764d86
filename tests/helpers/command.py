"""The command in a process of its own."""

import os
import subprocess
import sys

from tests.helpers.waiting import LIMIT


def command(*args, **how) -> subprocess.CompletedProcess:
    """Run ``vllm-npu-prep``, by default with its output in pipes and no width of a terminal."""
    environment = {k: v for k, v in os.environ.items() if k != "COLUMNS"}
    how = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True} | how
    argv = [sys.executable, "-m", "vllm_npu_prep.cli", *map(str, args)]
    return subprocess.run(argv, env=environment, timeout=LIMIT, **how)
