"""`make mutants RANDOM=50`: what it changes, what runs for a change, and what comes of it."""

import ast
from argparse import Namespace
from unittest import mock

import pytest

from tests.mutants import __main__ as command
from tests.mutants import suites
from tests.mutants.bench import ROOT, Verdict
from tests.mutants.sites import PACKAGE, POOLS, draw, every_site, sites_of
from tests.resume import log
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
    'LIMIT: "int | 1" = 3': {'LIMIT: "int | 1" = 4', 'LIMIT: "int | 1" = 2'},
    'def place(row: int, width: "3 + 4", *, first: int = 0) -> int:': {
        'def place(row: int, width: "3 + 4", *, first: int = 1) -> int:'
    },
    "if not row and ( # and so on": {"if not row or ( # and so on", "if row and ( # and so on"},
    ") < width:": {") <= width:"},
    "total = 2 * row": {"total = 3 * row", "total = 1 * row"},
    "total += max(row, width)": {"total -= max(row, width)", "total += min(row, width)"},
    "return where(row, total.real) if row is not None else True": {
        "return where(total.real, row) if row is not None else True",
        "return where(row, total.real) if row is None else True",
        "return where(row, total.real) if row is not None else False",
    },
}


def test_operators_and_constants_are_changed_and_texts_are_not():
    sites = sites_of("prep/file.py", SOURCE)
    found = {site.before: {s.after for s in sites if s.before == site.before} for site in sites}
    assert found == CHANGES
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


def test_a_draw_is_the_seed_s_and_a_longer_one_begins_with_it():
    keys = [site.key for site in draw(seed=1, count=60)]
    assert [site.key for site in draw(seed=1, count=20)] == keys[:20]
    assert [site.key for site in draw(seed=2, count=60)] != keys
    assert len({site.path for site in draw(seed=1, count=60)}) > 15


def test_keys_are_distinct_and_equivalent_ones_are_there():
    """A line of equivalent.txt whose code moved on has to be looked at again."""
    keys = [site.key for site in every_site()]
    assert len(set(keys)) == len(keys) > 4000
    assert set(command.equivalent()) - set(keys) == set()


def test_the_quick_tests_that_import_a_module_come_first():
    tests = suites.suite_for("prep/state.py")
    assert tests.index("tests/prep/test_state.py") < tests.index("tests/prep")
    assert list(tests) == sorted(tests, key=suites.slowness)
    assert {"tests/prep", "tests/differential"} <= set(tests)
    named = {f"tests/{name}" for names in suites.TESTS.values() for name in names.split()}
    assert [each for each in named if not (ROOT / each).exists()] == []


@pytest.mark.parametrize(
    ("missed", "told"),
    [
        (1, "5% of those that a test could notice survive, under 10%"),
        (3, "14% of those that a test could notice survive, NOT under 10%"),
    ],
)
def test_the_share_of_survivors_is_told(missed, told):
    assert told in command.share({"caught": 19, "missed": missed}, 0)


def test_a_run_goes_on_where_it_ended(tmp_path, monkeypatch, capsys):
    """Survivors run again once a file has changed; equivalent ones never run."""
    keys = [site.key for site in draw(seed=5, count=4)]
    survivors, ran = [keys[1]], []
    monkeypatch.setattr(command, "equivalent", lambda: {keys[2]: "says nothing"})
    monkeypatch.setattr(command, "suite_for", lambda path: ("tests/prep",))

    def try_out(mutant, examples):
        ran.append(mutant.name)
        return Verdict("missed") if mutant.name in survivors else Verdict("caught", "a test")

    codes = []
    for state, count in (("one", 3), ("one", 4), ("two", 4)):
        monkeypatch.setattr(log, "tree_state", lambda state=state: TreeState(state, state))
        options = Namespace(minutes=30, fresh=False, retry=False)
        if state == "two":
            survivors.clear()
        with log.Slice(tmp_path / "m.jsonl", options, 5) as part:
            mutants = command.drawn(part.seed, count, "steps")
            bench = mock.Mock(try_out=try_out)
            codes.append(command.resume(part, bench, mutants, count, "make mutants"))
    assert codes == [1, 1, 0]
    assert ran == [keys[0], keys[1], keys[3], keys[1]]
    out = capsys.readouterr().out
    assert "1 killed, 1 survived, 1 equivalent; 50% of" in out
    assert "3 killed, 0 survived, 1 equivalent; 0% of" in out
