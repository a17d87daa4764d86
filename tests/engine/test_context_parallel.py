"""Decode context parallelism: ranks share contexts, and tokens are those of whole ones."""

from functools import partial
from typing import Any

import pytest

from tests.helpers.engine import graphs, make_model
from tests.helpers.huggingface import is_varied, reference
from tests.helpers.latent import LATENT, V3_EXPERTS
from tests.helpers.prompts import prompts_of
from tests.helpers.ranks import Ranks, serve_on_ranks
from tests.helpers.v2 import asked_for, on_both

NUM_TOKENS = 12
SHARED = {"tensor_parallel_size": 2, "decode_context_parallel_size": 2}
CASES = {
    "eager": SHARED | {"block_size": 16, "async_scheduling": False},
    "pieces": SHARED
    | graphs("FULL_AND_PIECEWISE", 4, 16)
    | {"block_size": 16, "cp_kv_cache_interleave_size": 4, "enable_prefix_caching": True},
    "latent": SHARED | {"block_size": 16, "async_scheduling": False},
    "four ranks": SHARED | {"tensor_parallel_size": 4, "block_size": 16},
    "latent, four ranks": SHARED | {"tensor_parallel_size": 4, "block_size": 16},
}
"""Of four ranks, two have the same K/V head and share contexts; or of latent rows."""
DEEPSEEK = {"family": "DeepseekV3", "q_lora_rank": 20, **LATENT, **V3_EXPERTS}
MODELS = {"latent": DEEPSEEK, "latent, four ranks": DEEPSEEK, "four ranks": {}}


async def served(ranks: Ranks, prompts: list[list[int]]) -> dict[str, Any]:
    """Tokens of all prompts, twice: the second time with the prefix cache, if there is one."""
    await ranks.ask("probe_watch")
    tokens = [await ranks.generate(prompts, NUM_TOKENS) for _ in range(2)]
    told = {what: await ranks.ask(f"probe_{what}") for what in ("counts", "facts")}
    return {"tokens": tokens, **told}


@pytest.mark.parametrize(("case", "runner"), on_both({case: case for case in CASES}))
def test_tokens_are_those_of_transformers(tmp_path, seed, case, runner):
    """Prompts in chunks beside decodes, and contexts that one rank keeps alone, fully checked."""
    folder = make_model(tmp_path, **MODELS.get(case, {"num_key_value_heads": 1}))
    prompts = prompts_of(seed, [3, 1, 90, 40, 17])
    with asked_for(runner):
        got = serve_on_ranks(folder, CASES[case], partial(served, prompts=prompts))
    expected = reference(folder, prompts, NUM_TOKENS)
    assert is_varied(expected)
    assert got["tokens"] == [expected, expected]
    assert {fact["runner"] for fact in got["facts"]} == {runner}
    if case == "pieces":
        assert all({"piecewise graphs"} <= set(counts) for counts in got["counts"])
