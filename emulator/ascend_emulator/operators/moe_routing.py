"""References of the operators that bring tokens to experts and results back to tokens.

Rows past the last active pair are undefined on a device. They hold NaN here, so that a result that
depends on one shows it.
"""

from functools import partial

import torch

from ascend_emulator.operators.constraint import Constraint, Enforced, Family, shape_of

INIT_ROUTING = "npu::npu_moe_init_routing_v2"
TOKEN_UNPERMUTE = "npu::_npu_moe_token_unpermute"
"""The operator to which ``npu_moe_token_unpermute`` dispatches; its second result is for
gradients."""

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
MAX_EXPERTS = 10240
MAX_EXPERTS_AS_PAIRS = 5120
MAX_TOP_K = 512
CUMULATIVE, COUNTS, PAIRS = 0, 1, 2
"""``expert_tokens_num_type``: how tokens of each expert are counted."""
NO_QUANTISATION, DYNAMIC_INT8 = -1, 1
UNDEFINED_INT8 = -128
"""What undefined rows of int8 hold, which have no NaN."""

NAME = "npu_moe_init_routing_v2"
record = partial(Constraint, NAME)
AGREED, PRACTICE, READING = Enforced.AGREED, Enforced.PRACTICE, Enforced.READING
DOCSTRING, SOURCES = Enforced.DOCSTRING, Enforced.SOURCES
TILING = "cann/ops-transformer v8.5.0 to 9.1.0, tiling of `moe_init_routing_v3`"

# In each record: argument, name, demand, docstring_says, practice, source, enforced, why.
INIT_ROUTING_RULES = Family(
    NAME,
    [
        record(
            "x",
            "dtype",
            "float16, bfloat16, float32 or int8; int8 only without quantisation",
            "the same",
            "the same",
            TILING,
            AGREED,
        ),
        record(
            "x, expert_idx",
            "shapes",
            "[T, H] and [T, K] with the same T",
            "the same",
            "the same",
            TILING,
            AGREED,
        ),
        record("expert_idx", "ids dtype", "int32", "int32", "int32", TILING, AGREED),
        record(
            "expert_idx",
            "ids",
            "at most expert_num",
            "ids are not above the number of experts",
            "-1, too: below the range, as ids of other ranks' experts may be",
            TILING,
            AGREED,
        ),
        record(
            "expert_num",
            "expert_num",
            "1 to 10240, to 5120 with expert_tokens_num_type 2",
            "the same",
            "the same",
            TILING,
            AGREED,
        ),
        record(
            "active_expert_range",
            "active range",
            "two values with 0 <= start < end <= expert_num",
            "the same; none for all experts",
            "the release's adapter reads both values before it looks whether there are any",
            "Ascend/op-plugin, `CheckV2Case`; " + TILING,
            SOURCES,
        ),
        record(
            "active_num",
            "active_num",
            "T * K",
            "-1 or more",
            "T * K",
            "cann/ops-transformer v8.5.0, which refuses other values; later ones take them",
            PRACTICE,
        ),
        record(
            "drop_pad_mode, row_idx_type",
            "unsupported mode",
            "0, without a capacity for each expert, and indices by pair",
            "drop_pad_mode 0 only",
            "0 in inference",
            "cann/ops-transformer v8.5.0",
            DOCSTRING,
            "other modes are outside of this reference",
        ),
        record(
            "expert_tokens_num_type, expert_tokens_num_flag",
            "expert tokens",
            "types 1 or 2, asked for",
            "types 1 and 2, flag True",
            "1",
            TILING,
            DOCSTRING,
        ),
        record(
            "quant_mode",
            "quant_mode",
            "-1 for none or 1 for int8 by row",
            "-1 and 1",
            "these",
            TILING,
            DOCSTRING,
        ),
        record(
            "scale, offset",
            "scale",
            "no offset; scale float32, [T] without quantisation, else [end - start, H] or [1, H]",
            "no offset; [T], or [end - start, H]",
            "[1, H] too since CANN 9.1",
            TILING,
            AGREED,
        ),
        record(
            "expanded_x",
            "inactive rows",
            "undefined rows past the pairs of active experts",
            "the first rows are valid",
            "the same",
            "none needed",
            AGREED,
            refused=False,
        ),
        record(
            "expanded_row_idx",
            "inactive pairs",
            "-1 for a pair whose expert is not active",
            "-1",
            "-1",
            "none needed",
            AGREED,
            refused=False,
        ),
        record(
            "expert_idx",
            "order",
            "pairs of one expert stay in the order of their tokens",
            "not stated",
            "a stable sort in the documentation's equivalent code",
            "Ascend/op-plugin, its page of `npu_moe_init_routing_v2`",
            READING,
            refused=False,
        ),
    ],
)

record = partial(Constraint, "npu_moe_token_unpermute")
KERNEL = "cann/ops-transformer v8.5.0 to 9.1.0, moe_token_unpermute.h and its tiling"

TOKEN_UNPERMUTE_RULES = Family(
    "npu_moe_token_unpermute",
    [
        record(
            "permuted_tokens, probs",
            "dtype",
            "float16, bfloat16 or float32 each; they may differ",
            "these three",
            "these three, mixed too",
            KERNEL,
            AGREED,
        ),
        record(
            "permuted_tokens, sorted_indices, probs",
            "shapes",
            "[rows, H], [T * K] and [T, K] with K at most 512; without probs K is 1",
            "the same",
            "the same; fewer rows than T * K are allowed",
            KERNEL,
            AGREED,
        ),
        record("sorted_indices", "indices dtype", "int32", "int32", "int32", KERNEL, AGREED),
        record(
            "sorted_indices",
            "negative index",
            "no negative index where the probability is not 0",
            "0 to T * K - 1",
            "the kernel checks no lower bound: it would read memory before the tensor",
            KERNEL,
            SOURCES,
        ),
        record(
            "sorted_indices",
            "repeated index",
            "no row twice",
            "no repeated index",
            "vllm-ascend passes abs(-1), whose probability is 0, beside a 1",
            KERNEL,
            SOURCES,
            "the kernel reads rows of other pairs without harm, but gradients would be wrong",
        ),
        record(
            "padded_mode, restore_shape",
            "unsupported mode",
            "False and None",
            "False and None",
            "the defaults",
            KERNEL,
            AGREED,
        ),
        record(
            "sorted_indices",
            "index past the rows",
            "nothing from an index past the last row",
            "0 to T * K - 1",
            "skipped: so tokens that a capacity drops are left out",
            KERNEL,
            SOURCES,
            refused=False,
        ),
        record(
            "probs",
            "probability of 0",
            "nothing from a row whose probability is 0, whatever it holds",
            "not stated",
            "skipped",
            KERNEL,
            SOURCES,
            refused=False,
        ),
    ],
)


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
    demand = INIT_ROUTING_RULES.call(INIT_ROUTING).demand
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


def token_unpermute(
    permuted_tokens: torch.Tensor,
    sorted_indices: torch.Tensor,
    probs: torch.Tensor | None = None,
    padded_mode: bool = False,
    restore_shape: list[int] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add each token's rows, weighted, to ``[T, H]``; the second result is the input again."""
    demand = TOKEN_UNPERMUTE_RULES.call(TOKEN_UNPERMUTE).demand
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
