"""MLA through vLLM's engine: greedy tokens are those of transformers, in every state and mask."""

import pytest

from tests.helpers.cache import CacheWatch
from tests.helpers.engine import engine, generate, graphs, greedy, make_model, runner_of
from tests.helpers.huggingface import check_varied, reference
from tests.helpers.prompts import prompts_of
from tests.helpers.watch import count_preemptions, count_states

MLA = {
    "kv_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
    "head_dim": 8,
    "num_key_value_heads": 4,
}
MOE = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_group": 4,
    "topk_group": 2,
    "n_shared_experts": 1,
}
V2 = {**MLA, **MOE, "q_lora_rank": None, "topk_method": "group_limited_greedy"}


def test_deepseek_v3_with_experts_in_graphs(tmp_path, seed):
    """Queries through a low rank; experts by sigmoid, bias and groups; dense masks, async.

    Chunks of prompts, then the same prompts from the prefix cache.
    """
    experts = {
        **MOE,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 2.5,
    }
    folder = make_model(tmp_path, "DeepseekV3", q_lora_rank=20, **MLA, **experts)
    prompts = prompts_of(seed, [3, 1, 90, 40, 17])
    with engine(
        folder,
        block_size=16,
        max_num_batched_tokens=48,
        max_num_seqs=7,
        enable_prefix_caching=True,
        additional_config={"npu_prep": {"mask": "dense"}},
        **graphs("FULL_AND_PIECEWISE", 1, 4, 8, 16),
    ) as llm:
        runner = runner_of(llm)
        states, watch = count_states(llm), CacheWatch(runner)
        got = [generate(llm, prompts, greedy(16)) for _ in range(2)]
        shapes = {tuple(plane.shape[1:]) for plane in runner.kv_caches}
        layers, counts = len(runner.kv_caches), runner.padding.counts.by_kind
    expected = reference(folder, prompts, 16)
    assert got == [expected] * 2
    check_varied(expected)
    print(dict(states), dict(counts), "padding", watch.padding_seen)
    assert set(states) == {"PrefillNoCache", "ChunkedPrefill", "DecodeOnly"}
    assert states["PrefillNoCache"] == 1, "the second time, long prompts come from the cache"
    assert {"full graph", "piecewise graphs"} <= set(counts)
    assert watch.padding_seen - {0}
    assert (layers, shapes) == (2, {(16, 1, 32)}), "one row of latent and rotated key for a token"


@pytest.mark.parametrize("mask", ["dense", "compressed"])
def test_deepseek_v2_with_whole_prompts_from_the_prefix_cache(tmp_path, seed, mask):
    """Experts by softmax and groups, not renormalised; chunked prefill off, synchronous.

    Compressed masks let mixed steps into full graphs.
    """
    experts = {"first_k_dense_replace": 1, "routed_scaling_factor": 1.5}
    folder = make_model(tmp_path, "DeepseekV2", **V2, **experts)
    (shared,), tails = prompts_of(seed, [48]), prompts_of(seed + 1, [5, 9, 12])
    prompts = [shared + tail for tail in tails]
    with engine(
        folder,
        block_size=16,
        enable_chunked_prefill=False,
        enable_prefix_caching=True,
        async_scheduling=False,
        max_num_batched_tokens=256,
        additional_config={"npu_prep": {"mask": mask}},
        **(graphs("FULL", 1, 4, 8, 16) if mask == "compressed" else {}),
    ) as llm:
        states = count_states(llm)
        got = generate(llm, prompts[:1], greedy(16))
        got += generate(llm, prompts[1:], greedy(16))
        counts = runner_of(llm).padding.counts.by_kind
    expected = reference(folder, prompts, 16)
    assert got == expected
    check_varied(expected)
    print(dict(states), dict(counts))
    in_graphs = mask == "compressed"  # full graphs of mixed steps take the general state
    decodes = "ChunkedPrefill" if in_graphs else "DecodeOnly"
    assert set(states) == {"PrefillNoCache", "PrefillCacheHit", decodes}
    assert (counts["full graph"] > 20) == in_graphs


def test_dense_layers_with_preemption_and_drafts(tmp_path, seed):
    """A cache too small for the batch; ngram drafts, verified in one step."""
    folder = make_model(tmp_path, "DeepseekV2", spread=0.15, first_k_dense_replace=2, **V2)
    prompts = prompts_of(seed, [30, 28, 25, 31, 22, 29])
    with engine(
        folder,
        block_size=4,
        num_gpu_blocks_override=40,
        max_model_len=96,
        speculative_config={
            "method": "ngram",
            "num_speculative_tokens": 3,
            "prompt_lookup_max": 2,
        },
    ) as llm:
        states, count = count_states(llm), count_preemptions(llm)
        got = generate(llm, prompts, greedy(40))
    print(dict(states), dict(count))
    assert got == reference(folder, prompts, 40)
    assert count["preempted"] > 0
    assert {"DecodeOnly", "SpecDecoding"} <= set(states)
