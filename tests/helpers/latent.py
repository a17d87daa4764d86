"""Configs of small models with latent attention, for `tests.helpers.engine.make_model`."""

from typing import Any

LATENT: dict[str, Any] = {  # sizes that only the CPU fallback takes
    "kv_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
    "head_dim": 8,
    "num_key_value_heads": 4,
}

LATENT_ON_NPUS: dict[str, Any] = {  # sizes that the fused operators take
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "head_dim": 64,
    "num_key_value_heads": 4,
}

GROUPED_EXPERTS: dict[str, Any] = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_group": 4,
    "topk_group": 2,
    "n_shared_experts": 1,
}

V3_EXPERTS: dict[str, Any] = {  # by sigmoid, bias and groups; layer 0 dense
    **GROUPED_EXPERTS,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.5,
    # transformers does all of this for any DeepSeek V3; vLLM looks for both of these
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
}

V3_EXPERTS_ON_NPUS = {**V3_EXPERTS, "n_routed_experts": 12}
"""`npu_moe_gating_top_k` takes groups of three experts or more."""
