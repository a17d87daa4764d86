"""Benchmarks run, verify what they measure, and print nothing when that fails."""

import contextlib
import importlib
import io
import json
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest

from tests.helpers.ranks import in_a_fresh_process

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
CASES = ["step-256"]
CALLS = {
    "step-256": {"prepare": 31, "prepare_c": 13, "step": 225, "step_c": 635},
    "drafts-step": {"prepare": 47, "prepare_c": 20, "step": 277, "step_c": 923},
    "v2-step-256": {"prepare": 44, "prepare_c": 25, "step": 196, "step_c": 132},
}
"""Function calls of a step of 256 requests, as `benchmarks/host_calls.py` counts them on V1 and V2.
One more call for each request adds 256. Write down what it prints when a change is worth its
calls."""
ALLOWANCE = 0.1
"""By this share, counts may be above `CALLS`. If they are as far below, `CALLS` is out of date."""


class Ran(NamedTuple):
    """Outcome of a script."""

    returncode: int | str | None
    stdout: str
    stderr: str


def run(name: str, *arguments: str, planted: bool = False) -> Ran:
    return in_a_fresh_process(_run, name, arguments, planted)


def _run(name: str, arguments: tuple[str, ...], planted: bool) -> Ran:
    if planted:
        _plant_a_wrong_position()
    sys.argv = [str(BENCHMARKS / name), *arguments]
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
    from vllm_npu_prep.runner import model_runner

    prepare_step = model_runner.prepare_step

    def planted(*args):
        step = prepare_step(*args)
        step.arrays.positions[7] += 1
        return step

    model_runner.prepare_step = planted


def test_host_step_prints_one_object_a_line():
    cases = [word for case in CASES for word in ("--case", case)]
    flags = ("--json", "--steps", "3", "--record", "--looks", "--threads", "1", "2")
    result = run("host_step.py", *flags, *cases)
    assert result.returncode == 0, result.stderr[-2000:]
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    assert [(row["case"], row["threads"]) for row in rows] == [(CASES[0], 1), (CASES[0], 2)]
    for row in rows:
        assert set(row) == {
            *("case", "threads", "ours_us", "upstream_us", "ratio", "min_us", "max_us"),
            *(f"{look}_{unit}" for look in ("count", "keep", "check") for unit in ("us", "%")),
        }
        looks = [row[f"{look}_us"] for look in ("count", "keep", "check")]
        assert min(looks) > 0
        assert sum(looks) < row["ours_us"]
        assert 0 < row["min_us"] <= row["ours_us"] <= row["max_us"]
        assert row["ratio"] == pytest.approx(row["upstream_us"] / row["ours_us"], rel=0.02)


def test_host_step_measures_drafts_that_stay_on_the_device():
    cases = [word for case in ("drafts-256", "drafts-step") for word in ("--case", case)]
    result = run("host_step.py", "--json", "--steps", "3", "--async-scheduling", *cases)
    assert result.returncode == 0, result.stderr[-2000:]
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    assert [row["case"] for row in rows] == ["drafts-256", "drafts-step"]


def test_engine_step_has_drafts_on_both_sides():
    result = run("engine_step.py", "--json", "--steps", "3", "--case", "drafts-256")
    assert result.returncode == 0, result.stderr[-2000:]
    (row,) = [json.loads(line) for line in result.stdout.splitlines()]
    assert row["case"] == "drafts-256" and row["ratio"] > 0


def test_host_step_v2_measures_three_runners():
    result = run("host_step_v2.py", "--json", "--steps", "3", "--case", "step-256")
    assert result.returncode == 0, result.stderr[-2000:]
    (row,) = [json.loads(line) for line in result.stdout.splitlines()]
    assert row["case"] == "step-256"
    assert min(row[f"{name}_us"] for name in ("ours", "v1", "stock")) > 0


def test_engine_step_prints_the_parts_of_both_sides():
    flags = ("--json", "--markdown", "--parts", "--steps", "3", "--case", "decode-32")
    result = run("engine_step.py", *flags)
    assert result.returncode == 0, result.stderr[-2000:]
    line, *table = result.stdout.splitlines()
    row = json.loads(line)
    sides = [cell.split(" | ") for cell in table]
    assert [cells[0] for cells in sides] == ["| 32 decodes, vLLM", "| 32 decodes, ours"]
    assert sides[1][-1] == f"{row['ratio']:.2f} |"
    for cells, side in zip(sides, ("upstream", "ours"), strict=True):
        assert cells[1] == f"{row[f'{side}_schedule_us']:,.0f}"
        assert cells[5] == f"{row[f'{side}_us']:,.0f}"
    assert row["case"] == "decode-32"
    assert row["ratio"] == pytest.approx(row["upstream_us"] / row["ours_us"], rel=0.02)
    for side in ("ours", "upstream"):
        parts = [row[f"{side}_{part}_us"] for part in ("schedule", "runner", "update", "rest")]
        assert min(parts) > 0


@pytest.mark.parametrize("servers", ["ours", "ours vllm"])
def test_serving_prints_what_each_server_did(servers):
    """Among them, requests a second that the time to the first token allows."""
    names = [word for server in servers.split() for word in ("--server", server)]
    sizes = ("--concurrency", "4", "--prompts", "8", "--input-len", "16", "--output-len", "8")
    flags = ("--json", "--rounds", "1", "--warm-up", "0")
    result = run("serving.py", *flags, *sizes, *names)
    assert result.returncode == 0, result.stderr[-2000:]
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    assert [row.pop("server") for row in rows] == servers.split()
    for row in rows:
        assert set(row) == {
            *("requests_per_s", "itl_ms", "p99_itl_ms", "ttft_ms", "engine_us_per_token")
        }
        assert min(row.values()) > 0
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


def test_looking_costs_are_parts_of_a_decode_step():
    command = ["looking_costs.py", "--json", "--requests", "4", "--steps", "5"]
    result = run(*command)
    assert result.returncode == 0, result.stderr[-2000:]
    row = json.loads(result.stdout.splitlines()[-1])
    looks = [row[f"{look}_us"] for look in ("count", "keep", "check")]
    assert row["requests"] == 4 and min(looks) > 0
    assert sum(looks) < row["step_us"]


def test_host_step_prints_no_number_when_the_runners_disagree():
    flags = ("--steps", "3", "--case", "decode-256", "--check", "off")
    result = run("host_step.py", *flags, planted=True)
    assert result.returncode == 1
    assert result.stdout == ""
    assert "positions differs from upstream's; no numbers" in result.stderr


def test_a_step_makes_no_more_calls_than_it_did():
    """Counted, not timed: the same on a busy machine."""
    cases = [word for case in CALLS for word in ("--case", case)]
    result = run("host_calls.py", "--json", "--steps", "5", *cases)
    assert result.returncode == 0, result.stderr[-2000:]
    for row in map(json.loads, result.stdout.splitlines()):
        expected = CALLS[row["case"]]
        counts = {name: row[name] for name in expected}
        assert counts == pytest.approx(expected, rel=ALLOWANCE, abs=2), row["case"]
        if "upstream" in row:  # V1's
            assert row["step"] < row["upstream"] / 2, row["case"]
