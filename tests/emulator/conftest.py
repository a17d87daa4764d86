"""Run a script as `ascend-emulator -- python` runs it."""

import json
import subprocess
import sys
import textwrap
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.helpers.emulator import why_no_emulator

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


@dataclass
class Run:
    """Outcome of a script under the emulator."""

    code: int
    out: str
    err: str
    report: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"exit code {self.code}\n--- stdout\n{self.out}\n--- stderr\n{self.err}"


@pytest.fixture(autouse=True)
def _needs_torch_npu():
    if reason := why_no_emulator():
        pytest.skip(reason)


@pytest.fixture
def emulate(tmp_path):
    """Run a script; it must succeed unless the expected exit code says otherwise."""

    def run(script: str, *options: str, expect_code: int | None = 0) -> Run:
        path, report = tmp_path / "script.py", tmp_path / "report.json"
        path.write_text(PROLOGUE + textwrap.dedent(script))
        tool = [sys.executable, "-m", "ascend_emulator", "--report", str(report)]
        done = subprocess.run(
            [*tool, *options, "--", sys.executable, str(path)],
            capture_output=True,
            text=True,
            timeout=180,
            check=False,
        )
        outcome = Run(done.returncode, done.stdout, done.stderr)
        if report.exists():
            outcome.report = json.loads(report.read_text())
        assert expect_code is None or outcome.code == expect_code, str(outcome)
        return outcome

    return run
