"""Run a script on an emulated card, as `ascend-emulator -- python` runs it."""

import json
import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator, Mapping
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

def refused(call, *arguments, **keywords):
    try:
        call(*arguments, **keywords)
    except Exception as error:
        return str(error)
    raise AssertionError("it was not refused")

def pinned(n, value=0):
    return torch.full((n,), value, dtype=INT).pin_memory()

def malloc(n):
    out = ctypes.c_void_p()
    assert acl.aclrtMalloc(ctypes.byref(out), ctypes.c_size_t(n), 0) == 0
    return out
"""

RANKS = """
import os, re, signal
import psutil
import torch.distributed as dist
from tests.emulator.ranks import FORKS, run_ranks
from tests.helpers.waiting import LIMIT, wait_until

hccl = ctypes.CDLL("libhccl.so")
over = FORKS.Event()  # for what one rank tells another one

def is_inside():
    # a collective or a transfer
    return hccl.emulator_hccl_busy() > 0

def ones(n=8, dtype=torch.float32):
    return torch.ones(n, dtype=dtype, device="npu")

def messages_of(rank_main, **how):
    # what the ranks are told, which is the same for all of them
    messages = run_ranks(rank_main, **how)
    causes = {re.search("HCCL, communicator(.*)", text)[1] for text in messages if text is not None}
    assert len(causes) == 1, messages
    return messages

def begun():
    dist.all_reduce(ones())
    torch.npu.synchronize()

def capture_sum(x):
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        dist.all_reduce(x)
    return graph
"""

TOOL = [sys.executable, "-m", "ascend_emulator"]
TEMPLATE = (
    "env",
    "TORCH_DEVICE_BACKEND_AUTOLOAD=0",
    sys.executable,
    "-m",
    "tests.emulator.template",
)


@dataclass
class Run:
    code: int
    out: str
    err: str
    report: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"exit code {self.code}\n--- stdout\n{self.out}\n--- stderr\n{self.err}"


class Template:
    """A process of `tests.emulator.template`, which forks one for each script."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [*TOOL, "--quiet", "--", *TEMPLATE],
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
            if line.startswith(("ready", "[")):  # torch_npu prints, too
                return line.strip()
        raise AssertionError(f"the template ended with {self.process.wait()}")

    def run(self, script: Path, options: Options, environment: Mapping[str, str]) -> Run:
        """Run a script in a fork."""
        assert self.process.stdin is not None
        out, err, own = (script.with_name(name) for name in ("out", "err", "reports"))
        default, asked = (each.environment(Path(), Path()) for each in (Options(), options))
        job = {"script": str(script), "out": str(out), "err": str(err)}
        job["environment"] = {**dict(asked.items() - default.items()), **environment}
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()
        code, reports = json.loads(self._next_line())
        own.mkdir()
        for path in reports:
            shutil.move(path, own)
        report = merged_report(own, options)
        code = code if code >= 0 else 128 - code  # as the command has it
        code = code or (3 if report["unreported_faults"] else 0)
        return Run(code, out.read_text(), err.read_text(), report)

    def end(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(LIMIT)


@pytest.fixture(autouse=True)
def _needs_torch_npu():
    if reason := why_no_emulator():
        pytest.skip(reason)


@pytest.fixture(scope="session")
def template() -> Iterator[Template]:
    made = Template()
    yield made
    made.end()


@pytest.fixture
def emulate(request, tmp_path):
    """Run a script; it must succeed unless the expected exit code says otherwise.

    Words are options of the command, which then runs it. Other scripts are forked from a template,
    with keywords for the options of their card, and variables for its environment.
    """

    def run(
        script: str,
        *words: str,
        expect_code: int = 0,
        environment: Mapping[str, str] = {},
        **options: Any,
    ) -> Run:
        folder = tmp_path / f"run-{len(os.listdir(tmp_path))}"
        folder.mkdir()
        path = folder / "script.py"
        path.write_text(PROLOGUE + textwrap.dedent(script))
        if words:
            report = folder / "report.json"
            command = [*TOOL, "--report", report, *words, "--", sys.executable, path]
            done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT)
            found = json.loads(report.read_text())
            outcome = Run(done.returncode, done.stdout, done.stderr, found)
        else:
            template = request.getfixturevalue("template")
            outcome = template.run(path, Options(**options), environment)
        assert outcome.code == expect_code, str(outcome)
        return outcome

    return run


@pytest.fixture
def ranks(emulate):
    """Run a script with four devices, whose ranks may come late on a busy host."""
    return lambda script: emulate(RANKS + textwrap.dedent(script), devices=4, hang_seconds=300)
