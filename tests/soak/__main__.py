"""Random engines of every kind against transformers: one engine and its traffic a seed.

    python -m tests.soak [--minutes 30] [--fresh] [--retry]
    python -m tests.soak --seed N [--episodes N]

Without a seed: a slice of the run in tests/results/soak-engines.jsonl. It plays the seeds that come
next; before them those that failed, if anything changed since. With --seed: these episodes, and
nothing is recorded; with --fresh, too, a new run that begins there. A failing seed is appended to
tests/soak/seeds.txt; the suite then plays it.

With NPU_PREP_DEVICE=npu, on a card or under `ascend-emulator`, engines are those that an NPU
serves; two ranks want two. Their run is tests/results/soak-engines-device.jsonl, failures are in
seeds-device.txt.
"""

import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from tests.resume.seeds import failure, keep_in_file, print_counts, run

FILES = {"cpu": "seeds.txt", "npu": "seeds-device.txt"}
SEEDS = {device: Path(__file__).with_name(name) for device, name in FILES.items()}


class Engines:
    """Plays seeds on a device, "cpu" or "npu", and counts what of engines they had."""

    def __init__(self, device: str = "cpu") -> None:
        self.device, self.seeds = device, SEEDS[device]
        self.count, self.episodes, self.steps = Counter[str](), Counter[str](), Counter[str]()

    def play(self, seed: int, steps: int) -> tuple[str, dict[str, Any]]:
        from tests.soak.engines import play
        from tests.soak.kinds import draw

        kind = draw(seed, self.device)
        try:
            count = play(kind, steps)
        except Exception as error:
            keep_in_file(seed, self.seeds)
            return "failed", {**kind.told(), **failure(seed, error, self.seeds, kind)}
        self.count += count
        self.episodes.update(kind.parts())
        self.steps.update(dict.fromkeys(kind.parts(), count["steps"]))
        return "agreed", {
            **kind.told(),
            **{what: number for what, number in count.items() if number},
        }

    def report(self) -> None:
        for part, steps in self.steps.most_common():
            print(f"{steps:8,} steps in {self.episodes[part]:3} episodes: {part}")
        print_counts(self.count)


if __name__ == "__main__":
    device = os.environ.get("NPU_PREP_DEVICE", "cpu")
    name, steps = ("soak-engines-device", 100) if device == "npu" else ("soak-engines", 300)
    player = Engines(device)
    sys.exit(run(player, "python -m tests.soak", __doc__, f"{name}.jsonl", 1000, steps=steps))
