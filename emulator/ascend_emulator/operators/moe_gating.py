"""References of the operators that choose each token's experts."""

from functools import partial

import torch

from ascend_emulator.operators.constraint import Constraint, Enforced, Family, shape_of

GATING_TOP_K = "npu::npu_moe_gating_top_k"
GATING_TOP_K_SOFTMAX = "npu::npu_moe_gating_top_k_softmax_v2"
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
MAX_EXPERTS = 2048
MAX_TOP_K = 1024
SOFTMAX, SIGMOID = 0, 1
LARGEST, TWO_LARGEST = 0, 1
"""``group_select_mode``: whether a group's score is its largest one or the sum of its two
largest."""
GROUP_MULTIPLE = 32

AGREED, PRACTICE, READING = Enforced.AGREED, Enforced.PRACTICE, Enforced.READING
DOCSTRING, SOURCES = Enforced.DOCSTRING, Enforced.SOURCES
TILING = "cann/ops-transformer v8.5.0 to 9.1.0, tiling of `moe_gating_top_k`"
record = partial(Constraint, "npu_moe_gating_top_k")

# In each record: argument, name, demand, docstring_says, practice, source, enforced, why.
GATING_RULES = Family(
    "npu_moe_gating_top_k",
    [
        record(
            "x, bias",
            "dtype",
            "float16, bfloat16 or float32, the same for both",
            "the same",
            "the same",
            TILING,
            AGREED,
        ),
        record(
            "x, bias",
            "shapes",
            "[T, experts] with at most 2048 experts, and [experts]",
            "the same",
            "the same",
            TILING,
            AGREED,
        ),
        record(
            "k, k_group",
            "k",
            "1 <= k <= experts of k_group groups, 1 <= k_group <= group_count",
            "the same",
            "the same",
            TILING,
            AGREED,
        ),
        record(
            "group_count",
            "groups",
            "groups of equal size, of more than 2 experts if there are several",
            "groups of equal size, of more than 2",
            "2 if a group counts by its largest two",
            TILING,
            DOCSTRING,
            "the stricter one",
        ),
        record(
            "group_count",
            "padded groups",
            "at most 2048 experts once each group is padded to a multiple of 32",
            "the same",
            "unless all groups are kept, or each expert is a group",
            TILING,
            SOURCES,
        ),
        record(
            "norm_type, group_select_mode",
            "modes",
            "0 or 1 each",
            "0 and 1",
            "0 and 1; norm_type 2 on Ascend 950",
            TILING,
            AGREED,
        ),
        record(
            "renorm",
            "renorm",
            "0",
            "0 only",
            "0 only up to CANN 8.5; 9.1 takes 1, for a softmax",
            TILING,
            DOCSTRING,
        ),
        record(
            "input_ids, tid2eid",
            "no table",
            "no table of experts by token",
            "both or none",
            "none",
            "none needed",
            READING,
            "the table is outside of this reference",
        ),
        record(
            "norm_type",
            "division by the sum",
            "weights of a sigmoid divided by their sum, those of a softmax as they are",
            "not stated",
            "the same",
            "cann/ops-transformer 9.1.0, documentation and kernels of `moe_gating_top_k`",
            SOURCES,
            refused=False,
        ),
        record(
            "bias",
            "bias chooses",
            "a bias changes which experts are chosen, not their weights",
            "added to the input",
            "the same",
            "Ascend/op-plugin, its page of `npu_moe_gating_top_k`",
            PRACTICE,
            refused=False,
        ),
    ],
)

SOFTMAX_TILING = "cann/ops-transformer v8.5.0 to 9.1.0, tiling of `moe_gating_top_k_softmax_v2`"
record = partial(Constraint, "npu_moe_gating_top_k_softmax_v2")

GATING_SOFTMAX_RULES = Family(
    "npu_moe_gating_top_k_softmax_v2",
    [
        record(
            "x",
            "dtype",
            "float16, bfloat16 or float32",
            "these three",
            "these three",
            SOFTMAX_TILING,
            AGREED,
        ),
        record(
            "x, finished",
            "shapes",
            "[..., experts] with 2 or 3 dimensions, and a bool for each row",
            "the same",
            "the same",
            SOFTMAX_TILING,
            AGREED,
        ),
        record(
            "k",
            "k",
            "1 to the number of experts, at most 1024",
            "the same",
            "the same",
            SOFTMAX_TILING,
            AGREED,
        ),
        record("renorm", "renorm", "0 or 1", "0 or 1", "0 or 1", SOFTMAX_TILING, AGREED),
        record(
            "finished",
            "finished rows",
            "the number of experts as the id in rows that are finished",
            "rows that take no part",
            "the same",
            "cann/ops-transformer 9.1.0, documentation and kernels",
            SOURCES,
            refused=False,
        ),
        record(
            "renorm",
            "order of softmax",
            "1: the softmax of the k largest; 0: the k largest of the softmax",
            "the same",
            "the same",
            "cann/ops-transformer 9.1.0, documentation and kernels",
            SOURCES,
            refused=False,
        ),
    ],
)


