"""What both formats do with a layer whose weights have been loaded."""

from typing import Any

import torch
from torch import nn

from vllm_npu_prep.errors import PrepError
from vllm_npu_prep.quantization.int8 import Int8Linear, int8_linear


def check_scales(layer: nn.Module, name: str, scales: torch.Tensor) -> None:
    """Raise unless all scales are positive and finite: others would turn rows into NaN."""
    if not bool((torch.isfinite(scales) & (scales > 0)).all()):
        raise PrepError(
            f"{name_of(layer)}: {name} holds values that are not positive and finite; the "
            "checkpoint is damaged, or its weights were quantised wrongly"
        )


def name_of(layer: nn.Module) -> str:
    """Name of a layer in the model."""
    return str(getattr(layer, "prefix", "") or type(layer).__name__)


def dtype_of(layer: nn.Module) -> torch.dtype:
    """Dtype in which a layer computes."""
    return getattr(layer, "params_dtype", torch.get_default_dtype())


def add_int8(layer: Any, kept: Int8Linear) -> None:
    """Make a layer ready to multiply: `layer.int8` for its device.

    Its parameters stay, as other parts of vLLM look at ``weight``.
    """
    layer.int8 = int8_linear(kept, dtype_of(layer))


def num_layers_of(hf_config: Any) -> int:
    """Decoder layers of a model, with those that draft; a large number if unknown."""
    text = getattr(hf_config, "text_config", None) or hf_config
    layers = getattr(text, "num_hidden_layers", None)
    drafting = getattr(text, "num_nextn_predict_layers", None) or 0
    return 1 << 30 if layers is None else layers + drafting
