"""Small models for cards, by name, and how far the tokens of an engine are from the best ones."""

from pathlib import Path
from typing import Any

import numpy as np

from tests.helpers.engine import LLAMA4, make_model
from tests.helpers.huggingface import logits_of
from tests.helpers.hybrids import EXPERTS, ON_NPUS
from tests.helpers.latent import (
    GLM_DSA,
    GLM_FLASH_ON_NPUS,
    KIMI_K2,
    LATENT_ON_NPUS,
    V2,
    V2_LITE,
    V3_EXPERTS_ON_NPUS,
)
from tests.helpers.lora import merge
from tests.helpers.mixtures import MIXTURES
from tests.helpers.mtp import make_mtp_model
from tests.helpers.windows import SHARED_LAYERS, THREE_GROUPS
from tests.npu.inputs import adapters_of, prompts
from tests.npu.only_some import HEAD_SIZE

LOW_RANK = {**LATENT_ON_NPUS, "q_lora_rank": 96}
INDEXED = {**LOW_RANK, **V3_EXPERTS_ON_NPUS, "index_n_heads": 8, "index_head_dim": 128}
INDEXED["index_topk"] = 48  # of up to 161 positions
WIDE = {"hidden_size": 512, "intermediate_size": 512, "num_attention_heads": 8, "head_dim": 64}
"""int4 weights are packed beside int8 inputs, on two ranks, too."""
WIDE_EXPERTS = {**MIXTURES["Qwen3Moe"], **WIDE, "moe_intermediate_size": 512}
CLEAR = {"spread": 0.1, "embedding_scale": 20}
"""Much of a next token follows from the one before it: drafters can guess some."""
CLEARER = {"spread": 0.2, "embedding_scale": 10}
"""For models that part from float32 more often with the usual spread."""
STATES = {**ON_NPUS, "head_dim": HEAD_SIZE}  # a state fills the K of 512 tokens: four blocks
OF_128 = {**ON_NPUS, "head_dim": 256}  # of 128 tokens
GEMMA = {"head_dim": HEAD_SIZE, "query_pre_attn_scalar": HEAD_SIZE}
LOCAL = {key: value for key, value in LLAMA4.items() if key != "family"}
GLM = {"head_dim": HEAD_SIZE, "n_group": 1, "topk_group": 1}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen3": ("Qwen3", CLEAR),
    "Gemma 3": ("Gemma3", {**THREE_GROUPS, **GEMMA}),  # three groups, one of full attention
    "Llama 4": ("Llama4", {**LOCAL, "attention_chunk_size": 256, "spread": 0.15}),
    "Gemma 3n": ("Gemma3n", SHARED_LAYERS),  # layers that share K and V
    **{family: (family, {**CLEAR, **config}) for family, config in MIXTURES.items()},
    "Qwen3Moe of 1024": (  # as wide as MC2 demands on A3
        "Qwen3Moe",
        {**MIXTURES["Qwen3Moe"], **CLEAR, "spread": 0.025, "hidden_size": 1024},
    ),
    "wide Qwen3": ("Qwen3", {**WIDE, **CLEAR}),
    "wide Qwen3Moe": ("Qwen3Moe", {**WIDE_EXPERTS, "moe_intermediate_size": 128, **CLEAR}),
    "DeepSeek V2 Lite": ("DeepseekV2", {**LATENT_ON_NPUS, **V2_LITE, **CLEARER}),
    "DeepSeek V2": ("DeepseekV2", {**LOW_RANK, **V2, "n_routed_experts": 12, **CLEAR}),
    "DeepSeek V3": ("DeepseekV3", {**LOW_RANK, **V3_EXPERTS_ON_NPUS, **CLEAR}),
    "dense DeepSeek V3": (
        "DeepseekV3",
        {**LOW_RANK, "first_k_dense_replace": 2, "n_routed_experts": 0, **CLEAR},
    ),
    "DeepSeek V3.2": ("DeepseekV32", {**INDEXED, **CLEAR}),
    "GLM-5": ("GlmMoeDsa", {**GLM_DSA, **INDEXED, **CLEAR}),
    "Kimi K2": ("DeepseekV3", {**LOW_RANK, **KIMI_K2, **CLEAR}),
    "GLM-4.7-Flash": ("Glm4MoeLite", {**LOW_RANK, **GLM_FLASH_ON_NPUS, **CLEARER}),
    "Qwen3-Next": (
        "Qwen3Next",
        {**OF_128, **EXPERTS, "spread": 0.1, "embedding_scale": 10},
    ),
    "Qwen3.5": ("Qwen3_5", {**STATES, **CLEAR}),
    "Qwen3.5 of blocks of 128": ("Qwen3_5", {**OF_128, **CLEAR}),
    "Qwen3.5 of heads of 128": ("Qwen3_5", {**ON_NPUS, "head_dim": 128, **CLEAR}),
    "Qwen3.5 MoE": ("Qwen3_5Moe", {**STATES, **EXPERTS, **CLEAR}),
}
WITH_MTP: dict[str, tuple[str, dict[str, Any]]] = {
    "MiMo": ("MiMo", {}),
    "GLM-4.5": ("Glm4Moe", GLM),
    "DeepSeek V3": ("DeepseekV3", {**LOW_RANK, **V3_EXPERTS_ON_NPUS}),
    "DeepSeek V3.2": ("DeepseekV32", INDEXED),
    "GLM-5": ("GlmMoeDsa", {**GLM_DSA, **INDEXED}),
    "Qwen3.5": ("Qwen3_5", STATES),
    "Qwen3.5 of blocks of 128": ("Qwen3_5", OF_128),
    "Qwen3.5 of heads of 128": ("Qwen3_5", {**ON_NPUS, "head_dim": 128}),
    "Qwen3-Next": ("Qwen3Next", {**OF_128, **EXPERTS}),
}
BOUND = {"float16": 0.1, "bfloat16": 0.3}
"""Most that a token may lack (`bound_of`)."""
BOUND_OF_CHOICES = 0.7
"""The same where an indexer chooses: 16 bits let a token attend to another position here and there.
On the CPU fallback V3.2's tokens lack up to 0.20 and 0.46, and GLM-5's 0.02 and 1.12."""

