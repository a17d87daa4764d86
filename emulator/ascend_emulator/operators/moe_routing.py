"""References of the operators that bring tokens to experts and results back to tokens.

Rows past the last active pair are undefined on a device. They hold NaN here, so that a result that
depends on one shows it.
"""

import torch

from ascend_emulator.operators.constraint import Call, shape_of

INIT_ROUTING = "npu::npu_moe_init_routing_v2"
TOKEN_PERMUTE = "npu::npu_moe_token_permute"
TOKEN_UNPERMUTE = "npu::_npu_moe_token_unpermute"
"""The operator to which ``npu_moe_token_unpermute`` dispatches; its second result is for
gradients."""

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
MAX_EXPERTS = 10240
MAX_EXPERTS_AS_PAIRS = 5120
MAX_TOP_K = 512
MAX_PAIRS = 16777215
"""Pairs that a sort takes are fewer."""
CUMULATIVE, COUNTS, PAIRS = 0, 1, 2
"""``expert_tokens_num_type``: how tokens of each expert are counted."""
NO_QUANTISATION, DYNAMIC_INT8 = -1, 1
UNDEFINED_INT8 = -128
"""What undefined rows of int8 hold, which have no NaN."""


def init_routing_v2(
    x: torch.Tensor,
    expert_idx: torch.Tensor,
    *,
    scale: torch.Tensor | None = None,
    offset: torch.Tensor | None = None,
    active_num: int = -1,
    expert_capacity: int = -1,
    expert_num: int = -1,
    drop_pad_mode: int = 0,
    expert_tokens_num_type: int = 0,
    expert_tokens_num_flag: bool = False,
    quant_mode: int = -1,
    active_expert_range: list[int] = [],  # noqa: B006 - as the schema has it
    row_idx_type: int = 0,
    x_dtype: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sort rows of `x` by expert.

    The results are the rows, where each pair's row went, the tokens of each expert, and the scales
    of rows.
    """
    demand = Call("npu_moe_init_routing_v2", INIT_ROUTING).demand
    is_quantised = quant_mode != NO_QUANTISATION
    demand("quant_mode", quant_mode in (NO_QUANTISATION, DYNAMIC_INT8), quant_mode)
    ok = x.dtype in DTYPES or (x.dtype == torch.int8 and not is_quantised)
    demand("dtype", ok and x_dtype is None, f"{x.dtype}, x_dtype {x_dtype}")
    fits = x.dim() == expert_idx.dim() == 2 and len(x) == len(expert_idx)
    demand("shapes", fits, f"{shape_of(x)} and {shape_of(expert_idx)}")
    demand("ids dtype", expert_idx.dtype == torch.int32, expert_idx.dtype)
    as_pairs = expert_tokens_num_type == PAIRS
    most = MAX_EXPERTS_AS_PAIRS if as_pairs else MAX_EXPERTS
    demand("expert_num", 0 < expert_num <= most, expert_num)
    active = list(active_expert_range)
    ok = len(active) == 2 and 0 <= active[0] < active[1] <= expert_num
    demand("active range", ok, f"{active} of {expert_num}")
    demand("unsupported mode", drop_pad_mode == row_idx_type == 0, (drop_pad_mode, row_idx_type))
    asked = expert_tokens_num_type in (COUNTS, PAIRS) and expert_tokens_num_flag
    demand("expert tokens", asked, (expert_tokens_num_type, expert_tokens_num_flag))
    pairs = expert_idx.numel()
    demand("active_num", active_num == pairs, f"{active_num} with {pairs} pairs")
    start, end = active
    allowed = [(end - start, x.shape[1]), (1, x.shape[1])] if is_quantised else [(len(x),)]
    ok = scale is None or (scale.dtype == torch.float32 and shape_of(scale) in allowed)
    demand("scale", ok and offset is None, "offset" if scale is None else shape_of(scale))
    ids = expert_idx.flatten().long()
    demand("ids", bool((ids <= expert_num).all()), int(ids.max()) if pairs else 0)

    is_active = (ids >= start) & (ids < end)
    key = torch.where(is_active, ids, torch.full_like(ids, end))
    order = key.argsort(stable=True)[: int(is_active.sum())]  # pairs of active experts
    tokens = order // max(expert_idx.shape[1], 1)
    row_idx = torch.full((pairs,), -1, dtype=torch.int32)
    row_idx[order] = torch.arange(len(order), dtype=torch.int32)
    counts = torch.bincount(ids[is_active] - start, minlength=end - start)
    if as_pairs:
        present = counts.nonzero().flatten()
        tokens_of = torch.zeros(expert_num, 2, dtype=torch.int64)
        tokens_of[: len(present)] = torch.stack((present + start, counts[present]), 1)
    else:
        tokens_of = counts
    scales = torch.full((pairs,), float("nan"))
    rows = x[tokens]
    if is_quantised:
        rows = rows.float()
        if scale is not None:
            rows = rows * (scale if len(scale) == 1 else scale[ids[order] - start])
        largest = rows.abs().amax(-1) / 127 if rows.numel() else rows.new_zeros(len(rows))
        scales[: len(order)] = largest
        rows = (rows / largest.clamp(min=torch.finfo(torch.float32).tiny)[:, None]).round()
        expanded = torch.full((pairs, x.shape[1]), UNDEFINED_INT8, dtype=torch.int8)
    else:
        undefined = UNDEFINED_INT8 if x.dtype == torch.int8 else float("nan")
        expanded = torch.full((pairs, x.shape[1]), undefined, dtype=x.dtype)
        if scale is not None:
            scales[: len(order)] = scale[tokens]
    expanded[: len(order)] = rows.to(expanded.dtype)
    return expanded, row_idx, tokens_of, scales


def token_permute(
    tokens: torch.Tensor,
    indices: torch.Tensor,
    num_out_tokens: int | None = None,
    padded_mode: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sort a row for each pair by its expert; also return where each pair's row went, int32.

    `num_out_tokens` are the rows that are kept, from behind if negative; 0 and None keep all.
    """
    demand = Call("npu_moe_token_permute", TOKEN_PERMUTE).demand
    demand("dtype", tokens.dtype in (*DTYPES, torch.int8), tokens.dtype)
    demand("ids dtype", indices.dtype in (torch.int32, torch.int64), indices.dtype)
    fits = tokens.dim() == 2 and indices.dim() in (1, 2) and len(tokens) == len(indices)
    top_k = 1 if indices.dim() < 2 else indices.shape[1]
    given = f"{shape_of(tokens)} and {shape_of(indices)}"
    demand("shapes", fits and top_k <= MAX_TOP_K, given)
    demand("number of pairs", indices.numel() < MAX_PAIRS, given)
    demand("padded_mode", not padded_mode, padded_mode)
    pairs = indices.flatten().argsort(stable=True)
    return tokens[pairs[: num_out_tokens or None] // top_k], pairs.argsort().int()


def token_unpermute(
    permuted_tokens: torch.Tensor,
    sorted_indices: torch.Tensor,
    probs: torch.Tensor | None = None,
    padded_mode: bool = False,
    restore_shape: list[int] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add each token's rows, weighted, to ``[T, H]``; the second result is the input again."""
    demand = Call("npu_moe_token_unpermute", TOKEN_UNPERMUTE).demand
    demand("unsupported mode", not padded_mode and not restore_shape, (padded_mode, restore_shape))
    dtypes = [permuted_tokens.dtype, *(() if probs is None else (probs.dtype,))]
    demand("dtype", all(dtype in DTYPES for dtype in dtypes), dtypes)
    pairs = sorted_indices.numel()
    shape = (pairs, 1) if probs is None else shape_of(probs)
    fits = permuted_tokens.dim() == 2 and sorted_indices.dim() == 1 and len(shape) == 2
    fits = fits and shape[0] * shape[1] == pairs and shape[1] <= MAX_TOP_K
    given = f"{shape_of(permuted_tokens)}, {shape_of(sorted_indices)} and {shape}"
    demand("shapes", fits, given)
    demand("indices dtype", sorted_indices.dtype == torch.int32, sorted_indices.dtype)
    weights = torch.ones(shape) if probs is None else probs.float()
    rows = sorted_indices.long().view(shape)
    is_read = (rows < len(permuted_tokens)) & (weights != 0)
    read = rows[is_read]
    demand("negative index", bool((read >= 0).all()), int(read.min()) if len(read) else 0)
    demand("repeated index", len(read.unique()) == len(read), f"{len(read)} rows")
    output = torch.zeros(shape[0], permuted_tokens.shape[1])
    for k in range(shape[1]):
        mine = is_read[:, k]
        output[mine] += permuted_tokens[rows[mine, k]].float() * weights[mine, k, None]
    return output.to(permuted_tokens.dtype), permuted_tokens


def old_token_unpermute(
    permuted_tokens: torch.Tensor,
    sorted_indices: torch.Tensor,
    probs: torch.Tensor | None = None,
    padded_mode: bool = False,
    restore_shape: list[int] | None = None,
) -> torch.Tensor:
    """Do as `token_unpermute`, by the name and with the one result of torch_npu 2.10."""
    given = permuted_tokens, sorted_indices, probs, padded_mode, restore_shape
    return token_unpermute(*given)[0]
