"""Arguments that fit together: drawn at random, some would be refused by a kernel or show nothing.

A recording knows no result of what computes floats: which experts a token has, which rows they
get, or which token comes next. Such numbers are drawn here.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch

Made = dict[str, Any]
"""Arguments on the host by name; what fits is written in place, so that their layout stays."""

STEP = 1 / 32
"""About the size of a scale to int8: most of what is drawn fits, and some is cut off."""

OF_SUMS = 1 / 64
"""About the size of each of two scales of a product: float16 holds what comes out."""

OF_WEIGHTS = 1 / 64
"""About the size of a scale of weights of four bits."""

LARGEST = 4.5
"""Larger than all that is drawn, and not by so much that rounding would leave nothing of it."""

GAP = 8
"""One in so many is left out: a pair of token and expert without a row, a token of padding."""


def fit(operator: str, found: Made, random: torch.Generator) -> None:
    """Make arguments of a call fit together, after they were drawn one by one."""
    mask = found.get("atten_mask")
    if mask is not None and not mask.is_floating_point():  # ones above the diagonal
        rows, columns = (torch.arange(size) for size in mask.shape[-2:])
        found["atten_mask"] = (columns > rows[:, None]).to(mask.dtype).expand(mask.shape).clone()
    if operator in FITS:
        FITS[operator](found, random)


def _tokens(a: Made, random: torch.Generator) -> None:
    shape, count = a["indices"].shape, len(a["weight"])
    a["indices"].copy_(torch.randint(count, shape, generator=random))


def _positions(a: Made, random: torch.Generator) -> None:
    """Take other positions if some are none of the table: a graph's inputs are told at a replay."""
    _inside(a["positions"], len(a["cos_sin_cache"]), random)


def _inside(numbers: torch.Tensor, end: int, random: torch.Generator) -> None:
    if ((numbers < 0) | (numbers >= end)).any():
        numbers.copy_(torch.randint(end, numbers.shape, generator=random))


def _slots(a: Made, random: torch.Generator) -> None:
    """Write somewhere, where a graph was captured with padding alone; some padding stays."""
    slots, count = a["slot_mapping"], a["key_cache"].shape[0] * a["key_cache"].shape[1]
    if (slots < 0).all() or (slots >= count).any():
        slots.copy_(torch.randperm(count, generator=random)[torch.arange(len(slots)) % count])
        slots.masked_fill_(torch.arange(len(slots)) % GAP == GAP - 1, -1)


def _blocks(a: Made, random: torch.Generator) -> None:
    """Take other blocks if some are none of the cache, or all are the null block.

    A graph is told its blocks at a replay.
    """
    table = a.get("block_table")
    if table is not None:
        table.masked_fill_(~table.any(), -1)
        _inside(table, len(a["key"]), random)


