"""Norms and activations that round their results to int8, for the linear layers that come next.

vLLM's decoder layers hand the result of a norm to one projection only, and the result of the
activation to the next projection. So the launch that rounds them can be saved. This is done for
layers whose code is known to do nothing else with these results.
"""

import contextlib
from collections.abc import Container, Iterable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.layernorm import GemmaRMSNorm, RMSNorm
from vllm.model_executor.layers.linear import UnquantizedLinearMethod

from vllm_npu_prep.config import fused_operators
from vllm_npu_prep.errors import PrepError
from vllm_npu_prep.ops.npu.latent import (
    FusedMultiHeadLatentAttentionWrapper,
    ProjectionParts,
    keep_part_weights,
)
from vllm_npu_prep.quantization.int8 import Int8Linear, QuantizedRows, swiglu_may_round

if TYPE_CHECKING:
    from vllm.config import VllmConfig

MODELS = "vllm.model_executor.models"
DECODERS = {
    f"{MODELS}.deepseek_v2.DeepseekV2DecoderLayer.forward",
    f"{MODELS}.gemma.GemmaDecoderLayer.forward",
    f"{MODELS}.gemma2.Gemma2DecoderLayer.forward",
    f"{MODELS}.gemma3.Gemma3DecoderLayer.forward",
    f"{MODELS}.glm4.Glm4DecoderLayer.forward",
    f"{MODELS}.glm4_moe.Glm4MoeDecoderLayer.forward",
    f"{MODELS}.glm4_moe_lite.Glm4MoeLiteDecoderLayer.forward",
    f"{MODELS}.llama.LlamaDecoderLayer.forward",
    f"{MODELS}.minimax_m2.MiniMaxM2DecoderLayer.forward",
    f"{MODELS}.mistral.MistralDecoderLayer.forward",
    f"{MODELS}.mixtral.MixtralDecoderLayer.forward",
    f"{MODELS}.qwen2.Qwen2DecoderLayer.forward",
    f"{MODELS}.qwen2_moe.Qwen2MoeDecoderLayer.forward",
    f"{MODELS}.qwen3.Qwen3DecoderLayer.forward",
    f"{MODELS}.qwen3_moe.Qwen3MoeDecoderLayer.forward",
}
ATTENTIONS = {
    f"{MODELS}.gemma.GemmaAttention.forward",
    f"{MODELS}.gemma2.Gemma2Attention.forward",
    f"{MODELS}.gemma3.Gemma3Attention.forward",
    f"{MODELS}.glm4.Glm4Attention.forward",
    f"{MODELS}.glm4_moe.Glm4MoeAttention.forward",
    f"{MODELS}.llama.LlamaAttention.forward",
    f"{MODELS}.minimax_m2.MiniMaxM2Attention.forward",
    f"{MODELS}.mistral.MistralAttention.forward",
    f"{MODELS}.mixtral.MixtralAttention.forward",
    f"{MODELS}.qwen2.Qwen2Attention.forward",
    f"{MODELS}.qwen2_moe.Qwen2MoeAttention.forward",
    f"{MODELS}.qwen3.Qwen3Attention.forward",
    f"{MODELS}.qwen3_moe.Qwen3MoeAttention.forward",
}
LATENT_ATTENTIONS = {f"{MODELS}.deepseek_v2.DeepseekV2MLAAttention.forward"}
MLPS = {
    f"{MODELS}.deepseek_v2.DeepseekV2MLP.forward",
    f"{MODELS}.gemma.GemmaMLP.forward",
    f"{MODELS}.gemma2.Gemma2MLP.forward",
    f"{MODELS}.gemma3.Gemma3MLP.forward",
    f"{MODELS}.glm4_moe.Glm4MoeMLP.forward",
    f"{MODELS}.llama.LlamaMLP.forward",
    f"{MODELS}.mistral.MistralMLP.forward",
    f"{MODELS}.qwen2.Qwen2MLP.forward",
    f"{MODELS}.qwen2_moe.Qwen2MoeMLP.forward",
    f"{MODELS}.qwen3_moe.Qwen3MoeMLP.forward",
}
"""Methods whose code is known, here and in the three sets above; subclasses that have their own are
not among them. GELU has no operator that rounds."""


