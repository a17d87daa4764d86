"""The layers of models that this plugin computes; others are refused before weights are loaded.

A model's config doesn't tell what its layers need of attention; the layers do, once they are made.
"""

from collections.abc import Mapping
from typing import Any

from vllm.model_executor.layers.attention import (
    Attention,
    ChunkedLocalAttention,
    EncoderOnlyAttention,
    MLAAttention,
)
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

from vllm_npu_prep.errors import PrepError

COMPUTED = (Attention, ChunkedLocalAttention, EncoderOnlyAttention, MLAAttention)
"""vLLM's layers that run here, not their subclasses: these keep or see something else."""

ASKED = {
    "has_sink": ("attention sinks", "the softmax of its kernels gets the scores of tokens only"),
    "use_rswa": (
        "a sliding window that keeps prompts in sight (R-SWA)",
        "windows move over prompts, too",
    ),
}
"""What a layer may ask of attention and is refused, by vLLM's name: what it is, and why."""


def refuse_what_is_asked(config: Any) -> None:
    """Raise a `PrepError` that names what a layer asks of attention and no kernel family has.

    `config` is vLLM's ``AttentionSelectorConfig`` of the layer.
    """
    for name, (what, why) in ASKED.items():
        if getattr(config, name):
            raise PrepError(
                f"layers with {what} are not supported by vllm_npu_prep: {why}; use another model"
            )


def refuse_other_layers(layers: Mapping[str, Any]) -> None:
    """Raise a `PrepError` if a model has layers with a cache or states that are not computed here.

    It names the first layer of each kind. The keys of `layers` are those of vLLM's
    ``static_forward_context``.
    """
    others: dict[str, str] = {}
    for name, layer in layers.items():
        kind = type(layer)
        if isinstance(layer, AttentionLayerBase) and kind not in COMPUTED and not _is_ours(kind):
            others.setdefault(kind.__name__, name)
    if others:
        found = ", ".join(f"{kind} ({name})" for kind, name in others.items())
        known = ", ".join(kind.__name__ for kind in COMPUTED)
        raise PrepError(
            f"layers of this model are not supported by vllm_npu_prep: {found}; layers that have a "
            f"KV cache or recurrent states may be {known} or gated delta nets; use another model"
        )
    for name, layer in layers.items():
        if isinstance(layer, AttentionLayerBase):
            backend = layer.get_attn_backend()
            if not any(map(_is_ours, backend.__mro__)):
                raise PrepError(
                    f"the attention of {name} is not supported by vllm_npu_prep: its model chose "
                    f"{backend.__name__}, whose kernels do not run on NPUs; use another model"
                )


def _is_ours(kind: type) -> bool:
    return kind.__module__.startswith("vllm_npu_prep.")
