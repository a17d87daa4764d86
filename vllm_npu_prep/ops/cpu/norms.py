"""RMSNorm in one call on the CPU fallback, alone or with the residual's addition.

vLLM's RMSNorm calls operators of vLLM's IR, of which these are implementations.
Arguments that these don't take are left to vLLM's own.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch

PROVIDER = "compiled"
"""Name of our implementations among those of vLLM's IR operators."""

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@functools.cache
def _kernels() -> Any:
    """Return the compiled functions, which processes without a model need not import."""
    from vllm_npu_prep.ops.cpu import kernels

    return kernels


def _rms_norm(
    x: torch.Tensor,  # [..., D]
    weight: torch.Tensor | None,  # [D]
    epsilon: float,
    variance_size: int | None = None,
) -> torch.Tensor:
    del variance_size
    rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    return _kernels().rms_norm(rows, weight, epsilon).view(x.shape)


def _supports_rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    epsilon: float,
    variance_size: int | None = None,
) -> bool:
    return (
        weight is not None
        and variance_size is None
        and x.dtype in DTYPES
        and weight.dtype == x.dtype
        and x.stride(-1) == 1
    )


def _fused_add_rms_norm(
    x: torch.Tensor,  # [T, D]
    x_residual: torch.Tensor,  # the same
    weight: torch.Tensor | None,  # [D]
    epsilon: float,
    variance_size: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    del variance_size
    return _kernels().add_rms_norm(x, x_residual, weight, epsilon)


def _supports_fused_add_rms_norm(
    x: torch.Tensor,
    x_residual: torch.Tensor,
    weight: torch.Tensor | None,
    epsilon: float,
    variance_size: int | None = None,
) -> bool:
    return (
        _supports_rms_norm(x, weight, epsilon, variance_size)
        and x.dim() == 2
        and x_residual.dtype == x.dtype
        and x_residual.shape == x.shape
        and x_residual.stride(1) == 1
    )


IMPLEMENTATIONS: dict[str, tuple[Callable[..., Any], Callable[..., bool]]] = {
    "rms_norm": (_rms_norm, _supports_rms_norm),
    "fused_add_rms_norm": (_fused_add_rms_norm, _supports_fused_add_rms_norm),
}
