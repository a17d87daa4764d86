"""Rotary embeddings and SwiGLU of the CPU fallback: a compiled call in place of several."""

from typing import Any

import torch
from vllm.model_executor.custom_op import CustomOp, op_registry_oot
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding, RotaryEmbeddingBase
from vllm.model_executor.layers.rotary_embedding.dynamic_ntk_alpha_rope import (
    DynamicNTKAlphaRotaryEmbedding,
)
from vllm.model_executor.layers.rotary_embedding.dynamic_ntk_scaling_rope import (
    DynamicNTKScalingRotaryEmbedding,
)
from vllm.model_executor.layers.rotary_embedding.linear_scaling_rope import (
    LinearScalingRotaryEmbedding,
)
from vllm.model_executor.layers.rotary_embedding.llama3_rope import Llama3RotaryEmbedding
from vllm.model_executor.layers.rotary_embedding.ntk_scaling_rope import NTKScalingRotaryEmbedding
from vllm.model_executor.layers.rotary_embedding.yarn_scaling_rope import (
    YaRNScalingRotaryEmbedding,
)

from vllm_npu_prep.ops.cpu import kernels


class _CompiledRotaryEmbedding(RotaryEmbeddingBase):
    """A rotary embedding with one position for each token."""

    def forward_oot(
        self,
        positions: torch.Tensor,
        query: torch.Tensor,  # [T, N * D] or [T, N, D]
        key: torch.Tensor | None = None,  # [T, Nkv * D] or [T, Nkv, D]
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        # Traced code can't look at memory
        if query.dtype not in kernels.ELEMENTS or torch.compiler.is_compiling():
            return self.forward_native(positions, query, key)
        places, factors = positions.flatten(), self._match_cos_sin_cache_dtype(query)
        rotated = self._rotate(places, query, factors)
        return rotated, None if key is None else self._rotate(places, key, factors)

    def _rotate(
        self, positions: torch.Tensor, x: torch.Tensor, factors: torch.Tensor
    ) -> torch.Tensor:
        rows = x.flatten(1)
        if rows.stride(1) != 1:
            rows = rows.contiguous()
        size, is_neox = self.head_size, self.is_neox_style
        return kernels.rotate(positions, rows, factors, size, is_neox).view(x.shape)


class CompiledSiluAndMul(SiluAndMul):
    """``silu(x[..., :D]) * x[..., D:]`` in one call."""

    def forward_oot(self, x: torch.Tensor) -> torch.Tensor:
        if x.dtype not in kernels.ELEMENTS or torch.compiler.is_compiling() or x.stride(-1) != 1:
            return self.forward_native(x)
        out = kernels.silu_and_mul(x.flatten(0, -2))
        return out.view(*x.shape[:-1], out.shape[1])


ROTARY = (
    DynamicNTKAlphaRotaryEmbedding,
    DynamicNTKScalingRotaryEmbedding,
    LinearScalingRotaryEmbedding,
    Llama3RotaryEmbedding,
    NTKScalingRotaryEmbedding,
    RotaryEmbedding,
    YaRNScalingRotaryEmbedding,
)
"""Layers of vLLM that differ in their factors alone."""


def register_layers() -> None:
    """Register our layers for vLLM's, in a worker whose model isn't made yet."""
    rotary: dict[Any, Any] = {
        base: type(f"Compiled{base.__name__}", (_CompiledRotaryEmbedding, base), {})
        for base in ROTARY
    }
    for base, layer in {SiluAndMul: CompiledSiluAndMul, **rotary}.items():
        name, switch = base.__name__, base.name  # by which users switch vLLM's layer
        if name not in op_registry_oot:
            CustomOp.register_oot(layer, name=name)
            layer.name = switch
