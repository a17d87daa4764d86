"""Configs of small models with gated delta nets beside attention."""

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
import tiny_vision_model

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


def make_model_that_sees(folder: Path, family: str = "Qwen3_5", **config: Any) -> Path:
    """Save a tiny Qwen3.5 with its tower and processors, as published checkpoints are.

    `config` is of its language model, beside `tiny_vision_model`'s and `GATED_DELTA`.
    """
    import torch
    import transformers

    recipe = tiny_vision_model
    torch.manual_seed(recipe.tiny_model.SEED)
    tokenizer = recipe.make_tokenizer()
    ids = tokenizer.convert_tokens_to_ids(recipe.SPECIAL_TOKENS)
    names = ("vision_start_token_id", "vision_end_token_id", "image_token_id", "video_token_id")
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
    rope |= {"mrope_section": [2, 1, 1], "mrope_interleaved": True}  # of 8 in 16 elements
    text = {**recipe.TEXT_CONFIG, "vocab_size": len(tokenizer), "rope_parameters": rope}
    vision = {**recipe.VISION_CONFIG, "num_position_embeddings": 64}
    model_class = getattr(transformers, f"{family}ForConditionalGeneration")
    text |= {**GATED_DELTA, **config}
    made = model_class.config_class(
        text_config=text, vision_config=vision, **dict(zip(names, ids, strict=True))
    )
    model_class(made).save_pretrained(folder)
    recipe.make_processor("qwen3_vl", tokenizer).save_pretrained(folder)
    return folder
