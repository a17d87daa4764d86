"""Random traffic on the device, through our runner and upstream's: engines with experts.

Upstream's runner steps eagerly, so padding that reaches an expert or a wrong row shows as other
logits. Every step is checked in full.
"""

import json

import pytest

from tests.differential.__main__ import SEEDS
from tests.differential.episodes import SPARSE, Episode, play

EPISODES = {
    33: (30, {"full graph"}),  # Qwen3-MoE, fia, asynchronous
    2: (60, {"full graph"}),  # Mixtral, atb
    6: (60, {"full graph"}),  # Qwen2-MoE, fia, int8 by compressed-tensors
    11: (60, {"full graph", "piecewise graphs"}),  # GLM-4.5, fia, int8 by compressed-tensors
    3: (60, {"full graph", "piecewise graphs"}),  # MiniMax-M2, atb
    54: (60, {"full graph"}),  # Qwen3-MoE, fia, asynchronous, int8 by ModelSlim
    **{int(path.stem): (30, set()) for path in sorted((SEEDS / "device").glob("*.json"))},
}
"""Steps of each, and what happens in it; those of `make soak` that failed once come last."""
SPARSE_EPISODES = {
    8: {"full graph", "resumed", "pauses"},
    28: {"piecewise graphs", "resumed", "caches cleared in pauses"},  # asynchronous
    38: {"full graph", "resumed", "requests reset"},  # int8 by ModelSlim, in chunks
}
"""The same of DeepSeek V3.2, in 60 steps."""


@pytest.mark.parametrize("number", EPISODES)
def test_every_array_decision_and_sample_agrees(number):
    steps, expected = EPISODES[number]
    kept = SEEDS / "device" / f"{number}.json"
    if kept.exists():
        episode = Episode(**json.loads(kept.read_text()))
    else:
        episode = Episode.draw_for_device(number)
    assert happened_in(episode, steps) >= expected | {"finished"}


@pytest.mark.parametrize("number", SPARSE_EPISODES)
def test_engines_with_sparse_attention_agree(number):
    episode = Episode.draw_for_device(number, SPARSE)
    assert happened_in(episode, 60) >= SPARSE_EPISODES[number] | {"finished"}


def happened_in(episode, steps):
    traffic = play(episode, steps)
    print(dict(traffic.count), dict(traffic.states))
    return {what for what, times in (traffic.count + traffic.states).items() if times}
