"""Random serving traffic through our runner and upstream's, one engine and its traffic a seed.

    python -m tests.differential [--minutes 30] [--fresh] [--retry]
    python -m tests.differential --seed N [--episodes N]

Without a seed: a slice of the run in tests/results/soak.jsonl. It plays the seeds that come next;
before them those that failed, if anything changed since. With --seed: these episodes, and nothing
is recorded; with --fresh, too, a new run that begins there. A failing episode is written to
tests/differential/seeds; the suite then plays it.
"""

import argparse
import os
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from itertools import chain, count
from pathlib import Path
from typing import Any

from tests.resume.log import ENDLESS
from tests.resume.slice import Slice, SliceError, add_arguments
from tests.resume.tree import RESULTS

SEEDS = Path(__file__).parent / "seeds"
COMMAND = "make soak"


class Coverage:
    """What the episodes of a slice were made of.

    Attributes
    ----------
    count
        What happened how often.
    states
        Steps by attention state.
    by_feature, by_part
        Steps by attention state and by feature of a request, by part of the engine.
    """

    def __init__(self) -> None:
        self.count: Counter = Counter()
        self.states: Counter = Counter()
        self.by_feature: Counter = Counter()
        self.by_part: Counter = Counter()

    def play(self, seed: int, steps: int) -> tuple[str, dict[str, Any]]:
        """Play an episode: its outcome, and what is recorded of it."""
        from tests.differential.episodes import Episode, play

        episode = Episode.draw(seed)
        try:
            traffic = play(episode, steps)
        except Exception as error:
            SEEDS.mkdir(exist_ok=True)
            (SEEDS / f"{seed}.json").write_text(episode.dumps() + "\n")
            traceback.print_exc()
            print(f"seed {seed} FAILED, kept in {SEEDS}: {episode}", flush=True)
            what = str(error).partition("\n")[0][:200]
            return "failed", {"family": episode.family, "error": f"{type(error).__name__}: {what}"}
        self.count += traffic.count
        self.states += traffic.states
        self.by_feature += traffic.by_feature
        for part in episode.parts():
            for state, number in traffic.states.items():
                self.by_part[part, state] += number
        counts = {"steps": traffic.count["steps"], "tokens": traffic.count["tokens"]}
        return "agreed", {"family": episode.family, **counts, "states": dict(traffic.states)}

    def report(self) -> None:
        """Print what was covered."""
        self._table(self.by_part, "part of the engine")
        self._table(self.by_feature, "feature of a request")
        print(", ".join(f"{self.count[name]:,} {name}" for name in sorted(self.count)))

    def _table(self, steps: Counter, what: str) -> None:
        """Steps by attention state and by something else."""
        from rich.console import Console
        from rich.table import Table

        table = Table(what, *self.states, title="Steps by attention state")
        for name in sorted({name for name, _ in steps}):
            table.add_row(name, *(f"{steps[name, state]:,}" for state in self.states))
        Console(width=120).print(table)


def seeds_of(part: Slice) -> Iterator[str]:
    """Seeds for a slice: those that are to be played again, then ones that the run hasn't had."""
    again = [unit for unit, result in part.latest.items() if part.again(result)]
    had = [int(unit) + 1 for unit in part.latest]
    return chain(again, map(str, count(max([part.seed, *had]))))


def resume(part: Slice, coverage: Coverage, steps: int) -> int:
    """Play episodes until the time is up."""

    def one(unit: str) -> None:
        start = time.perf_counter()
        outcome, recorded = coverage.play(int(unit), steps)
        part.record(unit, outcome, time.perf_counter() - start, **recorded)

    whole = part.play(seeds_of(part), one, None)
    coverage.report()
    failed = part.finish(ENDLESS, COMMAND)
    return failed if whole else 130


def repeat(first: int, episodes: int, coverage: Coverage, steps: int) -> int:
    """Play given episodes; nothing is recorded."""
    failed = []
    for seed in range(first, first + episodes):
        outcome, recorded = coverage.play(seed, steps)
        print(f"seed {seed} {outcome}: {recorded}", flush=True)
        failed += [seed] * (outcome == "failed")
    coverage.report()
    print(f"first seed {first}, {episodes} episodes, {len(failed)} failed: {failed}")
    return 1 if failed else 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.differential", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add_arguments(parser)
    parser.add_argument("--seed", type=int, help="of the first episode")
    parser.add_argument("--episodes", type=int, default=1, help="how many from --seed on")
    parser.add_argument("--steps", type=int, default=1000, help="of an episode")
    args = parser.parse_args()

    # Small products gain nothing from threads, and spinning ones disturb each other.
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    coverage = Coverage()
    if args.seed is not None and not args.fresh:
        return repeat(args.seed, args.episodes, coverage, args.steps)
    try:
        part = Slice(
            RESULTS / "soak.jsonl",
            args.minutes,
            seed=args.seed,
            default_seed=int(time.time()),
            settings={"steps": args.steps},
            fresh=args.fresh,
            retry=args.retry,
        )
    except SliceError as error:
        print(f"{COMMAND}: {error}", file=sys.stderr)
        return 2
    with part:
        return resume(part, coverage, args.steps)


if __name__ == "__main__":
    sys.exit(main())
