"""``vllm-npu-prep verify-device`` as a command on the emulated runtime.

What each row finds is in `tests/npu/on_device/test_verify_device.py`; how dead rows are reported
is in `tests/verify/test_children.py`.
"""

import json
import subprocess
import sys

import pytest

from ascend_emulator import profiles
from tests.helpers.emulator import emulate, why_no_emulator
from tests.npu.only_some import LEFT_OUT
from vllm_npu_prep.cli import main
from vllm_npu_prep.verify.calls import lists

pytestmark = pytest.mark.skipif(bool(why_no_emulator()), reason=why_no_emulator())

COMMAND = ("-m", "vllm_npu_prep.cli", "verify-device")
STALE = {"graph-fia-decode", "graph-fia-chunk", "graph-fia-window", "graph-atb-decode"}
STALE |= {"graph-fia-padding", "graph-fia-sizes", "graph-atb-padding", "graph-atb-sizes"}
"""Beginnings of rows whose graphs are told other lengths before each replay."""
TEAMS = ("hccl-gather-lists", "hccl-graph")


def rows_of(*arguments: str, options: tuple[str, ...] = ()) -> tuple[int, dict[str, dict]]:
    done = emulate(*COMMAND, "--json", *arguments, options=options)
    assert done.stdout, done.stderr[-4000:]
    report = json.loads(done.stdout[done.stdout.index("{") :])
    assert report["versions"]["device"] == "Ascend910B1"
    assert report["versions"].keys() >= {"plugin", "CANN", "driver", "torch_npu"}
    return done.returncode, {row["name"]: row for row in report["rows"]}


def test_graphs_that_replay_old_lengths_are_found(tmp_path):
    """A fault of the runtime; beside it, rows that need several devices and have four."""
    page = tmp_path / "page.md"
    only = [word for name in ("graph", "fia-decode", *TEAMS) for word in ("--only", name)]
    options = ("--fault", "stale-lengths", "--devices", "4", "--hang-seconds", "300")
    code, rows = rows_of("--markdown", str(page), *only, options=options)
    wrong = {name for name in rows if name.startswith(tuple(STALE))}
    verdicts = {name: row["verdict"] for name, row in rows.items()}
    assert verdicts == {name: "DIFFERS" if name in wrong else "same" for name in rows}, rows
    assert code == 1 and rows.keys() >= set(TEAMS)
    assert all("eager is right" in rows[name]["got"] for name in wrong)
    assert f"{len(wrong)} DIFFERS" in page.read_text()


@pytest.mark.parametrize("profile", profiles.PROFILES)
def test_nothing_is_wrong_under_any_profile(profile):
    code, rows = rows_of(options=("--profile", profile))
    left_out = {name for name, row in rows.items() if row["verdict"] == "left out"}
    teams = {name for name in rows if name.startswith(("hccl-", "mc2-"))}  # of several devices
    assert left_out == LEFT_OUT.get(profile, set()) | teams
    assert {row["verdict"] for name, row in rows.items() if name not in left_out} == {"same"}
    assert code == 0 and "engine-graphs" in rows


def test_a_committed_list_is_recorded_again_byte_by_byte(tmp_path):
    """The list that takes the least time, of rank 0 of 16."""
    name = "DeepSeek-V3-EP16"
    again = ("-m", "vllm_npu_prep.verify.calls.lists", "--out", str(tmp_path), name)
    done = emulate(*again, options=("--memory", "64G"))
    assert done.returncode == 0, done.stderr[-4000:]
    path = lists.path_of(name)
    assert (tmp_path / path.name).read_bytes() == path.read_bytes()


def test_rows_of_several_ranks_compare_collectives():
    """Speed is told for each pair of devices, and judged by nobody."""
    options = ("--devices", "4", "--hang-seconds", "300")
    code, rows = rows_of("--only", "hccl", options=options)
    left_out = {"hccl-pairs-8", "hccl-pairs-16"}
    for name, row in rows.items():
        assert row["verdict"] == ("left out" if name in left_out else "same"), row
    assert code == 0 and len(rows) == 12 and rows.keys() >= left_out
    assert "GB/s, latency" in rows["hccl-pairs-4"]["got"]


EXCHANGES = {"mc2-bf16", "mc2-fp16", "mc2-int8", "mc2-four"}
FOUND_BY = {  # with what a row that finds the fault says
    "": (set(), ""),
    "mask-ignored": (EXCHANGES, "of 4 differ"),
    "combined-twice": (EXCHANGES, "differ"),
}


@pytest.mark.parametrize("fault", FOUND_BY)
def test_rows_of_several_ranks_find_wrong_exchanges(fault):
    finders, says = FOUND_BY[fault]
    options = ("--devices", "4", "--hang-seconds", "300", *(("--fault", fault) if fault else ()))
    code, rows = rows_of("--only", "mc2", options=options)
    verdicts = {name: row["verdict"] for name, row in rows.items()}
    assert verdicts == {name: "DIFFERS" if name in finders else "same" for name in EXCHANGES}, rows
    assert code == bool(finders) and any(says in row["got"] for row in rows.values()), rows


def test_a_page_without_a_folder_is_refused_before_any_row(tmp_path, capsys):
    assert main(["verify-device", "--markdown", str(tmp_path / "none" / "page.md")]) == 2
    told = capsys.readouterr()
    assert "there is no folder" in told.err and told.err.count("\n") == 1 and not told.out


def test_without_an_npu_there_is_one_line_and_exit_code_2(tmp_path):
    page = tmp_path / "page.md"
    command = [sys.executable, *COMMAND, "--markdown", str(page)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    (line,) = [row for row in done.stderr.splitlines() if "error" in row]
    assert "no NPU: " in line and "doctor" in line
    assert (done.returncode, done.stdout) == (2, "")
    assert "Traceback" not in done.stderr
    assert not page.exists()
