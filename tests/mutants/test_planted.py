"""The planted bugs can be planted: `make mutants` then tells whether they are caught."""

from collections import Counter
from pathlib import Path

import pytest

from tests.mutants import forks
from tests.mutants.bench import Bench, Verdict, compiled_files, compiled_from, verdict_of
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


HERE = "tests/mutants/test_planted.py"


@pytest.mark.parametrize(
    ("code", "output", "verdict"),
    [
        (0, "3 passed in 1.00s", Verdict("missed")),
        (
            1,
            "first failure: tests/npu/other.py::inner\nfirst failure: tests/prep/test_a.py::t[c 1]",
            Verdict("caught", "prep/test_a.py::t[c 1]"),
        ),
        (2, "1 error\nfirst failure: tests/prep/test_a.py", Verdict("caught", "prep/test_a.py")),
        (
            4,
            "ERROR: not found: tests/none.py\n",
            Verdict("broken", "ERROR: not found: tests/none.py"),
        ),
        (-9, "", Verdict("broken")),
        (None, "", Verdict("caught", "no end within 60 min")),
    ],
    ids=["missed", "caught", "caught when imported", "no such test", "killed", "late"],
)
def test_what_comes_of_a_bug_is_told_apart(code, output, verdict):
    assert verdict_of(code, output) == verdict


@pytest.mark.parametrize("how", ["signal.pause()", "while True: pass"])
def test_a_test_that_does_not_end_ends_the_run(tmp_path, monkeypatch, how):
    """Even one that never returns to the interpreter, as compiled code may not."""
    monkeypatch.setattr(forks, "BUSY", 1)
    monkeypatch.setattr(forks, "WAITING", 1)
    test, output = tmp_path / "test_endless.py", tmp_path / "output"
    test.write_text(f"import signal\n\ndef test_a():\n    {how}\n")
    order = {"words": ["-q", str(test)], "output": str(output), "environment": {}, "limit": 60}
    code = forks.fork(order)
    assert verdict_of(code, output.read_text()) == Verdict("caught", "a test did not end")


@pytest.fixture(scope="module")
def light(tmp_path_factory):
    """A bench whose process has imported pytest only: its tests are those of this file."""
    with Bench(tmp_path_factory.mktemp("bench"), kinds=("light",)) as made:
        yield made


def mutant(test: str, **changed) -> Mutant:
    pad = {"path": "prep/arrays.py", "before": "PAD_SLOT_ID = -1", "after": "PAD_SLOT_ID = 0"}
    return Mutant("n", **pad | changed, tests=(f"{HERE}::{test}",))


FINDS_IT = "test_every_line_is_there_exactly_once"


def test_a_bug_is_planted_in_a_copy_and_caught_there(light):
    """Once for real: the test that looks for its line finds it changed, and passes without."""
    assert light.try_out(mutant(FINDS_IT)) == Verdict("caught", f"{HERE[6:]}::{FINDS_IT}")
    assert light.passed == {f"{HERE}::{FINDS_IT}": True}
    assert light.try_out(mutant("test_names_are_distinct")) == Verdict("missed")


def test_a_test_that_fails_without_the_bug_catches_nothing(light):
    here = light.tree / HERE
    text = here.read_text()
    here.write_text(f"{text}\n\ndef test_never_passes():\n    assert MUTANTS == []\n")
    verdict = light.try_out(mutant("test_never_passes"))
    here.write_text(text)
    assert verdict == Verdict("broken", f"{HERE}::test_never_passes fails without the bug, too")


def test_compiled_code_of_a_changed_file_is_compiled_anew():
    """And that of files that it is compiled into."""
    package = "vllm_npu_prep"
    assert compiled_from("attention/backend.py") == set()
    changed = {f"{package}/prep/{name}.py" for name in ("recurrent_states", "checks", "fused_pass")}
    assert changed <= compiled_from("prep/recurrent_states.py")
    assert compiled_from("prep/compiled.py") == compiled_files()[1]