def _requests(name: str) -> Callable[[Made, torch.Generator], None]:
    """Return a function that gives requests whole tokens, as many keys at least, and blocks.

    In a graph, lengths and blocks are told at a replay.
    """

    def fit_requests(a: Made, random: torch.Generator) -> None:
        ends, lengths, table = a["actual_seq_lengths_query"], a[name], a.get("block_table")
        if table is None:
            return
        tokens = len(a["query"])
        counts = ends.diff(prepend=ends.new_zeros(1))
        if (counts < 0).any() or not 0 < ends[-1] <= tokens:
            ends.copy_(torch.arange(1, len(ends) + 1) * tokens // len(ends))
            counts = ends.diff(prepend=ends.new_zeros(1))
        lengths.copy_(lengths.clamp(max=table.shape[1] * a["key"].shape[1]).maximum(counts))
        _blocks(a, random)

    return fit_requests


def _chosen(a: Made, random: torch.Generator) -> None:
    """Choose different positions up to each token: a recording has none, for scores are floats.

    Values are keys.
    """
    _requests("actual_seq_lengths_kv")(a, random)
    a["value"].copy_(a["key"])
    chosen, begin = a["sparse_indices"], 0
    chosen.fill_(-1)
    for end, length in zip(a["actual_seq_lengths_query"].tolist(), a["actual_seq_lengths_kv"]):
        for row in range(begin, end):
            seen = torch.randperm(int(length) - (end - row) + 1, generator=random)
            chosen[row, 0, : len(seen)] = seen[: chosen.shape[-1]]
        begin = end


def _experts_of_tokens(a: Made, random: torch.Generator) -> None:
    """Choose different experts for each token, the first one of this rank among them.

    The last number means no expert.
    """
    ids, count = a["expert_idx"], a["expert_num"] - 1
    ids.copy_(torch.rand(len(ids), count, generator=random).topk(ids.shape[1]).indices)
    ids[:1] = (a["active_expert_range"][0] + torch.arange(ids.shape[1])) % count


def _finished(a: Made, random: torch.Generator) -> None:
    if a.get("finished") is not None:
        a["finished"].copy_(torch.arange(len(a["finished"])) % 4 == 3)


def _groups(a: Made, random: torch.Generator) -> None:
    """Give most rows to experts, at random; a product of int8 has scales."""
    for name in ("scale", "per_token_scale"):
        for scale in a.get(name) or ():
            _scale(scale, OF_SUMS)
    for weight, scale, offset in zip(
        a["weight"], a.get("antiquant_scale") or (), a.get("antiquant_offset") or ()
    ):
        _of_four_bits(weight, scale, offset, random)
    for weight in a["weight"]:
        _draw_words(weight, random)
    groups = a.get("group_list")
    if groups is None:
        return
    rows = len(a["x"][0])
    some = torch.randint(len(groups), (rows - rows // GAP,), generator=random)
    sizes = some.bincount(minlength=len(groups))
    groups.copy_(sizes if a.get("group_list_type") else sizes.cumsum(0))


def _places(name: str, with_gaps: bool) -> Callable[[Made, torch.Generator], None]:
    """Return a function that gives each pair a row of its own, or none."""

    def fit_places(a: Made, random: torch.Generator) -> None:
        places = torch.randperm(len(a[name]), generator=random)
        a[name].copy_(places.masked_fill(places % GAP == 3, -1) if with_gaps else places)

    return fit_places


def _scale(scale: torch.Tensor, about: float) -> None:
    """Turn drawn numbers into scales: between a half and three halves of `about`."""
    if scale.is_floating_point():
        scale.copy_(about * (1 + scale.double() / 6))
    else:  # the bits of float32
        scale.copy_(torch.full(scale.shape, about).view(torch.int32))


def _scales(about: float, *names: str) -> Callable[[Made, torch.Generator], None]:
    def fit_scales(a: Made, random: torch.Generator) -> None:
        for name in names:
            if a.get(name) is not None:
                _scale(a[name], about)

    return fit_scales


def _int8_rows(a: Made, random: torch.Generator) -> None:
    """Give a product of int8 rows scales, and draw weights that are of four bits."""
    _scales(OF_SUMS, "scale", "pertoken_scale")(a, random)
    _draw_words(a["x2"], random)


def _draw_words(weight: torch.Tensor, random: torch.Generator) -> None:
    """Draw numbers of four bits, eight in an int32."""
    if weight.dtype is torch.int32:
        weight.copy_(torch.randint(-(1 << 31), 1 << 31, weight.shape, generator=random))


def _rounded_rows(a: Made, random: torch.Generator) -> None:
    """Let the largest result of a row come last, or in odd rows first.

    Kernels take a wide row in parts, and a part's maximum may be missed.
    """
    _scales(STEP, "quant_scale")(a, random)
    half = a["x"].shape[-1] // 2
    for rows, column in ((slice(0, None, 2), half - 1), (slice(1, None, 2), 0)):
        a["x"][rows, ..., [column, half + column]] = LARGEST


def _words(a: Made, random: torch.Generator) -> None:
    _of_four_bits(a["weight"], a["antiquant_scale"], a.get("antiquant_offset"), random)


def _of_four_bits(
    weight: torch.Tensor,
    scale: torch.Tensor,
    offset: torch.Tensor | None,
    random: torch.Generator,
) -> None:
    """Draw numbers of four bits, eight in an int32, with scales, and with whole zero points."""
    _draw_words(weight, random)
    _scale(scale, OF_WEIGHTS)
    if offset is not None:
        offset.copy_((offset.double() * 4).round())


def _positive(a: Made, random: torch.Generator) -> None:
    a["self"].abs_()


def _rule(a: Made, random: torch.Generator) -> None:
    """Make vectors of length 1, rates between 0 and 1, decays below 1, and whole requests.

    In a graph, lengths are computed when it is replayed, and blocks are told then.
    """
    lengths, tokens = a["actual_seq_lengths"], len(a["value"])
    if lengths.sum() != tokens or (lengths < 1).any():
        lengths.fill_(tokens // len(lengths))
        lengths[-1] += tokens - lengths.sum()
    if a.get("num_accepted_tokens") is not None:
        a["num_accepted_tokens"].copy_(a["num_accepted_tokens"].clamp(min=1).minimum(lengths))
    blocks = a.get("ssm_state_indices")
    if blocks is not None:
        count = len(a["state"]) - 1  # without the null block
        blocks.copy_(torch.randperm(count, generator=random)[torch.arange(tokens) % count] + 1)
    for name in ("query", "key"):
        a[name].copy_(torch.nn.functional.normalize(a[name].double(), dim=-1))
    a["beta"].copy_(a["beta"].double().sigmoid())
    if a.get("g") is not None:
        a["g"].copy_(-a["g"].abs())


FITS: Mapping[str, Callable[[Made, torch.Generator], None]] = {
    "embedding": _tokens,
    "npu_add_rms_norm_quant": _scales(STEP, "scales1"),
    "npu_chunk_gated_delta_rule": _rule,
    "npu_dequant_swiglu_quant": _rounded_rows,
    "npu_fused_infer_attention_score": _blocks,
    "npu_fused_infer_attention_score_v2": _blocks,
    "npu_grouped_matmul": _groups,
    "npu_lightning_indexer": _requests("actual_seq_lengths_key"),
    "npu_moe_finalize_routing": _places("expanded_src_to_dst_row", with_gaps=True),
    "npu_moe_gating_top_k_softmax_v2": _finished,
    "npu_moe_init_routing_v2": _experts_of_tokens,
    "npu_moe_token_unpermute": _places("sorted_indices", with_gaps=False),
    "npu_mrope": _positions,
    "npu_quant_matmul": _int8_rows,
    "npu_quantize": _scales(STEP, "scales"),
    "npu_recurrent_gated_delta_rule": _rule,
    "npu_scatter_pa_kv_cache": _slots,
    "npu_sparse_flash_attention": _chosen,
    "npu_weight_quant_batchmatmul": _words,
    "rsqrt": _positive,
}
"""By operators, without their overloads."""