class QuantizingNorm(nn.Module):
    """The residual's addition, RMSNorm, and rounding for the projection that reads the result."""

    scales: torch.Tensor | None  # static: [hidden_size]
    offsets: torch.Tensor | None
    first: torch.Tensor | None  # Gemma's two factors: [hidden_size]
    second: torch.Tensor | None

    def __init__(self, norm: RMSNorm | GemmaRMSNorm, linear: Int8Linear) -> None:
        super().__init__()
        self.norm, self.linear = norm, linear
        for name, factor in self._factors().items():
            self.register_buffer(name, factor, persistent=False)

    def _factors(self) -> dict[str, torch.Tensor | None]:
        norm, first, second = self.norm, None, None
        if isinstance(norm, GemmaRMSNorm):
            first, second = two_factors(1 + norm.weight.data.float(), norm.weight.dtype)
        scales, offsets = static_factors(self.linear, norm.weight)
        return {"first": first, "second": second, "scales": scales, "offsets": offsets}

    def renew(self) -> None:
        """Copy the norm's new weights and the projection's new scales to where graphs read them.

        Raises
        ------
        PrepError
            If the operator can't take the new scale as exactly as the old one.
        """
        if not _is_exact(self.linear, self.norm.weight.dtype):
            raise PrepError(
                "new weights: an input_scale is not exact in the model's dtype, as the old one "
                "was: start the engine again with the new checkpoint"
            )
        _copy(self._factors(), self)

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
        """Normalise, with `QuantizedRows` in place of the first tensor of vLLM's result.

        The operators add in any case. Without a residual rows are added to themselves, and the
        norm of twice a row is that of the row, with four times the epsilon.
        """
        epsilon = self.norm.variance_epsilon
        if residual is None:
            return self._round(x, x, 4 * epsilon)[0]
        return self._round(x, residual, epsilon)

    def _round(
        self, x: torch.Tensor, added: torch.Tensor, epsilon: float
    ) -> tuple[QuantizedRows, torch.Tensor]:
        weight = self.norm.weight.data if self.first is None else self.first
        if self.scales is None:
            values, _, total, scale, _ = torch.ops.npu.npu_add_rms_norm_dynamic_quant(
                x, added, weight, smooth_scale1=self.second, epsilon=epsilon
            )
            return QuantizedRows(values, scale, x.dtype), total
        values, _, total = torch.ops.npu.npu_add_rms_norm_quant(
            x, added, weight, self.scales, self.offsets, epsilon=epsilon
        )
        return QuantizedRows(values, None, x.dtype), total


class QuantizingSiluAndMul(nn.Module):
    """``silu(gate) * up``, rounded for the projection that reads the result."""

    scale: torch.Tensor | None  # static: float32 [1]
    offset: torch.Tensor | None

    def __init__(self, linear: Int8Linear) -> None:
        super().__init__()
        self.linear = linear
        for name, factor in self._factors().items():
            self.register_buffer(name, factor, persistent=False)

    def _factors(self) -> dict[str, torch.Tensor | None]:
        offset, scale = self.linear.input_offset, self.linear.input_scale
        return {
            "scale": None if scale is None else scale.clone(),
            "offset": None if offset is None else offset.float(),
        }

    def renew(self) -> None:
        _copy(self._factors(), self)

    def forward(self, x: torch.Tensor) -> QuantizedRows:
        values, scale = torch.ops.npu.npu_dequant_swiglu_quant(
            x,
            quant_scale=self.scale,
            quant_offset=self.offset,
            activate_left=True,
            quant_mode=int(self.scale is None),
        )
        return QuantizedRows(values, scale if self.scale is None else None, x.dtype)


