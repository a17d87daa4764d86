"""Mixtures of experts through vLLM's engine: greedy tokens are those of transformers."""

import pytest

from tests.helpers.engine import engine, generate, graphs, greedy, make_model, runner_of
from tests.helpers.huggingface import check_varied, reference
from tests.helpers.prompts import prompts_of
from vllm_npu_prep.ops import experts

MODELS = {  # those of tests/engine/test_mla.py route by groups
    "Qwen3Moe": {  # softmax, renormalised; layer 0 dense
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "norm_topk_prob": True,
        "mlp_only_layers": [0],
    },
    "Qwen2Moe": {  # softmax, not renormalised; a gated shared expert
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 48,
        "norm_topk_prob": False,
    },
    "Mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "MiniMaxM2": {  # sigmoid with a bias
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
        "intermediate_size": 32,
        "scoring_func": "sigmoid",
        "use_routing_bias": True,
        "use_qk_norm": True,
        "rotary_dim": 8,
    },
}
GRAPHS = graphs("FULL_AND_PIECEWISE", 1, 4, 8, 16)
SETTINGS = {
    "Qwen2Moe": {**GRAPHS, "enable_expert_parallel": True},
    "Mixtral": {"async_scheduling": False},
    "MiniMaxM2": GRAPHS,
}


@pytest.mark.parametrize("family", MODELS)
def test_tokens_are_those_of_transformers(tmp_path, seed, family, monkeypatch):
    """Chunks, and steps whose padding no expert works for; one rank of expert parallelism."""
    folder = make_model(tmp_path, family, **MODELS[family])
    prompts = prompts_of(seed, [3, 1, 90, 40, 17])
    calls, apply_experts = [], experts.apply_experts

    def counted(x, *args):
        calls.append((args[3] < 0).any().item())
        return apply_experts(x, *args)

    monkeypatch.setattr(experts, "apply_experts", counted)
    settings = SETTINGS.get(family, {})
    with engine(folder, max_num_batched_tokens=48, max_num_seqs=7, **settings) as llm:
        calls.clear()
        got = generate(llm, prompts, greedy(16))
        counts = runner_of(llm).padding.counts.by_kind
    expected = reference(folder, prompts, 16)
    assert got == expected
    check_varied(expected)
    assert calls, "these experts computed them"
    if "compilation_config" in settings:
        assert {"full graph", "piecewise graphs"} <= set(counts)
        assert any(calls), "some steps had padding"
    print(family, len(calls), "calls,", sum(calls), "with padding", dict(counts))
