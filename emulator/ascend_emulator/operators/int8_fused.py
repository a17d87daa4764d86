"""References of norms and activations that round their results to int8."""

import torch

from ascend_emulator import faults
from ascend_emulator.operators.constraint import Call, shape_of
from ascend_emulator.operators.int8 import LEVELS, round_all, round_tokens

ADD_RMS_NORM_DYNAMIC_QUANT = "npu::npu_add_rms_norm_dynamic_quant"
ADD_RMS_NORM_QUANT = "npu::npu_add_rms_norm_quant"
DEQUANT_SWIGLU_QUANT = "npu::npu_dequant_swiglu_quant"

HALF = (torch.float16, torch.bfloat16)
WHOLE_ROW = 7840
"""Columns of a result that the kernel holds at once with dynamic scales: 192 KiB by 25 bytes, in
steps of 32 (cann/ops-nn 9.1.0, ``CalcUbMaxTileLen`` in dequant_swiglu_quant_tiling_base.cpp)."""
PART = 7680
"""Columns of a part of a wider row: whole cache lines of 512 bytes."""


def add_rms_norm_dynamic_quant(
    x1: torch.Tensor,
    x2: torch.Tensor,
    gamma: torch.Tensor,
    *,
    smooth_scale1: torch.Tensor | None = None,
    smooth_scale2: torch.Tensor | None = None,
    beta: torch.Tensor | None = None,
    epsilon: float = 1e-6,
    output_mask: list[bool] | None = None,
    y_dtype: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Round the norm of ``x1 + x2`` to int8, with a scale for each row.

    The third result is the sum, the fourth has the scales; the second and the fifth are empty. The
    sum is rounded to the dtype of `x1` before it is normalised, as in `npu_add_rms_norm`. Factors
    multiply the norm in float32 before it is rounded.
    """
    call = Call("norms to int8", ADD_RMS_NORM_DYNAMIC_QUANT)
    _check_norm(call, x1, x2, gamma, 2)
    call.demand("epsilon", epsilon > 0, epsilon)
    others = {
        "smooth_scale2": smooth_scale2 is not None,
        "beta": beta is not None,
        f"output_mask {output_mask}": output_mask not in (None, [True, False]),
        f"y_dtype {y_dtype}": y_dtype not in (None, 1),
    }
    _check_form(call, others)
    normed, total = _normalise(x1, x2, gamma, epsilon)
    if smooth_scale1 is not None:
        given = f"{smooth_scale1.dtype} {shape_of(smooth_scale1)}"
        fits = smooth_scale1.dtype == x1.dtype and smooth_scale1.shape == gamma.shape
        call.demand("factors", fits, given)
        normed = normed * smooth_scale1.float()
    values, scale = round_tokens(normed)
    return values, torch.empty(0, dtype=torch.int8), total, scale, torch.empty(0)


def add_rms_norm_quant(
    x1: torch.Tensor,
    x2: torch.Tensor,
    gamma: torch.Tensor,
    scales1: torch.Tensor,
    zero_points1: torch.Tensor | None,
    beta: torch.Tensor | None = None,
    scales2: torch.Tensor | None = None,
    zero_points2: torch.Tensor | None = None,
    *,
    axis: int = -1,
    epsilon: float = 1e-6,
    div_mode: bool = True,
    dst_type: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Round the norm of ``x1 + x2`` to int8 with given scales.

    The second result is undefined, the third is the sum.
    """
    call = Call("norms to int8", ADD_RMS_NORM_QUANT)
    _check_norm(call, x1, x2, gamma, 1)
    others = {
        "beta": beta is not None,
        "scales2": scales2 is not None,
        "zero_points2": zero_points2 is not None,
        f"axis {axis}": axis != -1,
        f"div_mode {div_mode}": not div_mode,
        f"dst_type {dst_type}": dst_type not in (None, 1),
    }
    _check_form(call, others)
    of_scale = torch.float32 if x1.dtype == torch.float16 else torch.bfloat16
    of_offset = torch.int32 if x1.dtype == torch.float16 else torch.bfloat16
    call.demand("scale dtype", scales1.dtype == of_scale, f"{scales1.dtype} for {x1.dtype}")
    fits = scales1.shape == gamma.shape
    call.demand("static shapes", fits, shape_of(scales1), "scales1")
    if zero_points1 is not None:
        is_right = zero_points1.dtype == of_offset
        call.demand("offset dtype", is_right, f"{zero_points1.dtype} for {x1.dtype}")
        fits = zero_points1.shape == gamma.shape
        call.demand("static shapes", fits, shape_of(zero_points1), "zero_points1")
    normed, total = _normalise(x1, x2, gamma, epsilon)
    undefined = torch.full(x1.shape, -128, dtype=torch.int8)
    return round_all(normed, scales1, zero_points1), undefined, total


def _check_norm(
    call: Call, x1: torch.Tensor, x2: torch.Tensor, gamma: torch.Tensor, least: int
) -> None:
    call.demand("dtype", x1.dtype in HALF, x1.dtype)
    call.demand("rank", least <= x1.dim() <= 8, shape_of(x1))
    same = x1.shape == x2.shape and x1.dtype == x2.dtype
    given = f"{shape_of(x2)} {x2.dtype} for {shape_of(x1)} {x1.dtype}"
    call.demand("equal shapes", same, given)
    fits = shape_of(gamma) == (x1.shape[-1],) and gamma.dtype == x1.dtype
    call.demand("gamma", fits, f"{shape_of(gamma)} {gamma.dtype} for {shape_of(x1)} {x1.dtype}")


def _check_form(call: Call, others: dict[str, bool]) -> None:
    given = [name for name, applies in others.items() if applies]
    call.demand("form", not given, given)


def _normalise(
    x1: torch.Tensor, x2: torch.Tensor, gamma: torch.Tensor, epsilon: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the norm in float32, and the sum in the dtype of the inputs."""
    total = (x1.float() + x2.float()).to(x1.dtype)
    reciprocal = (total.float().square().mean(-1, keepdim=True) + epsilon).rsqrt()
    return total.float() * reciprocal * gamma.float(), total


def dequant_swiglu_quant(
    x: torch.Tensor,
    *,
    weight_scale: torch.Tensor | None = None,
    activation_scale: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    quant_scale: torch.Tensor | None = None,
    quant_offset: torch.Tensor | None = None,
    group_index: torch.Tensor | None = None,
    activate_left: bool = False,
    quant_mode: int = 0,
    dst_type: int | None = None,
    round_mode: int | None = None,
    activate_dim: int | None = None,
    swiglu_mode: int = 0,
    clamp_limit: float = 7.0,
    glu_alpha: float = 1.702,
    glu_bias: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute ``silu(a) * b`` of two halves in int8, and float32 scales of rows if dynamic."""
    call = Call("npu_dequant_swiglu_quant", DEQUANT_SWIGLU_QUANT)
    call.demand("dtype", x.dtype in HALF, x.dtype)
    call.demand("shape", x.dim() >= 2 and x.shape[-1] % 2 == 0, shape_of(x))
    given = {
        "weight_scale": weight_scale,
        "activation_scale": activation_scale,
        "bias": bias,
        "group_index": group_index,
    }
    named = [name for name, value in given.items() if value is not None]
    call.demand("form", not named, named)
    mode = dst_type in (None, 1) and round_mode in (None, 0) and activate_dim in (None, -1)
    told = f"{dst_type}, {round_mode}, {activate_dim}, {swiglu_mode}"
    call.demand("mode", mode and swiglu_mode == 0, told)
    call.demand("quant_mode", quant_mode in (0, 1), quant_mode)
    halves = x.float().chunk(2, -1)
    gate, up = halves if activate_left else halves[::-1]
    result = torch.nn.functional.silu(gate) * up
    scales = {"quant_scale": quant_scale, "quant_offset": quant_offset}
    for name, tensor in scales.items():
        fits = (tensor is None) == (quant_mode == 1)
        if tensor is not None:
            sizes = (1, result.shape[-1])
            fits = fits and tensor.dtype == torch.float32 and tensor.numel() in sizes
        shown = None if tensor is None else f"{shape_of(tensor)} {tensor.dtype}"
        call.demand("static scales", fits, f"{shown} with quant_mode {quant_mode}", name)
    if quant_mode == 1:
        return _round_rows(result)
    assert quant_scale is not None
    undefined = torch.full(result.shape[:-1], torch.nan)
    return round_all(result, quant_scale, quant_offset), undefined


def _round_rows(result: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Do what `round_tokens` does, but take a wide row in parts and compare their maxima.

    The kernel does so, too.
    """
    if result.shape[-1] <= WHOLE_ROW:
        return round_tokens(result)
    parts = result.abs().split(PART, -1)
    maxima = torch.stack([part.amax(-1) for part in parts], -1)
    scale = faults.apply("maxima of the parts of a wide row", maxima).amax(-1) / LEVELS
    steps = torch.where(scale > 0, scale, torch.ones_like(scale))
    levels = torch.round(result / steps[..., None]).clamp(-LEVELS - 1, LEVELS)
    return levels.to(torch.int8), scale
