"""Random serving traffic through our runner and upstream's, one engine and its traffic a seed.

Ours is V2's for even seeds, and V1's for odd ones; upstream's is V1's.

    python -m tests.differential [--minutes 30] [--fresh] [--retry]
    python -m tests.differential --seed N [--episodes N]

Without a seed: a slice of the run in tests/results/soak.jsonl. It plays the seeds that come next;
before them those that failed, if anything changed since. With --seed: these episodes, and nothing
is recorded; with --fresh, too, a new run that begins there. A failing episode is written to
tests/differential/seeds; the suite then plays it.

With NPU_PREP_DEVICE=npu, on a card or under `ascend-emulator`, engines are mixtures of experts,
some with int8 weights; their run is tests/results/soak-device.jsonl, failures are in seeds/device.
"""

import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from tests.resume.seeds import failure, print_counts, run

SEEDS = Path(__file__).parent / "seeds"


class Episodes:
    """Plays seeds, and counts what happened; `on_device`: engines are those that an NPU serves."""

    def __init__(self, on_device: bool = False) -> None:
        self.on_device = on_device
        self.seeds = SEEDS / "device" if on_device else SEEDS
        self.count: Counter[str] = Counter()

    def play(self, seed: int, steps: int) -> tuple[str, dict[str, Any]]:
        from tests.differential.episodes import Episode, play

        draw = Episode.draw_for_device if self.on_device else Episode.draw_for_soak
        episode = draw(seed)
        try:
            traffic = play(episode, steps)
        except Exception as error:
            self.seeds.mkdir(exist_ok=True)
            (self.seeds / f"{seed}.json").write_text(episode.dumps() + "\n")
            told = failure(seed, error, self.seeds, episode)
            return "failed", {"family": episode.family, **told}
        self.count += traffic.count
        counts = {"steps": traffic.count["steps"], "tokens": traffic.count["tokens"]}
        return "agreed", {"family": episode.family, **counts, "states": dict(traffic.states)}

    def report(self) -> None:
        print_counts(self.count)


if __name__ == "__main__":
    on_device = os.environ.get("NPU_PREP_DEVICE") == "npu"
    results, steps = ("soak-device.jsonl", 200) if on_device else ("soak.jsonl", 1000)
    sys.exit(
        run(Episodes(on_device), "python -m tests.differential", __doc__, results, steps=steps)
    )
