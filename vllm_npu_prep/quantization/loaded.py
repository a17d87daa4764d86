"""What all formats do with a layer whose weights have been loaded."""

from typing import Any

import torch
from torch import nn

from vllm_npu_prep.errors import PrepError
from vllm_npu_prep.quantization.int8 import DequantizedLinear, Int8Linear, int8_linear


def check_scales(
    layer: nn.Module, name: str, scales: torch.Tensor, of_groups: bool = False
) -> None:
    """Raise unless all scales are positive and finite: others would turn rows into NaN.

    A layer's scales are 0 until a file gives it some. Those of groups of weights may be 0, for
    groups of zeros, and negative: tools choose the sign by the larger end of a group. So they are
    NaN until a file gives them. Nothing but comparisons is asked of the device: calls are recorded
    without a computation of floats (`verify.calls.call_recorder`).
    """
    if not bool(((scales > 0) | (scales < 0)).any()):
        raise PrepError(
            f"{name_of(layer)} is to be quantised, but no file gives it a {name}: vLLM has another "
            "name for it than the checkpoint, or none; quantise it, or leave the model in 16 bits"
        )
    if not bool((torch.isfinite(scales) & ((scales > 0) | of_groups)).all()):
        raise PrepError(
            f"{name_of(layer)}: {name} holds values that are not "
            f"{'' if of_groups else 'positive and '}finite, or no file gives some of them; the "
            "checkpoint is damaged, a file of it is missing, or it was quantised wrongly: fetch "
            "its files again, or quantise the model again"
        )


def check_offsets(layer: nn.Module, offsets: torch.Tensor) -> None:
    """Raise if weights have an offset, which the products leave out."""
    if bool(offsets.any()):
        raise PrepError(
            f"{name_of(layer)}: weight_offset is not 0, and products leave it out; quantise "
            "weights symmetrically (w_sym=True in ModelSlim)"
        )


def name_of(layer: nn.Module) -> str:
    name = getattr(layer, "prefix", "") or getattr(layer, "layer_name", "")
    return str(name or type(layer).__name__)


def dtype_of(layer: nn.Module) -> torch.dtype:
    return getattr(layer, "params_dtype", torch.get_default_dtype())


def add_int8(layer: Any, kept: Int8Linear, scale: torch.Tensor) -> None:
    """Make a layer ready to multiply: its ``int8`` becomes the implementation for its device.

    The layer's parameters stay, because other parts of vLLM look at ``weight``. The scale is that
    of the weights alone, float32 ``[N]``, or ``[N, G]`` for G groups of inputs.
    """
    layer.channel_scale = scale
    layer.int8 = int8_linear(kept, dtype_of(layer))


def dequantize(layer: Any) -> None:
    """Give a layer weights in the model's dtype in place of levels; inputs aren't rounded then.

    This is for weights by which something else multiplies, too: both then compute with the same
    numbers. Layers that are not quantised stay as they are.
    """
    if not isinstance(getattr(layer, "int8", None), Int8Linear):
        return
    scale = layer.channel_scale.view(len(layer.weight), -1, 1)  # [N, G, 1]
    groups = layer.weight.detach().float().unflatten(1, (scale.shape[1], -1))
    weight = (groups * scale).flatten(1)  # [N, K]
    if layer.weight.dtype == dtype_of(layer):  # a reload has put int8 levels into it
        layer.weight.data.copy_(weight)
    else:
        layer.weight = nn.Parameter(weight.to(dtype_of(layer)), requires_grad=False)
    layer.int8 = DequantizedLinear(layer.weight.data)


def num_layers_of(hf_config: Any) -> tuple[int, int]:
    """Return a model's number of decoder layers without and with those that draft.

    Both numbers are very large if the config doesn't tell.
    """
    text = getattr(hf_config, "text_config", None) or hf_config
    layers = getattr(text, "num_hidden_layers", None)
    drafting = getattr(text, "num_nextn_predict_layers", None) or 0
    return (1 << 30, 1 << 30) if layers is None else (layers, layers + drafting)
