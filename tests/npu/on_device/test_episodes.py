"""Random traffic on the device, through our runner and upstream's: engines with experts.

Upstream's runner steps eagerly, so padding that reaches an expert or a wrong row shows as other
logits. Every step is checked in full.
"""

import json

import pytest

from tests.differential.__main__ import SEEDS
from tests.differential.episodes import Episode, play

STEPS = 30
EPISODES = {33: {"full graph", "piecewise graphs"}}
"""What happens in each: Qwen3-MoE by `fia`, asynchronous, with padded graphs of both kinds."""
KEPT = {int(path.stem): set() for path in sorted((SEEDS / "device").glob("*.json"))}
"""Episodes of `make soak` that failed once."""


def check_episode(number: int, steps: int, expected: set[str]) -> None:
    kept = SEEDS / "device" / f"{number}.json"
    is_kept = kept.exists()
    episode = (
        Episode(**json.loads(kept.read_text())) if is_kept else Episode.draw_for_device(number)
    )
    traffic = play(episode, steps)
    print(number, dict(traffic.count), dict(traffic.states))
    happened = {what for what, times in (traffic.count + traffic.states).items() if times}
    assert happened >= expected | {"finished"}


@pytest.mark.parametrize("number", EPISODES | KEPT)
def test_every_array_decision_and_sample_agrees(number):
    check_episode(number, STEPS, (EPISODES | KEPT)[number])
