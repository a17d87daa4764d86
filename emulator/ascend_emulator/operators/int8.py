"""References of the operators that round to int8 and that multiply int8 matrices."""

import torch

from ascend_emulator.operators import int4_weights
from ascend_emulator.operators.constraint import Call, shape_of
from ascend_emulator.operators.matmul import exact_sums

DYNAMIC_QUANT = "npu::npu_dynamic_quant"
QUANTIZE = "npu::npu_quantize"
QUANT_MATMUL = "npu::npu_quant_matmul"

HALF = (torch.float16, torch.bfloat16)
DTYPE_OF_CODE = {
    1: torch.int8,
    3: torch.int32,
    5: torch.float16,
    12: torch.qint8,
    15: torch.bfloat16,
}
"""Dtypes by the number that torch gives them: operators take numbers."""

COPIED_IF_STRIDED = ("x1",)
LEVELS = 127
INNER_LIMIT = 65535


def round_tokens(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Round float32 rows to int8, each with a scale of its own; also return these scales."""
    scale = x.abs().amax(-1) / LEVELS
    steps = torch.where(scale > 0, scale, torch.ones_like(scale))
    return torch.round(x / steps[..., None]).to(torch.int8), scale


def round_all(x: torch.Tensor, scale: torch.Tensor, offset: torch.Tensor | None) -> torch.Tensor:
    levels = torch.round(x / scale.float() + (0 if offset is None else offset.float()))
    return levels.clamp(-128, 127).to(torch.int8)


def dynamic_quant(
    input: torch.Tensor,
    *,
    smooth_scales: torch.Tensor | None = None,
    group_index: torch.Tensor | None = None,
    dst_type: int | None = None,
    quant_mode: str = "pertoken",
    dst_type_max: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return int8 rows, and the float32 scale of each row."""
    demand = Call("npu_dynamic_quant", DYNAMIC_QUANT).demand
    demand("dtype", input.dtype in HALF, input.dtype)
    demand("rank", input.dim() >= 2, shape_of(input))
    given = {
        "smooth_scales": smooth_scales is not None,
        "group_index": group_index is not None,
        f"dst_type {dst_type}": dst_type not in (None, 1),
        f"quant_mode {quant_mode}": quant_mode != "pertoken",
        f"dst_type_max {dst_type_max}": dst_type_max != 0,
    }
    others = [name for name, applies in given.items() if applies]
    demand("form", not others, others)
    return round_tokens(input.float())


def quantize(
    input: torch.Tensor,
    scales: torch.Tensor,
    zero_points: torch.Tensor | None,
    dtype: int,
    axis: int = 1,
    div_mode: bool = True,
) -> torch.Tensor:
    """Compute ``round(input / scales + zero_points)`` in int8; multiply without `div_mode`."""
    demand = Call("npu_quantize", QUANTIZE).demand
    demand("dtype", input.dtype in (*HALF, torch.float32), input.dtype)
    to_int8 = DTYPE_OF_CODE.get(dtype) in (torch.int8, torch.qint8)
    demand("form", to_int8, f"dtype {dtype}")
    if not div_mode:
        return _multiplied(input, scales, zero_points, axis)
    demand("scale dtype", scales.dtype in (torch.float32, torch.bfloat16), scales.dtype)
    demand("axis", -input.dim() <= axis < input.dim(), f"{axis} for rank {input.dim()}")
    if zero_points is not None:
        plain = zero_points.dtype in (torch.int8, torch.uint8, torch.int32)
        all_bfloat16 = zero_points.dtype == input.dtype == scales.dtype == torch.bfloat16
        demand("offset dtype", plain or all_bfloat16, f"{zero_points.dtype} for {input.dtype}")
        same = zero_points.shape == scales.shape
        demand("sizes", same, f"{shape_of(zero_points)} for {shape_of(scales)}", "zero_points")
    size = input.shape[axis]
    fits = scales.dim() == 1 and scales.numel() in (1, size)
    demand("sizes", fits, f"{shape_of(scales)} for an axis of {size}", "scales")
    shape = [1] * input.dim()
    shape[axis] = scales.numel()
    offset = None if zero_points is None else zero_points.view(shape)
    return round_all(input.float(), scales.view(shape), offset)


def _multiplied(
    input: torch.Tensor, scales: torch.Tensor, zero_points: torch.Tensor | None, axis: int
) -> torch.Tensor:
    """Compute ``round(input * scales + zero_points)`` in int8."""
    demand = Call("npu_quantize", QUANTIZE).demand
    rank = input.dim()
    demand("axis of factors", -2 <= axis < rank <= 8, f"{axis} for rank {rank}")
    axis = rank + min(axis, -1) if axis < 0 else rank - 1
    sizes = [1] * rank
    sizes[axis] = scales.numel()
    shaped = []
    for name, tensor in {"scales": scales, "zero_points": zero_points}.items():
        if tensor is None:
            continue
        kinds = (*HALF, torch.float32) if input.dtype == torch.float32 else (input.dtype,)
        fits = tensor.dtype in kinds and tensor.dtype == scales.dtype
        demand("dtype of factors", fits, f"{tensor.dtype} for {input.dtype}", name)
        fits = list(tensor.shape) in (sizes[axis : axis + 1], sizes)
        fits = fits and tensor.numel() in (1, input.shape[axis])
        demand("shape of factors", fits, f"{shape_of(tensor)} for {shape_of(input)}", name)
        shaped.append(tensor.float().view(sizes))
    levels = torch.round(input.float() * shaped[0] + sum(shaped[1:]))
    return levels.clamp(-128, 127).to(torch.int8)


def quant_matmul(
    x1: torch.Tensor,
    x2: torch.Tensor,
    scale: torch.Tensor,
    *,
    offset: torch.Tensor | None = None,
    pertoken_scale: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    output_dtype: int | None = None,
    x1_dtype: int | None = None,
    x2_dtype: int | None = None,
    pertoken_scale_dtype: int | None = None,
    scale_dtype: int | None = None,
    group_sizes: list[int] | None = None,
    y_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    result = torch.int8 if output_dtype is None else DTYPE_OF_CODE.get(output_dtype)
    others = {
        "offset": offset,
        "group_sizes": group_sizes,
        "y_scale": y_scale,
        "x1_dtype": x1_dtype,
        "x2_dtype": x2_dtype,
        "pertoken_scale_dtype": pertoken_scale_dtype,
        "scale_dtype": scale_dtype,
    }
    if x2.dtype == torch.int32 and x1.dtype != torch.int32:
        call = Call("npu_quant_matmul, int4 weights", QUANT_MATMUL)
        more = {"pertoken_scale": pertoken_scale, "bias": bias}
        return int4_weights.quant_matmul(call, x1, x2, scale, result, others | more)
    call = Call("npu_quant_matmul", QUANT_MATMUL)
    given = [name for name, value in others.items() if value is not None]
    call.demand("form", not given, given)
    call.demand("result", result in (*HALF, torch.int32), result or output_dtype)
    _check_matrices(call, x1, x2, _takes_wide_rows(scale, pertoken_scale))
    _check_scales(call, x1, x2, scale, pertoken_scale, result)
    if bias is not None:
        kinds = {torch.int32}
        if result == torch.bfloat16:
            kinds |= {torch.float32, torch.bfloat16}
        elif result == torch.float16 and pertoken_scale is not None:
            kinds |= {torch.float32, torch.float16}
        fits = shape_of(bias) == (x2.shape[1],) and bias.dtype in kinds
        call.demand("bias", fits, f"{shape_of(bias)} {bias.dtype}")
    sums = exact_sums(x1, x2)
    if bias is not None and bias.dtype == torch.int32:
        sums = sums + bias
    if result == torch.int32:
        return sums
    factor = scale.to(torch.int32).view(torch.float32) if scale.dtype == torch.int64 else scale
    product = sums.float() * factor.float()
    if pertoken_scale is not None:
        product = product * pertoken_scale[:, None]
    if bias is not None and bias.dtype != torch.int32:
        product = product + bias.float()
    return product.to(result)


def _takes_wide_rows(scale: torch.Tensor, pertoken_scale: torch.Tensor | None) -> bool:
    """Return whether rows of more than `INNER_LIMIT` elements are taken."""
    return scale.dtype in (torch.float32, torch.bfloat16) and pertoken_scale is not None


def _check_matrices(call: Call, x1: torch.Tensor, x2: torch.Tensor, wide: bool) -> None:
    for argument, matrix in {"x1": x1, "x2": x2}.items():
        call.demand("dtype", matrix.dtype == torch.int8, matrix.dtype, argument)
    fits = x1.dim() == x2.dim() == 2 and x1.shape[1] == x2.shape[0]
    call.demand("shapes", fits, f"{shape_of(x1)} and {shape_of(x2)}")
    call.demand("layout", x2.is_contiguous() or x2.t().is_contiguous(), f"strides {x2.stride()}")
    transposed = not x2.is_contiguous()
    widths = {"x1": x1.shape[1], "x2": x2.shape[0] if transposed else x2.shape[1]}
    for argument, width in widths.items():
        call.demand("inner limit", wide or width <= INNER_LIMIT, width, argument)


def _check_scales(
    call: Call,
    x1: torch.Tensor,
    x2: torch.Tensor,
    scale: torch.Tensor,
    pertoken_scale: torch.Tensor | None,
    result: torch.dtype | None,
) -> None:
    kinds = {torch.float32, torch.bfloat16}
    if result == torch.float16:
        kinds = {torch.float32} if pertoken_scale is not None else {torch.float32, torch.int64}
    call.demand("scale dtype", scale.dtype in kinds, f"{scale.dtype} for {result}")
    fits = scale.dim() == 1 and scale.numel() in (1, x2.shape[1])
    call.demand("scale shape", fits, f"{shape_of(scale)} for n = {x2.shape[1]}")
    if pertoken_scale is not None:
        is_float = pertoken_scale.dtype == torch.float32 and result != torch.int32
        fits = shape_of(pertoken_scale) == (x1.shape[0],)
        given = f"{shape_of(pertoken_scale)} {pertoken_scale.dtype} for m = {x1.shape[0]}, {result}"
        call.demand("token scale", is_float and fits, given)
