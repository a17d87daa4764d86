"""``vllm-npu-prep verify-device`` as a command on the emulated runtime.

What each row finds is in `tests/npu/on_device/test_verify_device.py`; how dead rows are reported
is in `tests/verify/test_children.py`.
"""

import json
import subprocess
import sys

import pytest

from tests.helpers.emulator import emulate, why_no_emulator
from tests.npu.only_some import LEFT_OUT
from vllm_npu_prep.cli import main

pytestmark = pytest.mark.skipif(bool(why_no_emulator()), reason=why_no_emulator())

PROFILES = ("9.1", "8.5", "docs")
COMMAND = ("-m", "vllm_npu_prep.cli", "verify-device")
STALE = {"graph-fia-decode", "graph-fia-chunk", "graph-fia-window", "graph-atb-decode"}
STALE |= {"graph-fia-padding", "graph-fia-sizes", "graph-atb-padding", "graph-atb-sizes"}
"""Beginnings of rows whose graphs are told other lengths before each replay."""


def rows_of(*arguments: str, options: tuple[str, ...] = ()) -> tuple[int, dict[str, dict]]:
    done = emulate(*COMMAND, "--json", *arguments, options=options)
    assert done.stdout, done.stderr[-4000:]
    report = json.loads(done.stdout[done.stdout.index("{") :])
    assert report["versions"]["device"] == "Ascend910B1"
    assert report["versions"].keys() >= {"plugin", "CANN", "driver", "torch_npu"}
    return done.returncode, {row["name"]: row for row in report["rows"]}


@pytest.mark.parametrize("how", ["--fault stale-lengths", *map("--profile {}".format, PROFILES)])
def test_the_command_finds_what_is_wrong_and_nothing_else(how, tmp_path):
    """Replays with the lengths of their capture, a fault of the runtime; or no fault at all."""
    page = tmp_path / "page.md"
    is_wrong = "stale-lengths" in how
    some = ("--only", "graph", "--only", "fia-decode") if is_wrong else ()
    code, rows = rows_of("--markdown", str(page), *some, options=tuple(how.split()))
    wrong = {name for name in rows if is_wrong and name.startswith(tuple(STALE))}
    verdicts = {name: row["verdict"] for name, row in rows.items()}
    teams = {name for name in rows if name.startswith("hccl-")}  # which need two devices
    assert {verdicts[name] for name in teams} <= {"left out"}
    verdicts |= dict.fromkeys(teams, "same")
    left_out = {name for name in rows if verdicts[name] == "left out"} - teams
    assert left_out == LEFT_OUT.get(how.partition(" ")[2], set())
    verdicts |= dict.fromkeys(left_out, "same")
    assert verdicts == {name: "DIFFERS" if name in wrong else "same" for name in rows}, rows
    assert code == int(is_wrong)
    assert all("eager is right" in rows[name]["got"] for name in wrong)
    assert f"{len(wrong)} DIFFERS" in page.read_text() if wrong else "engine-graphs" in rows


SOME = ("hccl-gather-lists", "hccl-graph")


@pytest.mark.parametrize("names", [SOME, ("hccl",)], ids=["some", "all"])
def test_rows_of_several_ranks_compare_collectives(names):
    """Speed is told for each pair of devices, and judged by nobody."""
    only = [word for name in names for word in ("--only", name)]
    code, rows = rows_of(*only, options=("--devices", "4", "--hang-seconds", "60"))
    left_out = {name for name in rows if name in ("hccl-pairs-8", "hccl-pairs-16")}
    for name, row in rows.items():
        assert row["verdict"] == ("left out" if name in left_out else "same"), row
    assert code == 0 and rows.keys() >= set(SOME)
    if names == ("hccl",):
        assert len(rows) == 12 and len(left_out) == 2
        assert "GB/s, latency" in rows["hccl-pairs-4"]["got"]


def test_a_page_that_has_no_folder_is_refused_before_any_row_runs(tmp_path, capsys):
    assert main(["verify-device", "--markdown", str(tmp_path / "none" / "page.md")]) == 2
    told = capsys.readouterr()
    assert "there is no folder" in told.err and told.err.count("\n") == 1 and not told.out


def test_without_an_npu_there_is_one_line_and_exit_code_2(tmp_path):
    page = tmp_path / "page.md"
    done = subprocess.run(
        [sys.executable, *COMMAND, "--markdown", str(page)],
        capture_output=True,
        text=True,
        check=False,
    )
    (line,) = [row for row in done.stderr.splitlines() if "error" in row]
    assert "no NPU: " in line and "doctor" in line
    assert (done.returncode, done.stdout) == (2, "")
    assert "Traceback" not in done.stderr
    assert not page.exists()
