"""What a rank refuses is the last line of the server that the user started."""

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.helpers.waiting import LIMIT


def test_what_ranks_refuse_ends_the_server_with_one_line(demo_model, tmp_path):
    """A folder that the server's process can make, and that its children don't see."""
    folder = os.open(tmp_path, os.O_RDONLY)
    name = f"/proc/self/fd/{folder}/records"
    command = [
        *(Path(sys.executable).with_name("vllm"), "serve", demo_model, "--port", "0", "-tp", "2"),
        *("--skip-tokenizer-init", "--max-model-len", "128", "--enforce-eager"),
        *("--kv-cache-memory-bytes", str(1 << 24)),
        *("--additional-config", json.dumps({"npu_prep": {"record": {"dir": name}}})),
    ]
    run = subprocess.run(
        command, capture_output=True, text=True, pass_fds=[folder], timeout=LIMIT, check=False
    )
    os.close(folder)
    assert (tmp_path / "records").is_dir()
    text = run.stdout + run.stderr
    assert run.returncode == 2, text[-4000:]
    why = f'"npu_prep.record.dir" = "{name}": '
    # Python's resource tracker may add a warning of what a rank held that was stopped early.
    lines = [line for line in run.stderr.splitlines() if "resource_tracker" not in line]
    assert lines[-1].startswith(f"vllm_npu_prep: error: {why}")
    assert "give a folder that this process may write to" in lines[-1]
    assert "Traceback" not in text
    assert f"WorkerProc hit an exception. {why}" in text
