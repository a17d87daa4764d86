"""Runs vLLM's own tests with this plugin on the CPU fallback, in slices: make upstream-tests.

python -m tests.upstream [--minutes 30] [--fresh] [--retry] [--accept] [file ...]

A unit is a file of vLLM's tests, from `files.txt`. Where tests make vLLM's schedulers or launch its
kernels, they get this plugin's, and local models stand in for those of the hub. Each test passes,
is skipped by vLLM, or is in the ledger of the release with a reason. What fails and is not there
fails the unit. A line whose tests pass now is told, and removed with ``--accept``, which also adds
failures whose error names a reason.

With ``--alone``, vLLM runs without this plugin, and nothing is recorded: does a test fail, too?
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.resume.log import Slice, slice_parser
from tests.resume.tree import RESULTS
from tests.upstream.outcomes import BY_HAND, FOLDER, UNENDED, Came, Failure, ledger_of, read
from tests.upstream.prepare import environment, let_run, sources
from vllm_npu_prep.compat.releases import installed_vllm

COMMAND = "make upstream-tests"
AT_ONCE = 32
"""The most files of one folder that share a process: importing vLLM takes longer than most."""

SECONDS, TEST_SECONDS = 2400, 300
"""The most that a process takes, and a test."""


def near(one: str, other: str) -> bool:
    """Return whether two files are in one folder."""
    return Path(one).parent == Path(other).parent


def listed(tests: Path) -> list[str]:
    """Return the files of the list, without those that it leaves out; folders stand for theirs."""
    lines = (FOLDER / "files.txt").read_text().splitlines()
    lines = [line.partition("#")[0].strip() for line in lines]
    for line in lines:
        if line.startswith("+"):
            let_run(tests / line[1:])
    out = [line[1:] for line in lines if line.startswith("-")]
    found: dict[str, None] = {}
    for line in lines:
        if line and not line.startswith("-"):
            path = tests / line.lstrip("+")
            files = sorted(path.rglob("test_*.py")) if path.is_dir() else [path]
            found |= dict.fromkeys(str(each.relative_to(tests)) for each in files)
    return [each for each in found if not each.startswith(tuple(out))]


def run(files: list[str], version: str, log: Path, alone: bool = False) -> dict[str, Came]:
    """Run files of vLLM's tests in one process, and return what came of each that ended."""
    with tempfile.TemporaryDirectory() as folder:
        outcomes = Path(folder) / "outcomes.jsonl"
        variables = environment(version) | {"NPU_PREP_UPSTREAM_OUTCOMES": str(outcomes)}
        if alone:
            variables |= {"VLLM_PLUGINS": "", "NPU_PREP_UPSTREAM_ALONE": "1"}
        command = [sys.executable, "-m", "pytest", "-q", "-p", "substitutes", "-W", "ignore"]
        command += ["-p", "no:cacheprovider", "-o", "asyncio_default_fixture_loop_scope=function"]
        command += ["--continue-on-collection-errors", "--timeout", str(TEST_SECONDS)]
        command += [*(f"tests/{file}" for file in files)]
        with log.open("w") as output:
            process = subprocess.Popen(
                command,
                cwd=sources(version),
                env=variables,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(SECONDS)
            with contextlib.suppress(ProcessLookupError):  # servers that tests left, too
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        told = read(outcomes)
    came = {file: told.get(f"tests/{file}", Came()) for file in files}
    if process.returncode in (0, 1, 5):  # 5: all tests were left out
        return came
    begun = [file for file in files if f"tests/{file}" in told] or files[:1]
    unended = [file for file in begun if UNENDED in {each.said for each in came[file].failures}]
    last = (unended or begun[-1:])[0]
    if not unended:
        came[last].failures.append(Failure(f"tests/{last}", "unknown", "the process ended"))
    return {file: came[file] for file in files[: files.index(last) + 1]}


def main(arguments: list[str]) -> int:
    """Run a slice; exit code 1 if a file of the run has a failure that is not in the ledger."""
    parser = slice_parser("tests.upstream", __doc__)
    parser.add_argument("files", nargs="*", help="of vLLM's tests; without them those of the list")
    parser.add_argument("--accept", action="store_true", help="write the ledger anew")
    parser.add_argument("--alone", action="store_true", help="vLLM without this plugin")
    options = parser.parse_args(arguments)
    version = installed_vllm()
    runner = "V1" if os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "0" else "V2"
    logs = sources(version).parent / "logs"
    logs.mkdir(exist_ok=True)
    ledger = ledger_of(version, runner)
    known = listed(sources(version) / "tests")
    known = options.files or known
    if options.alone:
        for file, each_file in run(known, version, logs / "alone.log", True).items():
            print(file, json.dumps(each_file.counts))
            for each in each_file.failures:
                print(f"  {each.reason}: {each.test}: {each.said}")
        return 0
    with Slice(RESULTS / f"upstream-{version}-{runner}.jsonl", options) as part:
        pending = options.files or part.pending(dict.fromkeys(known, ""))
        came: dict[str, Came] = {}

        def one(file: str) -> None:
            began = time.monotonic()
            if file not in came:
                beside = [each for each in pending[pending.index(file) :] if near(each, file)]
                log = logs / f"{file.replace('/', '-')}-{runner}.log"
                came.update(run(beside[:AT_ONCE], version, log))
            stale = ledger.stale(f"tests/{file}", came[file])
            if options.accept:
                ledger.remove(stale)
                ledger.add(came[file])
                stale = []
            new = ledger.new(came[file])
            for each in new:
                print(f"  NEW, {each.reason}: {each.test}: {each.said}", flush=True)
            for test in stale:
                print(f"  passes, or is gone, though the ledger has it: {test}", flush=True)
            outcome = "failed" if new else "passed"
            part.record(file, outcome, time.monotonic() - began, **came[file].counts, new=len(new))

        part.play(pending, one)
        left = sum(file not in part.latest for file in listed(sources(version) / "tests"))
        print(f"  reasons by hand: {', '.join(BY_HAND)}; logs: {logs}")
        return part.finish(left, COMMAND)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
