"""The whole suite with every combination and the long runs, in slices.

python -m tests.resume.suite [--minutes 30] [--seed N] [--fresh] [--retry] [pytest arguments ...]

Each test is recorded in tests/results/test-all.jsonl when it ends; the next slice runs the others.
With another release of vLLM than the pinned one, the file has its number: test-all-0.33.0.jsonl.
With arguments for pytest that choose tests, these are run and recorded, and the run stays open.
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.resume.plugin import Recorder
from tests.resume.slice import Slice, slice_parser
from tests.resume.tree import RESULTS
from vllm_npu_prep.compat.releases import SUPPORTED_VLLM, installed_vllm

COMMAND = "make test-all"
SETTINGS = {"NPU_PREP_TEST_EXAMPLES": 10000, "NPU_PREP_TEST_STEPS": 4000}
SEED = 20240607


def results_of(version: str) -> Path:
    """Where tests beside a release of vLLM are recorded: a run is of one release."""
    name = "test-all" if version == SUPPORTED_VLLM[0] else f"test-all-{version}"
    return RESULTS / f"{name}.jsonl"


def run_tests(recorder: Recorder, processes: str, chosen: Sequence[str]) -> bool:
    """Run tests until the slice's time is up; False if some could not be collected."""
    workers = ["-n", processes, "--maxprocesses", "4", "--dist", "loadfile"]
    words = ["-q", *workers, "--no-loadscope-reorder", *chosen]
    code = pytest.main(words, plugins=[recorder])
    if code == pytest.ExitCode.NO_TESTS_COLLECTED and recorder.share["done"]:
        code, recorder.collected = pytest.ExitCode.OK, recorder.collected or []
    return code in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED) and not recorder.unreadable


def main(arguments: list[str], path: Path | None = None, settings: dict = SETTINGS) -> int:
    """Run a slice; exit code 1 if a test of the run failed or nothing could be collected."""
    parser = slice_parser("tests.resume.suite", __doc__)
    parser.add_argument("--seed", type=int, help=f"of a run that begins; {SEED} without it")
    parser.add_argument("--processes", default="auto", help="of pytest-xdist; 0 for none")
    args, chosen = parser.parse_known_args(arguments)
    with Slice(
        path or results_of(installed_vllm()),
        args.minutes,
        seed=args.seed,
        default_seed=SEED,
        settings=settings,
        fresh=args.fresh,
        retry=args.retry,
    ) as part:
        os.environ.update({name: str(value) for name, value in settings.items()})
        os.environ["NPU_PREP_TEST_SEED"] = str(part.seed)
        recorder, left = Recorder(part), None
        whole = run_tests(recorder, args.processes, chosen)
        if whole and not chosen:
            recorder.record_gone()
            left = recorder.left()
        failed = part.finish(left, COMMAND)
    return failed or int(not whole)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