CLOSE, CLOSE_IN_INT8 = 0.1, 0.25
"""How near two logits are where either may be taken, in bfloat16, and of int8 models, whose inputs
may come to lie a level higher or lower."""
PARTED = 4
"""One token of so many may be another than the best one."""


def bound_of(model: str, dtype: str, int8: bool = False) -> float:
    """By how many standard deviations of logits a token of a model may lack the best one's."""
    if model in ("DeepSeek V3.2", "GLM-5"):
        return BOUND_OF_CHOICES
    return CLOSE_IN_INT8 if int8 else BOUND[dtype]


def make(folder: Path, name: str, drafts: bool = False) -> Path:
    """A model's folder in another one, where it is made once; maybe with a layer that drafts."""
    path = folder / f"{name}{' MTP' * drafts}"
    family, config = (WITH_MTP if drafts else MODELS)[name]
    if not path.exists():
        (make_mtp_model if drafts else make_model)(path, family, **config)
    return path


def judges_of(model: Path, adapters: bool) -> list[Any]:
    """Of each prompt: the model in float32, with the prompt's adapter if it has one."""
    plain = logits_of(model)
    if not adapters:
        return [plain] * len(prompts())
    merged = {}
    for request in filter(None, adapters_of(model)):
        folder = model.with_name(f"{model.name}-merged-{request.lora_name}")
        if not folder.exists():
            merge(model, Path(request.lora_path), folder)
        merged[request.lora_name] = merged.get(request.lora_name) or logits_of(folder)
    return [merged[request.lora_name] if request else plain for request in adapters_of(model)]


def lacks(judge: Any, prompt: list[int], tokens: list[int]) -> np.ndarray:
    """What each token's logit lacks to the best one's, in standard deviations."""
    rows = judge(prompt + tokens)[len(prompt) - 1 : -1]
    return (rows.max(1) - rows[np.arange(len(tokens)), tokens]) / rows.std(1)
