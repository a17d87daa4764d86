"""What operators of attention, caches and recurrent states have to give, by their arguments."""

from collections.abc import Mapping

import torch

from vllm_npu_prep.verify import formulas
from vllm_npu_prep.verify.calls.expected_part import HEADS, Arguments, Expected, Formula, some_rows

STATE_TOLERANCE = 0.04
"""Operators round recurrent states to bfloat16 between chunks of a sequence, or between tokens."""

IN_PARTS = 0.03
"""Tolerance of attention with a rotated part: probabilities are rounded between two products."""


def _cache_write(a: Arguments) -> list[Expected]:
    """Return blocks of both planes after the write: some that are written, and some others."""
    slots, size = a["slot_mapping"].tolist(), a["key_cache"].shape[1]
    written = torch.tensor([slot // size for slot in slots if slot >= 0], dtype=torch.int64)
    blocks = torch.cat((written.unique(), some_rows(len(a["key_cache"])))).unique()
    blocks = blocks[some_rows(len(blocks))]
    place = {block: row for row, block in enumerate(blocks.tolist())}
    found = []
    for number, (name, cache) in enumerate((("key", "key_cache"), ("value", "value_cache"))):
        rows = a[cache][blocks].clone()
        for token, slot in enumerate(slots):
            if slot >= 0 and slot // size in place:
                rows[place[slot // size], slot % size] = a[name][token]
        found.append(Expected(number, rows, blocks, tolerance=0.0))
    return found


def _rows_written(a: Arguments) -> list[Expected]:
    """Return rows after a write of whole ones: some that are written, and some others."""
    plane, places = a["input"].clone(), a["indices"]
    if places.shape[-1] != 1:
        return []
    places = places.flatten().long()
    plane[places] = a["updates"]
    rows = torch.cat((places[some_rows(len(places))], some_rows(len(plane)))).unique()
    return [Expected(0, plane[rows], rows, 0.0)]


def _gather(a: Arguments) -> list[Expected]:
    """Gather rows of both caches, one request after the other."""
    starts, size = a.get("seq_offset"), a["key_cache"].shape[1]
    slots: list[int] = []
    for request, length in enumerate(a["seq_lens"].tolist()):
        start = 0 if starts is None else int(starts[request])
        table = a["block_tables"][request].tolist()
        slots += [table[p // size] * size + p % size for p in range(start, start + length)]
    rows = some_rows(len(slots))
    chosen = torch.tensor(slots, dtype=torch.int64)[rows]
    return [
        Expected(number, a[cache].flatten(0, 1)[chosen], rows, 0.0)
        for number, cache in enumerate(("key_cache", "value_cache"))
    ]


def _attention(a: Arguments) -> list[Expected]:
    """Attend with the TND layout, over fresh keys or blocks of a cache."""
    if a.get("input_layout") != "TND":
        return []
    query, scale, keys, values = a["query"], a.get("scale", 1.0), a["key"], a["value"]
    tolerance = None
    if a.get("query_rope") is not None:
        tolerance = IN_PARTS
        query = torch.cat((query, a["query_rope"]), -1)
        keys = torch.cat((keys, a["key_rope"]), -1)
    ends = a["actual_seq_lengths"]
    window = a["pre_tokens"] + 1 if a.get("sparse_mode", 0) == 4 else None
    causal = a.get("sparse_mode", 0) in (3, 4)
    table, size = a.get("block_table"), a.get("block_size", 0)
    rows, parts, sums = [], [], []
    chosen = set(some_rows(len(ends)).tolist())
    for request, end in enumerate(ends):
        begin = ends[request - 1] if request else 0
        lengths = a["actual_seq_lengths_kv"]
        if request not in chosen or end == begin:
            continue
        if table is None:
            start = lengths[request - 1] if request else 0
            key, value = keys[start : lengths[request]], values[start : lengths[request]]
        else:
            blocks = table[request, : -(-lengths[request] // size)].long()
            key, value = (
                plane[blocks].flatten(0, 1)[: lengths[request]] for plane in (keys, values)
            )
        heads = a.get("num_key_value_heads") or a["num_heads"]
        key, value = (each.reshape(len(each), heads, -1) for each in (key, value))
        own = some_rows(end - begin)
        seen = formulas.visible(end - begin, len(key), window, causal, own)
        output, lse = formulas.attention(query[begin:end][own], key, value, scale, seen)
        rows.append(own + begin)
        parts.append(output)
        sums.append(lse[..., None])
    found = [Expected(0, torch.cat(parts), torch.cat(rows), tolerance)]
    if a.get("softmax_lse_flag"):
        found.append(Expected(1, torch.cat(sums), torch.cat(rows), IN_PARTS))
    return found


OLDER_NAMES = {
    "actual_seq_qlen": "actual_seq_lengths",
    "actual_seq_kvlen": "actual_seq_lengths_kv",
    "num_query_heads": "num_heads",
    "softmax_scale": "scale",
    "return_softmax_lse": "softmax_lse_flag",
}
"""Arguments of fused attention's second version, by what the first one calls them."""


def _attention_v2(a: Arguments) -> list[Expected]:
    return _attention({OLDER_NAMES.get(name, name): value for name, value in a.items()})


def _merge(a: Arguments) -> list[Expected]:
    """Weigh parts of attention by their log-sum-exps."""
    rows = some_rows(len(a["local_out"][0]))
    lse = torch.stack([each[rows].double() for each in a["lse"]])
    whole = lse.logsumexp(0)
    outputs = torch.stack([each[rows].double() for each in a["local_out"]])
    merged = Expected(0, (outputs * (lse - whole).exp()[..., None]).sum(0), rows)
    return [merged, Expected(1, whole, rows)] if a["update_type"] == 1 else [merged]


def _heads_products(a: Arguments) -> list[Expected]:
    if any(a.get(name) is not None for name in ("bias", "scale")):
        return []
    x, weight = a["input"].permute(a["perm_x1"]), a["weight"].permute(a["perm_x2"])
    rows = some_rows(len(a["input"])) if a["perm_y"] == [1, 0, 2] else None
    if rows is not None:
        x = x[:, rows]
    return [Expected(0, (x.double() @ weight.double()).permute(a["perm_y"]), rows)]


def _some_heads(a: Arguments) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return some heads of values, and what a recurrence over them reads."""
    heads, group = some_rows(a["value"].shape[1], HEADS), a["value"].shape[1] // a["key"].shape[1]
    keys = heads // group
    given = {name: a[name][:, keys] for name in ("query", "key")}
    return heads, given | {name: a[name][:, heads] for name in ("value", "beta", "g")}


def _chunked_rule(a: Arguments) -> list[Expected]:
    heads, given = _some_heads(a)
    outputs, states, start = [], [], 0
    for request, length in enumerate(a["actual_seq_lengths"].tolist()):
        own = {name: each[start : start + length] for name, each in given.items()}
        output, kept = formulas.delta_rule(
            **own, scale=a["scale"], state=a["initial_state"][request, heads]
        )
        outputs.append(output)
        states.append(kept)
        start += length
    rows = some_rows(start)
    return [
        Expected(0, torch.cat(outputs)[rows], rows, STATE_TOLERANCE, columns=heads),
        Expected(1, torch.stack(states), None, STATE_TOLERANCE, columns=heads),
    ]


def _recurrent_rule(a: Arguments) -> list[Expected]:
    """Compute each request's tokens from the state after the last token that counts.

    The second result is what the operator writes: the state after each token, in its block.
    """
    heads, given = _some_heads(a)
    lengths, counts = a["actual_seq_lengths"].tolist(), a.get("num_accepted_tokens")
    chosen, places, start = set(some_rows(len(lengths)).tolist()), [], 0
    outputs, states = [], []
    for request, length in enumerate(lengths):
        if request in chosen:
            accepted = 1 if counts is None else int(counts[request])
            state = a["state"][int(a["ssm_state_indices"][start + accepted - 1]), heads]
            for place in range(start, start + length):
                token = {name: each[place, None] for name, each in given.items()}
                output, state = formulas.delta_rule(**token, scale=a["scale"], state=state)
                outputs.append(output)
                states.append(state)
                places.append(place)
        start += length
    rows = torch.tensor(places)
    blocks = a["ssm_state_indices"][rows].long()
    return [
        Expected(0, torch.cat(outputs), rows, STATE_TOLERANCE, columns=heads),
        Expected(1, torch.stack(states), blocks, STATE_TOLERANCE, columns=heads),
    ]


FORMULAS: Mapping[str, Formula] = {
    "npu_attention_update": _merge,
    "npu_chunk_gated_delta_rule": _chunked_rule,
    "npu_fused_infer_attention_score": _attention,
    "npu_fused_infer_attention_score_v2": _attention_v2,
    "npu_gather_pa_kv_cache": _gather,
    "npu_recurrent_gated_delta_rule": _recurrent_rule,
    "npu_scatter_nd_update_": _rows_written,
    "npu_scatter_pa_kv_cache": _cache_write,
    "npu_transpose_batchmatmul": _heads_products,
}
"""By operators, without their overloads: a function of the arguments on the host, by name."""
