"""Each supported release of vLLM in an environment of its own, in slices: part of make test-all.

python -m tests.compat.every [--minutes 30] [--fresh] [--retry]

A unit is a release: its seams, and whether the plugin starts beside it, by ``make compat``. Results
are in tests/results/compat.jsonl.
"""

import argparse
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from tests.resume.slice import Slice, SliceError, add_arguments
from tests.resume.tree import RESULTS, ROOT
from vllm_npu_prep.compat.releases import SUPPORTED_VLLM

COMMAND = "make test-all"


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
    about = __doc__.partition("\n")[0]
    parser = argparse.ArgumentParser(prog="python -m tests.compat.every", description=about)
    add_arguments(parser)
    args = parser.parse_args(arguments)
    try:
        part = Slice(path, args.minutes, fresh=args.fresh, retry=args.retry)
    except SliceError as error:
        print(f"{COMMAND}: {error}", file=sys.stderr)
        return 2

    def one(version: str) -> None:
        started = time.monotonic()
        code = attempt(version)
        part.record(version, "failed" if code else "passed", time.monotonic() - started)

    with part:
        pending = part.pending(dict.fromkeys(SUPPORTED_VLLM, ""))
        whole = part.play(pending, one, len(pending))
        left = sum(version not in part.latest for version in SUPPORTED_VLLM)
        failed = part.finish(left, COMMAND)
    return failed or int(not whole)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
