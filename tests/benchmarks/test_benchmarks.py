"""Benchmarks run, verify what they measure, and print nothing when that fails."""

import contextlib
import importlib
import io
import json
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from tests.helpers.ranks import in_a_fresh_process

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
CALLS = {
    "step-256": {"prepare": 31, "prepare_c": 13, "step": 225, "step_c": 635},
    "drafts-step": {"prepare": 47, "prepare_c": 20, "step": 277, "step_c": 923},
    "v2-step-256": {"prepare": 37, "prepare_c": 12, "step": 150, "step_c": 75},
    "v2-drafts-256": {"prepare": 42, "prepare_c": 16, "step": 182, "step_c": 99},
}
"""Function calls of a step of 256 requests, as `benchmarks/host_calls.py` counts them on V1 and V2.
One more call for each request adds 256. Write down what it prints when a change is worth its
calls."""
ALLOWANCE = 0.1
"""By this share, counts may be above `CALLS`. If they are as far below, `CALLS` is out of date."""


class Ran(NamedTuple):
    code: int
    stdout: str
    stderr: str

    def rows(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.stdout.splitlines() if line.startswith("{")]


def run(command: str, planted: bool = False) -> Ran:
    return in_a_fresh_process(_run, command.split(), planted)


def _run(command: list[str], planted: bool) -> Ran:
    if planted:
        _plant_a_wrong_position()
    sys.argv = [str(BENCHMARKS / command[0]), *command[1:]]
    sys.path.insert(0, str(BENCHMARKS))
    out, err, code = io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            runpy.run_path(sys.argv[0], run_name="__main__")
        except SystemExit as error:  # as the interpreter ends with it
            code = error.code if isinstance(error.code, int) else 1
            err.write(str(error.code))
    return Ran(code, out.getvalue(), err.getvalue())


def _plant_a_wrong_position() -> None:
    from vllm_npu_prep.runner.v1 import runner as v1_runner

    prepare_step = v1_runner.prepare_step

    def planted(*args):
        step = prepare_step(*args)
        step.arrays.positions[7] += 1
        return step

    v1_runner.prepare_step = planted


COMMANDS = {
    "host_step.py": (
        "--steps 3 --looks --record --threads 1 2 --case step-256",
        [{"case": "step-256", "threads": 1}, {"case": "step-256", "threads": 2}],
    ),
    "host_step.py drafts": (
        "--steps 3 --async-scheduling --case drafts-256 --case drafts-step",
        [{"case": "drafts-256"}, {"case": "drafts-step"}],
    ),
    "host_step_v2.py": ("--steps 3 --case step-256", [{"case": "step-256"}]),
    "engine_step.py": ("--steps 3 --case drafts-256", [{"case": "drafts-256"}]),
    "looking_costs.py": ("--requests 4 --steps 5", [{"requests": 4}]),
    "serving.py": (
        "--rounds 1 --warm-up 0 --concurrency 4 --prompts 8 --input-len 16 --output-len 8 "
        "--server ours --server vllm",
        [{"server": "ours"}, {"server": "vllm"}],
    ),
}
"""Quick runs, and what stands in each row beside numbers above 0."""


@pytest.mark.parametrize("which", COMMANDS)
def test_a_benchmark_prints_one_object_a_line(which):
    flags, expected = COMMANDS[which]
    result = run(f"{which.split()[0]} --json {flags}")
    assert result.code == 0, result.stderr[-2000:]
    rows = result.rows()
    assert [row | own for row, own in zip(rows, expected, strict=True)] == rows
    for row in rows:
        numbers = {name: value for name, value in row.items() if not isinstance(value, str)}
        assert all(value > 0 for value in numbers.values()), numbers
        if "ratio" in row:
            assert row["ratio"] == pytest.approx(
                row["upstream_us"] / row["ours_us"], rel=0.02, abs=0.01
            )
        if "check_us" in row:  # what looking costs is part of a step
            looks = [row[f"{look}_us"] for look in ("count", "keep", "check")]
            assert sum(looks) < row.get("ours_us", row.get("step_us"))
        if "itl_ms" in row:
            assert row["itl_ms"] <= row["p99_itl_ms"]
            # Little's law for four at once; the mean is at least half of the median
            assert row["requests_per_s"] < 2 * 4 * 1000 / row["ttft_ms"]


SERVED = {
    **{"completed": 8, "total_output_tokens": 64, "request_throughput": 2.0},
    **dict.fromkeys(("median_itl_ms", "p99_itl_ms", "median_ttft_ms"), 1.0),
}


@pytest.mark.parametrize("lost", [{}, {"completed": 7}, {"total_output_tokens": 63}])
@pytest.mark.parametrize("rate", [None, 20.0])
def test_serving_prints_no_number_when_a_request_was_lost(monkeypatch, rate, lost):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    serving = importlib.import_module("serving")
    asked: list[str] = []
    monkeypatch.setattr(serving, "bench", lambda *args: asked.extend(args[3:]) or SERVED | lost)
    seconds = iter([1.0, 2.0])
    server = SimpleNamespace(side="ours", engine_seconds=lambda: next(seconds))
    args = SimpleNamespace(prompts=8, output_len=8, input_len=4, concurrency=4, request_rate=rate)
    if lost:
        with pytest.raises(SystemExit, match="no numbers"):
            serving.ask(server, Path(), Path(), args)
        return
    assert serving.ask(server, Path(), Path(), args)["engine_us_per_token"] == 1e6 / 64
    limited, open_loop = (name in asked for name in ("--max-concurrency", "--request-rate"))
    assert (limited, open_loop) == (rate is None, rate is not None)


def test_host_step_prints_no_number_when_the_runners_disagree():
    result = run("host_step.py --steps 3 --case decode-256 --check off", planted=True)
    assert (result.code, result.stdout) == (1, "")
    assert "positions differs from upstream's; no numbers" in result.stderr


def test_a_step_makes_no_more_calls_than_it_did():
    """Counted, not timed: the same on a busy machine."""
    cases = " ".join(f"--case {case}" for case in CALLS)
    result = run(f"host_calls.py --json --steps 3 {cases}")
    assert result.code == 0, result.stderr[-2000:]
    for row in result.rows():
        expected = CALLS[row["case"]]
        counts = {name: row[name] for name in expected}
        assert counts == pytest.approx(expected, rel=ALLOWANCE, abs=2), row["case"]
        if "upstream" in row:  # V1's
            assert row["step"] < row["upstream"] / 2, row["case"]
