"""The benchmark beside vllm-ascend counts both programs; skipped without `make peer`."""

import json
import os
import subprocess
import sys

import pytest

from tests.helpers.emulator import ROOT
from tests.peer.test_peer import LIMIT, pytestmark  # noqa: F401 - the environment has to be there


@pytest.mark.parametrize("runner", ["V1", "V2"])
def test_both_programs_take_the_same_steps(runner):
    command = [sys.executable, "benchmarks/peer.py", "--json", "--rounds", "0"]
    done = subprocess.run(
        [*command, "--engine", f"{runner}-eager", "--case", "8 decodes"],
        cwd=ROOT,
        env={**os.environ, "NPU_PREP_DEVICE": "cpu"},
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    about, counted = rows[:2], {row["program"]: row for row in rows[2:]}
    for each, own in zip(about, ("vllm-ascend", "vllm-npu-prep"), strict=True):
        assert own in each["versions"]
    assert set(counted) == {"vllm-ascend", "this plugin"}
    for row in counted.values():
        assert row["scheduled"] == {"requests": 8, "tokens": 8, "drafts": 0}
        assert 0 < row["prepare"]["h2d_copies"] <= row["step"]["h2d_copies"]
        assert row["step"]["launches"] > row["prepare"]["launches"]
    assert counted["this plugin"]["step"]["h2d_copies"] == 1
