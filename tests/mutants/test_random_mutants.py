"""`make mutants RANDOM=50`: what it changes, what runs for a change, and what comes of it."""

import ast
import os
import subprocess
import sys
from unittest import mock

import pytest

from tests.mutants import random_mutants
from tests.mutants.bench import LIMIT, ROOT, Verdict, verdict_of
from tests.mutants.random_mutants import EQUIVALENT, FEWER, mutant_of, resume, share
from tests.mutants.sites import PACKAGE, POOLS, draw, every_site, sites_of
from tests.mutants.suites import BY_NAME, paths_of, suite_for
from tests.resume.log import Results
from tests.resume.slice import Slice
from tests.resume.tree import TreeState

SOURCE = b'''"""Numbers in texts, annotations and errors stay: 7."""
LIMIT: "int | 1" = 3


def place(row: int, width: "3 + 4", *, first: int = 0) -> int:
    """Row 5."""
    if not row and (  # and so on
        first
    ) < width:
        raise ValueError(f"{row + 8} of {width}")
    total = 2 * row
    total += max(row, width)
    return where(row, total.real) if row is not None else True
'''
CHANGES = {
    ("off by one", 'LIMIT: "int | 1" = 3', 'LIMIT: "int | 1" = 4'),
    ("off by one", 'LIMIT: "int | 1" = 3', 'LIMIT: "int | 1" = 2'),
    ("boolean", "if not row and ( # and so on", "if not row or ( # and so on"),
    ("dropped not", "if not row and ( # and so on", "if row and ( # and so on"),
    ("comparison", ") < width:", ") <= width:"),
    ("off by one", "total = 2 * row", "total = 3 * row"),
    ("off by one", "total = 2 * row", "total = 1 * row"),
    ("arithmetic", "total += max(row, width)", "total -= max(row, width)"),
    ("extreme", "total += max(row, width)", "total += min(row, width)"),
    (
        "swapped arguments",
        "return where(row, total.real) if row is not None else True",
        "return where(total.real, row) if row is not None else True",
    ),
    (
        "comparison",
        "return where(row, total.real) if row is not None else True",
        "return where(row, total.real) if row is None else True",
    ),
    (
        "constant",
        "return where(row, total.real) if row is not None else True",
        "return where(row, total.real) if row is not None else False",
    ),
}


def test_operators_and_constants_are_changed_and_texts_are_not():
    sites = sites_of("prep/file.py", SOURCE)
    found = {(site.kind, site.before, site.after) for site in sites}
    default = 'def place(row: int, width: "3 + 4", *, first: int = 0) -> int:'
    assert found == CHANGES | {("off by one", default, default.replace("= 0", "= 1"))}
    assert {site.function for site in sites} == {"", "place"}


def test_changes_of_the_package_can_be_planted():
    for site in draw(seed=1, count=50):
        before, after = site.planted()
        source = (PACKAGE / site.path).read_text()
        assert source.count(before) == 1, site.key
        changed = source.replace(before, after)
        assert ast.dump(ast.parse(changed)) != ast.dump(ast.parse(source)), site.key


def test_each_pool_is_drawn_by_itself():
    """Units of a run that has begun stay what they are when a folder gets a pool."""
    folders = {
        pool: {site.path.split("/")[0] for site in draw(seed=1, count=60, pool=pool)}
        for pool in POOLS
    }
    assert folders == {
        "steps": {"prep", "attention", "runner"},
        "scheduling": {"scheduling"},
        "served": {"runner", "attention", "scheduling", "ops"},
    }
    assert suite_for("scheduling/running.py")[-1] == "tests/scheduling"


def test_a_draw_is_the_seed_s_and_a_longer_one_begins_with_it():
    keys = [site.key for site in draw(seed=1, count=60)]
    assert [site.key for site in draw(seed=1, count=20)] == keys[:20]
    assert [site.key for site in draw(seed=2, count=60)] != keys
    assert len({site.path for site in draw(seed=1, count=60)}) > 15
    assert len({site.kind for site in draw(seed=1, count=60)}) > 4


