"""Random serving traffic through our runner and upstream's, for as long as one likes.

python -m tests.differential --minutes 60 [--seed N] [--steps N]

A failing episode is written to tests/differential/seeds; the suite then plays it.
"""

import argparse
import os
import sys
import time
import traceback
from collections import Counter
from pathlib import Path

SEEDS = Path(__file__).parent / "seeds"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--seed", type=int, default=int(time.time()), help="of the first episode")
    parser.add_argument("--steps", type=int, default=1000, help="of an episode")
    parser.add_argument("--episodes", type=int, help="stop after so many")
    args = parser.parse_args()

    # Small products gain nothing from threads, and spinning ones disturb each other.
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    from tests.differential.episodes import Episode, play

    start, faults, played = time.monotonic(), [], 0
    count: Counter = Counter()
    states: Counter = Counter()
    by_feature: Counter = Counter()
    by_part: Counter = Counter()
    while time.monotonic() - start < 60 * args.minutes and played != args.episodes:
        episode = Episode.draw(args.seed + played)
        played += 1
        try:
            traffic = play(episode, args.steps)
        except Exception:
            faults.append(episode.seed)
            SEEDS.mkdir(exist_ok=True)
            (SEEDS / f"{episode.seed}.json").write_text(episode.dumps() + "\n")
            traceback.print_exc()
            print(f"seed {episode.seed} FAILED, kept in {SEEDS}: {episode}", flush=True)
            continue
        count += traffic.count
        states += traffic.states
        by_feature += traffic.by_feature
        for part in sorted(episode.parts()):
            for state, steps in traffic.states.items():
                by_part[part, state] += steps
        print(
            f"seed {episode.seed}: {traffic.count['steps']} steps agree ({episode.family}, "
            f"{dict(traffic.states)}); {count['steps']} steps of {played} episodes in "
            f"{(time.monotonic() - start) / 60:.1f} min, {len(faults)} faults",
            flush=True,
        )
    report(states, by_part, "part of the engine")
    report(states, by_feature, "feature of a request")
    print(", ".join(f"{count[name]:,} {name}" for name in sorted(count)))
    print(f"first seed {args.seed}, {played} episodes, {len(faults)} faults: {faults}")
    return 1 if faults else 0


def report(states: Counter, steps: Counter, what: str) -> None:
    """Print what was covered: steps by attention state and by something else."""
    from rich.console import Console
    from rich.table import Table

    table = Table(what, *states, title="Steps by attention state")
    for name in sorted({name for name, _ in steps}):
        table.add_row(name, *(f"{steps[name, state]:,}" for state in states))
    Console(width=120).print(table)


if __name__ == "__main__":
    sys.exit(main())
