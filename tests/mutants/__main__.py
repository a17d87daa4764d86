"""Plant each bug in a copy of the packages, run its tests, print who caught it.

    python -m tests.mutants [PART OF A NAME ...]

Exit code 1 if a bug went unnoticed.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tests.mutants.planted import MUTANTS, Mutant

ROOT = Path(__file__).parents[2]


def plant(mutant: Mutant, root: Path) -> None:
    """Copy the packages to `root` with the bug in it."""
    for name in ("vllm_npu_prep", "emulator", "tests", "examples", "pyproject.toml"):
        source = ROOT / name
        if source.is_dir():
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(source, root / name, ignore=ignored)
        else:
            shutil.copy(source, root / name)
    path = root / "vllm_npu_prep" / mutant.path
    text = path.read_text()
    if text.count(mutant.before) != 1:
        raise SystemExit(f"{mutant.name}: {mutant.before!r} is not once in {mutant.path}")
    path.write_text(text.replace(mutant.before, mutant.after))


def caught_by(mutant: Mutant, kept: str) -> str | None:
    """First test that fails with the bug planted; None if all pass.

    `kept` holds what tests of the NPU path compare with, made without a bug.
    """
    with tempfile.TemporaryDirectory() as folder:
        plant(mutant, Path(folder))
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([folder, str(Path(folder) / "emulator")]),
            "NPU_PREP_TEST_EXAMPLES": "200",
            "NPU_PREP_TEST_REFERENCE": kept,
            "NPU_PREP_DEVICE": os.environ.get("NPU_PREP_DEVICE", "cpu"),
        }
        run = subprocess.run(
            [sys.executable, "-m", "pytest", "-x", "-q", "--no-header", *mutant.tests],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
        )
    failure = re.search(r"^(?:FAILED|ERROR) (\S+)", run.stdout, re.MULTILINE)
    if run.returncode == 0:
        return None
    if failure is None:
        raise SystemExit(f"{mutant.name}: pytest broke\n{run.stdout[-2000:]}{run.stderr[-2000:]}")
    return failure.group(1).removeprefix("tests/")


def main() -> int:
    """Run the mutants whose name contains an argument; all without one."""
    wanted = sys.argv[1:] or [""]
    mutants = [mutant for mutant in MUTANTS if any(part in mutant.name for part in wanted)]
    table = Table("planted bug", "file", "caught by")
    missed = 0
    kept = tempfile.mkdtemp(prefix="npu-prep-mutants-")
    for index, mutant in enumerate(mutants, 1):
        start = time.perf_counter()
        by = caught_by(mutant, kept)
        missed += by is None
        seconds = time.perf_counter() - start
        print(
            f"{index}/{len(mutants)} {mutant.name}: {by or 'MISSED'} ({seconds:.0f} s)", flush=True
        )
        table.add_row(mutant.name, mutant.path, by or "MISSED")
    shutil.rmtree(kept)
    Console(width=160).print(table)
    print(f"{len(mutants)} planted, {missed} missed")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
