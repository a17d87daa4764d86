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
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

from tests.resume.seeds import run

FILES = {"cpu": "seeds.txt", "npu": "seeds-device.txt"}
SEEDS = {device: Path(__file__).with_name(name) for device, name in FILES.items()}
RECORDED = ("steps", "tokens", "finished", "aborted", "preempted", "sleeps", "close calls")
RECORDED += (
    "life-cycle calls",
    "adapters overwritten",
    "parts of sessions",
    "tokens that a connector had",
    "drafts accepted",
    "largest margin in thousandths",
)


class Engines:
    """Plays seeds, and counts what of engines they had.

    Parameters
    ----------
    device
        "cpu" or "npu".
    """

    def __init__(self, device: str = "cpu") -> None:
        self.device, self.seeds = device, SEEDS[device]
        self.count: Counter[str] = Counter()
        self.parts: dict[str, Counter[str]] = {"episodes": Counter(), "steps": Counter()}

    def play(self, seed: int, steps: int) -> tuple[str, dict[str, Any]]:
        """Play a seed: its outcome, and what is recorded of it."""
        from tests.soak.engines import play
        from tests.soak.kinds import Kind

        kind = Kind.draw(seed, self.device)
        try:
            count = play(kind, steps)
        except Exception as error:
            with self.seeds.open("a") as file:
                file.write(f"{seed}\n")
            traceback.print_exc()
            print(f"seed {seed} FAILED, kept in {self.seeds}: {kind}", flush=True)
            what = str(error).partition("\n")[0][:200]
            return "failed", {**kind.told(), "error": f"{type(error).__name__}: {what}"}
        self.count += count
        for part in kind.parts():
            self.parts["episodes"][part] += 1
            self.parts["steps"][part] += count["steps"]
        counted = {name: count[name] for name in RECORDED if count[name]}
        return "agreed", {**kind.told(), **counted}

    def report(self) -> None:
        """Print what was covered."""
        episodes = self.parts["episodes"]
        for part, steps in self.parts["steps"].most_common():
            print(f"{steps:8,} steps in {episodes[part]:3} episodes: {part}")
        print(", ".join(f"{number:,} {name}" for name, number in sorted(self.count.items())))


if __name__ == "__main__":
    on_device = os.environ.get("NPU_PREP_DEVICE") == "npu"
    device, results, steps = (
        ("npu", "soak-engines-device.jsonl", 100)
        if on_device
        else ("cpu", "soak-engines.jsonl", 300)
    )
    sys.exit(run(Engines(device), "python -m tests.soak", __doc__, results, 1000, steps=steps))
