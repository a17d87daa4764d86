"""More episodes of `test_episodes`: each family of experts, both families of kernels, int8."""

import pytest

from tests.npu.on_device.test_episodes import check_episode

STEPS = 60
EPISODES = {
    2: {"full graph"},  # Mixtral, atb
    6: {"full graph"},  # Qwen2-MoE, fia, int8 by compressed-tensors
    11: {"full graph", "piecewise graphs"},  # GLM-4.5, fia, int8 by compressed-tensors
    3: {"full graph", "piecewise graphs"},  # MiniMax-M2, atb
    54: {"full graph"},  # Qwen3-MoE, fia, asynchronous, int8 by ModelSlim
}


@pytest.mark.parametrize("number", EPISODES)
def test_every_array_decision_and_sample_agrees(number):
    check_episode(number, STEPS, EPISODES[number])
