"""Plant each bug in a copy of the packages, run its tests, print who caught it.

    python -m tests.mutants [--minutes 30] [--fresh] [--retry]
    python -m tests.mutants PART OF A NAME ...

Without names: a slice of the run in tests/results/mutants.jsonl, which the next slice goes on with.
With names: those bugs, now, and nothing is recorded. Exit code 1 if a bug went unnoticed.
"""

import hashlib
import os
import sys
import time
from dataclasses import astuple, replace

from tests.mutants.bench import LIMIT, Bench, compiled_from
from tests.mutants.planted import MUTANTS, Mutant
from tests.mutants.suites import in_order, slowness
from tests.resume.slice import Slice, slice_parser
from tests.resume.tree import RESULTS

COMMAND = "make mutants"
ON_CARDS = {"NPU_PREP_TEST_SECONDS": "900"}
"""Seconds of a test: the first one of an emulated card waits until that has begun."""
SEED = int(os.environ.get("NPU_PREP_TEST_SEED", "20240607"))


def version(mutant: Mutant) -> str:
    """Eight digits that change with the bug or its tests: results of others don't count."""
    return hashlib.sha256(repr(astuple(mutant)).encode()).hexdigest()[:8]


FIRST_FOLDERS = ("prep", "attention", "runner")
"""Of the package: what every step passes through."""


def ordered(mutant: Mutant) -> Mutant:
    """The bug with the tests of its module first."""
    return replace(mutant, tests=in_order(mutant.path, mutant.tests))


def cost(mutant: Mutant) -> tuple[int, bool, int]:
    """Sorts planted bugs: quick tests first, and of these the folders that matter most.

    Compiled code is compiled anew for each bug in it, which takes longer than its tests.
    """
    slow = max(map(slowness, mutant.tests))
    order = [*FIRST_FOLDERS, mutant.path.split("/")[0]]
    return slow, bool(compiled_from(mutant.path)), order.index(order[-1])


def narrow(names: list[str], bench: Bench) -> int:
    """Run the bugs whose name contains one of `names`; nothing is recorded."""
    mutants = [mutant for mutant in MUTANTS if any(part in mutant.name for part in names)]
    if not mutants:
        print(f"{COMMAND}: no planted bug has a name with {names}", file=sys.stderr)
        return 2
    verdicts = []
    for number, mutant in enumerate(mutants, 1):
        start = time.perf_counter()
        verdict = bench.try_out(ordered(mutant), LIMIT, **ON_CARDS)
        verdicts.append(verdict)
        print(
            f"{number} of {len(mutants)}: {verdict.outcome} ({mutant.name}, {verdict.by}; "
            f"{time.perf_counter() - start:.0f} s)",
            flush=True,
        )
    missed = sum(verdict.outcome != "caught" for verdict in verdicts)
    print(f"{len(mutants)} planted, {missed} not caught")
    return 1 if missed else 0


def resume(part: Slice, bench: Bench) -> int:
    """Run a slice of all planted bugs."""
    mutants = {mutant.name: mutant for mutant in MUTANTS}
    versions = {name: version(mutant) for name, mutant in mutants.items()}

    def place(name: str) -> tuple[bool, tuple[int, bool, int]]:
        known = part.latest.get(name)
        return known is None or not known.failed, cost(mutants[name])

    todo = sorted(part.pending(versions), key=place)

    def one(name: str) -> None:
        start = time.perf_counter()
        verdict = bench.try_out(ordered(mutants[name]), LIMIT, **ON_CARDS)
        seconds = time.perf_counter() - start
        part.record(name, verdict.outcome, seconds, by=verdict.by, version=versions[name])

    whole = part.play(todo, one, len(todo))
    failed = part.finish(len(part.pending(versions)), COMMAND)
    return failed if whole else 130


def main() -> int:
    parser = slice_parser("tests.mutants", __doc__)
    parser.add_argument("names", nargs="*", metavar="name", help="part of a planted bug's name")
    args = parser.parse_args()
    if args.names:
        with Bench() as bench:
            return narrow(args.names, bench)
    part = Slice(
        RESULTS / "mutants.jsonl",
        args.minutes,
        default_seed=SEED,
        settings={"NPU_PREP_TEST_EXAMPLES": 200},
        fresh=args.fresh,
        retry=args.retry,
    )
    os.environ["NPU_PREP_TEST_SEED"] = str(part.seed)
    with part, Bench() as bench:
        return resume(part, bench)


if __name__ == "__main__":
    sys.exit(main())