def _copy(factors: Mapping[str, torch.Tensor | None], module: nn.Module) -> None:
    for name, factor in factors.items():
        if factor is not None:
            getattr(module, name).copy_(factor)


@contextlib.contextmanager
def laid_aside(model: nn.Module) -> Iterator[None]:
    """Put vLLM's modules back during a reload; those that round take new factors at its end.

    Files name the weights of norms as vLLM's modules do, so these have to be in the model
    meanwhile. The model is one that `fuse_rounding` has changed.
    """
    found = [
        (owner, name, child)
        for owner in model.modules()
        for name, child in owner.named_children()
        if isinstance(child, QuantizingNorm | QuantizingSiluAndMul)
    ]
    for owner, name, child in found:
        setattr(owner, name, child.norm if isinstance(child, QuantizingNorm) else nn.Identity())
    try:
        yield
    finally:
        for owner, name, child in found:
            setattr(owner, name, child)
        for _, _, child in found:  # also of a reload that failed: some layers have new weights
            child.renew()


TRIES = 128


def two_factors(product: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Find two numbers of 16 bits whose product is nearly a given one of float32, ``[N]``.

    Gemma's norms multiply by 1 + weight, which 16 bits don't hold: bfloat16 would shift columns by
    up to 0.4 %. The operator multiplies by two such numbers, in float32 (cann/ops-nn 9.1.0,
    ``add_rms_norm_dynamic_quant_normal_kernel.h``). The best of `TRIES` pairs is taken.
    """
    steps = torch.linspace(1, 2, TRIES, device=product.device)[:, None]
    first = (product * steps).to(dtype)  # [TRIES, N]
    second = torch.where(first == 0, 1, product / first.float()).to(dtype)
    error = (first.float() * second.float() - product).abs()
    best = error.argmin(0, keepdim=True)
    return first.gather(0, best)[0], second.gather(0, best)[0]


def static_factors(
    linear: Int8Linear, weight: torch.Tensor
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return a static scale and offset for each column, in the dtypes of the norm's operator.

    Both are None if the layer's inputs get a scale for each token.
    """
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

    With LoRA nothing is done: its layers read the inputs of projections themselves.
    """
    names = fused_operators(vllm_config)
    if vllm_config.lora_config is not None:
        return
    module: Any
    for module in model.modules():
        if isinstance(module, FusedMultiHeadLatentAttentionWrapper):
            _split_latent(module, "int8_norm" in names)
    for module in model.modules():
        if "int8_norm" in names and _is_known(module, DECODERS):
            _fuse_norms(module)
        if "int8_swiglu" in names and _is_known(module, MLPS):  # shared experts among them
            linear = getattr(module.down_proj, "int8", None)
            if linear is None or not isinstance(module.act_fn, SiluAndMul):
                continue
            columns = module.down_proj.input_size_per_partition
            if swiglu_may_round(columns, linear.input_scale is not None):
                module.act_fn = QuantizingSiluAndMul(linear)


def _fuse_norms(decoder: Any) -> None:
    attention = decoder.self_attn
    if _is_known(attention, ATTENTIONS):
        _fuse_norm(decoder, "input_layernorm", attention.qkv_proj)
    if _is_known(attention, LATENT_ATTENTIONS):
        wrapper = attention.mla_attn
        # With sequence parallelism, ranks exchange the norm's result; an indexer reads it, too.
        is_whole = not getattr(decoder, "use_sequence_parallel_moe", False)
        if is_whole and getattr(wrapper, "is_split", False) and wrapper.indexer is None:
            _fuse_norm(decoder, "input_layernorm", *wrapper.readers())
    mlp: Any = getattr(decoder, "mlp", None)
    # Mistral may scale what the norm gives, and gates of shared experts read it, too
    is_scaled = getattr(decoder, "ada_rms_norm_t_cond", None) is not None
    is_gated = getattr(mlp, "expert_gate", None) is not None
    if _is_known(mlp, MLPS) and not (is_scaled or is_gated):
        is_sandwich = hasattr(decoder, "pre_feedforward_layernorm")
        name = "pre_feedforward_layernorm" if is_sandwich else "post_attention_layernorm"
        _fuse_norm(decoder, name, mlp.gate_up_proj)


def _split_latent(wrapper: FusedMultiHeadLatentAttentionWrapper, with_norm: bool) -> None:
    """Split what a latent layer's int8 projections give, and round in the norm of queries."""
    if wrapper.is_split or not wrapper.may_be_split:
        return
    parts = wrapper.parts()
    if not all(_gives_parts(each.layer) for each in parts):
        return
    for each in parts:
        if isinstance(getattr(each.layer, "int8", None), Int8Linear):
            _order_rows(each)
        else:
            keep_part_weights(each)
    wrapper.use_parts()
    wrapper.refresh = partial(_split_anew, parts)  # `vllm_npu_prep.runner.new_weights` calls it
    if with_norm and wrapper.q_lora_rank is not None:
        readers: list[Any] = [wrapper.q_b_proj]
        if wrapper.indexer is not None:
            readers.append(wrapper.indexer.wq_b)
        _fuse_norm(wrapper, "q_a_layernorm", *readers)


def _split_anew(parts: Iterable[ProjectionParts]) -> None:
    """Split weights that were loaded anew; the others are split already."""
    for each in parts:
        linear = getattr(each.layer, "int8", None)
        if not isinstance(linear, Int8Linear):
            keep_part_weights(each)
        elif linear is not each.layer.ordered:
            _order_rows(each)


def _gives_parts(layer: Any) -> bool:
    linear = getattr(layer, "int8", None)
    return isinstance(linear, Int8Linear) or type(layer.quant_method) is UnquantizedLinearMethod


def _order_rows(parts: ProjectionParts) -> None:
    layer, sizes, order, _ = parts
    layer.part_sizes, layer.part_weights = sizes, None
    if order is not None:
        order = order.to(layer.weight.device)
        layer.channel_scale = layer.channel_scale[order]
        layer.int8 = layer.int8.ordered(order)
    layer.ordered = layer.int8


def _is_known(module: Any, methods: Container[str]) -> bool:
    if not isinstance(module, nn.Module):
        return False
    forward = type(module).forward
    return f"{forward.__module__}.{forward.__qualname__}" in methods


def _fuse_norm(owner: nn.Module, name: str, *projections: nn.Module) -> None:
    """Let a norm round for the projections that alone read its result, if it can for all."""
    norm: Any = getattr(owner, name)
    linears: list[Any] = [getattr(each, "int8", None) for each in projections]
    if not all(isinstance(each, Int8Linear) for each in linears):
        return
    if norm.weight.dtype not in DTYPES or not _is_exact(linears[0], norm.weight.dtype):
        return
    are_dynamic = not any(each.is_static for each in linears)
    if isinstance(norm, GemmaRMSNorm):  # whose two factors have no place in the static operator
        is_known = are_dynamic
    else:
        is_known = type(norm) is RMSNorm and norm.variance_size_override is None
    if is_known and (are_dynamic or len(linears) == 1):
        setattr(owner, name, QuantizingNorm(norm, linears[0]))


DTYPES = (torch.float16, torch.bfloat16)


def _is_exact(linear: Int8Linear, dtype: torch.dtype) -> bool:
    """Return whether a static scale is exact in the dtype that the norm's operator wants.

    Inputs with other scales are divided in float32, in a launch of their own: a rounded scale would
    shift the levels of all inputs.
    """
    if linear.input_scale is None or dtype == torch.float16:
        return True
    return bool((linear.input_scale.to(dtype).float() == linear.input_scale).all())
