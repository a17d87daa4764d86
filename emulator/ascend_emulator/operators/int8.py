"""References of the operators that round to int8 and that multiply int8 matrices."""

from functools import partial

import torch

from ascend_emulator.operators.constraint import Call, Constraint, Enforced, Family, shape_of

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

DYNAMIC_NAME, QUANTIZE_NAME, MATMUL_NAME = (
    "npu_dynamic_quant",
    "npu_quantize",
    "npu_quant_matmul",
)
dynamic_record = partial(Constraint, DYNAMIC_NAME)
quantize_record = partial(Constraint, QUANTIZE_NAME)
matmul_record = partial(Constraint, MATMUL_NAME)
AGREED, DOCSTRING, PRACTICE = Enforced.AGREED, Enforced.DOCSTRING, Enforced.PRACTICE
READING = Enforced.READING
OF_DYNAMIC = "Ascend/op-plugin, its page of `npu_dynamic_quant`"
OF_QUANTIZE = "Ascend/op-plugin, its page of `npu_quantize`; cann/ops-nn 9.1.0, `aclnnQuantize`"
OF_MATMUL = (
    "Ascend/op-plugin, its page of `npu_quant_matmul`; cann/ops-nn 9.1.0, `aclnnQuantMatmulV4`"
)

# In each record: argument, name, demand, docstring_says, practice, source, enforced, why.
DYNAMIC_QUANT_RULES = Family(
    DYNAMIC_NAME,
    [
        dynamic_record(
            "input",
            "dtype",
            "float16 or bfloat16",
            "these two",
            "the same",
            OF_DYNAMIC,
            AGREED,
        ),
        dynamic_record(
            "input", "rank", "at least 2 dimensions", "more than 1", "the same", OF_DYNAMIC, AGREED
        ),
        dynamic_record(
            "smooth_scales, group_index, dst_type, quant_mode",
            "form",
            "int8 by token, without factors",
            "other forms too",
            "the only form that the plugin uses",
            "none needed",
            READING,
            "other forms are outside of this reference",
        ),
        dynamic_record(
            "scale",
            "rows of zeros",
            "zeros and scale 0 for a row of zeros",
            "the largest magnitude over 127",
            "not known",
            "none found",
            READING,
            "padding may be zeros; the product is 0 with any finite scale",
            refused=False,
        ),
    ],
)

QUANTIZE_RULES = Family(
    QUANTIZE_NAME,
    [
        quantize_record(
            "input",
            "dtype",
            "float16, bfloat16 or float32",
            "these three",
            "the same",
            OF_QUANTIZE,
            AGREED,
        ),
        quantize_record(
            "dtype, div_mode",
            "form",
            "int8 (1) or qint8 (12), divided by the scale (div_mode)",
            "other types too, and a form that multiplies",
            "the only form that the plugin uses",
            "none needed",
            READING,
            "other forms are outside of this reference",
        ),
        quantize_record(
            "scales",
            "scale dtype",
            "float32 or bfloat16 scales",
            "these two on A2 and A3",
            "the same",
            OF_QUANTIZE,
            AGREED,
        ),
        quantize_record(
            "zero_points",
            "offset dtype",
            "int8, uint8 or int32 offsets; bfloat16 with a bfloat16 input and scale",
            "these four",
            "bfloat16 only beside bfloat16",
            OF_QUANTIZE,
            PRACTICE,
        ),
        quantize_record(
            "scales, zero_points",
            "sizes",
            "1 element each, or as many as the axis has",
            "one dimension",
            "1 or the size of the axis, both alike",
            OF_QUANTIZE,
            PRACTICE,
        ),
        quantize_record(
            "axis", "axis", "an existing dimension", "the axis of the scales", "the same",
            OF_QUANTIZE, AGREED,
        ),
    ],
)  # fmt: skip

