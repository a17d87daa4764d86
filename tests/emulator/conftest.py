"""Run a script as `ascend-emulator -- python` runs it."""

import json
import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from ascend_emulator.options import Options
from ascend_emulator.run import merged_report
from tests.helpers.emulator import ROOT, why_no_emulator
from tests.helpers.waiting import LIMIT

PROLOGUE = """
import ctypes, torch, torch_npu
import ascend_emulator as emulator
acl = ctypes.CDLL("libascendcl.so")
INT = torch.int32

def sync_error():
    try:
        torch.npu.synchronize()
    except RuntimeError as error:
        return str(error)
    return ""

def pinned(n, value=0):
    return torch.full((n,), value, dtype=INT).pin_memory()
"""

TOOL = [sys.executable, "-m", "ascend_emulator"]
TEMPLATE = "tests.emulator.template"


@dataclass
class Run:
    """Outcome of a script under the emulator."""

    code: int
    out: str
    err: str
    report: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"exit code {self.code}\n--- stdout\n{self.out}\n--- stderr\n{self.err}"


FORKED_OPTIONS = ("--delay", "--devices", "--hang-seconds")
"""Scripts with no other options are forked from a template."""


class Template:
    """A process of `tests.emulator.template` for scripts with the same options."""

    def __init__(self, options: tuple[str, ...]) -> None:
        given = dict(zip(options[::2], options[1::2]))
        self.options = Options(
            delay=given.get("--delay", "none"), devices=int(given.get("--devices", 1))
        )
        self.process = subprocess.Popen(
            [*TOOL, "--quiet", *options, "--", sys.executable, "-m", TEMPLATE],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert self._next_line() == "ready"

    def _next_line(self) -> str:
        assert self.process.stdout is not None
        while line := self.process.stdout.readline():
            if line.startswith(("ready", "{")):  # torch_npu prints, too
                return line.strip()
        raise AssertionError(f"the template ended with {self.process.wait()}")

    def run(self, script: Path, folder: Path) -> Run:
        """Run a script in a fork."""
        assert self.process.stdin is not None
        out, err = folder / "out", folder / "err"
        job = {"script": str(script), "out": str(out), "err": str(err)}
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()
        done = json.loads(self._next_line())
        own = folder / "reports"
        own.mkdir()
        for path in done["reports"]:
            shutil.move(path, own)
        report = merged_report(own, self.options)
        code = done["code"] or (3 if report["unreported_faults"] else 0)  # as the command has it
        return Run(code, out.read_text(), err.read_text(), report)

    def end(self) -> None:
        """End the process."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(LIMIT)


@pytest.fixture(autouse=True)
def _needs_torch_npu():
    if reason := why_no_emulator():
        pytest.skip(reason)


@pytest.fixture(scope="session")
def templates() -> Iterator[dict[tuple[str, ...], Template]]:
    """Templates by options, made when they are first needed."""
    made: dict[tuple[str, ...], Template] = {}
    yield made
    for template in made.values():
        template.end()


@pytest.fixture
def emulate(tmp_path, templates):
    """Run a script; it must succeed unless the expected exit code says otherwise.

    Scripts with other options than `FORKED_OPTIONS`, and those that are to end badly, are run by
    the command itself.
    """

    def run(script: str, *options: str, expect_code: int | None = 0) -> Run:
        folder = tmp_path / f"run-{len(os.listdir(tmp_path))}"
        folder.mkdir()
        path = folder / "script.py"
        path.write_text(PROLOGUE + textwrap.dedent(script))
        if expect_code == 0 and all(name in FORKED_OPTIONS for name in options[::2]):
            if options not in templates:
                templates[options] = Template(options)
            outcome = templates[options].run(path, folder)
        else:
            outcome = run_by_command(path, folder / "report.json", options)
        assert expect_code is None or outcome.code == expect_code, str(outcome)
        return outcome

    return run


def run_by_command(script: Path, report: Path, options: tuple[str, ...]) -> Run:
    """Run a script with ``ascend-emulator``, in processes of its own."""
    done = subprocess.run(
        [*TOOL, "--report", str(report), *options, "--", sys.executable, str(script)],
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )
    outcome = Run(done.returncode, done.stdout, done.stderr)
    if report.exists():
        outcome.report = json.loads(report.read_text())
    return outcome
