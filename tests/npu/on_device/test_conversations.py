"""Hundreds of turns with a real chat model, in 16 bits on the card."""

import pytest

from tests.engine.test_conversations import CHATS
from tests.helpers.conversations import converse
from tests.helpers.fused import forget_layers
from tests.helpers.v2 import RUNNERS

BOUND = {"float16": 0.13, "bfloat16": 0.5}
"""How far below the best logit by transformers in float32 that of a token may be, and how far off a
log-probability of a prompt's token: one and a half times what all parts have shown. Tokens were
short by 0.019 and 0.22 at most, log-probabilities off by 0.086 and 0.34."""
PARTS = 2
"""Each is a test, so a slice of `make test-all` can end after it."""


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("dtype", BOUND)
@pytest.mark.parametrize("runner", RUNNERS)
def test_every_token_of_every_turn(real_model, tmp_path, runner, dtype, part):
    """All of them together hold each of the conversations once."""
    forget_layers()
    groups = [(name, each, n) for name in RUNNERS for each in BOUND for n in range(PARTS)]
    which = slice(groups.index((runner, dtype, part)), len(groups) * CHATS, len(groups))
    found = converse(
        *(runner, real_model, tmp_path, which, 600),
        dtype=dtype,
        max_model_len=2048,
        block_size=128,
        num_gpu_blocks_override=18,
    )
    assert max(found.verdict.short) < BOUND[dtype]
    assert max(found.verdict.scores_off) < BOUND[dtype]
    assert found.cached > 0
    assert not found.drafts["otherwise"]
