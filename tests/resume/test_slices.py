"""Long runs go on where they ended: nothing is lost, nothing runs twice, nothing is called done
before it is."""

import argparse
import subprocess
import sys

import pytest

from tests.resume.log import Results, append, fold_runs
from tests.resume.slice import LONGEST, Slice, SliceError, minutes, summary
from tests.resume.tree import ROOT, TreeState, tree_state

UNITS = dict.fromkeys("abcdef", "")
BEFORE, AFTER = (TreeState(commit, dirty=False, source=commit) for commit in ("one", "two"))


@pytest.fixture
def path(tmp_path):
    return tmp_path / "results.jsonl"


def run_slice(path, units=UNITS, *, outcomes=None, stop_in=None, state=BEFORE, **options):
    """A slice whose time is up in the unit `stop_in`: units that were run, exit code."""
    ran = []

    def one(unit):
        ran.append(unit)
        if unit == stop_in:
            part.deadline = 0
        part.record(unit, (outcomes or {}).get(unit, "passed"), 1.0, version=units[unit])

    with Slice(path, LONGEST, look=lambda: state, **options) as part:
        part.play(part.pending(units), one, len(units))
        return ran, part.finish(len(part.pending(units)), "make it")


def last_summary(path):
    results = Results(path)
    return summary(results, results.runs()[-1], "make it")


def test_a_slice_goes_on_with_what_has_no_result(path, capsys):
    assert run_slice(path, stop_in="b") == (["a", "b"], 0)
    out = capsys.readouterr().out
    assert "1 of 6: passed (a; 1 s), 30 min left" in out
    assert "unfinished, 4 left; go on with: make it" in out
    assert run_slice(path, stop_in="e", state=AFTER) == (["c", "d", "e"], 0)
    assert run_slice(path, state=AFTER) == (["f"], 0)
    out = capsys.readouterr().out
    assert "complete" in out and "3 slices" in out
    assert "at commits: one (2), two (4)" in out  # honest of a tree that moved on
    assert run_slice(path) == ([], 0)


def test_a_failure_is_run_first_once_something_changed(path, capsys):
    assert run_slice(path, outcomes={"c": "missed"}, stop_in="d") == (["a", "b", "c", "d"], 1)
    assert "3 of 6: MISSED (c; 1 s)" in capsys.readouterr().out
    assert run_slice(path, stop_in="e") == (["e"], 1)  # nothing of it failed; the run has
    assert "MISSED at one: c" in last_summary(path)
    assert run_slice(path, stop_in="c", state=AFTER) == (["c"], 0)
    assert "MISSED" not in last_summary(path)
    assert run_slice(path, state=AFTER, outcomes={"f": "failed"}) == (["f"], 1)
    assert "complete, 1 failed" in last_summary(path)
    assert run_slice(path, state=AFTER) == ([], 1)
    assert run_slice(path, state=AFTER, retry=True) == (["f"], 0)


def test_a_failed_unit_that_was_removed_is_gone(path):
    run_slice(path, outcomes={"c": "failed"})
    assert run_slice(path, dict.fromkeys("abdef", ""), state=AFTER) == ([], 0)
    assert "1 gone" in last_summary(path)


def test_a_unit_that_changed_has_no_result(path):
    run_slice(path)
    assert run_slice(path, UNITS | {"d": "rewritten"}) == (["d"], 0)
    assert run_slice(path, UNITS | {"d": "rewritten"}) == ([], 0)


KILLED = """
import os, signal, sys
from pathlib import Path
from tests.resume.slice import Slice

def one(unit):
    if unit == "c":
        with part.path.open("a") as file:
            file.write('{"slice": "%s", "unit": "c", "outco' % part.id)
        os.kill(os.getpid(), signal.SIGKILL)
    part.record(unit, "passed", 1.0)

with Slice(Path(sys.argv[1]), 30) as part:
    part.play(part.pending(dict.fromkeys("abcdef", "")), one, 6)
"""


def test_a_kill_loses_the_unit_under_way_alone(path):
    done = subprocess.run([sys.executable, "-c", KILLED, path], cwd=ROOT)
    assert done.returncode == -9
    assert not path.read_text().endswith("\n")
    assert "what is left is not known" in last_summary(path)
    assert run_slice(path) == (["c", "d", "e", "f"], 0)
    assert "6 done" in last_summary(path)
    assert "1 torn lines" in last_summary(path)


def test_ctrl_c_loses_the_unit_under_way_alone(path, capsys):
    def one(unit):
        if unit == "c":
            raise KeyboardInterrupt
        part.record(unit, "passed", 1.0)

    with Slice(path, LONGEST, look=lambda: BEFORE) as part:
        assert not part.play(part.pending(UNITS), one, 6)
    assert "interrupted" in capsys.readouterr().out
    assert run_slice(path)[0] == ["c", "d", "e", "f"]


