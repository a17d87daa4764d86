"""Reference of the grouped matrix product in which rows are grouped: a weight for each group.

Rows and weights are float, or both are int8 with scales for both.
"""

from typing import Any

import torch

from ascend_emulator.operators.constraint import Call, shape_of

GROUPED_MATMUL = "npu::npu_grouped_matmul"
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
INNER_LIMIT = 65536
MAX_GROUPS = 1024
CUMULATIVE, COUNTS = 0, 1
"""``group_list_type``: whether the list holds the ends of groups or their sizes."""
GROUPS = ("group_list", "group_list_type")
SCALES = ("scale", "per_token_scale", "output_dtype")
SCALE_DTYPE = {torch.bfloat16: torch.bfloat16, torch.float16: torch.float32}
"""Dtype of the scales of int8 weights by the result's dtype."""
RESULTS = {5: torch.float16, 15: torch.bfloat16}
"""Dtypes of results by the number that torch gives them."""


def grouped_rows(
    x: list[torch.Tensor],
    weight: list[torch.Tensor],
    split_item: int,
    given: dict[str, Any],
) -> list[torch.Tensor]:
    """Multiply each group's rows of `x` by its weight; rows of no group hold NaN.

    `given` are all other arguments that are not left out. With int8, results are multiplied by
    scales of weights and of rows.
    """
    is_int8 = x[0].dtype == torch.int8
    family = "npu_grouped_matmul, int8 rows" if is_int8 else "npu_grouped_matmul, rows"
    call = Call(family, GROUPED_MATMUL)
    taken = (*GROUPS, *SCALES) if is_int8 else GROUPS
    others = [name for name in given if name not in taken]
    call.demand("form" if is_int8 else "plain", not others, others)
    rows, columns = _one_pair(call, (torch.int8,) if is_int8 else DTYPES, x, weight, split_item)
    dtype, scales = rows.dtype, None
    if is_int8:
        dtype, *scales = _scales(call, given, len(rows), columns)
    listed, kind = (given.get(name) for name in GROUPS)
    sizes = _sizes_of_groups(call, listed, kind or 0, len(columns), len(rows))
    output = torch.full((len(rows), columns.shape[2]), torch.nan, dtype=dtype)
    wide = torch.float64 if is_int8 else torch.float32  # sums of int8 are exact
    end = 0
    for group, size in enumerate(sizes):
        start, end = end, end + size
        if size:
            product = (rows[start:end].to(wide) @ columns[group].to(wide)).float()
            if scales:
                product = product * scales[0][group].float() * scales[1][start:end, None]
            output[start:end] = product.to(dtype)
    return [output]


def _scales(
    call: Call, given: dict[str, Any], num_rows: int, columns: torch.Tensor
) -> tuple[torch.dtype, torch.Tensor, torch.Tensor]:
    """Return the result's dtype, and the scales of weights ``[groups, n]`` and of rows ``[m]``."""
    code: Any = given.get("output_dtype")
    call.demand("result", code in RESULTS, code)
    dtype = RESULTS[code]
    found = []
    for name, argument, shape, scale_dtype in (
        ("scale", "scale", (len(columns), columns.shape[2]), SCALE_DTYPE[dtype]),
        ("token scale", "per_token_scale", (num_rows,), torch.float32),
    ):
        scales = [*(given.get(argument) or ())][:1]
        ok = [(shape_of(each), each.dtype) for each in scales] == [(shape, scale_dtype)]
        told = f"{shape_of(scales[0])} {scales[0].dtype}" if scales else None
        call.demand(name, ok, told)
        found += scales
    return dtype, found[0], found[1]


def _one_pair(
    call: Call,
    dtypes: tuple[torch.dtype, ...],
    x: list[torch.Tensor],
    weight: list[torch.Tensor],
    split_item: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rows ``[m, k]`` and weights ``[groups, k, n]``, both of one of these dtypes."""
    one = len(x) == len(weight) == 1 and split_item in (2, 3)
    told = f"{len(x)} x, {len(weight)} weights, split_item {split_item}"
    call.demand("one tensor each", one, told)
    rows, columns = x[0], weight[0]
    told = f"{rows.dtype} and {columns.dtype}"
    call.demand("dtype", rows.dtype in dtypes and rows.dtype == columns.dtype, told)
    fits = rows.dim() == 2 and columns.dim() == 3 and rows.shape[1] == columns.shape[1]
    call.demand("shapes", fits, f"{shape_of(rows)} and {shape_of(columns)}")
    is_transposed = columns.transpose(1, 2).is_contiguous()
    dense = rows.is_contiguous() and (columns.is_contiguous() or is_transposed)
    call.demand("contiguous", dense, f"strides {rows.stride()} and {columns.stride()}")
    inner = max(rows.shape[1], columns.shape[1 if is_transposed else 2])
    call.demand("inner limit", inner < INNER_LIMIT, inner)
    return rows, columns


def _sizes_of_groups(
    call: Call, group_list: torch.Tensor | None, kind: int, groups: int, num_rows: int
) -> list[int]:
    ok = group_list is not None and (
        group_list.dtype == torch.int64
        and shape_of(group_list) == (groups,)
        and groups <= MAX_GROUPS
        and kind in (CUMULATIVE, COUNTS)
        and (groups > 1 or kind == CUMULATIVE)
    )
    listed = None if group_list is None else (group_list.dtype, shape_of(group_list))
    call.demand("group list", ok, f"{listed} of type {kind} for {groups} weights")
    assert group_list is not None
    sizes = group_list
    if kind == CUMULATIVE:
        sizes = torch.diff(group_list, prepend=group_list.new_zeros(1))
    ok = bool((sizes >= 0).all()) and int(sizes.sum()) <= num_rows
    call.demand("group sizes", ok, f"{group_list.tolist()} for {num_rows} rows")
    return sizes.tolist()
