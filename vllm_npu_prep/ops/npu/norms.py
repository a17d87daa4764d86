"""Norms in one launch: RMSNorm, RMSNorm with the residual's addition, and Gemma's norm.

vLLM's RMSNorm calls operators of vLLM's IR, of which this module has implementations.
Gemma's norm is a layer that vLLM lets others replace.
"""

from collections.abc import Callable
from typing import Any

import torch
from vllm.model_executor.layers.layernorm import GemmaRMSNorm

from vllm_npu_prep.ops.npu.switches import is_fused

PROVIDER = "npu"
"""Name of our implementations among those of vLLM's IR operators."""

IR_OPERATORS = {"rms_norm": "rms_norm", "add_rms_norm": "fused_add_rms_norm"}
"""The IR operator that each switch replaces."""

MAX_TOKENS_OF_WHOLE_ROWS = 1024
"""Up to this many tokens the two launches that are saved are worth more than the bytes of V, which
are read and written twice: 4 KiB for each token with 8 heads of 128, at some 1 TB/s."""

DTYPES = (torch.float16, torch.bfloat16)


def _rms_norm(
    x: torch.Tensor,  # [..., D]
    weight: torch.Tensor | None,  # [D]
    epsilon: float,
    variance_size: int | None = None,
) -> torch.Tensor:
    del variance_size
    assert weight is not None
    return normalise(torch.ops.npu.npu_rms_norm, x, weight, epsilon)


def _supports_rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    epsilon: float,
    variance_size: int | None = None,
) -> bool:
    """Return whether the operator takes these arguments: the weight's dtype is that of x."""
    return (
        weight is not None
        and variance_size is None
        and x.dtype in DTYPES
        and weight.dtype == x.dtype
        and x.dim() >= 2
    )


def _fused_add_rms_norm(
    x: torch.Tensor,  # [..., D]
    x_residual: torch.Tensor,  # the same
    weight: torch.Tensor | None,  # [D]
    epsilon: float,
    variance_size: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    del variance_size
    output, _, total = torch.ops.npu.npu_add_rms_norm(x, x_residual, weight, epsilon)
    return output, total


def _supports_fused_add_rms_norm(
    x: torch.Tensor,
    x_residual: torch.Tensor,
    weight: torch.Tensor | None,
    epsilon: float,
    variance_size: int | None = None,
) -> bool:
    """Return whether the operator takes these arguments: one dtype and one shape."""
    return (
        _supports_rms_norm(x, weight, epsilon, variance_size)
        and x_residual.dtype == x.dtype
        and x_residual.shape == x.shape
    )


IMPLEMENTATIONS: dict[str, tuple[Callable[..., Any], Callable[..., bool]]] = {
    "rms_norm": (_rms_norm, _supports_rms_norm),
    "fused_add_rms_norm": (_fused_add_rms_norm, _supports_fused_add_rms_norm),
}


class FusedGemmaRMSNorm(GemmaRMSNorm):
    """Gemma's norm, whose factors are 1 + weight."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._is_fused = is_fused("gemma_rms_norm")

    def forward_oot(
        self,
        x: torch.Tensor,  # [..., D]
        residual: torch.Tensor | None = None,  # the same
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Normalise in two launches with a residual, else in one."""
        if not self._is_fused or self.weight.dtype != x.dtype or x.dtype not in DTYPES:
            return self.forward_native(x, residual)
        operator = torch.ops.npu.npu_gemma_rms_norm
        if residual is None:
            return normalise(operator, x, self.weight.data, self.variance_epsilon)
        total = x + residual
        return normalise(operator, total, self.weight.data, self.variance_epsilon), total


def normalise(
    operator: Callable[..., tuple[torch.Tensor, torch.Tensor]],
    x: torch.Tensor,  # [..., D]
    weight: torch.Tensor,  # [D]
    epsilon: float,
) -> torch.Tensor:
    """Apply a norm over the last dimension.

    The operators copy an input that isn't contiguous. Heads of Q or K are slices of the fused
    projection's rows; we normalise the whole rows, which are contiguous, and return the slice.
    """
    first = first_head_of_rows(x)
    if first is None:
        return operator(x, weight, epsilon)[0]
    (tokens, heads, size), row = x.shape, x.stride(0)
    rows = x.as_strided((tokens, row // size, size), (row, size, 1), 0)
    return operator(rows, weight, epsilon)[0][:, first : first + heads]


def first_head_of_rows(x: torch.Tensor) -> int | None:
    """Return the place of a slice of heads in rows that fill their memory.

    The result is None if `x` is no such slice.
    """
    if x.dim() != 3 or torch.compiler.is_compiling() or x.is_contiguous():
        return None
    (tokens, _, size), row = x.shape, x.stride(0)
    fills_memory = x.untyped_storage().nbytes() == tokens * row * x.element_size()
    if (
        tokens > MAX_TOKENS_OF_WHOLE_ROWS
        or x.stride()[1:] != (size, 1)
        or row % size
        or x.storage_offset() % size
        or not fills_memory
    ):
        return None
    return x.storage_offset() // size
