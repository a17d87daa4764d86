"""Asks for a tiny model of each architecture of vLLM's registry, in slices: part of make test-all.

python -m tests.registry [--minutes 30] [--fresh] [--retry] [architecture ...]

A unit is an architecture. Results are in tests/results/registry.jsonl, from which the page
docs/reference/features.md is written. Of architectures that are named what came is printed, as
a line of JSON each, and nothing is recorded.
"""

import json
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict

from tests.registry import ask, page, tiny
from tests.resume.log import Slice, slice_parser

COMMAND = "make test-all"


def timed(architecture: str) -> tuple[ask.Came, float]:
    """What came of an architecture, and how many seconds it took."""
    started = time.monotonic()
    return ask.in_child(architecture), time.monotonic() - started


def main(arguments: list[str]) -> int:
    """Run a slice; exit code 1 if an architecture is neither served nor refused in one line."""
    parser = slice_parser("tests.registry", __doc__)
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="at a time")
    parser.add_argument("architectures", nargs="*", help="to be asked, whatever came before")
    parser.add_argument("--page", action="store_true", help="write the page, and ask nothing")
    args = parser.parse_args(arguments)
    if args.page:
        page.write()
        return 0
    known = list(tiny.registered())
    ask.prepare()
    if args.architectures:
        for each in args.architectures:
            print(json.dumps(asdict(ask.in_child(each))), flush=True)
        return 0
    with Slice(page.RESULTS_FILE, args) as part, ThreadPoolExecutor(args.processes) as pool:
        pending = part.pending(dict.fromkeys(known, ""))
        asked = {each: pool.submit(timed, each) for each in pending}

        def one(architecture: str) -> None:
            came, seconds = asked[architecture].result()
            outcome = "failed" if came.what == "fault" else "passed"
            part.record(architecture, outcome, seconds, by=came.what, **asdict(came))

        part.play(pending, one)
        pool.shutdown(cancel_futures=True)
        failed = part.finish(sum(each not in part.latest for each in known), COMMAND)
    page.write()
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
