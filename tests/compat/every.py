"""Each supported release of vLLM in an environment of its own, in slices: part of make test-all.

python -m tests.compat.every [--minutes 30] [--fresh] [--retry]

A unit is a release: its seams, and whether the plugin starts beside it, by ``make compat``. Results
are in tests/results/compat.jsonl.
"""

import subprocess
import sys
import time

from tests.resume.log import Slice, slice_parser
from tests.resume.tree import RESULTS, ROOT
from vllm_npu_prep.compat.releases import SUPPORTED_VLLM


def try_release(version: str) -> int:
    """Exit code of ``make compat`` for a release."""
    command = ["make", "--no-print-directory", "compat", f"VLLM={version}"]
    return subprocess.run(command, cwd=ROOT).returncode


def main(arguments: list[str]) -> int:
    """Run a slice; exit code 1 if a release has failed."""
    options = slice_parser("tests.compat.every", __doc__).parse_args(arguments)

    def one(version: str) -> None:
        started = time.monotonic()
        outcome = "failed" if try_release(version) else "passed"
        part.record(version, outcome, time.monotonic() - started)

    with Slice(RESULTS / "compat.jsonl", options) as part:
        part.play(part.pending(dict.fromkeys(SUPPORTED_VLLM, "")), one)
        return part.finish(len({*SUPPORTED_VLLM} - {*part.latest}), "make test-all")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
