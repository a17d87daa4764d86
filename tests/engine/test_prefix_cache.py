"""Prefix caching: the same tokens, and the states of hits."""

import pytest

from tests.conftest import SEED
from tests.helpers.engine import generate, greedy
from tests.helpers.huggingface import reference
from tests.helpers.prompts import prompts_of
from tests.helpers.v2 import engine_of, on_both
from tests.helpers.watch import record_states

BLOCK_SIZE = 8


def shared_prompts() -> list[list[int]]:
    """Prompts that begin alike: whole blocks, one token more, and some that part inside a block."""
    start = prompts_of(SEED, [40])[0]
    tails = prompts_of(SEED + 1, [1, 5, 9, 12])
    return [start, *(start + tail for tail in tails), start[:24] + tails[3], start[:19] + tails[2]]


@pytest.fixture(scope="module")
def expected(qwen3):
    return reference(qwen3, shared_prompts(), 12)


@pytest.mark.parametrize(
    ("caching", "chunked", "budget", "runner"),
    on_both(
        {
            "on-chunks": (True, True, 8),
            "off-chunks": (False, True, 8),
            "on-whole": (True, False, 256),
        }
    ),
)
def test_tokens_and_states_of_hits(qwen3, expected, caching, chunked, budget, runner):
    prompts = shared_prompts()
    whole, one_more, two_blocks = prompts[0], prompts[1], prompts[5][:16]
    with engine_of(
        runner,
        qwen3,
        block_size=BLOCK_SIZE,
        num_gpu_blocks_override=64,
        max_num_seqs=4,
        enable_prefix_caching=caching,
        enable_chunked_prefill=chunked,
        max_num_batched_tokens=budget,
        additional_config={"npu_prep": {"check": "full"}},
    ) as llm:
        states = record_states(llm)
        # Alone: a miss, then all but the last token, then the last block, then another tail
        for prompt in (one_more, one_more, whole, two_blocks + whole[:7]):
            generate(llm, [prompt], greedy(1))
        alone = states.copy()
        assert generate(llm, prompts, greedy(12)) == expected
        assert generate(llm, prompts[::-1], greedy(12)) == expected[::-1]
    hit = "ChunkedPrefill" if chunked else "PrefillCacheHit"
    if caching:
        miss = ["PrefillNoCache", *["ChunkedPrefill"] * 4, "DecodeOnly"]  # 41 tokens by eights
        assert alone == [*(miss if chunked else miss[:1]), "DecodeOnly", hit, hit]
    else:
        assert alone.count("PrefillNoCache") == 4
