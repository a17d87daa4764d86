"""Reference of the operator that adds the rows of each token's experts, some of which are missing.

Rows are taken as rows of experts with a capacity, ``[E, C, H]``, the only form for which the
documentation allows the index -1. The product ``E * C`` is the number of pairs, so the sorted rows
of a grouped product, seen as ``[T * K, 1, H]``, are such rows as well.
"""

import torch

from ascend_emulator.operators.constraint import Call, shape_of

FINALIZE_ROUTING = "npu::npu_moe_finalize_routing"

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
DROPPED_BY_ROW = 3
"""``drop_pad_mode``: pairs may lack a row, and those of a token lie side by side."""
MAX_WIDTH_OF_FOUR = 8192
NO_ROW = -1


def finalize_routing(
    expanded_permuted_rows: torch.Tensor,
    skip1: torch.Tensor | None,
    skip2: torch.Tensor | None,
    bias: torch.Tensor | None,
    scales: torch.Tensor | None,
    expanded_src_to_dst_row: torch.Tensor,
    export_for_source_row: torch.Tensor | None,
    drop_pad_mode: int | None = 0,
    k: int | None = 1,
) -> torch.Tensor:
    """Add each token's rows, weighted by `scales`, to ``[T, H]`` in their dtype."""
    demand = Call("npu_moe_finalize_routing", FINALIZE_ROUTING).demand
    rows, indices = expanded_permuted_rows, expanded_src_to_dst_row
    demand("unsupported mode", drop_pad_mode == DROPPED_BY_ROW, drop_pad_mode)
    given = [x is not None for x in (skip1, skip2, bias, export_for_source_row)]
    demand("unsupported argument", not any(given) and k == 1, f"{given}, k {k}")
    scale_dtype = rows.dtype if scales is None else scales.dtype
    mixed = (rows.dtype, scale_dtype) == (torch.bfloat16, torch.float32)
    ok = rows.dtype in DTYPES and (scale_dtype == rows.dtype or mixed)
    demand("dtype", ok, f"{rows.dtype} and {scale_dtype}")
    shape = (indices.numel(), 1) if scales is None else shape_of(scales)
    fits = rows.dim() == 3 and indices.dim() == 1 and len(shape) == 2
    fits = fits and shape[0] * shape[1] == indices.numel() and len(rows) >= shape[1]
    demand("shapes", fits, f"{shape_of(rows)}, {shape_of(indices)} and {shape}")
    demand("indices dtype", indices.dtype == torch.int32, indices.dtype)
    width = rows.shape[2]
    demand("cut rows", shape[1] != 4 or width <= MAX_WIDTH_OF_FOUR, f"{width} with K {shape[1]}")
    flat = rows.flatten(0, 1)
    row_of_pair = indices.long().view(shape)
    ok = bool(((row_of_pair >= NO_ROW) & (row_of_pair < len(flat))).all())
    demand("indices", ok, f"{indices.tolist()} of {len(flat)} rows")
    adds_in = torch.float16 if rows.dtype == torch.float16 else torch.float32
    weights = torch.ones(shape, dtype=adds_in) if scales is None else scales.to(adds_in)
    output = torch.zeros(shape[0], width, dtype=adds_in)
    for nth in range(shape[1]):
        mine = row_of_pair[:, nth] != NO_ROW
        output[mine] += flat[row_of_pair[mine, nth]].to(adds_in) * weights[mine, nth, None]
    return output.to(rows.dtype)
