"""`make soak`: each slice plays seeds that the run hasn't had, and those that failed once more."""

from tests.resume import seeds as soak
from tests.resume.log import Results
from tests.resume.slice import Slice
from tests.resume.tree import TreeState

BEFORE, AFTER = (TreeState(commit, dirty=False, source=commit) for commit in ("one", "two"))


class Played:
    """Episodes that take no time: those in `fail` fail; in `last` the time is up."""

    def __init__(self, part, last, fail):
        self.part, self.last, self.fail = part, last, fail

    def play(self, seed, steps):
        if seed == self.last:
            self.part.deadline = 0
        return ("failed" if seed in self.fail else "agreed"), {"family": "Qwen3", "steps": steps}

    def report(self):
        pass


def test_failed_seeds_are_played_before_those_that_come_next(tmp_path, capsys):
    path = tmp_path / "soak.jsonl"

    def run(last, fail=(), state=BEFORE, **options):
        with Slice(path, 30, default_seed=100, look=lambda: state, **options) as part:
            code = soak.resume(part, Played(part, last, fail), steps=7)
        return code, [result.unit for result in Results(path).by_slice[part.id]]

    assert run(102, fail={101}) == (1, ["100", "101", "102"])
    assert "FAILED at one: 101" in capsys.readouterr().out
    assert run(103) == (1, ["103"])
    assert run(104, state=AFTER) == (0, ["101", "104"])
    out = capsys.readouterr().out
    assert "5 done: 5 agreed" in out
    assert "go on with: make soak" in out and "complete" not in out
    assert run(7, fresh=True, seed=7) == (0, ["7"])
    assert run(8) == (0, ["8"])
