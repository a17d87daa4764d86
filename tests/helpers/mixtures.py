"""Small mixtures of experts, by family of transformers."""

from typing import Any

MIXTURES: dict[str, dict[str, Any]] = {  # those of tests/engine/test_mla.py route by groups
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
    "Glm4Moe": {  # sigmoid with a bias, in one group; a shared expert; layer 0 dense
        "n_routed_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.5,
        "first_k_dense_replace": 1,
        "partial_rotary_factor": 0.5,
        "use_qk_norm": True,
    },
}
"""Config of each, for `tests.helpers.engine.make_model`."""
