"""Fill the matrix: run tests whose cells are empty or stale, merge, write the page.

    python -m tests.matrix [--minutes 30] [--fresh] [--retry] [--processes N]
    python -m tests.matrix --merge

A slice runs, of the tests that start engines, those that fill a cell by an older package or failed,
and those that were never run here; under the emulator, those of `tests/matrix/test_rows.py` alone.
With --merge nothing runs: what tests have collected meanwhile, those of `make test` say, is taken
in. Either way cells of tests that pytest no longer collects are dropped.
"""

import os
import subprocess
import sys

from tests.helpers.models import MODELS
from tests.matrix import page
from tests.matrix.asked import answer
from tests.matrix.cells import FEATURES
from tests.matrix.collect import FILE, ROOT, commit
from tests.matrix.plan import OWN, no_use
from tests.matrix.results import Matrix, lines_of
from tests.resume.log import Slice, slice_parser
from tests.resume.plugin import Recorder, files_of
from vllm_npu_prep.compat.releases import installed_vllm

COMMAND = "make matrix"
ROWS = "tests/matrix/test_rows.py"
FOLDERS = {"cpu": ("tests/engine", "tests/npu", ROWS), "npu": (ROWS,)}
"""Tests that start engines, by the device that they are started on."""


def merge() -> Matrix:
    """Take in what was collected, ask start-up about every cell, and write the results."""
    matrix = Matrix.read()
    # Tests start engines of other models, too, which have no row
    collected = [line for line in lines_of(FILE) if line["model"] in MODELS]
    matrix.merge(collected, commit()[1], existing_tests(matrix.engines + collected))
    ask(matrix)
    matrix.write()
    return matrix


def existing_tests(lines: list[dict]) -> set[str]:
    """Ids of tests that pytest collects, and of engines of the models that there are.

    Which of the latter are collected depends on the device, and on the results themselves.
    """
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "tests"]
    collected = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    own = {line["test"] for line in lines if line["test"].startswith(OWN)}
    own = {test for test in own if test.partition("[")[2].partition(",")[0] in MODELS}
    return own.union(collected.stdout.splitlines())


def ask(matrix: Matrix) -> None:
    """Ask start-up for each model with each feature, with the release that is installed."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    tables = matrix.tables()
    matrix.answers = {
        (table, model): told
        for (table, model), told in matrix.answers.items()
        if model in tables.get(table, ())
    }
    for table, models in tables.items():
        for model in models if table[0] == installed_vllm() else ():
            matrix.answers[table, model] = {
                feature.name: answer(model, feature.name, *table[1:])
                for feature in FEATURES
                if not no_use(model, feature.name)
            }


def fill(part: Slice, processes: str, chosen: tuple[str, ...]) -> int:
    package, recorder = commit()[1], Recorder(part)
    matrix, seen = Matrix.read(), lines_of(FILE)
    fresh = {line["test"] for line in (*matrix.engines, *seen) if line["package"] == package}
    stale = matrix.stale(package) - {line["test"] for line in seen if line["package"] == package}
    done = (set(recorder.share["done"]) | fresh) - stale
    recorder.share |= {"done": sorted(done), "first": files_of(stale)}
    whole = recorder.run(processes, chosen)
    return part.finish(recorder.left() if whole else None, COMMAND) or int(not whole)


def main(words: list[str]) -> int:
    """Run a slice, merge, write; exit code 1 if a test failed."""
    parser = slice_parser("tests.matrix", __doc__)
    parser.add_argument("--processes", default="auto", help="of pytest-xdist; 0 for none")
    parser.add_argument("--merge", action="store_true", help="run nothing")
    args = parser.parse_args(words)
    code, device = 0, os.environ.get("NPU_PREP_DEVICE", "cpu")
    if not args.merge:
        if not all(commit()):
            sys.exit(f"{COMMAND}: commit what you changed first: a cell names a commit")
        # What ran here, in slices: for this machine only. The cells are what is committed.
        run = FILE.with_suffix(f".{device}.jsonl")
        with Slice(run, args) as part:
            code = fill(part, args.processes, FOLDERS[device])
    if device == "cpu":
        matrix = merge()
        page.write(matrix)
        print(f"{len(matrix.filled()):,} cells ran; page: {page.PAGE}")
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
