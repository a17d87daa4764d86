"""A process with torch and torch_npu imported, forked for each script.

Importing both takes ten times as long as most scripts. Started by `ascend-emulator`, it takes
jobs as JSON lines on its standard input: a script, and files for standard output and error. For
each it prints a JSON line: the exit code, and the reports that the script's processes left.
"""

import gc
import json
import os
import runpy
import sys
from pathlib import Path

import torch
import torch_npu  # noqa: F401

REPORTS = Path(os.environ["NPU_EMULATOR_REPORT"])


def become(job: dict[str, str]) -> None:
    """Turn this process, a fork, into one that was started for the script."""
    for name, flags, number in (
        (os.devnull, os.O_RDONLY, 0),
        (job["out"], os.O_WRONLY | os.O_CREAT, 1),
        (job["err"], os.O_WRONLY | os.O_CREAT, 2),
    ):
        os.dup2(os.open(name, flags), number)
    sys.argv[:] = [job["script"]]
    runpy.run_path(job["script"], run_name="__main__")


def main() -> None:
    assert not torch.npu.is_initialized()
    gc.collect()
    gc.freeze()  # what is imported need not be looked at, or torn down, in each fork
    print("ready", flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        before = set(REPORTS.iterdir())
        pid = os.fork()
        if pid == 0:
            become(job)
            return
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        reports = [str(path) for path in sorted(set(REPORTS.iterdir()) - before)]
        print(json.dumps({"code": code, "reports": reports}), flush=True)


if __name__ == "__main__":
    main()
