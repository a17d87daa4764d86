"""Norms that give routers their input in float32, in the launch of the norm.

MiniMax-M2 and GLM-4.5 keep the weights of their routers in float32, so a layer of theirs casts its
input, which is a launch. ``npu_add_rms_norm_cast`` gives the norm's result in both dtypes: the
router gets the float32 one and the experts get the other. This is done for layers whose code is
known to do nothing else with the norm's result.

DeepSeek V3 and Kimi K2 add a float32 bias to scores, for which logits are cast, also a launch.
Their routers' weights become float32, which changes no value; logits are then not rounded, as in
transformers' code.

Norms and mixtures of experts get another class (`_cast_in`). They stay the modules that they are,
with their parameters, loaders and names, so that new weights find them; and their type says to
everybody who asks whether a norm is vLLM's plain one (``quantization/rounding.py``) that it isn't.
A ``forward`` that is set on the module would leave the type as it was.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from vllm.model_executor.layers.fused_moe.router.gate_linear import GateLinear
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import UnquantizedLinearMethod

from vllm_npu_prep.ops.npu.norms import DTYPES
from vllm_npu_prep.ops.npu.routing import GatingRouter


@dataclass
class CastRows:
    """What a norm hands to a mixture of experts, in place of a tensor.

    Both tensors have the same numbers, ``[T, hidden_size]``: `values` in float16 or bfloat16 for
    the experts, `cast` in float32 for the router.
    """

    values: torch.Tensor
    cast: torch.Tensor


class CastingNorm(RMSNorm):
    """vLLM's norm, whose result is `CastRows` if there is a residual."""

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
        if residual is None:
            return super().forward(x)
        cast, values, _, total = torch.ops.npu.npu_add_rms_norm_cast(
            x, residual, self.weight.data, self.variance_epsilon
        )
        return CastRows(values, cast), total


def _forward(self: Any, hidden_states: CastRows) -> torch.Tensor:
    """Do what ``MiniMaxM2MoE.forward`` and ``Glm4MoE.forward`` do, without the router's cast."""
    logits, _ = self.gate(hidden_states.cast)
    return self.experts(hidden_states=hidden_states.values, router_logits=logits)


def _forward_deepseek(
    self: Any, hidden_states: CastRows, already_sequence_parallel: bool = False
) -> torch.Tensor:
    """Compute what ``DeepseekV2MoE.forward`` does for rows that are this rank's own."""
    del already_sequence_parallel
    return _forward(self, hidden_states)


def _known() -> Mapping[type[nn.Module], tuple[str, type[nn.Module]]]:
    """Return, by class of decoder layer, where its mixture of experts is and that one's class."""
    from vllm.model_executor.models.deepseek_v2 import DeepseekV2DecoderLayer, DeepseekV2MoE
    from vllm.model_executor.models.glm4_moe import Glm4MoE, Glm4MoeDecoderLayer
    from vllm.model_executor.models.minimax_m2 import MiniMaxM2DecoderLayer, MiniMaxM2MoE

    return {
        MiniMaxM2DecoderLayer: ("block_sparse_moe", MiniMaxM2MoE),
        Glm4MoeDecoderLayer: ("mlp", Glm4MoE),
        DeepseekV2DecoderLayer: ("mlp", DeepseekV2MoE),
    }


def cast_for_routers(model: nn.Module) -> None:
    """Let the norms of a loaded model cast for those of its routers that compute in float32."""
    layer: Any
    known = _known()
    for layer in model.modules():
        name, kind = known.get(type(layer), ("", nn.Module))
        mixture: Any = getattr(layer, name, None) if name else None
        if type(mixture) is kind and _may_cast(layer.post_attention_layernorm, mixture.gate):
            _cast_in(layer, mixture, kind)


def _cast_in(layer: Any, mixture: Any, kind: type[nn.Module]) -> None:
    forward: Any = _forward
    if mixture.gate.weight.dtype != torch.float32:
        if not _may_widen(layer, mixture):
            return
        mixture.gate.weight.data = mixture.gate.weight.data.float()
        mixture.experts.gate = None  # the layer gives it logits now
        forward = _forward_deepseek
    layer.post_attention_layernorm.__class__ = CastingNorm
    mixture.__class__ = type(f"Casting{kind.__name__}", (kind,), {"forward": forward})


def _may_widen(layer: Any, mixture: Any) -> bool:
    """Return whether logits are cast for a bias, and the norm's rows are this rank's (DeepSeek)."""
    bias = getattr(mixture.gate, "e_score_correction_bias", None)
    return (
        isinstance(mixture.experts.router, GatingRouter)
        and mixture.experts.gate is mixture.gate
        and bias is not None
        and bias.dtype == torch.float32
        and mixture.is_sequence_parallel == layer.use_sequence_parallel_moe
    )


def _may_cast(norm: Any, gate: Any) -> bool:
    """Return whether the operator takes what the norm gets, and the router is a plain product."""
    return (
        type(norm) is RMSNorm
        and norm.variance_size_override is None
        and norm.has_weight
        and norm.weight.dtype in DTYPES
        and type(gate) is GateLinear
        and type(gate.quant_method) is UnquantizedLinearMethod
        and gate.out_dtype in (None, torch.float32)
    )
