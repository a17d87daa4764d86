"""What a recorded call has to give: float64 on the host, by formulas or torch's own operators.

Large calls are compared in some of their rows: rows are computed alone, so those of a few tokens
say what the others would.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_map

from vllm_npu_prep.verify import formulas
from vllm_npu_prep.verify.calls import expected_attention, expected_experts, expected_sparse
from vllm_npu_prep.verify.calls.expected_part import (
    Arguments,
    Expected,
    Formula,
    product,
    some_rows,
)


def _norm(a: Arguments) -> list[Expected]:
    rows = some_rows(len(a["input"]))
    epsilon = a.get("epsilon", 1e-6)
    return [Expected(0, formulas.rms_norm(a["input"][rows], a["gamma"], epsilon), rows)]


def _gemma_norm(a: Arguments) -> list[Expected]:
    return _norm({**a, "gamma": 1 + a["gamma"].double()})


def _swiglu(a: Arguments) -> list[Expected]:
    rows = some_rows(len(a["input"]))
    return [Expected(0, formulas.swiglu(a["input"][rows]), rows)]


def _geglu(a: Arguments) -> list[Expected]:
    """Multiply one half by GELU of the other: of the first one if `activate_left`."""
    rows = some_rows(len(a["input"]))
    x, gate = a["input"][rows].double().chunk(2, -1)
    if a.get("activate_left"):
        x, gate = gate, x
    form = "tanh" if a.get("approximate", 1) else "none"
    return [Expected(0, x * torch.nn.functional.gelu(gate, approximate=form), rows)]


def _gelu(a: Arguments) -> list[Expected]:
    rows = some_rows(len(a["input"]))
    form = a.get("approximate", "none")
    given = a["input"][rows].double()
    return [Expected(0, torch.nn.functional.gelu(given, approximate=form), rows)]


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


def _linear(a: Arguments) -> list[Expected]:
    rows = some_rows(len(a["input"]))
    return [Expected(0, product(a["input"][rows], a["weight"].t(), a.get("bias")), rows)]


def _embedding(a: Arguments) -> list[Expected]:
    rows = some_rows(len(a["indices"]))
    return [Expected(0, a["weight"][a["indices"][rows]], rows, 0.0)]


def _argmax(a: Arguments) -> list[Expected]:
    """Compare numbers and not places: equal numbers are often the largest."""
    rows = some_rows(len(a["self"]))
    given = a["self"][rows]
    return [Expected(0, given.max(-1).values, rows, 0.0, given)]


FORMULAS: Mapping[str, Formula] = {
    "argmax": _argmax,
    "embedding": _embedding,
    "linear": _linear,
    "npu_geglu": _geglu,
    "npu_gelu": _gelu,
    "npu_gemma_rms_norm": _gemma_norm,
    "npu_mrope": _rotate,
    "npu_rms_norm": _norm,
    "npu_swiglu": _swiglu,
    **expected_attention.FORMULAS,
    **expected_experts.FORMULAS,
    **expected_sparse.FORMULAS,
}
"""By operators, without their overloads: a function of the arguments on the host, by name."""


MOVES = ("cat", "copy_", "index_copy_", "index_select")
"""Operators that move whole weights or states and compute nothing: these are not widened, for which
a host may lack the memory."""


def expected_of(operator: str, function: Any, arguments: Arguments) -> list[Expected]:
    """Return what is known of a call's results; empty if no formula says it.

    The arguments are on the host. torch's own operators are computed in float64, if they compute.
    """
    name = operator.partition("::")[2].partition(".")[0]
    if name in FORMULAS:
        return FORMULAS[name](arguments)
    if not operator.startswith("aten::"):
        return []
    taken = _own if name in MOVES else _wide
    given = {name: tree_map(taken, value) for name, value in arguments.items()}
    takes_device = any(argument.name == "device" for argument in function._schema.arguments)
    if takes_device and (given.get("dtype") is not None or "device" in given):
        given["device"] = torch.device("cpu")
    results = function(**given)
    if results is None:
        results = given.get("out", ())
    listed = results if isinstance(results, (tuple, list)) else [results]
    return [Expected(n, each) for n, each in enumerate(listed) if each is not None]


def _wide(value: Any) -> Any:
    """Return floats in float64, and copies of other numbers: the operator may write them."""
    is_float = isinstance(value, torch.Tensor) and value.is_floating_point()
    return value.double() if is_float else _own(value)


def _own(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value
