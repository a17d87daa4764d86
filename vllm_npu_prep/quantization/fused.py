"""Norms and activations that round their results to int8, for the linear layers that come next.

vLLM's decoder layers hand the result of a norm to one projection only, and that of the activation
to the next. So the launch that rounds them can be saved. This is done for layers whose code is
known to do nothing else with these results.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.layernorm import RMSNorm

from vllm_npu_prep.config import fused_operators
from vllm_npu_prep.quantization.int8 import Int8Linear, QuantizedRows

if TYPE_CHECKING:
    from vllm.config import VllmConfig

MODELS = "vllm.model_executor.models."
DECODERS = {
    "glm4.Glm4DecoderLayer",
    "glm4_moe.Glm4MoeDecoderLayer",
    "llama.LlamaDecoderLayer",
    "minimax_m2.MiniMaxM2DecoderLayer",
    "mistral.MistralDecoderLayer",
    "mixtral.MixtralDecoderLayer",
    "qwen2.Qwen2DecoderLayer",
    "qwen2_moe.Qwen2MoeDecoderLayer",
    "qwen3.Qwen3DecoderLayer",
    "qwen3_moe.Qwen3MoeDecoderLayer",
}
ATTENTIONS = {
    "glm4.Glm4Attention",
    "glm4_moe.Glm4MoeAttention",
    "llama.LlamaAttention",
    "minimax_m2.MiniMaxM2Attention",
    "mistral.MistralAttention",
    "mixtral.MixtralAttention",
    "qwen2.Qwen2Attention",
    "qwen2_moe.Qwen2MoeAttention",
    "qwen3.Qwen3Attention",
    "qwen3_moe.Qwen3MoeAttention",
}
MLPS = {
    "deepseek_v2.DeepseekV2MLP",
    "glm4_moe.Glm4MoeMLP",
    "llama.LlamaMLP",
    "mistral.MistralMLP",
    "qwen2.Qwen2MLP",
    "qwen2_moe.Qwen2MoeMLP",
    "qwen3_moe.Qwen3MoeMLP",
}
"""Classes whose ``forward`` is known; subclasses that have their own are not among them. Gemma's
norms and GELU have no operator that rounds, nor has a norm without a residual."""


class QuantizingNorm(nn.Module):
    """The residual's addition, RMSNorm, and rounding for the projection that reads the result.

    Parameters
    ----------
    norm
        vLLM's, whose weight is used.
    linear
        Of the projection.
    """

    scales: torch.Tensor | None  # static: [hidden_size]
    offsets: torch.Tensor | None

    def __init__(self, norm: RMSNorm, linear: Int8Linear) -> None:
        super().__init__()
        self.norm = norm
        scales, offsets = static_factors(linear, norm.weight)
        self.register_buffer("scales", scales, persistent=False)
        self.register_buffer("offsets", offsets, persistent=False)

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
        """As vLLM's, with `QuantizedRows` in place of the first tensor where there is a residual.

        The first layer has none, and its projection rounds for itself.
        """
        if residual is None:
            return self.norm(x)
        weight, epsilon = self.norm.weight.data, self.norm.variance_epsilon
        if self.scales is None:
            values, _, total, scale, _ = torch.ops.npu.npu_add_rms_norm_dynamic_quant(
                x, residual, weight, epsilon=epsilon
            )
            return QuantizedRows(values, scale, x.dtype), total
        values, _, total = torch.ops.npu.npu_add_rms_norm_quant(
            x, residual, weight, self.scales, self.offsets, epsilon=epsilon
        )
        return QuantizedRows(values, None, x.dtype), total


class QuantizingSiluAndMul(nn.Module):
    """``silu(gate) * up``, rounded for the projection that reads the result.

    Parameters
    ----------
    linear
        Of the projection.
    """

    scale: torch.Tensor | None  # static: float32 [1]
    offset: torch.Tensor | None

    def __init__(self, linear: Int8Linear) -> None:
        super().__init__()
        offset = None if linear.input_offset is None else linear.input_offset.float()
        self.register_buffer("scale", linear.input_scale, persistent=False)
        self.register_buffer("offset", offset, persistent=False)

    def forward(self, x: torch.Tensor) -> QuantizedRows:
        """``[T, 2 D]`` to rows of D."""
        values, scale = torch.ops.npu.npu_dequant_swiglu_quant(
            x,
            quant_scale=self.scale,
            quant_offset=self.offset,
            activate_left=True,
            quant_mode=int(self.scale is None),
        )
        return QuantizedRows(values, scale if self.scale is None else None, x.dtype)


def static_factors(
    linear: Int8Linear, weight: torch.Tensor
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """A static scale and offset for each column, in the dtypes that the norm's operator wants."""
    if linear.input_scale is None or linear.input_offset is None:
        return None, None
    is_half = weight.dtype == torch.float16
    scale_dtype, offset_dtype = (
        (torch.float32, torch.int32) if is_half else (torch.bfloat16, torch.bfloat16)
    )
    scale = linear.input_scale.to(scale_dtype).expand_as(weight).contiguous()
    return scale, linear.input_offset.to(offset_dtype).expand_as(weight).contiguous()


