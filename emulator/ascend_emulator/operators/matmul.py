"""References of plain matrix products: with int8 or int4 weights, and added to a float32 sum."""

from functools import cache

import torch

from ascend_emulator.operators.constraint import Call, shape_of

WEIGHT_QUANT_MATMUL = "npu::npu_weight_quant_batchmatmul"
MATMUL_ADD = "atb::_npu_matmul_add_fp32"
BIAS_DTYPE = {torch.float16: torch.float16, torch.bfloat16: torch.float32}
"""Dtype of a bias by the dtype of rows."""


def weight_quant_batchmatmul(
    x: torch.Tensor,
    weight: torch.Tensor,
    antiquant_scale: torch.Tensor,
    antiquant_offset: torch.Tensor | None = None,
    quant_scale: torch.Tensor | None = None,
    quant_offset: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    antiquant_group_size: int = 0,
    inner_precise: int = 0,
    weight_dtype: int | None = None,
) -> torch.Tensor:
    """Compute ``x @ ((weight + antiquant_offset) * antiquant_scale) + bias``.

    Eight numbers of four bits are in an int32 along the dimension that is contiguous in memory, the
    first in the lowest bits. They are dequantised in the dtype of `x`, as products take them.
    """
    demand = Call("npu_weight_quant_batchmatmul", WEIGHT_QUANT_MATMUL).demand
    is_int4, size = weight.dtype == torch.int32, antiquant_group_size
    fits = x.dtype in BIAS_DTYPE and (is_int4 or weight.dtype == torch.int8)
    demand("dtype", fits, f"{x.dtype} and {weight.dtype}")
    others = {
        "quant_scale": quant_scale is not None,
        "quant_offset": quant_offset is not None,
        f"weight_dtype {weight_dtype}": weight_dtype is not None,
    }
    given = [name for name, applies in others.items() if applies]
    demand("form", not given, given)
    if is_int4 and weight.dim() == 2:
        weight = int4_values(weight)
    fits = x.dim() == weight.dim() == 2 and x.shape[1] == weight.shape[0]
    demand("shapes", fits, f"{shape_of(x)} and {shape_of(weight)}")
    k, n = weight.shape
    fits = size == 0 or (is_int4 and size % 32 == 0 and 32 <= size < k)
    demand("groups", fits, f"groups of {size} for {'int4' if is_int4 else 'int8'}, k = {k}")
    shapes = [(-(-k // size), n)] if size else [(n,), (1, n), (1,), (1, 1)]
    scales = {"antiquant_scale": antiquant_scale, "antiquant_offset": antiquant_offset}
    for argument, tensor in scales.items():
        if tensor is not None:
            fits = shape_of(tensor) in shapes and tensor.dtype == x.dtype
            demand("scales", fits, f"{shape_of(tensor)} {tensor.dtype} for n = {n}", argument)
    demand("inner_precise", inner_precise in (0, 1), inner_precise)
    whole = weight.float()
    if antiquant_offset is not None:
        whole = whole + _of_inputs(antiquant_offset, k, size)
    whole = whole * _of_inputs(antiquant_scale, k, size)
    product = x.float() @ (whole.to(x.dtype).float() if is_int4 else whole)
    if bias is not None:
        fits = shape_of(bias) in ((n,), (1, n)) and bias.dtype == BIAS_DTYPE[x.dtype]
        told = f"{shape_of(bias)} {bias.dtype}, strides {bias.stride()}"
        demand("bias", fits and bias.is_contiguous(), told)
        product = product + bias.float()
    return product.to(x.dtype)


@cache
def torch_sums_exactly() -> bool:
    """Return whether torch adds products of int8 exactly here; without VNNI, oneDNN does not."""
    largest = torch.full((32, 32), 127, dtype=torch.int8)
    return bool((torch._int_mm(largest, largest) == 32 * 127**2).all())


def exact_sums(rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """Multiply int8 ``[m, k]`` by int8 ``[k, n]``: int32 ``[m, n]``, as the kernels add."""
    if torch_sums_exactly():
        return torch._int_mm(rows, columns)
    return (rows.double() @ columns.double()).to(torch.int32)


@cache
def _has_bfloat16_products() -> bool:
    return torch.cpu._is_avx512_bf16_supported()


def rounded_product(rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """Multiply floats, with sums in float32, and round them to the dtype of the rows once."""
    if rows.dtype == torch.bfloat16 and _has_bfloat16_products():
        return rows @ columns  # the same, without copies in float32
    return (rows.float() @ columns.float()).to(rows.dtype)


def int4_values(words: torch.Tensor) -> torch.Tensor:
    """Return the numbers from -8 to 7 in a matrix of int32."""
    is_transposed = words.stride(0) == 1 and words.stride(1) != 1
    rows = (words.t() if is_transposed else words).contiguous().view(torch.int8)
    values = torch.stack(((rows << 4) >> 4, rows >> 4), -1).flatten(1)
    return values.t() if is_transposed else values


def _of_inputs(factors: torch.Tensor, inputs: int, size: int) -> torch.Tensor:
    """Return factors of groups for each input, and others as they are."""
    wide = factors.float()
    return wide.repeat_interleave(size, 0)[:inputs] if size else wide


def matmul_add_fp32(
    x: torch.Tensor,
    weight: torch.Tensor,
    C: torch.Tensor,  # noqa: N803 - as the schema has it
) -> None:
    """Add the product of the transposed ``x`` and ``weight`` to ``C``."""
    demand = Call("npu_matmul_add_fp32", MATMUL_ADD).demand
    fits = x.dtype in BIAS_DTYPE and x.dtype == weight.dtype
    demand("dtype", fits, f"{x.dtype} and {weight.dtype}")
    fits = x.dim() == weight.dim() == 2 and len(x) == len(weight)
    demand("shapes", fits, f"{shape_of(x)} and {shape_of(weight)}")
    fits = shape_of(C) == (x.shape[1], weight.shape[1])
    fits = fits and C.dtype == torch.float32 and C.is_contiguous()
    demand("sum", fits, f"{shape_of(C)} {C.dtype}, strides {C.stride()}")
    C.add_(x.float().t() @ weight.float())
