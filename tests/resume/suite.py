"""The whole suite with every combination and the long runs, in slices.

python -m tests.resume.suite [--minutes 30] [--seed N] [--fresh] [--retry] [pytest arguments ...]

Each test is recorded in tests/results/test-all.jsonl when it ends; the next slice runs the others.
With another release of vLLM than the pinned one, the file has its number: test-all-0.33.0.jsonl.
With arguments for pytest that choose tests, these are run and recorded, and the run stays open.
"""

import os
import sys
from pathlib import Path

from tests.resume.log import Slice, slice_parser
from tests.resume.plugin import Recorder
from tests.resume.tree import RESULTS
from vllm_npu_prep.compat.releases import SUPPORTED_VLLM, installed_vllm

SETTINGS = {"NPU_PREP_TEST_EXAMPLES": "10000", "NPU_PREP_TEST_STEPS": "4000"}
SEED = 20240607


def results_of(version: str) -> Path:
    """Where tests beside a release of vLLM are recorded: a run is of one release."""
    return RESULTS / f"test-all{f'-{version}' * (version != SUPPORTED_VLLM[0])}.jsonl"


def main(arguments: list[str], path: Path | None = None) -> int:
    """Run a slice; exit code 1 if a test of the run failed or nothing could be collected."""
    parser = slice_parser("tests.resume.suite", __doc__, f"of a run that begins; {SEED} without it")
    parser.add_argument("--processes", default="auto", help="of pytest-xdist; 0 for none")
    options, chosen = parser.parse_known_args(arguments)
    with Slice(path or results_of(installed_vllm()), options, SEED, SETTINGS) as part:
        os.environ.update(SETTINGS, NPU_PREP_TEST_SEED=str(part.seed))
        recorder, left = Recorder(part), None
        whole = recorder.run(options.processes, chosen)
        if whole and not chosen:
            for unit in sorted(recorder.again - {*(recorder.collected or [])}):
                part.record(unit, "gone", 0)
            left = recorder.left()
        return part.finish(left, "make test-all") or int(not whole)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
