"""Activations in one launch: SwiGLU, GeGLU and GELU.

torch's own GELU on NPUs is always the approximation by tanh (op-plugin's documentation of
``npu_gelu``), so the exact one needs an operator of its own.
"""

from typing import Any

import torch
from vllm.model_executor.custom_op import CustomOp
from vllm.model_executor.layers.activation import (
    GELU,
    FastGELU,
    GeluAndMul,
    GELUTanh,
    NewGELU,
    SiluAndMul,
)

from vllm_npu_prep.ops.npu.switches import is_fused


class FusedSiluAndMul(SiluAndMul):
    """``silu(gate) * up`` of the two halves of a row: ``[..., 2 D]`` to ``[..., D]``."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._is_fused = is_fused("swiglu")

    def forward_oot(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.npu.npu_swiglu(x, -1) if self._is_fused else self.forward_native(x)


class FusedGeluAndMul(GeluAndMul):
    """``gelu(gate) * up`` of the two halves of a row: ``[..., 2 D]`` to ``[..., D]``.

    By default the operator would take the second half as the gate.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._is_fused = is_fused("geglu")

    def forward_oot(self, x: torch.Tensor) -> torch.Tensor:
        if not self._is_fused:
            return self.forward_native(x)
        by_tanh = int(self.approximate == "tanh")
        return torch.ops.npu.npu_geglu(x, -1, by_tanh, activate_left=True)[0]


class _OneLaunch(CustomOp):
    """GELU in one launch; vLLM has three layers with the formula by tanh."""

    approximation = "tanh"

    def __init__(self) -> None:
        super().__init__()
        self._is_fused = is_fused("gelu")

    def forward_oot(self, x: torch.Tensor) -> torch.Tensor:
        if not self._is_fused:
            return self.forward_native(x)
        return torch.ops.npu.npu_gelu(x, approximate=self.approximation)


class FusedGELU(_OneLaunch, GELU):
    """The exact GELU, without an approximation by tanh."""

    approximation = "none"


class FusedGELUTanh(_OneLaunch, GELUTanh):
    """GELU by tanh, which vLLM computes by torch's function."""


class FusedNewGELU(_OneLaunch, NewGELU):
    """GELU by tanh, which vLLM writes out with a power of three."""


class FusedFastGELU(_OneLaunch, FastGELU):
    """GELU by tanh, which vLLM writes out with a square."""
