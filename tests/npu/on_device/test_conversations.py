"""Hundreds of turns with a real chat model, in 16 bits on the card."""

import pytest

from tests.engine.test_conversations import CHATS
from tests.helpers.conversations import converse
from tests.helpers.fused import forget_layers
from tests.helpers.v2 import RUNNERS

BOUND = {"float16": 0.1, "bfloat16": 0.8}
"""How far below the best logit by transformers in float32 that of a token may be: about twice of
what was measured. Log-probabilities of prompts are as near."""


@pytest.mark.parametrize("dtype", BOUND)
@pytest.mark.parametrize("runner", RUNNERS)
def test_every_token_of_every_turn(real_model, tmp_path, runner, dtype):
    """Each has a quarter of the conversations."""
    forget_layers()
    first = 2 * [*BOUND].index(dtype) + RUNNERS.index(runner)
    found = converse(
        *(runner, real_model, tmp_path, slice(first, 4 * CHATS, 4)),
        dtype=dtype,
        block_size=128,
        num_gpu_blocks_override=80,
    )
    assert max(found.verdict.short) < BOUND[dtype]
    assert max(found.verdict.scores_off) < BOUND[dtype]
    assert found.preempted > 0