QUANT_MATMUL_RULES = Family(
    MATMUL_NAME,
    [
        matmul_record(
            "x1, x2",
            "dtype",
            "int8",
            "int8, or int4 packed in int32",
            "int8",
            OF_MATMUL,
            AGREED,
            "int4 is outside of this reference",
        ),
        matmul_record(
            "offset, group_sizes, y_scale, x1_dtype, x2_dtype, pertoken_scale_dtype, scale_dtype",
            "form",
            "none of them",
            "for int8 results, int4 and FP8",
            "not used",
            "none needed",
            READING,
            "other forms are outside of this reference",
        ),
        matmul_record(
            "x1, x2",
            "shapes",
            "[m, k] and [k, n]",
            "2 to 6 dimensions",
            "2 dimensions",
            OF_MATMUL,
            AGREED,
        ),
        matmul_record(
            "x2",
            "layout",
            "contiguous, or the transpose of a contiguous matrix",
            "both are shown",
            "a transposed x2 is read as it is (`is_transpose_last_two_dims`)",
            "Ascend/op-plugin, QuantMatmulKernelNpuOpApi.cpp",
            AGREED,
        ),
        matmul_record(
            "x1, x2",
            "inner limit",
            "at most 65535 elements in a row",
            "at most 65535",
            "more with a float32 or bfloat16 scale and a scale for each token",
            OF_MATMUL,
            PRACTICE,
        ),
        matmul_record(
            "output_dtype",
            "result",
            "float16, bfloat16 or int32",
            "int8 too",
            "not int8",
            OF_MATMUL,
            AGREED,
            "int8 results are outside of this reference",
        ),
        matmul_record(
            "scale",
            "scale dtype",
            "float32 or bfloat16 for bfloat16 and int32; for float16 float32, or without a scale "
            "for each token int64 that holds the bits of float32",
            "a table of combinations",
            "the same; torch_npu converts float32 to int64 itself, a launch more",
            OF_MATMUL,
            AGREED,
        ),
        matmul_record(
            "scale",
            "scale shape",
            "[1] or [n]",
            "one dimension of 1 or n",
            "the same",
            OF_MATMUL,
            AGREED,
        ),
        matmul_record(
            "pertoken_scale",
            "token scale",
            "float32 [m], and not with int32 results",
            "float32, one dimension of m",
            "the same",
            OF_MATMUL,
            AGREED,
        ),
        matmul_record(
            "bias",
            "bias",
            "[n] in int32; float32 or bfloat16 too for bfloat16, float32 or float16 too for "
            "float16 with a scale for each token",
            "a table of combinations, which differs from CANN's in bfloat16 for float16",
            "CANN's table",
            OF_MATMUL,
            PRACTICE,
        ),
        matmul_record(
            "bias",
            "order of sums",
            "an int32 bias is added before scaling, others after it",
            "the same",
            "the same",
            OF_MATMUL,
            AGREED,
            refused=False,
        ),
    ],
)


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
    demand = DYNAMIC_QUANT_RULES.call(DYNAMIC_QUANT).demand
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
    """Compute ``round(input / scales + zero_points)`` in int8."""
    demand = QUANTIZE_RULES.call(QUANTIZE).demand
    demand("dtype", input.dtype in (*HALF, torch.float32), input.dtype)
    to_int8 = DTYPE_OF_CODE.get(dtype) in (torch.int8, torch.qint8)
    demand("form", to_int8 and div_mode, f"dtype {dtype}, div_mode {div_mode}")
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
    call = QUANT_MATMUL_RULES.call(QUANT_MATMUL)
    others = {
        "offset": offset,
        "group_sizes": group_sizes,
        "y_scale": y_scale,
        "x1_dtype": x1_dtype,
        "x2_dtype": x2_dtype,
        "pertoken_scale_dtype": pertoken_scale_dtype,
        "scale_dtype": scale_dtype,
    }
    given = [name for name, value in others.items() if value is not None]
    call.demand("form", not given, given)
    result = torch.int8 if output_dtype is None else DTYPE_OF_CODE.get(output_dtype)
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
    sums = (x1.double() @ x2.double()).to(torch.int64)  # exact: below 2 ** 53
    if bias is not None and bias.dtype == torch.int32:
        sums = sums + bias
    if result == torch.int32:
        return sums.to(torch.int32)
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
