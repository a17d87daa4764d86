"""Reference of the grouped matrix product of int8 rows and int8 weights, with scales for both."""

from collections.abc import Mapping
from functools import partial

import torch

from ascend_emulator.operators.constraint import Call, Constraint, Enforced, Family, shape_of
from ascend_emulator.operators.grouped_rows import one_pair, sizes_of_groups

NAME = "npu_grouped_matmul, int8 rows"
SCALE_DTYPE = {torch.bfloat16: torch.bfloat16, torch.float16: torch.float32}
"""Dtype of the weights' scales by the result's dtype."""

RESULTS = {5: torch.float16, 15: torch.bfloat16}
"""Dtypes of results by the number that torch gives them."""

record = partial(Constraint, NAME)
AGREED, PRACTICE, READING = Enforced.AGREED, Enforced.PRACTICE, Enforced.READING
DOCUMENTATION = (
    "Ascend/op-plugin, its page of `npu_grouped_matmul`; cann/ops-transformer 9.1.0, "
    "`aclnnGroupedMatmulV5`, A8W8"
)

# In each record: argument, name, demand, docstring_says, practice, source, enforced, why.
GROUPED_INT8_RULES = Family(
    NAME,
    [
        record(
            "x, weight, split_item",
            "one tensor each",
            "one x, one weight and split_item 2 or 3",
            "one of each when quantised",
            "the same",
            DOCUMENTATION,
            AGREED,
        ),
        record(
            "bias, offset, act_type, tuning_config, ...",
            "form",
            "scales of weights and of rows, neither bias nor activation",
            "other forms too",
            "experts without biases",
            "none needed",
            READING,
            "other forms are outside of this reference",
        ),
        record("x, weight", "dtype", "int8", "int8", "the same", DOCUMENTATION, AGREED),
        record(
            "x, weight",
            "shapes",
            "[m, k] and [groups, k, n]",
            "the same",
            "the same",
            DOCUMENTATION,
            AGREED,
        ),
        record(
            "x, weight",
            "contiguous",
            "a contiguous x; a weight that is contiguous, or transposed in its last two dimensions",
            "x is not transposed; a weight may be",
            "the same",
            DOCUMENTATION,
            AGREED,
        ),
        record(
            "x, weight",
            "inner limit",
            "less than 65536 elements in a row",
            "the limit has a name only",
            "less than 65536",
            DOCUMENTATION,
            PRACTICE,
        ),
        record(
            "output_dtype",
            "result",
            "float16 or bfloat16",
            "int8 and int32, too",
            "these two",
            DOCUMENTATION,
            AGREED,
            "other results are outside of this reference",
        ),
        record(
            "scale",
            "scale",
            "[groups, n], bfloat16 for bfloat16 and float32 for float16",
            "the same on A2 and A3",
            "the same",
            DOCUMENTATION,
            AGREED,
        ),
        record(
            "per_token_scale",
            "token scale",
            "float32 [m]",
            "the same",
            "the same",
            DOCUMENTATION,
            AGREED,
        ),
        record(
            "group_list",
            "group list",
            "int64 on the device, a value for each group, at most 1024; two or more as sizes",
            "the same",
            "the same",
            DOCUMENTATION,
            AGREED,
        ),
        record(
            "group_list",
            "group sizes",
            "sizes of 0 or more, or ends that don't decrease, of all rows at most",
            "what no group has is not written",
            "fewer rows, where other ranks have the other experts",
            DOCUMENTATION,
            PRACTICE,
        ),
        record(
            "output",
            "rows of no group",
            "undefined rows past the last group",
            "not updated",
            "not written",
            DOCUMENTATION,
            READING,
            refused=False,
        ),
    ],
)


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
