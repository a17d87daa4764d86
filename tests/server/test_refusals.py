"""What a rank refuses is the last line of the server that the user started."""

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.helpers.waiting import LIMIT

VLLM = str(Path(sys.executable).with_name("vllm"))


def test_what_ranks_refuse_ends_the_server_with_one_line(demo_model, tmp_path):
    """A folder that the server's process can make, and that its children don't see."""
    folder = os.open(tmp_path, os.O_RDONLY)
    record = {"npu_prep": {"record": {"dir": f"/proc/self/fd/{folder}/records"}}}
    flags = ("--skip-tokenizer-init", "--max-model-len", "128", "--enforce-eager")
    flags += ("--port", "0", "--kv-cache-memory-bytes", str(1 << 24))
    try:
        run = subprocess.run(
            [
                VLLM,
                "serve",
                demo_model,
                "-tp",
                "2",
                "--additional-config",
                json.dumps(record),
                *flags,
            ],
            capture_output=True,
            text=True,
            pass_fds=[folder],
            timeout=LIMIT,
        )
    finally:
        os.close(folder)
    assert (tmp_path / "records").is_dir()
    text = run.stdout + run.stderr
    assert run.returncode == 2, text[-4000:]
    why = f'"npu_prep.record.dir" = "/proc/self/fd/{folder}/records": '
    assert last_line_of_the_server(run.stderr).startswith(f"vllm_npu_prep: error: {why}")
    assert "give a folder that this process may write to" in run.stderr
    assert "Traceback" not in text
    assert f"WorkerProc hit an exception. {why}" in text


def last_line_of_the_server(text: str) -> str:
    """The last line but for what Python's resource tracker adds after the server has ended.

    The tracker removes what the other rank held if it was stopped in the middle of its start, and
    warns of it, in two lines.
    """
    lines = text.splitlines()
    while "resource_tracker" in lines[-1]:
        lines.pop()
    return lines[-1]


def test_the_last_line_is_found_before_a_warning_of_the_tracker():
    text = (
        "vllm_npu_prep: error: no\n"
        "/lib/multiprocessing/resource_tracker.py:254: UserWarning: resource_tracker: There appear "
        "to be 1 leaked shared_memory objects to clean up at shutdown\n"
        "  warnings.warn('resource_tracker: There appear to be %d '\n"
    )
    assert last_line_of_the_server(text) == "vllm_npu_prep: error: no"
