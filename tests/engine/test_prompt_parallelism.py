"""Prefill context parallelism: ranks share prompts, and tokens are those of whole ones."""

from functools import partial
from typing import Any

import pytest

from tests.helpers.engine import graphs, make_model
from tests.helpers.huggingface import is_varied, reference
from tests.helpers.latent import LATENT, V3_EXPERTS
from tests.helpers.prompts import prompts_of
from tests.helpers.ranks import Ranks, serve_on_ranks

NUM_TOKENS = 12
TWO = {"prefill_context_parallel_size": 2, "block_size": 16}
CASES: dict[str, dict[str, Any]] = {
    "eager": TWO | {"async_scheduling": False, "enable_prefix_caching": True},
    "graphs": TWO | graphs("FULL_AND_PIECEWISE", 1, 2, 4, 16) | {"enable_prefix_caching": True},
    "four ranks": TWO | {"prefill_context_parallel_size": 4},
    "tensor parallelism": TWO | {"tensor_parallel_size": 2},
    "latent": TWO | graphs("FULL_AND_PIECEWISE", 1, 2, 4, 16) | {"enable_prefix_caching": True},
}
DEEPSEEK = {"family": "DeepseekV3", "q_lora_rank": 20, **LATENT, **V3_EXPERTS}
MODELS: dict[str, dict[str, Any]] = {"latent": DEEPSEEK}


async def served(ranks: Ranks, prompts: list[list[int]]) -> dict[str, Any]:
    """Tokens of all prompts, twice: the second time with the prefix cache, if there is one."""
    await ranks.ask("probe_watch")
    tokens = [await ranks.generate(prompts, NUM_TOKENS) for _ in range(2)]
    told = {what: await ranks.ask(f"probe_{what}") for what in ("counts", "facts")}
    return {"tokens": tokens, **told}


@pytest.mark.parametrize("case", CASES)
def test_tokens_are_those_of_transformers(tmp_path, seed, case):
    """Prompts in chunks beside decodes, a prompt of one token, and prefixes in the cache."""
    folder = make_model(tmp_path, **MODELS.get(case, {"num_key_value_heads": 2}))
    prompts = prompts_of(seed, [3, 1, 90, 40, 17])
    got = serve_on_ranks(folder, CASES[case], partial(served, prompts=prompts))
    expected = reference(folder, prompts, NUM_TOKENS)
    assert is_varied(expected)
    assert got["tokens"] == [expected, expected]
    print(got["counts"], got["facts"])
