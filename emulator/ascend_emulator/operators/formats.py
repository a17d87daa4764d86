"""The reference of the operator that gives a tensor another format of storage."""

from typing import Any

import torch

from ascend_emulator.operators.constraint import Call

FORMAT_CAST = "npu::npu_format_cast"
ND, FRACTAL_NZ = 2, 29


def cast(
    input: torch.Tensor,
    acl_format: int,
    *,
    customize_dtype: int | None = None,
    input_dtype: int | None = None,
) -> torch.Tensor:
    """Return a copy for FRACTAL_NZ, the tensor itself for ND: nothing here sees formats."""
    demand = Call("npu_format_cast", FORMAT_CAST).demand
    demand("format", acl_format in (ND, FRACTAL_NZ), acl_format)
    given: list[Any] = [customize_dtype, input_dtype]
    demand("dtypes", given == [None, None], given)
    return input.clone() if acl_format == FRACTAL_NZ else input
