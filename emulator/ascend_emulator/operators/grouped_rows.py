"""Reference of the grouped matrix product in which rows are grouped: a weight for each group.

Rows and weights are float, or both are int8 with scales for both, or without any for int32 sums.
Rows may be float beside weights of four bits, which have scales and offsets.
"""

from typing import Any

import torch

from ascend_emulator.operators import int4_weights
from ascend_emulator.operators.constraint import Call, shape_of
from ascend_emulator.operators.matmul import exact_sums, int4_values, rounded_product

GROUPED_MATMUL = "npu::npu_grouped_matmul"
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
INNER_LIMIT = 65536
MAX_GROUPS = 1024
UNDEFINED_INT32 = -(1 << 31)
"""What undefined rows of int32 hold, which have no NaN."""
CUMULATIVE, COUNTS = 0, 1
"""``group_list_type``: whether the list holds the ends of groups or their sizes."""
GROUPS = ("group_list", "group_list_type")
SCALES = ("scale", "per_token_scale", "output_dtype")
ANTIQUANT = ("antiquant_scale", "antiquant_offset")
SCALE_DTYPE = {torch.bfloat16: torch.bfloat16, torch.float16: torch.float32}
"""Dtype of the scales of int8 weights by the result's dtype."""
RESULTS = {3: torch.int32, 5: torch.float16, 15: torch.bfloat16}
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
    is_int8, is_int4 = x[0].dtype == torch.int8, weight[0].dtype == torch.int32
    if is_int8 and is_int4:
        return _by_packed_weights(x, weight, split_item, given)
    kind = "int4 weights" if is_int4 else "int8 rows" if is_int8 else "rows"
    call = Call(f"npu_grouped_matmul, {kind}", GROUPED_MATMUL)
    taken = (*GROUPS, *(SCALES if is_int8 else ANTIQUANT if is_int4 else ()))
    others = [name for name in given if name not in taken]
    call.demand("form" if is_int8 or is_int4 else "plain", not others, others)
    if is_int4:
        weight = [_dequantised(call, x[0], weight[0], *(given.get(name) for name in ANTIQUANT))]
    rows, columns = _one_pair(call, (torch.int8,) if is_int8 else DTYPES, x, weight, split_item)
    dtype, scales = rows.dtype, None
    if is_int8:
        dtype, scales = _scales(call, given, len(rows), columns)
    listed, form = (given.get(name) for name in GROUPS)
    sizes = _sizes_of_groups(call, listed, form or 0, len(columns), len(rows))
    undefined = UNDEFINED_INT32 if dtype == torch.int32 else torch.nan
    output = torch.full((len(rows), columns.shape[2]), undefined, dtype=dtype)
    multiply = exact_sums if is_int8 else rounded_product
    end = 0
    for group, size in enumerate(sizes):
        start, end = end, end + size
        if size:
            product = multiply(rows[start:end], columns[group])
            if scales:
                product = product.float() * scales[0][group].float() * scales[1][start:end, None]
            output[start:end] = product.to(dtype)
    return [output]


def _by_packed_weights(
    x: list[torch.Tensor], weight: list[torch.Tensor], split_item: int, given: dict[str, Any]
) -> list[torch.Tensor]:
    """Multiply int8 rows by weights of four bits."""
    call = Call("npu_grouped_matmul, int8 rows and int4 weights", GROUPED_MATMUL)
    _demand_one_each(call, x, weight, split_item)
    others = [name for name in given if name not in (*GROUPS, *SCALES, "bias")]
    call.demand("form", not others, others)
    code: Any = given.get("output_dtype")
    dtype = RESULTS.get(code)
    call.demand("result", dtype in int4_weights.HALF, code)
    (rows,), (words,) = x, weight
    int4_weights.check_grouped(call, rows, words, given)
    listed, form = (given.get(name) for name in GROUPS)
    call.demand("group list", form == COUNTS or len(words) == 1, f"type {form}")
    output = torch.full((len(rows), 8 * words.shape[2]), torch.nan, dtype=dtype)
    end = 0
    for group, size in enumerate(_sizes_of_groups(call, listed, form or 0, len(words), len(rows))):
        start, end = end, end + size
        scales, added = (given[name][0][group] for name in ("scale", "bias"))
        tokens = given["per_token_scale"][0][start:end]
        levels = int4_values(words[group])
        output[start:end] = int4_weights.product(rows[start:end], levels, scales, added, tokens)
    return [output]


def _demand_one_each(
    call: Call, x: list[torch.Tensor], weight: list[torch.Tensor], split_item: int
) -> None:
    one = len(x) == len(weight) == 1 and split_item in (2, 3)
    told = f"{len(x)} x, {len(weight)} weights, split_item {split_item}"
    call.demand("one tensor each", one, told)


def _dequantised(
    call: Call, rows: torch.Tensor, words: torch.Tensor, scales: Any, offsets: Any
) -> torch.Tensor:
    """Return weights ``[groups, k, n]`` in the dtype of the rows, as products take them."""
    call.demand("words", words.dim() == 3 and words.is_contiguous(), shape_of(words))
    call.demand("dtype", rows.dtype in SCALE_DTYPE, rows.dtype)
    levels = torch.stack([int4_values(each) for each in words]).float()
    groups, k, n = levels.shape
    found: list[torch.Tensor] = []
    for name, given in (("scales", scales), ("offsets", offsets)):
        told = [f"{shape_of(each)} {each.dtype}" for each in given or ()]
        call.demand(name, len(told) == 1 and given[0].dtype == rows.dtype, told)
        shape, parts = shape_of(given[0]), given[0].shape[1] if given[0].dim() == 3 else 1
        fits = shape in ((groups, n), (groups, parts, n)) and k % parts == 0
        call.demand(name, fits and (not found or parts == len(found[0][0])), told)
        found.append(given[0].float().view(groups, parts, n))
    scale, offset = (each.repeat_interleave(k // each.shape[1], 1) for each in found)
    return ((levels + offset) * scale).to(rows.dtype)


def _scales(
    call: Call, given: dict[str, Any], num_rows: int, columns: torch.Tensor
) -> tuple[torch.dtype, list[torch.Tensor]]:
    """Return the result's dtype, and the scales of weights ``[groups, n]`` and of rows ``[m]``.

    Sums in int32 have none.
    """
    code: Any = given.get("output_dtype")
    call.demand("result", code in RESULTS, code)
    dtype = RESULTS[code]
    found = []
    for name, argument, shape, scale_dtype in (
        ("scale", "scale", (len(columns), columns.shape[2]), SCALE_DTYPE.get(dtype)),
        ("token scale", "per_token_scale", (num_rows,), torch.float32),
    ):
        scales = [*(given.get(argument) or ())][:1]
        wanted = [] if dtype == torch.int32 else [(shape, scale_dtype)]
        ok = [(shape_of(each), each.dtype) for each in scales] == wanted
        told = f"{shape_of(scales[0])} {scales[0].dtype}" if scales else None
        call.demand(name, ok, told)
        found += scales
    return dtype, found


def _one_pair(
    call: Call,
    dtypes: tuple[torch.dtype, ...],
    x: list[torch.Tensor],
    weight: list[torch.Tensor],
    split_item: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rows ``[m, k]`` and weights ``[groups, k, n]``, both of one of these dtypes."""
    _demand_one_each(call, x, weight, split_item)
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
