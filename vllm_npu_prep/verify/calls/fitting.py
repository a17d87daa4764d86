"""Arguments that fit together: drawn at random, some would be refused by a kernel or show nothing.

A recording knows no result of what computes floats: which experts a token has, which rows they
get, or which token comes next. Such numbers are drawn here.
"""

import copy
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

UNKNOWN = -1
"""Stands for a whole number that is not recorded, and is chosen here."""


def fit(operator: str, found: Made, random: torch.Generator) -> None:
    """Make arguments of a call fit together, after they were drawn one by one."""
    mask = found.get("atten_mask")
    if mask is not None and not mask.is_floating_point():  # ones above the diagonal
        rows, columns = (torch.arange(size) for size in mask.shape[-2:])
        found["atten_mask"] = (columns > rows[:, None]).to(mask.dtype).expand(mask.shape).clone()
    if operator in NUMBERS:
        NUMBERS[operator][1](found, random)
    if operator in FITS:
        FITS[operator](found, random)


def other_numbers(operator: str, host: Mapping[str, Any], random: torch.Generator) -> Made:
    """Return what else a graph may be told at a replay: other lengths, blocks or experts, by name.

    It is empty if a replay changes nothing but floats.
    """
    if operator not in NUMBERS:
        return {}
    names, choose = NUMBERS[operator]
    given = [name for name in names if host.get(name) is not None]
    if not given or ("block_table" in names and "block_table" not in given):
        return {}
    found = {**host, **{name: _unknown(host[name]) for name in given}}
    choose(found, random)
    return {name: found[name] for name in given}


def _unknown(numbers: Any) -> Any:
    if isinstance(numbers, list):
        return [UNKNOWN] * len(numbers)
    return copy.deepcopy(numbers).fill_(UNKNOWN)  # with its offset and strides


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


def _lengths(counts: list[int], blocks: int, size: int) -> list[int]:
    """Choose lengths of contexts, by the tokens of requests and the blocks that each may have.

    The first context fills its blocks; the others end beside the edge of a block.
    """
    room = blocks * size
    beside = [min(size + number % 3 - 1, room) for number in range(1, len(counts))]
    pairs = zip(counts, [room, *beside])
    return [max(count, other) if count else 0 for count, other in pairs]


def _contexts(of_queries: str, of_contexts: str) -> Callable[[Made, torch.Generator], None]:
    """Return a function that gives requests blocks, and lengths that are not known.

    The names are those of ends of queries, and of lengths of contexts: lists.
    """

    def fit_contexts(a: Made, random: torch.Generator) -> None:
        _blocks(a, random)
        if UNKNOWN in (a.get(of_contexts) or ()):
            ends = a[of_queries]
            counts = [end - start for start, end in zip([0, *ends], ends)]
            a[of_contexts][:] = _lengths(counts, a["block_table"].shape[1], a["block_size"])

    return fit_contexts


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
        blocks, size = table.shape[1], a["key"].shape[1]
        if (lengths == UNKNOWN).any():
            lengths.copy_(torch.tensor(_lengths(counts.tolist(), blocks, size)))
        lengths.copy_(lengths.clamp(max=blocks * size).maximum(counts))
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
        first = int(torch.randint(1, 4, (1,), generator=random))  # one token alone goes on
        a["finished"].copy_(torch.arange(len(a["finished"])) % 4 == first)


def _groups(a: Made, random: torch.Generator) -> None:
    """Give scales to a product of int8, and draw weights that are of four bits."""
    for name in ("scale", "per_token_scale"):
        for scale in a.get(name) or ():
            _scale(scale, OF_SUMS)
    for weight, scale, offset in zip(
        a["weight"], a.get("antiquant_scale") or (), a.get("antiquant_offset") or ()
    ):
        _of_four_bits(weight, scale, offset, random)
    for weight in a["weight"]:
        _draw_words(weight, random)


def _sizes_of_groups(a: Made, random: torch.Generator) -> None:
    """Give most rows to experts, at random."""
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


def _rows(a: Made, random: torch.Generator) -> None:
    """Take different rows: of two that are written to one place, either may remain."""
    _different(a["index"], a["self"].shape[a["dim"]], random)


def _slots_of_rows(a: Made, random: torch.Generator) -> None:
    """Write to different rows: all padding goes to one, where any of it may remain."""
    _different(a["indices"], len(a["input"]), random)


def _different(index: torch.Tensor, count: int, random: torch.Generator) -> None:
    places = torch.arange(index.numel()) % count
    index.copy_(torch.randperm(count, generator=random)[places].view(index.shape))