def fuse_rounding(model: nn.Module, vllm_config: "VllmConfig") -> None:
    """Let norms and activations round for quantised layers, in a model whose weights are loaded.

    Not with LoRA, whose layers read the inputs of projections themselves.
    """
    names = fused_operators(vllm_config)
    if vllm_config.lora_config is not None:
        return
    module: Any
    for module in model.modules():
        if "int8_norm" in names and _is_known(module, DECODERS):
            _fuse_norms(module)
        if "int8_swiglu" in names and _is_known(module, MLPS):  # shared experts among them
            linear = getattr(module.down_proj, "int8", None)
            if linear is not None and isinstance(module.act_fn, SiluAndMul):
                module.act_fn = QuantizingSiluAndMul(linear)


def _fuse_norms(decoder: Any) -> None:
    """Let a decoder layer's norms round for the projections that alone read their results."""
    if _is_known(decoder.self_attn, ATTENTIONS):
        _fuse_norm(decoder, "input_layernorm", decoder.self_attn.qkv_proj)
    mlp: Any = getattr(decoder, "mlp", None)
    # Mistral may scale what the norm gives, and gates of shared experts read it, too
    is_scaled = getattr(decoder, "ada_rms_norm_t_cond", None) is not None
    is_gated = getattr(mlp, "expert_gate", None) is not None
    if _is_known(mlp, MLPS) and not (is_scaled or is_gated):
        _fuse_norm(decoder, "post_attention_layernorm", mlp.gate_up_proj)


def _is_known(module: Any, classes: Iterable[str]) -> bool:
    """Whether a module runs the ``forward`` of one of these classes."""
    if not isinstance(module, nn.Module):
        return False
    forward = type(module).forward
    return f"{forward.__module__}.{forward.__qualname__}" in {
        f"{MODELS}{name}.forward" for name in classes
    }


def _fuse_norm(decoder: nn.Module, name: str, projection: nn.Module) -> None:
    norm, linear = getattr(decoder, name), getattr(projection, "int8", None)
    if type(norm) is not RMSNorm or linear is None or norm.weight.dtype not in DTYPES:
        return
    if norm.variance_size_override is not None or not _is_exact(linear, norm.weight.dtype):
        return
    setattr(decoder, name, QuantizingNorm(norm, linear))


DTYPES = (torch.float16, torch.bfloat16)


def _is_exact(linear: Int8Linear, dtype: torch.dtype) -> bool:
    """Whether a static scale survives in the dtype that the norm's operator wants.

    Others are divided by in float32, in a launch of their own: a rounded scale would shift the
    levels of all inputs.
    """
    if linear.input_scale is None or dtype == torch.float16:
        return True
    return bool((linear.input_scale.to(dtype).float() == linear.input_scale).all())
