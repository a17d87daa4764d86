"""Configs of small models with latent attention, for `tests.helpers.engine.make_model`."""

import json
import shutil
from pathlib import Path
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

CHOOSING: dict[str, Any] = {  # fewer positions than most tokens of tests see
    "q_lora_rank": 20,
    "index_topk": 16,
    "index_n_heads": 8,
    "index_head_dim": 24,
}

V32: dict[str, Any] = {**LATENT, **V3_EXPERTS, **CHOOSING}
"""DeepSeek V3.2 for the CPU fallback."""

GLM_DSA: dict[str, Any] = {  # GLM-5: rotates by pairs, and two layers read what another chose
    **V32,
    "num_hidden_layers": 4,
    "index_topk_freq": 2,
    "index_skip_topk_offset": 1,
    "indexer_rope_interleave": True,
}

YARN = {  # as Kimi K2's, but for fewer positions before it stretches them
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 1.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 64,
    "rope_theta": 50000.0,
}

ONE_GROUP = {"n_group": 1, "topk_group": 1}

V2_LITE: dict[str, Any] = {  # queries without a low rank; experts by softmax, not renormalised
    **GROUPED_EXPERTS,
    **ONE_GROUP,
    "first_k_dense_replace": 1,
    "q_lora_rank": None,
    "topk_method": "greedy",
    "routed_scaling_factor": 1.0,
}

V2: dict[str, Any] = {
    **GROUPED_EXPERTS,
    "first_k_dense_replace": 1,
    "topk_method": "group_limited_greedy",
    "routed_scaling_factor": 1.5,
}

KIMI_K2: dict[str, Any] = {
    **V3_EXPERTS,
    **ONE_GROUP,
    "routed_scaling_factor": 2.827,
    "rope_parameters": YARN,
}

GLM_FLASH: dict[str, Any] = {  # GLM-4.7-Flash: heads are no power of two, values wider than keys
    **GROUPED_EXPERTS,
    **ONE_GROUP,
    "first_k_dense_replace": 1,
    "mlp_layer_types": ["dense", "sparse"],
    "num_attention_heads": 5,
    "num_key_value_heads": 5,
    "routed_scaling_factor": 1.8,
}

GLM_FLASH_ON_NPUS = {**GLM_FLASH, "qk_nope_head_dim": 192, "v_head_dim": 256}


def as_kimi_k2(model: Path) -> Path:
    """The same DeepSeek V3, as a checkpoint of Kimi K2 names it; transformers doesn't know it."""
    copy = model.with_name(f"{model.name}-kimi")
    shutil.copytree(model, copy)
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "model_type": "kimi_k2"}))
    return copy
