"""Rows that die, hang, refuse or need several ranks: each gets a result, and the rest goes on."""

import io
import json
import sys
from pathlib import Path

import pytest
from rich.console import Console

from vllm_npu_prep.errors import PrepError
from vllm_npu_prep.verify import children
from vllm_npu_prep.verify.children import Runner
from vllm_npu_prep.verify.outcome import Result, RunResults
from vllm_npu_prep.verify.report import report_json, report_markdown, report_text, summary

CHILD = """
import argparse, json, os, signal, sys, time
parser = argparse.ArgumentParser()
parser.add_argument("--rows", nargs="*")
parser.add_argument("--only", action="append")
parser.add_argument("--no-engine", action="store_true")
parser.add_argument("--folder")
parser.add_argument("--rank", type=int, default=0)
parser.add_argument("--ranks", type=int, default=1)
args = parser.parse_args()
started = os.path.join({folder!r}, "started")
number = len(open(started).readlines()) if os.path.exists(started) else 0
print(args.rows, file=open(started, "a"))

def tell(**line):
    print(json.dumps(line), flush=True)

WHAT = {what!r}
if {missing!r}:
    tell(missing="torch_npu is installed, but sees no NPU")
    sys.exit()
if number >= {last_start}:
    sys.exit("no more")
rows = args.rows if args.rows is not None else list(WHAT)
tell(device="chip", visible=2, versions={{}}, rows=[
    dict(name=n, what=n, ranks=1 + n.startswith("pair"), seconds=60) for n in rows
])
print("a library prints this")
for name in rows:
    if name.startswith("pair") != (args.ranks == 2):
        continue
    tell(begin=name)
    what = WHAT[name]
    if what == "die":
        print("first\\nthe kernel left a core", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGSEGV)
    if what == "exit":
        sys.exit(7)
    if what == "hang":
        signal.pause()
    if what == "one rank dies":
        if args.rank == 1:
            sys.exit("rank 1 gave up")
        signal.pause()
    tell(end=name, outcome=dict(given="", expected="a", got="a", verdict=what))
    if what == "FAILED":
        break
"""


@pytest.fixture
def run(tmp_path):
    def run(seconds=300.0, missing=False, last_start=100, selection=(), **what) -> RunResults:
        script = CHILD.format(
            folder=str(tmp_path), what=what, missing=missing, last_start=last_start
        )
        runner = Runner(tmp_path, (sys.executable, "-c", script), row_seconds=seconds)
        return runner.run(selection)

    return run


def verdicts(found: RunResults) -> dict[str, str]:
    return {result.name: result.verdict for result in found.results}


def starts(tmp_path: Path) -> int:
    return len((tmp_path / "started").read_text().splitlines())


def test_rows_after_a_dead_one_run_in_the_next_process(run, tmp_path):
    found = run(a="same", b="die", c="DIFFERS", d="exit", e="FAILED", f="same")
    assert verdicts(found) == {
        "a": "same",
        "b": "DEAD",
        "c": "DIFFERS",
        "d": "DEAD",
        "e": "FAILED",
        "f": "same",
    }
    dead = found.results[1].got
    assert "SIGSEGV" in dead and dead.endswith("first / the kernel left a core")
    assert "code 7" in found.results[3].got
    assert found.results[4].got == "a (no output)"
    assert starts(tmp_path) == 4


def test_a_row_that_hangs_is_dead_after_its_time(run):
    found = run(seconds=2.0, a="same", b="hang", c="same")
    assert list(verdicts(found).values()) == ["same", "DEAD", "same"]
    assert found.results[1].got == "no end after 2 seconds"


def test_without_a_device_each_row_left_has_a_result(run, tmp_path):
    found = run(a="die", b="same", c="same", last_start=1)
    assert set(verdicts(found).values()) == {"DEAD"}
    assert "the device is gone: no more" in found.results[2].got
    assert starts(tmp_path) == 2


def test_a_host_without_an_npu_gets_one_line(run):
    with pytest.raises(PrepError, match="no NPU: torch_npu is installed, but sees no NPU") as error:
        run(missing=True)
    assert "\n" not in str(error.value)


def test_a_first_process_that_dies_is_one_line(run):
    with pytest.raises(PrepError, match="code 1 before a row ran: no more"):
        run(last_start=0, a="same")


def test_ranks_run_a_row_together_and_one_that_ends_ends_all(run):
    found = run(a="same", pair_good="same", pair_bad="one rank dies", b="same")
    assert verdicts(found) == {"a": "same", "pair_good": "same", "pair_bad": "DEAD", "b": "same"}
    assert found.results[2].got.startswith("rank 1: ")
    assert "rank 1 gave up" in found.results[2].got


def test_a_row_for_more_devices_than_are_visible_is_left_out(run, monkeypatch):
    monkeypatch.setattr(children, "CHILD", ())  # nothing else may be started
    hello = {"rows": [], "device": "", "versions": {}, "visible": 1}
    runner = Runner(Path())
    runner._rows = {"pair": {"what": "two ranks", "ranks": 2, "seconds": 1}}
    (result,) = runner._teams(["pair"], 2, hello["visible"]).values()
    assert (result.verdict, result.got) == ("left out", "needs 2 devices, 1 visible")
    assert not result.verdict.is_bad


RESULTS = [
    Result("a", "an operator", "3 tokens", "1 | 2", "1 | 2", "same", 0.1),
    Result("b", "another", "", "an answer", "died\nof it", "DEAD", 0.1),
]


def test_the_page_to_send_back_has_every_row_and_version():
    page = report_markdown(RunResults("chip", {}, RESULTS), {"CANN": "9.1.0"})
    assert "| CANN | 9.1.0 |" in page
    assert "| a | an operator | 3 tokens | 1 \\| 2 | 1 \\| 2 | same |" in page
    assert "| b | another |  | an answer | died of it | **DEAD** |" in page
    assert summary(RESULTS) == "2 rows: 1 same, 1 DEAD"


def test_table_and_json_have_the_same_rows():
    found = RunResults("chip", {}, RESULTS)
    console = Console(file=io.StringIO(), width=120)
    report_text(found, {"plugin": "1"}, console)
    text = console.file.getvalue()
    assert [line.split()[0] for line in text.splitlines()[:3]] == ["row", "a", "b"]
    as_json = json.loads(json.dumps(report_json(found, {"plugin": "1"})))
    assert [row["name"] for row in as_json["rows"]] == ["a", "b"]
    assert as_json["versions"] == {"plugin": "1"}
