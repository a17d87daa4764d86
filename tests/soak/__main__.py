"""Random engines of every kind against transformers: one engine and its traffic a seed.

    python -m tests.soak [--minutes 30] [--fresh] [--retry]
    python -m tests.soak --seed N [--episodes N]

Without a seed: a slice of the run in tests/results/soak-engines.jsonl. It plays the seeds that come
next; before them those that failed, if anything changed since. With --seed: these episodes, and
nothing is recorded; with --fresh, too, a new run that begins there. A failing seed is appended to
tests/soak/seeds.txt; the suite then plays it.
"""

import sys
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

from tests.resume.seeds import run

SEEDS = Path(__file__).with_name("seeds.txt")
RECORDED = ("steps", "tokens", "finished", "aborted", "preempted", "sleeps")


class Engines:
    """Plays seeds, and counts what of engines they had."""

    def __init__(self) -> None:
        self.count: Counter[str] = Counter()
        self.parts: Counter[str] = Counter()

    def play(self, seed: int, steps: int) -> tuple[str, dict[str, Any]]:
        """Play a seed: its outcome, and what is recorded of it."""
        from tests.soak.engines import Kind, play

        kind = Kind.draw(seed)
        try:
            count = play(kind, steps)
        except Exception as error:
            with SEEDS.open("a") as file:
                file.write(f"{seed}\n")
            traceback.print_exc()
            print(f"seed {seed} FAILED, kept in {SEEDS}: {kind}", flush=True)
            what = str(error).partition("\n")[0][:200]
            return "failed", {"family": kind.family, "error": f"{type(error).__name__}: {what}"}
        self.count += count
        for part in kind.parts():
            self.parts[part] += count["steps"]
        return "agreed", {"family": kind.family, **{name: count[name] for name in RECORDED}}

    def report(self) -> None:
        """Print what was covered."""
        print("steps by part:", ", ".join(f"{n:,} {part}" for part, n in self.parts.most_common()))
        print(", ".join(f"{number:,} {name}" for name, number in sorted(self.count.items())))


if __name__ == "__main__":
    sys.exit(run(Engines(), "python -m tests.soak", __doc__, "soak-engines.jsonl", 1000, steps=300))
