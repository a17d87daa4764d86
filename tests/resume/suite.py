"""The whole suite with every combination and the long runs, in slices.

python -m tests.resume.suite [--minutes 30] [--seed N] [--fresh] [--retry] [pytest arguments ...]

Each test is recorded in tests/results/test-all.jsonl when it ends; the next slice runs the others.
With another release of vLLM than the pinned one, the file has its number: test-all-0.33.0.jsonl.
With arguments for pytest that choose tests, these are run and recorded, and the run stays open.
"""

import argparse
import os
import sys
from pathlib import Path

import pytest

from tests.resume.plugin import Recorder
from tests.resume.slice import Slice, SliceError, add_arguments
from tests.resume.tree import RESULTS
from vllm_npu_prep.compat.releases import SUPPORTED_VLLM, installed_vllm

COMMAND = "make test-all"
SETTINGS = {"NPU_PREP_TEST_EXAMPLES": 10000, "NPU_PREP_TEST_STEPS": 4000}
SEED = 20240607


def results_of(version: str) -> Path:
    """Where tests beside a release of vLLM are recorded: a run is of one release."""
    name = "test-all" if version == SUPPORTED_VLLM[0] else f"test-all-{version}"
    return RESULTS / f"{name}.jsonl"


def main(arguments: list[str], path: Path | None = None, settings: dict = SETTINGS) -> int:
    """Run a slice; exit code 1 if a test of the run failed or nothing could be collected."""
    path = path or results_of(installed_vllm())
    parser = argparse.ArgumentParser(
        prog="python -m tests.resume.suite", description=__doc__.partition("\n")[0]
    )
    add_arguments(parser)
    parser.add_argument("--seed", type=int, help=f"of a run that begins; {SEED} without it")
    parser.add_argument("--processes", default="auto", help="of pytest-xdist; 0 for none")
    args, chosen = parser.parse_known_args(arguments)
    try:
        part = Slice(
            path,
            args.minutes,
            seed=args.seed,
            default_seed=SEED,
            settings=settings,
            fresh=args.fresh,
            retry=args.retry,
        )
    except SliceError as error:
        print(f"{COMMAND}: {error}", file=sys.stderr)
        return 2
    with part:
        os.environ.update({name: str(value) for name, value in settings.items()})
        os.environ["NPU_PREP_TEST_SEED"] = str(part.seed)
        recorder = Recorder(part)
        workers = ["-n", args.processes, "--maxprocesses", "4"]
        workers += ["--dist", "loadfile", "--no-loadscope-reorder"]
        code = pytest.main(["-q", *workers, *chosen], plugins=[recorder])
        whole = code in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)
        if code == pytest.ExitCode.NO_TESTS_COLLECTED and recorder.share["done"]:
            whole, recorder.collected = True, recorder.collected or []
        if recorder.unreadable:  # what tests they have isn't known
            whole = False
        if chosen or not whole:
            left = None
        else:
            recorder.record_gone()
            left = recorder.left()
        failed = part.finish(left, COMMAND)
    return failed or int(not whole)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
