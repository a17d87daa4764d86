"""Reference of the grouped matrix product in which rows are grouped: a weight for each group."""

from collections.abc import Mapping

import torch

from ascend_emulator.operators.constraint import Call, shape_of

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
INNER_LIMIT = 65536
MAX_GROUPS = 1024
CUMULATIVE, COUNTS = 0, 1
"""``group_list_type``: whether the list holds the ends of groups or their sizes."""


def grouped_rows(
    call: Call,
    x: list[torch.Tensor],
    weight: list[torch.Tensor],
    group_list: torch.Tensor | None,
    group_list_type: int,
    split_item: int,
    others: Mapping[str, object],
) -> list[torch.Tensor]:
    """Multiply each group's rows of `x` by its weight; rows of no group hold NaN."""
    rows, columns = one_pair(call, "plain", DTYPES, x, weight, split_item, others)
    sizes = sizes_of_groups(call, group_list, group_list_type, len(columns), len(rows))
    output = torch.full((len(rows), columns.shape[2]), float("nan"), dtype=rows.dtype)
    end = 0
    for group, size in enumerate(sizes):
        start, end = end, end + size
        if size:
            product = rows[start:end].float() @ columns[group].float()
            output[start:end] = product.to(rows.dtype)
    return [output]


def one_pair(
    call: Call,
    form: str,
    dtypes: tuple[torch.dtype, ...],
    x: list[torch.Tensor],
    weight: list[torch.Tensor],
    split_item: int,
    others: Mapping[str, object],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Check a call whose rows are grouped; return rows ``[m, k]`` and weights ``[groups, k, n]``.

    `form` is the name of the demand that none of `others` is given; both tensors have one of
    `dtypes`.
    """
    one = len(x) == len(weight) == 1 and split_item in (2, 3)
    told = f"{len(x)} x, {len(weight)} weights, split_item {split_item}"
    call.demand("one tensor each", one, told)
    given = [name for name, value in others.items() if value is not None]
    call.demand(form, not given, given)
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


def sizes_of_groups(
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
