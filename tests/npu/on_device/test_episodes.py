"""Random traffic on the device, through our runner and upstream's: engines with experts.

Upstream's runner steps eagerly, so padding that reaches an expert or a wrong row shows as other
logits. Every step is checked in full.
"""

import pytest

from tests.differential.episodes import Episode, play

STEPS = 30
EPISODES = {33: {"full graph", "piecewise graphs"}}
"""What happens in each: Qwen3-MoE by `fia`, asynchronous, with padded graphs of both kinds."""


def check_episode(number: int, steps: int, expected: set[str]) -> None:
    traffic = play(Episode.draw_for_device(number), steps)
    print(number, dict(traffic.count), dict(traffic.states))
    happened = {what for what, times in (traffic.count + traffic.states).items() if times}
    assert happened >= expected | {"finished"}


@pytest.mark.parametrize("number", EPISODES)
def test_every_array_decision_and_sample_agrees(number):
    check_episode(number, STEPS, EPISODES[number])
