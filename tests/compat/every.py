"""Each supported release of vLLM in an environment of its own, in slices: part of make test-all.

python -m tests.compat.every [--minutes 30] [--fresh] [--retry]

A unit is a release: its seams, and whether the plugin starts beside it, by ``make compat``. Results
are in tests/results/compat.jsonl.
"""

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from tests.resume.slice import Slice, slice_parser
from tests.resume.tree import RESULTS, ROOT
from vllm_npu_prep.compat.releases import SUPPORTED_VLLM


def try_release(version: str) -> int:
    """Exit code of ``make compat`` for a release."""
    command = ["make", "--no-print-directory", "compat", f"VLLM={version}"]
    return subprocess.run(command, cwd=ROOT).returncode


def main(
    arguments: list[str],
    path: Path = RESULTS / "compat.jsonl",
    attempt: Callable[[str], int] = try_release,
) -> int:
    """Run a slice; exit code 1 if a release has failed."""
    args = slice_parser("tests.compat.every", __doc__).parse_args(arguments)

    def one(version: str) -> None:
        started = time.monotonic()
        code = attempt(version)
        part.record(version, "failed" if code else "passed", time.monotonic() - started)

    with Slice(path, args.minutes, fresh=args.fresh, retry=args.retry) as part:
        pending = part.pending(dict.fromkeys(SUPPORTED_VLLM, ""))
        whole = part.play(pending, one, len(pending))
        left = sum(version not in part.latest for version in SUPPORTED_VLLM)
        return part.finish(left, "make test-all") or int(not whole)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
