"""Refusals of input beside text: images, videos, and what their encoders can't do."""

import json
from typing import TYPE_CHECKING

from vllm_npu_prep.startup.asked import RequestedEngine, multimodal_inputs
from vllm_npu_prep.startup.refusal import Refusal, Subject

if TYPE_CHECKING:
    from vllm.config import MultiModalConfig

MODALITIES = ("image", "video")
"""Kinds of multimodal input that were tried."""


def _others(asked: RequestedEngine) -> list[str]:
    return [each for each in multimodal_inputs(asked.model) if each not in MODALITIES]


def _words(asked: RequestedEngine) -> dict[str, object]:
    others = _others(asked)
    return {
        "kinds": " and ".join(others),
        "known": " and ".join(MODALITIES),
        "limits": json.dumps(dict.fromkeys(others, 0)),
    }


def _names_encoder_attention(options: "MultiModalConfig") -> bool:
    backend = options.mm_encoder_attn_backend
    other = backend is not None and backend.name != "TORCH_SDPA"
    return other or options.mm_encoder_attn_dtype is not None


MULTIMODAL = (
    Refusal(
        "modality",
        _others,
        "{kinds} input ({model})",
        "only {known} input is supported",
        "use --limit-mm-per-prompt '{limits}'",
        _words,
    ),
    Refusal(
        "mm-prefix",
        lambda c: c.model.is_mm_prefix_lm,
        "bidirectional attention within images ({model})",
        "masks are always causal",
        "use --language-model-only to serve text",
    ),
    Refusal(
        "mm-raw-input",
        lambda c: c.model.is_multimodal_raw_input_only_model,
        "raw multimodal input ({model})",
        "the plugin expects encoder outputs that replace placeholder tokens",
        "use another model",
    ),
    Refusal(
        "mm-prompt-embeds",
        lambda c: c.model.enable_prompt_embeds,
        "--enable-prompt-embeds with a multimodal model",
        "a step takes embeddings from the encoder or from prompts, not from both",
    ),
    Refusal(
        "video-pruning",
        lambda c: c.model.get_multimodal_config().is_multimodal_pruning_enabled(),
        "--video-pruning-rate",
        "positions would depend on what the encoder computes on the device",
    ),
    Refusal(
        "mm-encoder-only",
        lambda c: c.model.get_multimodal_config().mm_encoder_only,
        "--mm-encoder-only",
        "the plugin prepares steps of the language model",
    ),
    Refusal(
        "mm-encoder-attention",
        lambda c: _names_encoder_attention(c.model.get_multimodal_config()),
        "--mm-encoder-attn-backend or --mm-encoder-attn-dtype",
        "encoders use torch's attention operator, in the model's dtype",
        "leave the flags out",
    ),
    Refusal(
        "ec-transfer",
        lambda c: c.config.ec_transfer_config is not None,
        "--ec-transfer-config",
        "the encoder's outputs can't be sent to other engines",
    ),
    Refusal(
        "lora-tower",
        lambda c: (
            c.config.lora_config is not None and c.config.lora_config.enable_tower_connector_lora
        ),
        "--enable-tower-connector-lora",
        "adapters are applied to the language model only",
    ),
)

SUBJECTS = (
    Subject(
        "multimodal",
        MULTIMODAL,
        when=lambda c: c.model.supports_multimodal_inputs and not c.model.is_encoder_decoder,
    ),
)