def test_another_run_makes_earlier_ones_a_line_each(path):
    fold_runs(path)
    assert not path.exists()
    run_slice(path, outcomes={"b": "failed"}, seed=3)
    assert run_slice(path, stop_in="a", fresh=True, state=AFTER) == (["a"], 0)
    (line,) = Results(path).folded
    assert line["failed"] == ["b"]
    assert line["outcomes"] == {"passed": 5, "failed": 1}
    assert (line["seed"], line["commits"], line["left"]) == (3, ["one"], 0)
    assert run_slice(path) == (["b", "c", "d", "e", "f"], 0)
    run_slice(path, fresh=True)
    outcomes = [run["outcomes"] for run in Results(path).folded]
    assert outcomes == [{"passed": 5, "failed": 1}, {"passed": 6}]


def test_a_run_keeps_its_seed(path):
    with Slice(path, 1, seed=7, look=lambda: BEFORE):
        pass
    with Slice(path, 1, default_seed=9, look=lambda: BEFORE) as part:
        assert part.seed == 7
    with pytest.raises(SliceError, match=r"begun with seed 7, not 8: .*FRESH=1"):
        Slice(path, 1, seed=8, look=lambda: BEFORE)
    with Slice(path, 1, seed=8, fresh=True, look=lambda: BEFORE) as part:
        assert part.seed == 8


def test_two_slices_of_a_run_can_t_be_under_way(path):
    with Slice(path, 1, look=lambda: BEFORE), pytest.raises(SliceError, match="another process"):
        Slice(path, 1, look=lambda: BEFORE)
    with Slice(path, 1, look=lambda: BEFORE):
        pass


def test_files_that_change_during_a_slice_are_said(path, capsys):
    states = iter([BEFORE, AFTER])
    with Slice(path, 1, look=lambda: next(states)) as part:
        part.finish(0, "make it")
    assert "files were changed while this slice ran" in capsys.readouterr().out
    assert Results(path).ends[part.id]["changed"] is True


def test_lines_of_two_branches_may_be_merged(path):
    """git's union merge puts the lines of one after those of the other."""
    run_slice(path, stop_in="b")
    common = path.read_text().splitlines()
    run_slice(path, stop_in="d")
    ours = path.read_text().splitlines()[len(common) :]
    path.write_text("\n".join(common) + "\n")
    run_slice(path, outcomes={"c": "failed"}, stop_in="c")
    theirs = path.read_text().splitlines()[len(common) :]
    path.write_text("\n".join([*common, *theirs, *ours]) + "\n")
    results = Results(path)
    assert len(results.slices_of(results.runs()[-1])) == 3
    assert set(results.latest(results.runs()[-1])) == set("abcd")
    assert run_slice(path)[0] == ["e", "f"]


def test_every_line_that_is_written_can_be_read(path):
    append(path, {"slice": "s", "run": "s", "begun": "1", "seed": 0, "settings": {}})
    append(path, {"slice": "s", "unit": "two\nlines, « »", "outcome": "passed", "seconds": 1})
    with path.open("a") as file:
        file.write('{"torn')
    append(path, {"slice": "s", "unit": "b", "outcome": "passed", "seconds": 1})
    results = Results(path)
    assert list(results.latest("s")) == ["two\nlines, « »", "b"]
    assert results.unreadable == 1


def test_a_slice_is_short():
    for text in ("0", "-1", "31"):
        with pytest.raises(argparse.ArgumentTypeError, match="30 minutes"):
            minutes(text)


def test_the_source_is_every_file_but_what_long_runs_write(tmp_path):
    def git(*words):
        user = ["-c", "user.name=a", "-c", "user.email=a@b"]
        subprocess.run(["git", *user, *words], cwd=tmp_path, check=True, capture_output=True)

    assert tree_state(tmp_path) == TreeState("unknown", dirty=True, source="unknown")
    git("init")
    (tmp_path / "code.py").write_text("a = 1\n")
    for folder in ("tests/results", "tests/differential/seeds"):
        (tmp_path / folder).mkdir(parents=True)
    git("add", ".")
    git("commit", "-m", "first")
    clean = tree_state(tmp_path)
    assert len(clean.commit) == 10 and not clean.dirty
    (tmp_path / "tests/results/soak.jsonl").write_text("{}\n")
    (tmp_path / "tests/differential/seeds/1.json").write_text("{}\n")
    assert tree_state(tmp_path) == clean
    git("add", ".")
    git("commit", "-m", "results")
    assert tree_state(tmp_path).source == clean.source
    assert tree_state(tmp_path).commit != clean.commit
    (tmp_path / "new.py").write_text("")
    assert tree_state(tmp_path).dirty
    assert tree_state(tmp_path).source != clean.source
    (tmp_path / "new.py").unlink()
    (tmp_path / "code.py").write_text("a = 2\n")
    assert tree_state(tmp_path).source != clean.source
