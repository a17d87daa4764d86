"""What operators of experts and of int8 layers have to give, by their arguments on the host."""

from collections.abc import Mapping

import torch

from vllm_npu_prep.verify import formulas
from vllm_npu_prep.verify.calls.expected_part import (
    Arguments,
    Expected,
    Formula,
    packed_product,
    product,
    rounded,
    rounded_by_row,
    some_rows,
)

SUMMED = 2e-2
"""Tolerance of scales of rows that were rounded to 16 bits before."""

SINGLE = 1e-4
"""Tolerance of scales of rows that were computed in float32."""


# ------------------------------------------------------------------------- experts


def _gating(a: Arguments) -> list[Expected]:
    rows = some_rows(len(a["x"]))
    scoring = "sigmoid" if a.get("norm_type", 0) else "softmax"
    groups = a.get("group_count", 1), a.get("k_group", 1)
    logits, bias = a["x"][rows], a.get("bias")
    factor = a.get("routed_scaling_factor", 1.0)
    weights, ids = formulas.gating(logits, a["k"], scoring, bias, groups, factor)
    scores = logits.double().sigmoid() if scoring == "sigmoid" else logits.double().softmax(-1)
    choice = scores if bias is None else scores + bias.double()
    return [
        Expected(0, weights, rows),
        Expected(1, choice.gather(1, ids), rows, SINGLE, places_in=choice),
    ]


def _gating_softmax(a: Arguments) -> list[Expected]:
    finished = a.get("finished")
    rows = some_rows(len(a["x"]))
    if finished is not None:
        rows = rows[~finished[rows]]
    logits = a["x"][rows]
    weights, ids = formulas.gating(logits, a["k"], "softmax")
    if a.get("renorm"):
        weights = weights / weights.sum(-1, keepdim=True)
    given = logits.double()
    return [
        Expected(0, weights, rows),
        Expected(1, given.gather(1, ids), rows, 0.0, places_in=given),
    ]


