"""Requests that share a prefix, where a call may not name more blocks than the cache has."""

import pytest

from ascend_emulator import profiles
from tests.helpers.engine import engine, generate, graphs, greedy, make_model, runner_of
from tests.helpers.latent import LATENT_ON_NPUS, V2_LITE

OF_8_5 = {"head_dim": 192, "num_attention_heads": 2, "num_key_value_heads": 2}  # PFA
OTHERS = {"head_dim": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
LATENT = {"family": "DeepseekV2", "spread": 0.1, **V2_LITE, **LATENT_ON_NPUS}
LATENT["first_k_dense_replace"] = 2  # of two layers: none has experts


@pytest.mark.parametrize("is_latent", [False, True], ids=["heads", "latent"])
def test_many_requests_are_served_in_several_calls(is_latent, tmp_path):
    """18 blocks, shared ones counted for each of 6 requests, in a cache of 14: a card that knows
    the documentation would refuse the graph of 8 requests, and any one call."""
    is_8_5 = profiles.current().name == "8.5"
    if is_latent and is_8_5:
        pytest.skip("no kernel limits batches of latent attention, only the documentation does")
    config = LATENT if is_latent else OF_8_5 if is_8_5 else OTHERS
    model = make_model(tmp_path / "model", **config)
    shared = [(7 * i) % 50 + 5 for i in range(300)]
    prompts = [[*shared, 10 + i] for i in range(6)]
    settings = {
        "dtype": "bfloat16",
        "block_size": 128,
        "max_model_len": 512,
        "max_num_batched_tokens": 1024,
        "num_gpu_blocks_override": 14,
        "enable_prefix_caching": True,
        "additional_config": {"npu_prep": {} if is_8_5 else {"kernel_rules": "documented"}},
        **graphs("FULL", 1, 2, 4, 8),
    }
    with engine(model, **settings) as llm:
        alone = [generate(llm, [prompt], greedy(4))[0] for prompt in prompts]
        assert generate(llm, prompts, greedy(4)) == alone
        counts = runner_of(llm).padding.counts.by_kind
    assert counts["full graph"] >= 6, counts
    assert any("more blocks than the cache has" in kind for kind in counts), counts
