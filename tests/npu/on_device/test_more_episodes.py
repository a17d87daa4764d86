"""More episodes of `test_episodes`: each family of experts, both families of kernels."""

import pytest

from tests.npu.on_device.test_episodes import check_episode

STEPS = 60
EPISODES = {
    2: {"full graph"},  # Mixtral, atb
    6: {"full graph"},  # Qwen2-MoE, fia
    11: {"full graph", "piecewise graphs"},  # GLM-4.5, fia
    3: {"full graph", "piecewise graphs"},  # MiniMax-M2, atb
}


@pytest.mark.parametrize("number", EPISODES)
def test_every_array_decision_and_sample_agrees(number):
    check_episode(number, STEPS, EPISODES[number])
