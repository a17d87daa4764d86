"""Long runs go on where they ended: nothing is lost, nothing runs twice, nothing is called done
before it is."""

import subprocess
import sys
from unittest import mock

import pytest

from tests.resume import log
from tests.resume.log import Log, Slice, slice_parser
from tests.resume.tree import ROOT, TreeState, tree_state

UNITS = dict.fromkeys("abcdef", "")


tree = mock.Mock()
"""Tells the state of the tree."""


@pytest.fixture
def path(tmp_path, monkeypatch):
    monkeypatch.setattr(log, "tree_state", tree)
    return tmp_path / "results.jsonl"


def begin(path, *words, state="one", **more):
    """A slice of a command that was given `words`, in a state of the tree."""
    tree.return_value = TreeState(state, state)
    return Slice(path, slice_parser("a", "b", "c").parse_args(words), **more)


def run_slice(path, *words, units=UNITS, outcomes=None, stop_in=None, **more):
    """A slice whose time is up in the unit `stop_in`: units that were run, exit code."""
    ran = []

    def one(unit):
        ran.append(unit)
        if unit == stop_in:
            part.deadline = 0
        part.record(unit, (outcomes or {}).get(unit, "passed"), 1.0, version=units[unit])

    with begin(path, *words, **more) as part:
        part.play(part.pending(units), one)
        return ran, part.finish(len(part.pending(units)), "make it")


def test_a_slice_goes_on_with_what_has_no_result(path, capsys):
    assert run_slice(path, stop_in="b") == (["a", "b"], 0)
    out = capsys.readouterr().out
    assert "1: passed (a; 1 s), 30 min left" in out
    assert "4 left; go on with: make it" in out
    assert run_slice(path, stop_in="e", state="two") == (["c", "d", "e"], 0)
    capsys.readouterr()
    assert run_slice(path, state="two") == (["f"], 0)
    out = capsys.readouterr().out
    assert "complete" in out
    assert "at commits: one (2), two (4)" in out  # honest of a tree that moved on
    assert run_slice(path) == ([], 0)


def test_a_failure_is_run_first_once_something_changed(path, capsys):
    assert run_slice(path, outcomes={"c": "missed"}, stop_in="d") == (["a", "b", "c", "d"], 1)
    assert "3: MISSED (c; 1 s)" in capsys.readouterr().out
    assert run_slice(path, stop_in="e") == (["e"], 1)  # nothing of it failed; the run has
    assert "MISSED at one: c" in Log(path).summary()
    assert run_slice(path, stop_in="c", state="two") == (["c"], 0)
    assert "MISSED" not in Log(path).summary()
    assert run_slice(path, state="two", outcomes={"f": "failed"}) == (["f"], 1)
    assert "complete, 1 failed" in capsys.readouterr().out
    assert run_slice(path, state="two") == ([], 1)
    assert run_slice(path, "--retry", state="two") == (["f"], 0)


def test_a_failed_unit_that_was_removed_is_gone(path):
    run_slice(path, outcomes={"c": "failed"})
    assert run_slice(path, units=dict.fromkeys("abdef", ""), state="two") == ([], 0)
    assert Log(path).latest["c"].outcome == "gone"


def test_a_unit_that_changed_has_no_result(path):
    run_slice(path)
    changed = UNITS | {"d": "rewritten"}
    assert run_slice(path, units=changed) == (["d"], 0)
    assert run_slice(path, units=changed) == ([], 0)


KILLED = """
import os, signal, sys
from pathlib import Path
from tests.resume.log import Slice, slice_parser

def one(unit):
    if unit == "c":
        with part.path.open("a") as file:
            file.write('{"slice": "%s", "unit": "c", "outco' % part.id)
        os.kill(os.getpid(), signal.SIGKILL)
    part.record(unit, "passed", 1.0)

with Slice(Path(sys.argv[1]), slice_parser("a", "b").parse_args([])) as part:
    part.play("abcdef", one)
"""


def test_a_kill_loses_the_unit_under_way_alone(path):
    done = subprocess.run([sys.executable, "-c", KILLED, path], cwd=ROOT)
    assert done.returncode == -9
    assert not path.read_text().endswith("\n")
    assert run_slice(path) == (["c", "d", "e", "f"], 0)
    assert list(Log(path).latest) == [*"abcdef"]


def test_a_fresh_run_has_none_of_the_results_before_it(path):
    run_slice(path, outcomes={"b": "failed"})
    assert run_slice(path, "--fresh", stop_in="a", state="two") == (["a"], 0)
    assert run_slice(path, state="two") == (["b", "c", "d", "e", "f"], 0)


def test_lines_of_two_branches_may_be_merged(path):
    """git's union merge puts the lines of one after those of the other."""
    run_slice(path, stop_in="b")
    common = path.read_text()
    run_slice(path, stop_in="d")
    ours = path.read_text().removeprefix(common)
    path.write_text(common)
    run_slice(path, outcomes={"c": "failed"}, stop_in="c")
    path.write_text(path.read_text() + ours)
    assert len(Log(path).slices) == 3
    assert set(Log(path).latest) == set("abcd")
    assert run_slice(path)[0] == ["e", "f"]


def test_the_source_is_every_file_but_what_long_runs_write(tmp_path):
    def git(*words):
        user = ["-c", "user.name=a", "-c", "user.email=a@b"]
        subprocess.run(["git", *user, *words], cwd=tmp_path, check=True, capture_output=True)

    assert tree_state(tmp_path) == TreeState("unknown", "unknown")
    git("init")
    (tmp_path / "code.py").write_text("a = 1\n")
    for folder in ("tests/results", "tests/differential/seeds"):
        (tmp_path / folder).mkdir(parents=True)
    git("add", ".")
    git("commit", "-m", "first")
    clean = tree_state(tmp_path)
    assert len(clean.commit) == 10
    (tmp_path / "tests/results/soak.jsonl").write_text("{}\n")
    (tmp_path / "tests/differential/seeds/1.json").write_text("{}\n")
    assert tree_state(tmp_path) == clean
    git("add", ".")
    git("commit", "-m", "results")
    assert tree_state(tmp_path).source == clean.source
    assert tree_state(tmp_path).commit != clean.commit
    for name, text in (("new.py", ""), ("code.py", "a = 2\n")):
        (tmp_path / name).write_text(text)
        assert tree_state(tmp_path).commit.endswith("+")
        assert tree_state(tmp_path).source != clean.source
        git("stash", "-u")
