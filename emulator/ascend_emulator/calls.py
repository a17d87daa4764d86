"""Distinct calls of operators that have a reference, as JSON lines: the option ``--calls``.

Two calls are the same if they agree in operator, dtypes, ranks, layouts, flags, sides (host or
device), and whether a graph runs them. Of each, the example that is shortest to write is kept.
"""

import json
import math
import os
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

CALLS = "NPU_EMULATOR_CALLS"
"""Folder to which each process writes its calls, if they are recorded."""
MOST_VALUES = 256
"""Values of an integer tensor are written up to this many; of float tensors they never are."""
SMALL = 4
"""Integers up to this one are modes, unless they are a number of something; others are sizes."""

_shortest: dict[str, tuple[float, str]] = {}
_writing = threading.Lock()


def record(schema: Any, arguments: dict[str, Any], captured: bool, on_host: Any) -> None:
    """Write a call, if it is new or shorter than the one before; `on_host` tells of a tensor."""
    defaults = {a.name: a.default_value for a in schema.arguments}
    given = {
        name: _described(value, on_host)
        for name, value in arguments.items()
        if not _is_default(value, defaults[name])
    }
    call: dict[str, Any] = {"operator": schema.name}
    if schema.overload_name:
        call["overload"] = schema.overload_name
    call["arguments"] = given
    if captured:
        call["captured"] = True
    line, key = json.dumps(call, default=str), key_of(call)
    with _writing:
        if (len(line), line) < _shortest.get(key, (math.inf, "")):
            _shortest[key] = len(line), line
            with (Path(os.environ[CALLS]) / f"{os.getpid()}.calls").open("a") as file:
                file.write(line + "\n")


def merged(calls: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The shortest example of each call, in order of operators."""
    found: dict[str, dict[str, Any]] = {}
    for call in sorted(calls, key=lambda call: (len(json.dumps(call)), json.dumps(call))):
        found.setdefault(key_of(call), call)
    return [found[key] for key in sorted(found)]


def key_of(call: dict[str, Any]) -> str:
    """What distinguishes a call from others."""
    arguments = {name: _kind(value, name) for name, value in sorted(call["arguments"].items())}
    operator = call["operator"], call.get("overload", ""), bool(call.get("captured"))
    return json.dumps([*operator, arguments], default=str)


def arguments_of(call: dict[str, Any]) -> dict[str, Any]:
    """Make the arguments of a recorded call: 0.5 in all floats, 0 where integers are not known."""
    return {name: _made(value) for name, value in call["arguments"].items()}


def _is_default(value: Any, default: Any) -> bool:
    if value is None or isinstance(value, (bool, int, float, str)):
        return type(value) is type(default) and value == default
    return False


def _described(value: Any, on_host: Callable[[Any], bool]) -> Any:
    import torch

    if isinstance(value, torch.Tensor):
        return _described_tensor(value, on_host)
    if isinstance(value, (list, tuple)):
        return [_described(item, on_host) for item in value]
    return str(value) if isinstance(value, torch.dtype) else value


def _described_tensor(tensor: Any, on_host: Callable[[Any], bool]) -> dict[str, Any]:
    text: dict[str, Any] = {"dtype": str(tensor.dtype)[6:], "shape": list(tensor.shape)}
    if not tensor.is_contiguous():
        text["strides"] = list(tensor.stride())
    if on_host(tensor):
        text["host"] = True
    is_whole = not tensor.is_floating_point() and not tensor.is_complex()
    if is_whole and tensor.device.type == "cpu" and tensor.numel() <= MOST_VALUES:
        text["values"] = tensor.flatten().tolist()
    return text


def _kind(value: Any, name: str) -> Any:
    if isinstance(value, dict):
        kept = {"dtype": value["dtype"], "rank": len(value["shape"]), "host": value.get("host")}
        return {**kept, "layout": _layout(value.get("strides"))}
    if isinstance(value, list):
        if value and isinstance(value[0], (dict, bool)):
            return [_kind(item, name) for item in value]
        return "list"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return value
    if isinstance(value, float):
        return "float"
    is_mode = abs(value) <= SMALL and not name.endswith("_num")
    return value if is_mode or "type" in name else "size"


def _layout(strides: list[int] | None) -> str:
    if strides is None:
        return "contiguous"
    return "rows with gaps" if strides[-1] == 1 else "strided"


def _made(value: Any) -> Any:
    import torch

    if isinstance(value, list):
        return [_made(item) for item in value]
    if isinstance(value, str) and value.startswith("torch."):
        return getattr(torch, value[6:])
    if not isinstance(value, dict):
        return value
    shape, dtype = value["shape"], getattr(torch, value["dtype"])
    strides = value.get("strides")
    if strides is None:
        tensor = torch.zeros(shape, dtype=dtype)
    else:
        room = 1 + sum((size - 1) * step for size, step in zip(shape, strides))
        tensor = torch.zeros(max(room, 0), dtype=dtype).as_strided(shape, strides)
    if "values" in value:
        return tensor.copy_(torch.tensor(value["values"], dtype=dtype).view(shape))
    is_small = math.prod(shape) <= 1 << 20  # zeros of a large cache take no memory
    return tensor.fill_(0.5) if dtype.is_floating_point and is_small else tensor
