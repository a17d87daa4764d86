"""Reference of the operator that multiplies batches of matrices and transposes around it.

The operator copies strided inputs first, weights among them (``l0op::Contiguous`` of both in
``aclnn_transpose_batch_mat_mul.cpp``, cann/ops-nn v8.5.0 to 9.2.0-beta.1).
"""

from collections.abc import Sequence

import torch

from ascend_emulator.operators.constraint import Call, shape_of

TRANSPOSE_MATMUL = "npu::npu_transpose_batchmatmul"
LIMIT = 65536


def transpose_batchmatmul(
    input: torch.Tensor,
    weight: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
    perm_x1: Sequence[int] | None = None,
    perm_x2: Sequence[int] | None = None,
    perm_y: Sequence[int] | None = None,
    batch_split_factor: int | None = 1,
) -> torch.Tensor:
    """Multiply each batch of input by its weight, ``[M, B, N]``; sums are in float32."""
    demand = Call("npu_transpose_batchmatmul", TRANSPOSE_MATMUL).demand
    dtypes = {input.dtype, weight.dtype}
    allowed = {torch.float16, torch.bfloat16, torch.float32}
    demand("dtype", len(dtypes) == 1 and dtypes <= allowed, dtypes, "input")
    first, second, last = (
        list(perm or default)
        for perm, default in (
            (perm_x1, (0, 1, 2)),
            (perm_x2, (0, 1, 2)),
            (perm_y, (1, 0, 2)),
        )
    )
    fits = first in ([0, 1, 2], [1, 0, 2]) and second == [0, 1, 2] and last == [1, 0, 2]
    demand("permutations", fits, f"{first}, {second}, {last}")
    fits = input.dim() == weight.dim() == 3
    batches = input.permute(first) if fits else input
    fits = fits and batches.shape[0] == weight.shape[0] and batches.shape[2] == weight.shape[1]
    demand("shapes", fits, f"{shape_of(input)} and {shape_of(weight)}")
    count, inner, columns = weight.shape
    fits = inner % 16 == 0 and columns % 16 == 0
    fits = fits and (inner * count if first == [1, 0, 2] else inner) < LIMIT
    demand("sizes", fits, f"{count} batches, inner size {inner}, last size {columns}")
    unused = bias is None and scale is None and batch_split_factor == 1
    demand("unused arguments", unused, f"{bias}, {scale}, {batch_split_factor}")
    result = torch.bmm(batches.float(), weight.float()).to(input.dtype)
    return result.transpose(0, 1).contiguous()
