"""Runs a part of the tests on aarch64, in slices: make test-aarch64.

python -m tests.aarch64 [--minutes 30] [--fresh] [--retry] [pytest arguments ...]

`scripts/aarch64.sh` starts it in an environment for aarch64 that an x86-64 host interprets, ten to
forty times as slow as itself. So it runs some folders and engines, with few examples.
Each test is recorded in tests/results/aarch64.jsonl when it ends; the next slice runs the others.
"""

import os
import platform
import sys
from collections import Counter

from tests.resume.log import Slice, slice_parser
from tests.resume.plugin import Recorder
from tests.resume.tree import RESULTS

SETTINGS = {"NPU_PREP_TEST_EXAMPLES": "20", "NPU_PREP_TEST_STEPS": "30"}
SETTINGS["NPU_PREP_TEST_SECONDS"] = "7200"  # an emulated card takes half an hour to begin
SETTINGS["PYTEST_ADDOPTS"] = "-p no:npu_prep_matrix"  # whose cells are of x86-64
TOKENS = "tests/npu/on_device/test_tokens.py::test_tokens_are_the_best_by_transformers"
TESTS = (
    *("tests/prep", "tests/attention", "tests/ops", "tests/runner", "tests/v2"),
    *("tests/scheduling", "tests/emulator"),
    "tests/engine/test_against_transformers.py::test_chunks_of_prompts_beside_decodes",
    *(f"{TOKENS}[fia, graphs]", f"{TOKENS}[fia, graphs, V2]"),
)
"""Folders, of the emulator's also HCCL; engines on the CPU fallback, and on the emulated card."""


def main(arguments: list[str]) -> int:
    """Run a slice; exit code 1 if a test of the run failed or nothing could be collected."""
    if platform.machine() != "aarch64":
        print(
            "tests.aarch64 runs on aarch64 alone; make test-aarch64 starts it on an x86-64 host",
            file=sys.stderr,
        )
        return 2
    parser = slice_parser("tests.aarch64", __doc__)
    options, chosen = parser.parse_known_args(arguments)
    with Slice(RESULTS / "aarch64.jsonl", options, settings=SETTINGS) as part:
        os.environ.update(SETTINGS)
        recorder = Recorder(part)
        whole = recorder.run("0", chosen or TESTS)
        outcomes = Counter(
            ("/".join(result.unit.split("/")[:2]), result.outcome)
            for result in part.latest.values()
        )
        for (folder, outcome), count in sorted(outcomes.items()):
            print(f"  {folder}: {count:,} {outcome}")
        left = recorder.left() if whole and not chosen else None
        return part.finish(left, "make test-aarch64") or int(not whole)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
