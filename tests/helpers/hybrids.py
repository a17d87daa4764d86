"""Configs of small models with gated delta nets beside attention."""

from typing import Any

LINEAR, FULL = "linear_attention", "full_attention"

GATED_DELTA: dict[str, Any] = {  # two heads of values share one of keys
    "num_hidden_layers": 4,
    "layer_types": [LINEAR, LINEAR, FULL, LINEAR],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 8,
}

EXPERTS: dict[str, Any] = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}

QWEN3_NEXT: dict[str, Any] = {**GATED_DELTA, **EXPERTS}
"""Qwen3-Next has experts in vLLM always."""

ON_NPUS: dict[str, Any] = {**GATED_DELTA, "linear_key_head_dim": 128, "linear_value_head_dim": 128}
"""The NPU's operators take heads of 128."""
