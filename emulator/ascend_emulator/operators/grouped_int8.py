"""Reference of the grouped matrix product of int8 rows and int8 weights, with scales for both."""

from collections.abc import Mapping

import torch

from ascend_emulator.operators.constraint import Call, shape_of
from ascend_emulator.operators.grouped_rows import one_pair, sizes_of_groups

SCALE_DTYPE = {torch.bfloat16: torch.bfloat16, torch.float16: torch.float32}
"""Dtype of the weights' scales by the result's dtype."""

RESULTS = {5: torch.float16, 15: torch.bfloat16}
"""Dtypes of results by the number that torch gives them."""


def grouped_int8(
    call: Call,
    x: list[torch.Tensor],
    weight: list[torch.Tensor],
    scale: list[torch.Tensor] | None,
    per_token_scale: list[torch.Tensor] | None,
    group_list: torch.Tensor | None,
    group_list_type: int,
    split_item: int,
    output_dtype: int | None,
    others: Mapping[str, object],
) -> list[torch.Tensor]:
    """Multiply each group's rows of `x` by its weight and scales; rows of no group hold NaN."""
    rows, columns = one_pair(call, "form", (torch.int8,), x, weight, split_item, others)
    result = RESULTS.get(-1 if output_dtype is None else output_dtype)
    call.demand("result", result is not None, output_dtype)
    assert result is not None
    groups = len(columns)
    factors = scale[0] if scale else None
    ok = factors is not None and factors.dtype == SCALE_DTYPE[result]
    ok = ok and factors is not None and shape_of(factors) == (groups, columns.shape[2])
    call.demand("scale", ok, None if factors is None else f"{shape_of(factors)} {factors.dtype}")
    of_rows = per_token_scale[0] if per_token_scale else None
    ok = of_rows is not None and of_rows.dtype == torch.float32
    ok = ok and of_rows is not None and shape_of(of_rows) == (len(rows),)
    given_rows = None if of_rows is None else f"{shape_of(of_rows)} {of_rows.dtype}"
    call.demand("token scale", ok, given_rows)
    sizes = sizes_of_groups(call, group_list, group_list_type, groups, len(rows))
    assert factors is not None and of_rows is not None
    output = torch.full((len(rows), columns.shape[2]), torch.nan, dtype=result)
    end = 0
    for group, size in enumerate(sizes):
        start, end = end, end + size
        if size:
            sums = rows[start:end].double() @ columns[group].double()  # exact
            product = sums.float() * factors[group].float() * of_rows[start:end, None]
            output[start:end] = product.to(result)
    return [output]
