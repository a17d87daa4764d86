"""What a recorded call has to give: float64 on the host, by formulas or torch's own operators.

Large calls are compared in some of their rows: rows are computed alone, so those of a few tokens
say what the others would.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_map

from vllm_npu_prep.verify import formulas

ROWS = 24
"""How many rows of a large result are compared: the first and last ones, and some between."""

COLUMNS = 8192
"""How many columns of a weight are widened to float64 at once."""

Arguments = Mapping[str, Any]


@dataclass(frozen=True)
class Expected:
    """What one result of a call has to hold, in all rows or in some."""

    result: int  # which result of the schema; if it has none, which argument that is written
    values: torch.Tensor
    rows: torch.Tensor | None = None  # int64; None means all rows
    tolerance: float | None = None
    places_in: torch.Tensor | None = None  # the result holds places of `values` in these rows

    def of(self, got: torch.Tensor) -> torch.Tensor:
        """Return the part of a result that is compared."""
        part = got if self.rows is None else got[self.rows.to(got.device)]
        if self.places_in is None:
            return part
        return self.places_in.gather(-1, part.cpu()[..., None])[..., 0]


def some_rows(count: int) -> torch.Tensor:
    """Return up to `ROWS` rows of `count`, the first and the last among them."""
    if count <= ROWS:
        return torch.arange(count)
    return torch.linspace(0, count - 1, ROWS).long().unique()


def _norm(a: Arguments) -> list[Expected]:
    rows = some_rows(len(a["input"]))
    epsilon = a.get("epsilon", 1e-6)
    return [Expected(0, formulas.rms_norm(a["input"][rows], a["gamma"], epsilon), rows)]


def _gemma_norm(a: Arguments) -> list[Expected]:
    return _norm({**a, "gamma": 1 + a["gamma"].double()})


def _add_norm(a: Arguments) -> list[Expected]:
    rows = some_rows(len(a["x1"]))
    total = a["x1"][rows].double() + a["x2"][rows].double()
    normed = formulas.rms_norm(total, a["gamma"], a.get("epsilon", 1e-6))
    return [Expected(0, normed, rows), Expected(2, total, rows)]


def _swiglu(a: Arguments) -> list[Expected]:
    rows = some_rows(len(a["input"]))
    return [Expected(0, formulas.swiglu(a["input"][rows]), rows)]


def _rotate(a: Arguments) -> list[Expected]:
    """Rotate Q and K; with sections, each frequency takes its own position."""
    rows, size = some_rows(a["positions"].shape[-1]), a["head_size"]
    table, positions = a["cos_sin_cache"], a["positions"][..., rows]
    sections = [*(a.get("mrope_section") or [0, 0, 0])]
    if positions.dim() == 2:
        half = table.shape[1] // 2
        if a.get("cache_mode") == "interleave":
            of = torch.arange(half) % 3
            for plane in (1, 2):
                of[(of == plane) & (torch.arange(half) >= 3 * sections[plane])] = 0
        else:
            of = torch.repeat_interleave(torch.arange(3), torch.tensor(sections))
        columns = torch.arange(table.shape[1])
        turned_by = table[positions[of.repeat(2)].T, columns]
    else:
        turned_by = table[positions]
    interleaved = a.get("rotary_mode") == "interleave"
    found = []
    for number, name in enumerate(("query", "key")):
        heads = a[name][rows].unflatten(-1, (-1, size))
        found.append(
            Expected(number, formulas.rotated(heads, turned_by, interleaved).flatten(1), rows)
        )
    return found


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


def _product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Multiply by a weight ``[inputs, outputs]``, some columns at a time: a head has many."""
    parts = [x.double() @ part.double() for part in weight.split(COLUMNS, 1)]
    product = torch.cat(parts, -1)
    return product if bias is None else product + bias.double()


def _linear(a: Arguments) -> list[Expected]:
    rows = some_rows(len(a["input"]))
    return [Expected(0, _product(a["input"][rows], a["weight"].t(), a.get("bias")), rows)]


def _embedding(a: Arguments) -> list[Expected]:
    rows = some_rows(len(a["indices"]))
    return [Expected(0, a["weight"][a["indices"][rows]], rows, 0.0)]


def _grouped(a: Arguments) -> list[Expected]:
    """Multiply a list of inputs by a list of weights, each by its own."""
    if len(a["x"]) != len(a["weight"]) or a.get("group_list") is not None:
        return []
    found, biases = [], a.get("bias") or [None] * len(a["x"])
    for number, (x, weight, bias) in enumerate(zip(a["x"], a["weight"], biases)):
        rows = some_rows(len(x))
        found.append(Expected(number, _product(x[rows], weight, bias), rows))
    return found


def _attention(a: Arguments) -> list[Expected]:
    """Attend with the TND layout, over fresh keys or blocks of a cache."""
    if a.get("input_layout") != "TND" or a.get("query_rope") is not None:
        return []
    query, scale = a["query"], a.get("scale", 1.0)
    ends = a["actual_seq_lengths"]
    window = a["pre_tokens"] + 1 if a.get("sparse_mode", 0) == 4 else None
    causal = a.get("sparse_mode", 0) in (3, 4)
    table, size = a.get("block_table"), a.get("block_size", 0)
    keys, values = a["key"], a["value"]
    rows, parts = [], []
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
        seen = formulas.visible(end - begin, len(key), window, causal)[own]
        output, _ = formulas.attention(query[begin:end][own], key, value, scale, seen)
        rows.append(own + begin)
        parts.append(output)
    return [Expected(0, torch.cat(parts), torch.cat(rows))]


def _argmax(a: Arguments) -> list[Expected]:
    """Compare numbers and not places: equal numbers are often the largest."""
    rows = some_rows(len(a["self"]))
    given = a["self"][rows]
    return [Expected(0, given.max(-1).values, rows, 0.0, given)]


FORMULAS: Mapping[str, Callable[[Arguments], list[Expected]]] = {
    "argmax": _argmax,
    "embedding": _embedding,
    "linear": _linear,
    "npu_rms_norm": _norm,
    "npu_gemma_rms_norm": _gemma_norm,
    "npu_add_rms_norm": _add_norm,
    "npu_swiglu": _swiglu,
    "npu_mrope": _rotate,
    "npu_scatter_pa_kv_cache": _cache_write,
    "npu_grouped_matmul": _grouped,
    "npu_fused_infer_attention_score": _attention,
}
"""By operators, without their overloads: a function of the arguments on the host, by name."""


def expected_of(operator: str, function: Any, arguments: Arguments) -> list[Expected]:
    """Return what is known of a call's results; empty if no formula says it.

    The arguments are on the host. torch's own operators are computed in float64.
    """
    name = operator.partition("::")[2].partition(".")[0]
    if name in FORMULAS:
        return FORMULAS[name](arguments)
    if not operator.startswith("aten::"):
        return []
    given = {name: tree_map(_wide, value) for name, value in arguments.items()}
    if given.get("dtype") is not None or "device" in given:
        given["device"] = torch.device("cpu")
    results = function(**given)
    listed = results if isinstance(results, (tuple, list)) else [results]
    return [Expected(n, each) for n, each in enumerate(listed) if each is not None]


def _wide(value: Any) -> Any:
    is_float = isinstance(value, torch.Tensor) and value.is_floating_point()
    return value.double() if is_float else value