def _sums_near_one(a: Made, random: torch.Generator) -> None:
    """Draw smaller weights in float32: rounding of larger sums shows where a sum is nearly 0."""
    if a["weight"].dtype is torch.float32:
        a["weight"].div_(a["weight"].shape[-1] ** 0.5)


def _positive(a: Made, random: torch.Generator) -> None:
    a["self"].abs_()


def _requests_of_rule(a: Made, random: torch.Generator) -> None:
    """Give requests whole tokens, at most as many accepted ones, and blocks.

    In a graph, lengths are computed when it is replayed, and blocks are told then. Each of its
    requests has as many tokens as any other one.
    """
    lengths, tokens = a["actual_seq_lengths"], len(a["value"])
    if lengths.sum() != tokens or (lengths < 1).any():
        lengths.fill_(tokens // len(lengths))
        lengths[-1] += tokens - lengths.sum()
    accepted = a.get("num_accepted_tokens")
    if accepted is not None:
        some = (torch.rand(len(lengths), generator=random) * lengths).int() + 1
        accepted.copy_(accepted.where(accepted >= 1, some).minimum(lengths))
    blocks = a.get("ssm_state_indices")
    if blocks is not None:
        count = len(a["state"]) - 1  # without the null block
        blocks.copy_(torch.randperm(count, generator=random)[torch.arange(tokens) % count] + 1)


def _rule(a: Made, random: torch.Generator) -> None:
    """Make vectors of length 1, rates between 0 and 1, and decays below 1."""
    for name in ("query", "key"):
        a[name].copy_(torch.nn.functional.normalize(a[name].double(), dim=-1))
    a["beta"].copy_(a["beta"].double().sigmoid())
    if a.get("g") is not None:
        a["g"].copy_(-a["g"].abs())


NUMBERS: Mapping[str, tuple[tuple[str, ...], Callable[[Made, torch.Generator], None]]] = {
    "_npu_moe_token_unpermute": (("sorted_indices",), _places("sorted_indices", with_gaps=False)),
    "embedding": (("indices",), _tokens),
    "index_copy_": (("index",), _rows),
    "index_select": (("index",), _rows),
    "npu_chunk_gated_delta_rule": ((), _requests_of_rule),
    "npu_fused_infer_attention_score": (
        ("block_table", "actual_seq_lengths_kv"),
        _contexts("actual_seq_lengths", "actual_seq_lengths_kv"),
    ),
    "npu_fused_infer_attention_score_v2": (
        ("block_table", "actual_seq_kvlen"),
        _contexts("actual_seq_qlen", "actual_seq_kvlen"),
    ),
    "npu_grouped_matmul": (("group_list",), _sizes_of_groups),
    "npu_lightning_indexer": (
        ("block_table", "actual_seq_lengths_key"),
        _requests("actual_seq_lengths_key"),
    ),
    "npu_moe_finalize_routing": (
        ("expanded_src_to_dst_row",),
        _places("expanded_src_to_dst_row", with_gaps=True),
    ),
    "npu_moe_gating_top_k_softmax_v2": (("finished",), _finished),
    "npu_moe_init_routing_v2": (("expert_idx",), _experts_of_tokens),
    "npu_moe_token_unpermute": (("sorted_indices",), _places("sorted_indices", with_gaps=False)),
    "npu_mrope": (("positions",), _positions),
    "npu_recurrent_gated_delta_rule": (
        ("ssm_state_indices", "num_accepted_tokens"),
        _requests_of_rule,
    ),
    "npu_scatter_nd_update_": (("indices",), _slots_of_rows),
    "npu_scatter_pa_kv_cache": (("slot_mapping",), _slots),
    "npu_sparse_flash_attention": (
        ("block_table", "actual_seq_lengths_kv", "sparse_indices"),
        _chosen,
    ),
}
"""By operators, without their overloads: whole numbers that an engine tells a graph before each
replay, or that other operators of the graph compute, and a function that chooses unknown ones."""

FITS: Mapping[str, Callable[[Made, torch.Generator], None]] = {
    "linear": _sums_near_one,
    "npu_add_rms_norm_quant": _scales(STEP, "scales1"),
    "npu_chunk_gated_delta_rule": _rule,
    "npu_dequant_swiglu_quant": _rounded_rows,
    "npu_grouped_matmul": _groups,
    "npu_quant_matmul": _int8_rows,
    "npu_quantize": _scales(STEP, "scales"),
    "npu_recurrent_gated_delta_rule": _rule,
    "npu_weight_quant_batchmatmul": _words,
    "rsqrt": _positive,
}
"""By operators, without their overloads: a function that changes what was drawn."""
