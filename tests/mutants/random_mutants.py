"""Bugs that nobody planned: one operator or constant of the package changed at random.

    python -m tests.mutants.random_mutants [--count 50] [--seed N] [--minutes 30] [--fresh]
                                           [--pool scheduling]
    python -m tests.mutants.random_mutants --show "part of a change's name"

A slice of the run in tests/results/random-mutants.jsonl; of another pool of folders than that of
steps, in a file of its own. Each change is planted in a copy of the
packages, as planned bugs are; the tests of its module run until one fails, the fast ones first. A
survivor either gets a test that kills it, or a line in tests/mutants/equivalent.txt that says why
no test can. Exit code 1 while a change survives. With --show: nothing runs, changes are listed.
"""

import hashlib
import sys
import time
from pathlib import Path

from tests.mutants.__main__ import ON_CARDS, SEED
from tests.mutants.bench import LIMIT, Bench
from tests.mutants.planted import Mutant
from tests.mutants.sites import POOLS, Site, draw, every_site
from tests.mutants.suites import slowness, suite_for
from tests.resume.slice import Slice, slice_parser
from tests.resume.tree import RESULTS

COMMAND = "make mutants RANDOM={count}"
STEPS = next(iter(POOLS))
COUNT = 50
FEWER = {"NPU_PREP_TEST_EXAMPLES": "100", **ON_CARDS}
"""Examples of a property, of which `make test` has more. Episodes need all of their steps: tests
demand what happens in these."""
MOST_SURVIVORS = 0.1
"""Share of the changes that may survive, of those that a test could notice."""


def read_equivalent(text: str) -> dict[str, str]:
    """Changes of the list by name, and why nothing can notice them."""
    found: dict[str, str] = {}
    key = ""
    for line in text.splitlines():
        if line.startswith("    "):
            found[key] = f"{found[key]} {line.strip()}".strip()
        elif line and not line.startswith("#"):
            key = line
            found[key] = ""
    return found


EQUIVALENT = read_equivalent(Path(__file__).with_name("equivalent.txt").read_text())


def mutant_of(site: Site) -> Mutant:
    """A change as a bug that can be planted."""
    return Mutant(site.key, site.path, *site.planted(), tests=suite_for(site.path))


def version(mutant: Mutant) -> str:
    """Changes with the change itself; tests may be added that notice it."""
    told = (mutant.path, mutant.before, mutant.after)
    return hashlib.sha256(repr(told).encode()).hexdigest()[:8]


def resume(part: Slice, count: int, bench: Bench, pool: str = STEPS) -> int:
    """Run a slice of the changes of a pool that the run's seed draws."""
    mutants = {site.key: mutant_of(site) for site in draw(part.seed, count, pool)}
    versions = {key: version(mutant) for key, mutant in mutants.items()}
    for key in mutants:
        known = part.latest.get(key)
        if key in EQUIVALENT and (known is None or known.outcome != "equivalent"):
            part.record(key, "equivalent", 0, by=EQUIVALENT[key], version=versions[key])
    todo = part.pending(versions)
    todo.sort(key=lambda key: slowness(mutants[key].tests[0]))  # stable: retried ones come first

    def one(key: str) -> None:
        start = time.perf_counter()
        verdict = bench.try_out(mutants[key], LIMIT, **FEWER)
        seconds = time.perf_counter() - start
        part.record(key, verdict.outcome, seconds, by=verdict.by, version=versions[key])

    whole = part.play(todo, one, len(todo))
    left = len(part.pending(versions))
    failed = part.finish(left, command(count, pool))
    print(share({key: result.outcome for key, result in part.latest.items() if key in versions}))
    return failed if whole else 130


def command(count: int, pool: str) -> str:
    """What runs the next slice."""
    return COMMAND.format(count=count) + f" POOL={pool}" * (pool != STEPS)


def share(outcomes: dict[str, str]) -> str:
    """How many changes survive, in a line."""
    killed, survived, equivalent = (
        sum(outcome == each for outcome in outcomes.values())
        for each in ("caught", "missed", "equivalent")
    )
    noticed = killed + survived
    part = survived / noticed if noticed else 0.0
    judged = "under" if part < MOST_SURVIVORS else "NOT under"
    return (
        f"{len(outcomes)} random changes: {killed} killed, {survived} survived, {equivalent} "
        f"equivalent; {part:.0%} of those that a test could notice survive, {judged} "
        f"{MOST_SURVIVORS:.0%}"
    )


def main() -> int:
    parser = slice_parser("tests.mutants.random_mutants", __doc__)
    parser.add_argument("--count", type=int, default=COUNT, help="how many changes a run has")
    parser.add_argument("--seed", type=int, help=f"of a run that begins; {SEED} without it")
    parser.add_argument("--pool", choices=POOLS, default=STEPS, help="of folders")
    parser.add_argument("--show", metavar="PART", help="list changes with this in their names")
    args = parser.parse_args()
    if args.show is not None:
        print("\n".join(site.key for site in every_site() if args.show in site.key))
        return 0
    part = Slice(
        RESULTS / f"random-mutants{'' if args.pool == STEPS else '-' + args.pool}.jsonl",
        args.minutes,
        seed=args.seed,
        default_seed=SEED,
        settings={"count": args.count, **FEWER},
        fresh=args.fresh,
        retry=args.retry,
    )
    with part, Bench() as bench:
        return resume(part, args.count, bench, args.pool)


if __name__ == "__main__":
    sys.exit(main())
