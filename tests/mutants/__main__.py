"""Plant each bug in a copy of the packages, run its tests, print who caught it.

    python -m tests.mutants [--minutes 30] [--fresh] [--retry]
    python -m tests.mutants PART OF A NAME ...

Without names: a slice of the run in tests/results/mutants.jsonl, which the next slice goes on with.
With names: those bugs, now, and nothing is recorded. Exit code 1 if a bug went unnoticed.
"""

import argparse
import hashlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from pathlib import Path

from tests.mutants.planted import MUTANTS, Mutant
from tests.resume.slice import Slice, SliceError, add_arguments
from tests.resume.tree import RESULTS

ROOT = Path(__file__).parents[2]
COMMAND = "make mutants"
LIMIT = 20 * 60
"""Seconds that the tests of a planted bug may take. A bug that never ends is caught by this."""
SEED = int(os.environ.get("NPU_PREP_TEST_SEED", "20240607"))


@dataclass(frozen=True)
class Verdict:
    """What came of a planted bug.

    Attributes
    ----------
    outcome
        ``caught``, ``missed``, ``stale`` if the line to change isn't there exactly once, or
        ``broken`` if pytest could not run its tests.
    by
        The first test that failed; or what went wrong.
    """

    outcome: str
    by: str = ""


def version(mutant: Mutant) -> str:
    """Eight digits that change with the bug or its tests: results of others don't count."""
    return hashlib.sha256(repr(astuple(mutant)).encode()).hexdigest()[:8]


def plant(mutant: Mutant, root: Path) -> bool:
    """Copy the packages to `root` with the bug; False if its line isn't there exactly once."""
    for name in ("vllm_npu_prep", "emulator", "tests", "examples", "benchmarks", "pyproject.toml"):
        source = ROOT / name
        if source.is_dir():
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(source, root / name, ignore=ignored)
        else:
            shutil.copy(source, root / name)
    path = root / "vllm_npu_prep" / mutant.path
    text = path.read_text() if path.exists() else ""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text.replace(mutant.before, mutant.after))
    return text.count(mutant.before) == 1


def run_tests(
    mutant: Mutant,
    kept: str,
    limit: float = LIMIT,
    options: Sequence[str] = (),
    **variables: str,
) -> Verdict:
    """Plant a bug and run its tests.

    `kept` holds what tests of the NPU path compare with, made without a bug. `options` are further
    words for pytest, `variables` are of its environment.
    """
    with tempfile.TemporaryDirectory() as folder:
        if not plant(mutant, Path(folder)):
            return Verdict("stale", f"{mutant.before!r} is not once in {mutant.path}")
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([folder, str(Path(folder) / "emulator")]),
            "NPU_PREP_TEST_EXAMPLES": "200",
            "NPU_PREP_TEST_REFERENCE": kept,
            "NPU_PREP_DEVICE": os.environ.get("NPU_PREP_DEVICE", "cpu"),
            **variables,
        }
        run = subprocess.Popen(
            [sys.executable, "-m", "pytest", "-x", "-q", "--no-header", *options, *mutant.tests],
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,  # with all that its tests start, it can be ended
        )
        try:
            output, _ = run.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            return Verdict("caught", f"no end within {limit / 60:.0f} min")
        finally:
            if run.poll() is None:
                os.killpg(run.pid, signal.SIGKILL)
                run.communicate()
    return verdict_of(run.returncode, output)


def verdict_of(returncode: int, output: str) -> Verdict:
    """What pytest said of a planted bug."""
    if returncode == 0:
        return Verdict("missed")
    if returncode == -signal.SIGALRM:
        return Verdict("caught", "a test did not end")
    failure = re.search(r"^(?:FAILED|ERROR) (\S+)", output, re.MULTILINE)
    if failure is None:
        return Verdict("broken", output[-500:].strip())
    return Verdict("caught", failure.group(1).removeprefix("tests/"))


def narrow(names: list[str], kept: str) -> int:
    """Run the bugs whose name contains one of `names`; nothing is recorded."""
    mutants = [mutant for mutant in MUTANTS if any(part in mutant.name for part in names)]
    if not mutants:
        print(f"{COMMAND}: no planted bug has a name with {names}", file=sys.stderr)
        return 2
    verdicts = []
    for number, mutant in enumerate(mutants, 1):
        start = time.perf_counter()
        verdict = run_tests(mutant, kept)
        verdicts.append(verdict)
        print(
            f"{number} of {len(mutants)}: {verdict.outcome} ({mutant.name}, {verdict.by}; "
            f"{time.perf_counter() - start:.0f} s)",
            flush=True,
        )
    missed = sum(verdict.outcome != "caught" for verdict in verdicts)
    print(f"{len(mutants)} planted, {missed} not caught")
    return 1 if missed else 0


def resume(part: Slice, kept: str) -> int:
    """Run a slice of all planted bugs."""
    mutants = {mutant.name: mutant for mutant in MUTANTS}
    versions = {name: version(mutant) for name, mutant in mutants.items()}
    todo = part.pending(versions)

    def one(name: str) -> None:
        start = time.perf_counter()
        verdict = run_tests(mutants[name], kept)
        seconds = time.perf_counter() - start
        part.record(name, verdict.outcome, seconds, by=verdict.by, version=versions[name])

    whole = part.play(todo, one, len(todo))
    failed = part.finish(len(part.pending(versions)), COMMAND)
    return failed if whole else 130


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add_arguments(parser)
    parser.add_argument("names", nargs="*", metavar="name", help="part of a planted bug's name")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="npu-prep-mutants-") as kept:
        if args.names:
            return narrow(args.names, kept)
        try:
            part = Slice(
                RESULTS / "mutants.jsonl",
                args.minutes,
                default_seed=SEED,
                settings={"NPU_PREP_TEST_EXAMPLES": 200},
                fresh=args.fresh,
                retry=args.retry,
            )
        except SliceError as error:
            print(f"{COMMAND}: {error}", file=sys.stderr)
            return 2
        with part:
            os.environ["NPU_PREP_TEST_SEED"] = str(part.seed)
            return resume(part, kept)


if __name__ == "__main__":
    sys.exit(main())
