"""Running vLLM's own tests: what came of each is told, and only known failures are let pass."""

from collections import Counter
from textwrap import dedent

import pytest

from tests.upstream import __main__ as upstream
from tests.upstream.outcomes import BY_HAND, FOLDER, REASONS, Came, Failure, Ledger, reason_of

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
    assert reason_of(f"E   an error that led to it\n{text}") == (reason, text[1:].strip())
    assert reason_of(f"{text}\nE   an error that followed")[0] == reason


def test_the_source_around_an_error_names_no_reason():
    source = "    if 'CUDA driver' in said:\nE   assert 3 == 4\ntests/triton/x.py:3: AssertionError"
    assert reason_of(source) == ("unknown", "assert 3 == 4")


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
    assert came["test_a.py"].counts == Counter(passed=1, failed=1, skipped=1)
    assert came["test_a.py"].passed == ["tests/test_a.py::test_right"]
    assert came["test_a.py"].failures == [
        Failure("tests/test_a.py::test_wrong", "unknown", "assert 3 == 4")
    ]
    assert "nothing_like_this" in came["test_b.py"].failures[0].said
    ended = "tests/test_c.py::test_that_ends_the_process"
    assert came["test_c.py"].counts == Counter(passed=1, failed=1)
    assert came["test_c.py"].failures == [Failure(ended, "unknown", "it did not end")]


def test_a_file_with_a_plus_runs_without_cuda(tmp_path, monkeypatch):
    (tmp_path / "files.txt").write_text(
        "v1  # all\n-v1/test_b.py  # takes too long\n+v1/test_a.py\n"
    )
    asked = 'if not torch.cuda.is_available():\n    skip()\nDEVICE = "cuda"\n'
    asked += "CARDS = torch.accelerator.device_count()\n"
    (tmp_path / "v1").mkdir()
    for name in "test_a.py", "test_b.py", "test_c.py":
        (tmp_path / "v1" / name).write_text(asked)
    monkeypatch.setattr(upstream, "FOLDER", tmp_path)
    assert upstream.listed(tmp_path) == ["v1/test_a.py", "v1/test_c.py"]
    runs = 'if not True:\n    skip()\nDEVICE = "cpu"\nCARDS = 1\n'
    assert (tmp_path / "v1/test_a.py").read_text() == runs
    assert (tmp_path / "v1/test_c.py").read_text() == asked


def failures(reason: str, *names: str) -> list[Failure]:
    return [Failure(f"tests/{name}", reason, "an error") for name in names]


def test_the_ledger_takes_failures_that_name_a_reason(tmp_path):
    unknown = failures("unknown", "test_a.py::test_y")
    came = Came(failures=[*failures("refused", "test_a.py::test_x[a | b]"), *unknown])
    Ledger(tmp_path / "ledger.txt").add(came)
    ledger = Ledger(tmp_path / "ledger.txt")
    assert ledger.new(came) == unknown
    passes = Came(passed=["tests/test_a.py::test_x[a | b]"])
    stale = ledger.stale("tests/test_a.py", passes)
    assert stale == passes.passed
    ledger.remove(stale)
    assert Ledger(tmp_path / "ledger.txt").new(came) == came.failures


@pytest.mark.parametrize(
    ("passed", "lines"),
    [
        ((), ["test_a.py::*"]),
        (["test_a.py::test_z"], ["test_a.py::TestIt::*", "test_a.py::test_x"]),
        (["test_a.py::TestIt::test_w"], ["test_a.py::TestIt::test_y[*", "test_a.py::test_x"]),
    ],
)
def test_one_line_stands_for_tests_that_fail_for_the_same_reason(passed, lines, tmp_path):
    failed = failures(
        "gpu",
        *("test_a.py::TestIt::test_y[1]", "test_a.py::TestIt::test_y[2]", "test_a.py::test_x"),
    )
    came = Came(passed=[f"tests/{test}" for test in passed], failures=failed)
    Ledger(tmp_path / "ledger.txt").add(came)
    ledger = Ledger(tmp_path / "ledger.txt")
    assert list(ledger.lines) == [f"tests/{line}" for line in lines]
    assert not ledger.new(came) and not ledger.stale("tests/test_a.py", came)


@pytest.mark.parametrize("path", sorted(FOLDER.glob("ledger-*.txt")), ids=lambda path: path.stem)
def test_every_line_of_a_ledger_has_a_reason(path):
    lines = Ledger(path).lines
    assert lines and {reason for reason, _ in lines.values()} <= {*REASONS, *BY_HAND}
    assert all(said for _, said in lines.values())