def _init_routing(a: Arguments) -> list[Expected]:
    """Sort pairs of this rank's experts by expert; those of an expert stay in order."""
    x, ids = a["x"], a["expert_idx"].flatten().long()
    start, end = a["active_expert_range"]
    mine = ((ids >= start) & (ids < end)).nonzero().flatten()
    order = mine[ids[mine].argsort(stable=True)]
    row_of_pair = torch.full_like(ids, -1)
    row_of_pair[order] = torch.arange(len(order))
    counts = torch.bincount(ids[mine] - start, minlength=end - start)
    rows = some_rows(len(order))
    values = x[order[rows] // a["expert_idx"].shape[1]]
    found = [Expected(1, row_of_pair), Expected(2, counts)]
    if a.get("quant_mode", -1) == 1:
        return [*found, *rounded_by_row((0, 3), values.double(), rows, SINGLE)]
    return [*found, Expected(0, values, rows, 0.0)]


def _expert_of_rows(a: Arguments) -> torch.Tensor:
    """Return the number of the expert of each row that has one."""
    sizes = a["group_list"].long()
    if not a.get("group_list_type"):  # ends
        sizes = sizes.diff(prepend=sizes.new_zeros(1))
    return torch.repeat_interleave(torch.arange(len(sizes)), sizes)


def _grouped(a: Arguments) -> list[Expected]:
    """Multiply each input by its own weight, or each row by the weight of its expert."""
    if a.get("group_list") is None:
        found, biases = [], a.get("bias") or [None] * len(a["x"])
        for number, (x, weight, bias) in enumerate(zip(a["x"], a["weight"], biases)):
            rows = some_rows(len(x))
            found.append(Expected(number, product(x[rows], weight, bias), rows))
        return found
    (x,), (weight,) = a["x"], a["weight"]
    experts = _expert_of_rows(a)
    rows = some_rows(len(experts))
    if weight.dtype is torch.int32 and x.dtype is torch.int8:
        return [Expected(0, _by_experts_of_rounded(a, x[rows], experts[rows], rows), rows)]
    if weight.dtype is torch.int32:
        return [Expected(0, _by_packed_experts(a, x[rows], experts[rows]), rows)]
    of_rows = experts[rows]
    parts = [product(x[rows[of_rows == e]], weight[e], None) for e in of_rows.unique().tolist()]
    values = torch.cat([x.new_empty(0, weight.shape[-1], dtype=torch.float64), *parts])
    for name, of in (("scale", experts[rows]), ("per_token_scale", rows)):
        if a.get(name):
            factors = a[name][0][of].double()
            values = values * (factors if factors.dim() > 1 else factors[:, None])
    return [Expected(0, values, rows)]


def _by_packed_experts(a: Arguments, x: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
    """Multiply rows, sorted by expert, by packed weights with scales and offsets."""
    scales, offsets = (a[f"antiquant_{name}"][0] for name in ("scale", "offset"))
    found = [x.new_empty(0, scales.shape[-1], dtype=torch.float64)]
    for expert in experts.unique().tolist():
        factors = (each[expert].double().view(-1, each.shape[-1]) for each in (scales, offsets))
        found.append(packed_product(x[experts == expert], a["weight"][0][expert], *factors))
    return torch.cat(found)


def _by_experts_of_rounded(
    a: Arguments, x: torch.Tensor, experts: torch.Tensor, rows: torch.Tensor
) -> torch.Tensor:
    """Multiply int8 rows, sorted by expert, by packed weights with scales and corrections."""
    scales, added, tokens = (a[name][0] for name in ("scale", "bias", "per_token_scale"))
    found = [x.new_empty(0, scales.shape[-1], dtype=torch.float64)]
    for expert in experts.unique().tolist():
        given = a["weight"][0][expert], scales[expert], added[expert]
        found.append(_by_rounded(x[experts == expert], *given))
    return torch.cat(found) * tokens[rows, None].double()


def _by_rounded(
    x: torch.Tensor, words: torch.Tensor, scale: torch.Tensor, added: torch.Tensor
) -> torch.Tensor:
    """Multiply int8 rows less 8 by packed weights, and add what was given for the 8."""
    factors = scale.to(torch.int32).view(torch.float32).double()
    return packed_product(x.double() - 8, words, factors, None) + added.double()


def _sum(rows: torch.Tensor, weights: torch.Tensor | None, places: torch.Tensor) -> list[Expected]:
    if weights is None:
        weights = torch.ones(len(places), 1)
    tokens = some_rows(len(weights))
    own = places.view(weights.shape)[tokens].flatten()
    return [Expected(0, formulas.sums(rows, weights[tokens], own), tokens)]


def _finalize(a: Arguments) -> list[Expected]:
    rows = a["expanded_permuted_rows"].flatten(0, -2)
    return _sum(rows, a.get("scales"), a["expanded_src_to_dst_row"])


def _unpermute(a: Arguments) -> list[Expected]:
    rows, places = a["permuted_tokens"], a["sorted_indices"]
    return _sum(rows, a.get("probs"), places.where(places < len(rows), -1))


# ------------------------------------------------------------------------- int8


def _dynamic_quant(a: Arguments) -> list[Expected]:
    rows = some_rows(len(a["input"]))
    return rounded_by_row((0, 1), a["input"][rows].double(), rows, SINGLE)


def _quantize(a: Arguments) -> list[Expected]:
    rows = some_rows(len(a["input"]))
    offset = a["zero_points"].double() if a.get("zero_points") is not None else 0
    scales = a["scales"].double()
    values = a["input"][rows].double()
    values = values / scales if a.get("div_mode", True) else values * scales
    return [rounded(0, values + offset, rows)]


def _quant_matmul(a: Arguments) -> list[Expected]:
    rows, bias, scale = some_rows(len(a["x1"])), a.get("bias"), a["scale"]
    if a["x2"].dtype is torch.int32:
        values = _by_rounded(a["x1"][rows], a["x2"], scale.view(-1, scale.shape[-1]), a["offset"])
        return [Expected(0, values * a["pertoken_scale"].flatten()[rows, None].double(), rows)]
    if scale.dtype is torch.int64:  # the bits of float32
        scale = scale.to(torch.int32).view(torch.float32)
    values = product(a["x1"][rows], a["x2"], None)
    is_summed = bias is not None and bias.dtype is torch.int32
    if bias is not None and is_summed:
        values = values + bias.double()
    values = values * scale.double()
    if a.get("pertoken_scale") is not None:
        values = values * a["pertoken_scale"][rows, None].double()
    if bias is not None and not is_summed:
        values = values + bias.double()
    return [Expected(0, values, rows)]


def _weight_quant_matmul(a: Arguments) -> list[Expected]:
    """Multiply by packed weights of groups of inputs, or of all inputs of an output."""
    rows, words, bias = some_rows(len(a["x"])), a["weight"], a.get("bias")
    if words.dtype is not torch.int32 or not words.is_contiguous():
        return []  # forms that no layer calls
    groups = a["antiquant_scale"].shape[0] if a.get("antiquant_group_size") else 1
    scale, offset = a["antiquant_scale"].double().view(groups, -1), a.get("antiquant_offset")
    offset = None if offset is None else offset.double().view(scale.shape)
    values = packed_product(a["x"][rows], words, scale, offset)
    return [Expected(0, values if bias is None else values + bias.double(), rows)]


def _normed(a: Arguments) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return some rows, the norm of their sums, and the sums."""
    rows = some_rows(len(a["x1"]))
    total = a["x1"][rows].double() + a["x2"][rows].double()
    return rows, formulas.rms_norm(total, a["gamma"], a.get("epsilon", 1e-6)), total


def _add_norm(a: Arguments) -> list[Expected]:
    rows, normed, total = _normed(a)
    return [Expected(0, normed, rows), Expected(2, total, rows)]


def _add_norm_cast(a: Arguments) -> list[Expected]:
    rows, normed, total = _normed(a)
    wide = Expected(0, normed, rows, SUMMED)
    return [wide, Expected(1, normed, rows), Expected(3, total, rows)]


def _add_norm_dynamic_quant(a: Arguments) -> list[Expected]:
    rows, normed, total = _normed(a)
    if a.get("smooth_scale1") is not None:
        normed = normed * a["smooth_scale1"].double()
    return [*rounded_by_row((0, 3), normed, rows, SUMMED), Expected(2, total, rows)]


def _add_norm_quant(a: Arguments) -> list[Expected]:
    rows, normed, total = _normed(a)
    offset = a["zero_points1"].double() if a.get("zero_points1") is not None else 0
    values = normed / a["scales1"].double() + offset
    return [rounded(0, values, rows), Expected(2, total, rows)]


def _swiglu_quant(a: Arguments) -> list[Expected]:
    rows = some_rows(len(a["x"]))
    x = a["x"][rows]
    halves = x.chunk(2, -1) if a.get("activate_left") else x.chunk(2, -1)[::-1]
    values = formulas.swiglu(torch.cat(halves, -1))
    if a.get("quant_mode", 0) == 1:
        return rounded_by_row((0, 1), values, rows, SINGLE)
    return [rounded(0, values / a["quant_scale"].double() + a["quant_offset"].double(), rows)]


FORMULAS: Mapping[str, Formula] = {
    "npu_add_rms_norm": _add_norm,
    "npu_add_rms_norm_cast": _add_norm_cast,
    "npu_add_rms_norm_dynamic_quant": _add_norm_dynamic_quant,
    "npu_add_rms_norm_quant": _add_norm_quant,
    "npu_dequant_swiglu_quant": _swiglu_quant,
    "npu_dynamic_quant": _dynamic_quant,
    "npu_grouped_matmul": _grouped,
    "npu_moe_finalize_routing": _finalize,
    "npu_moe_gating_top_k": _gating,
    "npu_moe_gating_top_k_softmax_v2": _gating_softmax,
    "npu_moe_init_routing_v2": _init_routing,
    "npu_moe_token_unpermute": _unpermute,
    "_npu_moe_token_unpermute": _unpermute,
    "npu_quant_matmul": _quant_matmul,
    "npu_quantize": _quantize,
    "npu_weight_quant_batchmatmul": _weight_quant_matmul,
}
"""By operators, without their overloads: a function of the arguments on the host, by name."""
