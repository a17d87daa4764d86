"""`make soak`: each slice plays seeds that the run hasn't had, and those that failed once more."""

from itertools import islice

import pytest

from tests.resume import seeds as soak
from tests.resume.log import Results
from tests.resume.slice import Slice
from tests.resume.tree import TreeState

BEFORE, AFTER = (TreeState(commit, dirty=False, source=commit) for commit in ("one", "two"))


class Played:
    """Episodes that take no time: those in `fail` fail; in `last` the time is up."""

    def __init__(self, part, last, fail=()):
        self.part, self.last, self.fail = part, last, fail

    def play(self, seed, steps):
        if seed == self.last:
            self.part.deadline = 0
        return ("failed" if seed in self.fail else "agreed"), {"family": "Qwen3", "steps": steps}

    def report(self):
        pass


@pytest.fixture
def run_slice(tmp_path):
    def run(last, *, fail=(), state=BEFORE, **options):
        path = tmp_path / "soak.jsonl"
        with Slice(path, 30, default_seed=100, look=lambda: state, **options) as part:
            code = soak.resume(part, Played(part, last, fail), steps=7)
        return code, [result.unit for result in Results(path).by_slice[part.id]]

    return run


def test_a_slice_plays_the_seeds_that_come_next(run_slice, capsys):
    assert run_slice(102) == (0, ["100", "101", "102"])
    assert run_slice(104) == (0, ["103", "104"])
    out = capsys.readouterr().out
    assert "5 done: 5 agreed" in out
    assert "go on with: make soak" in out and "complete" not in out


def test_a_seed_that_failed_is_played_first_once_something_changed(run_slice, capsys):
    assert run_slice(102, fail={101}) == (1, ["100", "101", "102"])
    assert "FAILED at one: 101" in capsys.readouterr().out
    assert run_slice(103) == (1, ["103"])
    assert run_slice(104, state=AFTER) == (0, ["101", "104"])


def test_a_fresh_run_begins_where_it_is_told(run_slice):
    run_slice(101)
    assert run_slice(7, fresh=True, seed=7) == (0, ["7"])
    assert run_slice(8) == (0, ["8"])


def test_seeds_of_a_slice_do_not_end(tmp_path):
    with Slice(tmp_path / "soak.jsonl", 30, default_seed=3, look=lambda: BEFORE) as part:
        assert list(islice(soak.seeds_of(part), 50)) == [str(seed) for seed in range(3, 53)]
