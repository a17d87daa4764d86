"""Hundreds of turns with a real chat model: each token is the best one by transformers."""

import os

import pytest

from tests.helpers.conversations import converse
from tests.helpers.v2 import RUNNERS

CHATS = int(os.environ.get("NPU_PREP_TEST_CHATS", "1000"))
"""At most so many conversations."""
CLOSE = 1e-3
"""Tokens are those of transformers wherever the best logit is this much above the second, and
log-probabilities are as near: sums of float32 in another order differ by some 1e-4."""


@pytest.mark.parametrize("runner", RUNNERS)
def test_every_token_of_every_turn(real_model, tmp_path, runner):
    """Contexts go up to 8,000 tokens; 560 blocks of 16 don't hold them all."""
    which = slice(CHATS)
    found = converse(
        runner, real_model, tmp_path, which, block_size=16, num_gpu_blocks_override=560
    )
    assert max(found.verdict.short) < CLOSE
    assert max(found.verdict.scores_off) < CLOSE
    assert max(len(turn.prompt) for turn in found.turns) > 7900
    assert found.preempted > 0
    assert found.cached > sum(len(turn.prompt) for turn in found.turns) / 3
    assert 0.02 < found.accepted < 0.5
