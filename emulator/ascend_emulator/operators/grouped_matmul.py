"""Reference of the operator that multiplies several pairs of matrices.

This file has the form in which nothing is grouped; `grouped_rows` has the one that groups rows.
"""

import torch

from ascend_emulator.operators.constraint import Call, shape_of
from ascend_emulator.operators.grouped_rows import (
    DTYPES,
    GROUPED_MATMUL,
    INNER_LIMIT,
    grouped_rows,
)
from ascend_emulator.operators.matmul import rounded_product

MAX_TENSORS = 128
HANDLED = ("x", "weight", "bias", "split_item", "group_type")
GROUPED_BY_ROWS = 0
"""``group_type`` with which each group of rows has a weight."""


def grouped_matmul(
    x: list[torch.Tensor],
    weight: list[torch.Tensor],
    *,
    bias: list[torch.Tensor] | None = None,
    scale: list[torch.Tensor] | None = None,
    offset: list[torch.Tensor] | None = None,
    antiquant_scale: list[torch.Tensor] | None = None,
    antiquant_offset: list[torch.Tensor] | None = None,
    per_token_scale: list[torch.Tensor] | None = None,
    group_list: torch.Tensor | None = None,
    activation_input: list[torch.Tensor] | None = None,
    activation_quant_scale: list[torch.Tensor] | None = None,
    activation_quant_offset: list[torch.Tensor] | None = None,
    split_item: int | None = 0,
    group_type: int | None = None,
    group_list_type: int | None = 0,
    act_type: int | None = 0,
    tuning_config: list[int] | None = None,
    output_dtype: int | None = None,
    x_dtype: int | None = None,
    weight_dtype: int | None = None,
    scale_dtype: int | None = None,
    per_token_scale_dtype: int | None = None,
) -> list[torch.Tensor]:
    """Compute ``x[i] @ weight[i] + bias[i]`` for each i, or groups of rows with a weight each."""
    arguments = {name: value for name, value in locals().items() if name not in HANDLED}
    zeros = [name for name in ("act_type", "group_list_type") if not arguments[name]]  # defaults
    given = {n: value for n, value in arguments.items() if value is not None and n not in zeros}
    if group_type == GROUPED_BY_ROWS:
        given |= {"bias": bias} if bias else {}
        return grouped_rows(x, weight, split_item or 0, given)
    demand = Call("npu_grouped_matmul", GROUPED_MATMUL).demand
    is_apart = (group_type, split_item) == (-1, 0) and not given
    demand("not grouped", is_apart, f"group_type {group_type}, split_item {split_item}, {[*given]}")
    biases: list[torch.Tensor | None] = [*bias] if bias else [None] * len(weight)
    counts = f"{len(x)}, {len(weight)} and {len(biases)}"
    same_count = 0 < len(x) == len(weight) == len(biases) <= MAX_TENSORS
    demand("tensor count", same_count, counts)
    dtype = x[0].dtype
    transposed = set()
    for rows, columns, added in zip(x, weight, biases):
        dtypes = f"{rows.dtype} and {columns.dtype}"
        demand("dtype", dtype in DTYPES and rows.dtype == columns.dtype == dtype, dtypes)
        shapes = f"{shape_of(rows)} and {shape_of(columns)}"
        fits = rows.dim() == columns.dim() == 2 and rows.shape[1] == columns.shape[0]
        demand("shapes", fits, shapes)
        demand("contiguous", rows.is_contiguous(), f"strides {rows.stride()}")
        transposed.add((columns.is_contiguous(), columns.t().is_contiguous()))
        inner = max(rows.shape[1], columns.shape[0 if columns.stride(0) == 1 else 1])
        demand("inner limit", inner < INNER_LIMIT, inner)
        if added is not None:
            wanted = torch.float16 if dtype == torch.float16 else torch.float32
            ok = added.dtype == wanted and shape_of(added) == (columns.shape[1],)
            demand("bias", ok, f"{added.dtype} {shape_of(added)}")
    alike = all(plain for plain, _ in transposed) or all(turned for _, turned in transposed)
    demand("transposed alike", alike, [columns.stride() for columns in weight])
    outputs = []
    for rows, columns, added in zip(x, weight, biases):
        if added is None:
            outputs.append(rounded_product(rows, columns))
        else:
            outputs.append((rows.float() @ columns.float() + added.float()).to(dtype))
    return outputs
