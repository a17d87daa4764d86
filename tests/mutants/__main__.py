"""Plant bugs, one at a time, in a copy of the packages, run the tests of each, print who caught it.

    python -m tests.mutants [--minutes 30] [--fresh] [--retry]
    python -m tests.mutants --random 50 [--seed N] [--pool scheduling] [--minutes 30] ...
    python -m tests.mutants PART OF A NAME ...

Without names: a slice of the run in tests/results/mutants.jsonl, which the next slice goes on with.
With names: those planted bugs, now, and nothing is recorded. With --random: bugs that nobody
planned, one operator or constant of the package changed for each, as the run's seed draws them from
a pool of folders, in tests/results/random-mutants.jsonl. A survivor either gets a test that kills
it, or a line in tests/mutants/equivalent.txt that says why no test can.

Exit code 1 if a bug went unnoticed.
"""

import hashlib
import os
import sys
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import astuple
from pathlib import Path

from tests.mutants.bench import Bench
from tests.mutants.planted import MUTANTS, Mutant
from tests.mutants.sites import POOLS, draw
from tests.mutants.suites import slowness, suite_for
from tests.resume.log import Slice, slice_parser
from tests.resume.tree import RESULTS

SEED = int(os.environ.get("NPU_PREP_TEST_SEED", "20240607"))
STEPS = next(iter(POOLS))
MOST_SURVIVORS = 0.1
"""Share of random changes that may survive, of those that a test could notice."""


def equivalent() -> dict[str, str]:
    """Random changes that nothing can notice, by name, and why: the line below, indented."""
    lines = Path(__file__).with_name("equivalent.txt").read_text().splitlines()
    lines = [line for line in lines if line and not line.startswith("#")]
    return {key: why.strip() for key, why in zip(lines[::2], lines[1::2])}


def drawn(seed: int, count: int, pool: str) -> list[Mutant]:
    """Random changes of a pool, those that a test may notice, quick tests first."""
    known = equivalent()
    mutants = [
        Mutant(site.key, site.path, *site.planted(), tests=suite_for(site.path))
        for site in draw(seed, count, pool)
        if site.key not in known
    ]
    return sorted(mutants, key=lambda mutant: slowness(mutant.tests[0]))


def version(mutant: Mutant, is_drawn: bool) -> str:
    """Eight digits that change with a planted bug or its tests, or with a random change itself.

    Results of others don't count.
    """
    told = astuple(mutant)
    return hashlib.sha256(repr(told[1:4] if is_drawn else told).encode()).hexdigest()[:8]


def resume(part: Slice, bench: Bench, mutants: list[Mutant], count: int, command: str) -> int:
    """Run a slice: of `count` random changes, or of planted bugs if that is 0."""
    by_name = {mutant.name: mutant for mutant in mutants}
    versions = {name: version(mutant, count > 0) for name, mutant in by_name.items()}

    def one(name: str) -> None:
        start = time.perf_counter()
        verdict = bench.try_out(by_name[name], examples=100 if count else 200)
        told = {"by": verdict.by, "version": versions[name]}
        part.record(name, verdict.outcome, time.perf_counter() - start, **told)

    part.play(part.pending(versions), one)
    code = part.finish(len(part.pending(versions)), command)
    if count:
        latest = {name: part.latest[name].outcome for name in by_name if name in part.latest}
        print(share(Counter(latest.values()), count - len(mutants)))
    return code


def share(outcomes: Mapping[str, int], unnoticeable: int) -> str:
    """How many changes survive, in a line."""
    killed, survived = outcomes.get("caught", 0), outcomes.get("missed", 0)
    part = survived / max(killed + survived, 1)
    return (
        f"{killed} killed, {survived} survived, {unnoticeable} equivalent; {part:.0%} of those "
        f"that a test could notice survive, {'NOT ' * (part >= MOST_SURVIVORS)}under "
        f"{MOST_SURVIVORS:.0%}"
    )


def narrow(names: list[str], bench: Bench) -> int:
    """Run the planted bugs whose name contains one of `names`; nothing is recorded."""
    mutants = [mutant for mutant in MUTANTS if any(part in mutant.name for part in names)]
    missed = 0
    for mutant in mutants:
        verdict = bench.try_out(mutant)
        missed += verdict.outcome != "caught"
        print(f"{verdict.outcome} ({mutant.name}, {verdict.by})", flush=True)
    print(f"{len(mutants)} planted, {missed} not caught")
    return int(missed > 0 or not mutants)


def main() -> int:
    parser = slice_parser("tests.mutants", __doc__, f"of a run that begins; {SEED} without it")
    parser.add_argument("names", nargs="*", metavar="name", help="part of a planted bug's name")
    parser.add_argument("--random", type=int, default=0, help="how many random changes a run has")
    parser.add_argument("--pool", choices=POOLS, default=STEPS, help="of folders, for --random")
    options = parser.parse_args()
    if options.names:
        with Bench() as bench:
            return narrow(options.names, bench)
    pool = f"-{options.pool}" * (options.pool != STEPS)
    name, command = "mutants", "make mutants"
    if options.random:
        name = f"random-mutants{pool}"
        command += f" RANDOM={options.random}{f' POOL={options.pool}' * bool(pool)}"
    with Slice(RESULTS / f"{name}.jsonl", options, SEED) as part, Bench() as bench:
        if not options.random:
            os.environ["NPU_PREP_TEST_SEED"] = str(part.seed)
        mutants = drawn(part.seed, options.random, options.pool) if options.random else MUTANTS
        return resume(part, bench, mutants, options.random, command)


if __name__ == "__main__":
    sys.exit(main())
