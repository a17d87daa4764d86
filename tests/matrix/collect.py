"""A plugin of pytest: which engines a test started, and what came of the test.

It is always on. Where a test starts an engine, `note` keeps its cell; when the test has ended, each
cell is a line of `FILE`, with the test and its outcome. ``make matrix`` takes them from there.
Nothing is written while files differ from the commit that is checked out: a cell names a commit.
"""

import functools
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
FILE = ROOT / ".cache" / "matrix" / f"{ROOT.name}.jsonl"
"""Where lines are collected. Worktrees may share the folder."""
COLLECTED = pytest.StashKey[list[pytest.Item]]()
"""All tests that a run found, also those that it leaves out."""
_noted: list[dict[str, Any]] = []


def note(config: Any) -> dict[str, Any]:
    """Keep the cell of an engine that started, by its `VllmConfig`; give it back."""
    from tests.matrix.cells import cell_of

    cell = cell_of(config)
    _noted.append(cell)
    return cell


def add(cells: list[dict[str, Any]]) -> None:
    """Keep cells that another process noted for the test that runs here."""
    _noted.extend(cells)


def taken() -> list[dict[str, Any]]:
    """What was kept since the last call; it is forgotten here."""
    cells, _noted[:] = list(_noted), []
    return cells


@functools.cache
def commit() -> tuple[str, str]:
    """The commit and the tree of its package, ten digits each; empty if files differ from it."""
    code = ("vllm_npu_prep", "emulator", "tests", ":(exclude)tests/results")
    if _git("status", "--porcelain", "--", *code) != "":
        return "", ""
    names = _git("rev-parse", "HEAD", "HEAD:vllm_npu_prep").split()
    return (names[0][:10], names[1][:10]) if len(names) == 2 else ("", "")


def _git(*words: str) -> str:
    """Output of a git command; "?" if git fails or is missing."""
    try:
        done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True)
    except FileNotFoundError:
        return "?"
    return done.stdout if done.returncode == 0 else "?"


class Collector:
    """Writes what the tests of a process started."""

    def __init__(self, file: Path = FILE) -> None:
        self.file = file
        self.outcomes: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Collect the outcomes of a test's phases; write its engines when it is torn down.

        An engine of a fixture that several tests share belongs to the first of them.
        """
        self.outcomes.add(report.outcome)
        if report.when != "teardown":
            return
        outcome = next(name for name in ("failed", "skipped", "passed") if name in self.outcomes)
        self.outcomes.clear()
        cells = taken()
        if not cells or outcome == "skipped" or not all(commit()):
            return
        of = {"test": report.nodeid, "outcome": outcome}
        of |= dict(zip(("commit", "package"), commit()))
        told = {json.dumps(of | cell) for cell in cells}
        self.file.parent.mkdir(parents=True, exist_ok=True)
        with self.file.open("ab") as file:  # one write: processes share the file
            os.write(file.fileno(), "".join(f"{line}\n" for line in sorted(told)).encode())
