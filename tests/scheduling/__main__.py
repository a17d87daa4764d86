"""Random traffic through vLLM's schedulers and ours, one engine and its traffic a seed.

    python -m tests.scheduling [--minutes 30] [--fresh] [--retry]
    python -m tests.scheduling --seed N [--episodes N]

Without a seed: a slice of the run in tests/results/scheduling.jsonl. It plays the seeds that come
next; before them those that failed, if anything changed since. With --seed: these episodes, and
nothing is recorded; with --fresh, too, a new run that begins there. A failing seed is appended to
tests/scheduling/seeds.txt; the suite then plays it.
"""

import sys
from collections import Counter
from pathlib import Path
from typing import Any

from tests.resume.seeds import failure, keep_in_file, print_counts, run

SEEDS = Path(__file__).with_name("seeds.txt")
RECORDED = ("steps", "tokens", "preempted", "upstream failed")


class Twins:
    """Plays seeds, and counts what happened."""

    def __init__(self) -> None:
        self.count: Counter[str] = Counter()

    def play(self, seed: int, steps: int) -> tuple[str, dict[str, Any]]:
        from tests.scheduling.twin import play

        try:
            twin = play(seed, steps, every=20)
        except Exception as error:
            keep_in_file(seed, SEEDS)
            return "failed", failure(seed, error, SEEDS)
        self.count += twin.count
        return "agreed", {name: twin.count[name] for name in RECORDED}

    def report(self) -> None:
        print_counts(self.count)


if __name__ == "__main__":
    sys.exit(run(Twins(), "python -m tests.scheduling", __doc__, "scheduling.jsonl", 1000))