def gating_top_k(
    x: torch.Tensor,
    k: int,
    *,
    bias: torch.Tensor | None = None,
    input_ids: torch.Tensor | None = None,
    tid2eid: torch.Tensor | None = None,
    k_group: int = 1,
    group_count: int = 1,
    group_select_mode: int = 0,
    renorm: int = 0,
    norm_type: int = 0,
    out_flag: bool = False,
    routed_scaling_factor: float = 1.0,
    eps: float = 1e-20,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return weights and ids ``[T, k]`` of each row's experts, and all scores if asked for."""
    demand = GATING_RULES.call(GATING_TOP_K).demand
    dtypes = [x.dtype, *(() if bias is None else (bias.dtype,))]
    demand("dtype", x.dtype in DTYPES and len(set(dtypes)) == 1, dtypes)
    experts = x.shape[-1]
    fits = x.dim() == 2 and experts <= MAX_EXPERTS
    fits = fits and (bias is None or shape_of(bias) == (experts,))
    demand("shapes", fits, (shape_of(x), None if bias is None else shape_of(bias)))
    demand("no table", input_ids is None and tid2eid is None, "a table")
    modes = norm_type in (SOFTMAX, SIGMOID) and group_select_mode in (LARGEST, TWO_LARGEST)
    demand("modes", modes, (norm_type, group_select_mode))
    demand("renorm", renorm == 0, renorm)
    size = experts // group_count if group_count > 0 and not experts % group_count else 0
    demand("groups", size > (0 if group_count == 1 else 2), f"{experts} in {group_count}")
    ok = 1 <= k_group <= group_count and 1 <= k <= k_group * size
    demand("k", ok, f"k {k}, k_group {k_group} of {group_count}")
    padded = group_count * -(-size // GROUP_MULTIPLE) * GROUP_MULTIPLE
    ok = group_count == 1 or k_group == group_count or padded <= MAX_EXPERTS
    demand("padded groups", ok, padded)

    logits = x.float()
    scores = logits.softmax(-1) if norm_type == SOFTMAX else logits.sigmoid()
    choice = scores if bias is None else scores + bias.float()
    if group_count > 1:
        groups = choice.view(len(x), group_count, size)
        best = groups.topk(1 if group_select_mode == LARGEST else 2, -1).values.sum(-1)
        kept = best.sort(dim=-1, descending=True, stable=True).indices[:, :k_group]
        is_kept = torch.zeros(len(x), group_count, dtype=torch.bool).scatter_(1, kept, True)
        choice = groups.masked_fill(~is_kept[..., None], float("-inf")).view(len(x), experts)
    ids = choice.sort(dim=-1, descending=True, stable=True).indices[:, :k]
    weights = scores.gather(1, ids)
    if norm_type == SIGMOID:
        weights = weights / (weights.sum(-1, keepdim=True) + eps)
    weights = weights * routed_scaling_factor
    norm_out = scores if out_flag else torch.full_like(scores, float("nan"))
    return weights.to(x.dtype), ids.int(), norm_out


def gating_top_k_softmax(
    x: torch.Tensor,
    *,
    k: int = 1,
    finished: torch.Tensor | None = None,
    renorm: int | None = 0,
    output_softmax: bool | None = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return weights and ids ``[..., k]`` of each row's experts, and the softmax if asked for."""
    demand = GATING_SOFTMAX_RULES.call(GATING_TOP_K_SOFTMAX).demand
    demand("dtype", x.dtype in DTYPES, x.dtype)
    rows = shape_of(x)[:-1]
    fits = x.dim() in (2, 3) and (
        finished is None or (finished.dtype == torch.bool and shape_of(finished) == rows)
    )
    demand("shapes", fits, (shape_of(x), None if finished is None else shape_of(finished)))
    demand("k", 1 <= k <= min(x.shape[-1], MAX_TOP_K), k)
    demand("renorm", renorm in (0, 1), renorm)
    logits = x.float()
    softmax = logits.softmax(-1)
    ids = logits.sort(dim=-1, descending=True, stable=True).indices[..., :k]
    weights = logits.gather(-1, ids).softmax(-1) if renorm else softmax.gather(-1, ids)
    if finished is not None:
        ids = ids.masked_fill(finished[..., None], x.shape[-1])
    shown = softmax if output_softmax and not renorm else torch.empty(0)
    return weights.to(x.dtype), ids.int(), shown
