"""Benchmarks run, verify what they measure, and print nothing when that fails."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CASES = ["step-256"]


def run(*command: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, *command], cwd=ROOT, capture_output=True, text=True, timeout=300
    )


def test_host_step_prints_one_object_a_line():
    cases = [word for case in CASES for word in ("--case", case)]
    result = run("benchmarks/host_step.py", "--json", "--steps", "3", "--record", "--looks", *cases)
    assert result.returncode == 0, result.stderr[-2000:]
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    assert [row["case"] for row in rows] == CASES
    for row in rows:
        assert set(row) == {
            *("case", "ours_us", "upstream_us", "ratio", "min_us", "max_us"),
            *(f"{look}_{unit}" for look in ("count", "keep", "check") for unit in ("us", "%")),
        }
        looks = [row[f"{look}_us"] for look in ("count", "keep", "check")]
        assert min(looks) > 0
        assert sum(looks) < row["ours_us"]
        assert 0 < row["min_us"] <= row["ours_us"] <= row["max_us"]
        assert row["ratio"] == pytest.approx(row["upstream_us"] / row["ours_us"], rel=0.02)


def test_looking_costs_are_parts_of_a_decode_step():
    command = ["benchmarks/looking_costs.py", "--json", "--requests", "4", "--steps", "5"]
    result = run(*command)
    assert result.returncode == 0, result.stderr[-2000:]
    row = json.loads(result.stdout.splitlines()[-1])
    looks = [row[f"{look}_us"] for look in ("count", "keep", "check")]
    assert row["requests"] == 4 and min(looks) > 0
    assert sum(looks) < row["step_us"]


def test_host_step_prints_no_number_when_the_runners_disagree():
    plant = (
        "import sys; sys.path.insert(0, 'benchmarks')\n"
        "import host_step\n"
        "from vllm_npu_prep.runner import model_runner\n"
        "prepare_step = model_runner.prepare_step\n"
        "def planted(*args):\n"
        "    step = prepare_step(*args)\n"
        "    step.arrays.positions[7] += 1\n"
        "    return step\n"
        "model_runner.prepare_step = planted\n"
        "sys.argv = ['host_step.py', '--steps', '3', '--case', 'decode-256', '--check', 'off']\n"
        "host_step.main()\n"
    )
    result = run("-c", plant)
    assert result.returncode == 1
    assert result.stdout == ""
    assert "positions differs from upstream's; no numbers" in result.stderr