def test_keys_are_distinct_and_tests_exist():
    sites = list(every_site())
    assert len({site.key for site in sites}) == len(sites) > 4000
    named = {test for site in sites for test in suite_for(site.path)} | {
        test for names in BY_NAME.values() for test in paths_of(names)
    }
    assert [each for each in named if not (ROOT / each.partition("::")[0]).exists()] == []
    assert [each for each in BY_NAME if not (PACKAGE / each).exists()] == []


def test_equivalent_changes_are_changes_of_the_package():
    """A line that moved on has to be looked at again."""
    gone = set(EQUIVALENT) - {site.key for site in every_site()}
    assert gone == set()
    assert all(EQUIVALENT.values()), "each has a reason"


@pytest.mark.parametrize(
    ("outcomes", "told"),
    [
        (["caught"] * 19 + ["missed"], "5% of those that a test could notice survive, under 10%"),
        (["caught"] * 9 + ["missed"], "10% of those that a test could notice survive, NOT under"),
        (["equivalent"], "1 equivalent; 0% of those that a test could notice survive, under 10%"),
    ],
)
def test_the_share_of_survivors_is_told(outcomes, told):
    assert told in share(dict(enumerate(outcomes)))


def test_a_run_goes_on_where_it_ended(tmp_path, monkeypatch, capsys):
    """Survivors run again once a file has changed; equivalent ones never run."""
    keys = [site.key for site in draw(seed=5, count=4)]
    survivor, ran = keys[1], []
    monkeypatch.setattr(random_mutants, "EQUIVALENT", {keys[2]: "says nothing"})

    def try_out(mutant, limit, **variables):
        ran.append(mutant.name)
        assert (limit, variables) == (LIMIT, FEWER)
        return Verdict("missed") if mutant.name == survivor else Verdict("caught", "a test")

    bench = mock.Mock(try_out=try_out)
    codes = []
    for state, count in (("one", 3), ("one", 4), ("two", 4)):
        tree = TreeState(state, dirty=False, source=state)
        with Slice(tmp_path / "m.jsonl", 30, default_seed=5, look=lambda tree=tree: tree) as part:
            if state == "two":
                survivor = ""
            codes.append(resume(part, count, bench))
    assert codes == [1, 1, 0]
    assert ran == [keys[0], keys[1], keys[3], keys[1]]
    out = capsys.readouterr().out
    assert "3 random changes: 1 killed, 1 survived, 1 equivalent; 50% of" in out
    assert "4 random changes: 3 killed, 0 survived, 1 equivalent; 0% of" in out
    outcomes = Results(tmp_path / "m.jsonl").latest(part.run)
    assert outcomes[keys[2]].more == {"by": "says nothing"}


def test_a_planted_change_names_its_tests():
    (site,) = [s for s in every_site() if s.path == "prep/state.py" and "SOME_SEVERAL" in s.before][
        :1
    ]
    mutant = mutant_of(site)
    assert mutant.tests[0] == "tests/prep/test_state.py"
    assert mutant.tests[-1] == "tests/differential"


@pytest.mark.parametrize("how", ["signal.pause()", "while True: pass"])
def test_a_test_that_does_not_end_ends_the_run(tmp_path, how):
    """Even one that never returns to the interpreter, as compiled code may not."""
    (tmp_path / "test_endless.py").write_text(f"import signal\n\ndef test_a():\n    {how}\n")
    code = "import sys, pytest\nfrom tests.mutants import order\norder.BUSY = order.WAITING = 1\n"
    code += "sys.exit(pytest.main(['-q', '-p', 'tests.mutants.order', 'test_endless.py']))"
    run = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert verdict_of(run.returncode, run.stdout) == Verdict("caught", "a test did not end")
