"""Fill the matrix: run tests whose cells are empty or stale, merge, write the page.

    python -m tests.matrix [--minutes 30] [--fresh] [--retry] [--processes N]
    python -m tests.matrix --merge

A slice runs, of the tests that start engines, those that fill a cell by an older package or failed,
and those that were never run here; under the emulator, those of `tests/matrix/test_rows.py` alone.
With --merge nothing runs: what tests have collected meanwhile, those of `make test` say, is taken
in.
"""

import json
import os
import sys
from pathlib import Path

from tests.matrix import page
from tests.matrix.cells import FEATURES
from tests.matrix.collect import FILE, commit
from tests.matrix.results import RESULTS, Matrix, collected_in
from tests.resume.log import Slice, slice_parser
from tests.resume.plugin import Recorder, files_of
from vllm_npu_prep.compat.releases import installed_vllm

COMMAND = "make matrix"
ROWS = "tests/matrix/test_rows.py"
FOLDERS = {"cpu": ("tests/engine", "tests/npu", ROWS), "npu": (ROWS,)}
"""Tests that start engines, by the device that they are started on."""


def merge(collected: Path = FILE, results: Path = RESULTS) -> Matrix:
    """Take in what was collected, ask start-up about every cell, and write the results."""
    matrix = Matrix.read(results)
    matrix.merge(collected_in(collected), commit()[1])
    ask(matrix)
    matrix.write(results)
    return matrix


def ask(matrix: Matrix) -> None:
    """Ask start-up for each model with each feature, with the release that is installed."""
    from tests.matrix.asked import answers
    from tests.matrix.subjects import SUBJECTS, folder_of

    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    names = [feature.name for feature in FEATURES]
    matrix.answers = {
        key: told for key, told in matrix.answers.items() if key[1] in matrix.models(key[0])
    }
    for table in matrix.tables():
        release, device, runner = table
        for model in matrix.models(table) if release == installed_vllm() else ():
            config = matrix.configs.get((model, device))
            if config is None and model in SUBJECTS:  # it is refused there, whatever it is asked
                config = json.loads((folder_of(model) / "config.json").read_text())
                matrix.configs[model, device] = config
            if config is None:
                matrix.answers.pop((table, model), None)
            else:
                matrix.answers[table, model] = answers(config, names, device, runner)


def fill(part: Slice, processes: str, chosen: tuple[str, ...]) -> int:
    """Run a slice."""
    package, recorder = commit()[1], Recorder(part)
    matrix, seen = Matrix.read(), collected_in(FILE)
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
