"""Running vLLM's own tests: what came of each is told, and only known failures are let pass."""

from collections import Counter
from textwrap import dedent

import pytest

from tests.upstream import __main__ as upstream
from tests.upstream.outcomes import BY_HAND, FOLDER, REASONS, Failure, Ledger, reason_of

REFUSED = "E   vllm_npu_prep.errors.PrepError: --x is not supported by vllm_npu_prep: use y"


@pytest.mark.parametrize(
    ("reason", "text"),
    [
        ("refused", REFUSED),
        ("gpu", "E   AssertionError: Torch not compiled with CUDA enabled"),
        ("hub", "E   Value error, Invalid repository ID or local directory specified: 'a/b'."),
        ("unknown", "E   assert 3 == 4"),
    ],
)
def test_an_error_names_the_reason(reason, text):
    assert reason_of(text) == reason


TESTS = {
    "tests/test_a.py": """
        import pytest
        def test_right(): pass
        def test_wrong(): assert 3 == 4
        def test_left_out(): pytest.skip("no GPU")
    """,
    "tests/test_b.py": "import nothing_like_this",
    "tests/test_c.py": """
        import os
        def test_right(): pass
        def test_that_ends_the_process(): os._exit(3)
    """,
    "tests/test_d.py": "def test_right(): pass",
}


def test_each_file_is_told_up_to_the_one_that_ends_the_process(tmp_path, monkeypatch):
    (tmp_path / "tests").mkdir()
    for name, text in TESTS.items():
        (tmp_path / name).write_text(dedent(text))
    monkeypatch.setattr(upstream, "sources", lambda version: tmp_path)
    variables = {"PYTHONPATH": str(FOLDER / "inside")}
    monkeypatch.setattr(upstream, "environment", lambda version: variables)
    files = [name.removeprefix("tests/") for name in TESTS]
    came = upstream.run(files, "0.32.0", tmp_path / "log", alone=True)
    assert list(came) == files[:3]
    assert came["test_a.py"][0] == Counter(passed=1, failed=1, skipped=1)
    assert came["test_a.py"][1] == [
        Failure("tests/test_a.py::test_wrong", "unknown", "assert 3 == 4")
    ]
    assert "nothing_like_this" in came["test_b.py"][1][0].said
    ended = "tests/test_c.py::test_that_ends_the_process"
    assert came["test_c.py"] == (
        Counter(passed=1, failed=1),
        [Failure(ended, "unknown", "it did not end")],
    )


def test_the_ledger_takes_failures_that_name_a_reason(tmp_path):
    refused = Failure("tests/test_a.py::test_x[a | b]", "refused", "PrepError: --x")
    unknown = Failure("tests/test_a.py::test_y", "unknown", "assert 3 == 4")
    Ledger(tmp_path / "ledger.txt").add([refused, unknown])
    ledger = Ledger(tmp_path / "ledger.txt")
    assert ledger.new([refused, unknown]) == [unknown]
    assert ledger.of_file("tests/test_a.py") == {refused.test}
    ledger.remove({refused.test})
    assert Ledger(tmp_path / "ledger.txt").new([refused]) == [refused]


@pytest.mark.parametrize("path", sorted(FOLDER.glob("ledger-*.txt")), ids=lambda path: path.stem)
def test_every_line_of_a_ledger_has_a_reason(path):
    lines = Ledger(path).lines
    assert lines and {reason for reason, _ in lines.values()} <= {*REASONS, *BY_HAND}
    assert all(said for _, said in lines.values())
