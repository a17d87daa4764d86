"""References of the operators that choose each token's experts."""

import torch

from ascend_emulator.operators.constraint import Call, shape_of

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
    demand = Call("npu_moe_gating_top_k", GATING_TOP_K).demand
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
    demand = Call("npu_moe_gating_top_k_softmax_v2", GATING_TOP_K_SOFTMAX).demand
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
