"""The planted bugs can be planted: `make mutants` then tells whether they are caught."""

from collections import Counter
from pathlib import Path

import pytest

from tests.mutants.__main__ import Verdict, run_tests, verdict_of, version
from tests.mutants.planted import MUTANTS, Mutant

ROOT = Path(__file__).parents[2]


def test_every_line_is_there_exactly_once():
    texts = {mutant.path: (ROOT / "vllm_npu_prep" / mutant.path).read_text() for mutant in MUTANTS}
    wrong = [m.name for m in MUTANTS if texts[m.path].count(m.before) != 1 or m.before == m.after]
    assert wrong == []


def test_names_are_distinct():
    """Results are recorded by name."""
    assert [name for name, n in Counter(m.name for m in MUTANTS).items() if n > 1] == []


def test_their_tests_exist():
    files = {test.partition("::")[0] for mutant in MUTANTS for test in mutant.tests}
    assert [file for file in sorted(files) if not (ROOT / file).exists()] == []


@pytest.mark.parametrize("changed", ["path", "before", "after", "tests"])
def test_a_bug_s_version_changes_with_all_that_its_result_follows_from(changed):
    plain = {"name": "n", "path": "p", "before": "b", "after": "a", "tests": ("t",)}
    other = plain | {changed: ("u",) if changed == "tests" else "other"}
    assert version(Mutant(**plain)) != version(Mutant(**other))
    assert version(Mutant(**plain)) == version(Mutant(**plain))


PAD = {"path": "prep/arrays.py", "before": "PAD_SLOT_ID = -1", "after": "PAD_SLOT_ID = 0"}
HERE = "tests/mutants/test_planted.py"


@pytest.mark.parametrize(
    ("code", "output", "verdict"),
    [
        (0, "3 passed in 1.00s", Verdict("missed")),
        (
            1,
            "1 passed\nFAILED tests/prep/test_a.py::test_b[c-1] - assert 0\nFAILED tests/d.py::e",
            Verdict("caught", "prep/test_a.py::test_b[c-1]"),
        ),
        (2, "ERROR tests/prep/test_a.py - KeyError: 1", Verdict("caught", "prep/test_a.py")),
        (
            4,
            "ERROR: file or directory not found: tests/none.py\n",
            Verdict("broken", "ERROR: file or directory not found: tests/none.py"),
        ),
        (-9, "", Verdict("broken")),
        (-14, "3 passed", Verdict("caught", "a test did not end")),
    ],
    ids=["missed", "caught", "caught when imported", "no such test", "killed", "endless"],
)
def test_what_comes_of_a_bug_is_told_apart(code, output, verdict):
    assert verdict_of(code, output) == verdict


def test_a_bug_is_planted_in_a_copy_and_caught_there(tmp_path):
    """Once for real: the test that looks for its line finds it changed."""
    test = "test_every_line_is_there_exactly_once"
    verdict = run_tests(Mutant("n", **PAD, tests=(f"{HERE}::{test}",)), str(tmp_path))
    assert verdict == Verdict("caught", f"mutants/test_planted.py::{test}")


def test_a_bug_whose_line_is_gone_is_stale(tmp_path):
    for change in ({"before": "no such line"}, {"path": "no_such_file.py"}):
        verdict = run_tests(Mutant("n", **PAD | change, tests=(HERE,)), str(tmp_path))
        assert verdict.outcome == "stale"
        assert "is not once in" in verdict.by


def test_a_bug_that_never_ends_is_caught_by_the_time_limit(tmp_path):
    mutant = Mutant("n", **PAD, tests=(f"{HERE}::test_names_are_distinct",))
    assert run_tests(mutant, str(tmp_path), limit=0.01) == Verdict("caught", "no end within 0 min")
