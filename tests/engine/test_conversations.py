"""Hundreds of turns with a real chat model: each token is the best one by transformers."""

import os

import pytest

from tests.helpers.conversations import converse
from tests.helpers.v2 import RUNNERS

CHATS = int(os.environ.get("NPU_PREP_TEST_CHATS", "1000"))
"""At most so many conversations in a part, beside two about a book."""
PARTS = 4
"""Each is a test, so a slice of `make test-all` can end after it."""
CLOSE = 1e-3
"""Tokens are those of transformers wherever the best logit is this much above the second, and
log-probabilities are as near: sums of float32 in another order differ by some 1e-4."""


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("runner", RUNNERS)
def test_every_token_of_every_turn(real_model, tmp_path, runner, part):
    """In the first part, contexts go up to 8,000 tokens; in the others, the cache is too small."""
    length, limit, blocks = (400, 640, 42) if part else (7900, 8192, 560)
    found = converse(
        *(runner, real_model, tmp_path, slice(part, PARTS * CHATS, PARTS), length),
        max_model_len=limit,
        block_size=16,
        num_gpu_blocks_override=blocks,
    )
    assert max(found.verdict.short) < CLOSE
    assert max(found.verdict.scores_off) < CLOSE
    assert max(found.lengths) > length
    assert found.cached > 0
    assert not found.drafts["otherwise"]
    assert 0 < found.drafts["kept"] < found.drafts["drafted"]
    if part and len(found.turns) > 50:  # with few conversations, all requests fit into the cache
        assert found.preempted > 0
