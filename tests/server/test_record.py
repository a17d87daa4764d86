"""`vllm serve` with a record of its last steps, replayed beside it."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.server.test_server import QUESTIONS, Server
from vllm_npu_prep.inspect.record_file import read_record, record_files


def replayed(path: Path, *flags: str) -> tuple[int, str]:
    """Exit code and output of the command."""
    command = [str(Path(sys.executable).with_name("vllm-npu-prep")), "replay", str(path), *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    return done.returncode, done.stdout + done.stderr


def test_a_served_run_is_recorded_by_signal_and_replayed(demo_model, tmp_path):
    """Asynchronous scheduling, graphs, a prefix that all questions share; and then a fault."""
    config = {"npu_prep": {"record": {"dir": str(tmp_path / "records"), "steps": "last 40"}}}
    server = Server(demo_model, tmp_path / "log", "--additional-config", json.dumps(config))
    try:
        asked = [QUESTIONS[i % len(QUESTIONS)] for i in range(24)]
        with ThreadPoolExecutor(24) as pool:
            answers = list(pool.map(lambda pair: server.chat(pair[0]), asked))
        assert answers == [answer for _, answer in asked]
        assert f"record        last 40, in {tmp_path / 'records'}" in server.log()
        found = re.search(r"Recording the last 40 steps.*kill -USR1 (\d+)", server.log())
        assert found is not None
        os.kill(int(found[1]), signal.SIGUSR1)
        deadline = time.monotonic() + 60
        while "40 steps are in" not in server.log() and time.monotonic() < deadline:
            time.sleep(0.1)
        assert server.chat(QUESTIONS[0][0]) == QUESTIONS[0][1]  # it serves on
        assert server.stop(signal.SIGTERM) == 0
    finally:
        server.kill()
    (folder,) = (tmp_path / "records").iterdir()
    files = record_files(folder)
    assert len(files) == 40
    assert replayed(folder) == (0, "40 steps: core and oracle prepare what was recorded\n")
    records = [read_record(file) for file in files]
    assert any("is_on_device" in record.prepared for record in records)
    assert any(record.settings.num_reqs > 4 for record in records)

    file, record = files[7], records[7]
    record.prepared["positions"][0] += 1
    file.write_bytes(record.to_bytes())
    code, text = replayed(folder)
    position = int(record.prepared["positions"][0])
    where = f"positions[0] (token 0, request {record.settings.req_ids[0]})"
    said = f"recorded {position}, the %s says {position - 1}\n"
    assert code == 1 and text.startswith(f"1 of 40 steps differ, first in {file}\n")
    for by in ("core", "oracle"):
        assert f"step {record.number}: {where}: {said % by}" in text
