"""Calls of operators that an engine makes: how they are written down, read back and made again.

A list is a file of JSON lines, which may be compressed (``.gz``). The first line has the settings
and the model's configuration of the engine that made it. Each other line is a call: operator,
dtypes, shapes, strides, offsets in the storage, attributes, and whether a graph captured it. Whole
numbers on the host and in small tensors are kept, since they say which blocks, lengths and modes a
kernel meets; floats are drawn again.
"""

import gzip
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from vllm_npu_prep.errors import PrepError
from vllm_npu_prep.verify.calls.fitting import fit, other_numbers

FORMAT = "vllm_npu_prep calls 1"
"""What the first line of a list names itself."""

MOST_VALUES = 1 << 16
"""Whole numbers of a tensor are written down up to this many."""

SPREAD = 3.0
"""Floats are drawn between this and its negative. With smaller ones, attention over a long context
would be close to the mean of all values, and no comparison could tell which keys a kernel read."""

PERIOD = 1 << 22
"""How many floats are drawn; a larger tensor repeats them, which saves time."""

ALIGNED = 512
"""Offsets that are as even up to this number of elements are the same to a kernel."""

NOTHING = ("aten::empty", "aten::new_empty", "aten::resize_", "aten::_local_scalar_dense")
"""Beginnings of the names of operators that make room, or read a number, and compute nothing."""

MC2 = "npu::npu_moe_distribute_"
"""Beginning of the names of the operators that bring tokens to experts of other ranks, and back."""

COLLECTIVES = ("c10d::", "_c10d_functional::", MC2)
"""Beginnings of the names of operators that need other ranks. Rows of their own (``hccl-`` and
``mc2-``) try them."""

OF_PYTHON = ("vllm", "vllm_ir", "_moe_C")
"""Namespaces of operators that are written in Python: the calls that these make are the ones that
count."""

READ_BY_TABLE = ("key", "value", "key_rope")
"""Arguments of attention that are caches of blocks, if it is given a table of blocks."""

FEW = 4
"""Lists of up to so many numbers are attributes; longer ones are lengths of requests."""


@dataclass(frozen=True)
class Call:
    """One call of an operator.

    Attributes
    ----------
    operator
        Name with namespace and overload, ``npu::npu_fused_infer_attention_score.out`` say.
    arguments
        By name, as `described` gives them.
    captured
        Whether a graph captured it.
    """

    operator: str
    arguments: Mapping[str, Any]
    captured: bool = False

    @classmethod
    def of(
        cls,
        schema: Any,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        captured: bool,
        note: "Note" = lambda tensor, found: None,
    ) -> "Call":
        """Describe a call of the operator with a schema; `described` calls `note`."""
        given = {**dict(zip((argument.name for argument in schema.arguments), args)), **kwargs}
        # Of what has no default, None has to be given, too
        defaults = {a.name: a.default_value for a in schema.arguments if a.has_default_value()}
        arguments = {
            name: described(value, note)
            for name, value in given.items()
            if isinstance(value, (torch.Tensor, list, tuple))
            or name not in defaults
            or value != defaults[name]
        }
        operator = f"{schema.name}.{schema.overload_name}".removesuffix(".")
        return cls(operator, arguments, captured)

    @property
    def key(self) -> str:
        """What distinguishes kernels of this call from others.

        These are neither the numbers in tensors nor how many blocks a cache has, which depends on
        the memory that an engine finds.
        """
        kinds = {name: _kind(value) for name, value in self.arguments.items()}
        for name in kinds:
            if self._has_blocks(name):
                kinds[name] = {**kinds[name], "shape": kinds[name]["shape"][1:]}
        return json.dumps([self.operator, kinds, self.captured])

    def _has_blocks(self, name: str) -> bool:
        """Return whether an argument is a cache of blocks, or of recurrent states."""
        value = self.arguments[name]
        is_read = self.arguments.get("block_table") is not None and name in READ_BY_TABLE
        is_cache = is_read or name.endswith("_cache") or name == "state"
        return is_cache and isinstance(value, dict) and len(value["shape"]) > 2

    @property
    def name(self) -> str:
        """The operator without its namespace."""
        return self.operator.partition("::")[2]

    def as_json(self) -> dict[str, Any]:
        found: dict[str, Any] = {"operator": self.operator, "arguments": dict(self.arguments)}
        return {**found, "captured": True} if self.captured else found

    def function(self) -> Any:
        """The operator of torch.

        Raises
        ------
        AttributeError
            If the installed torch and torch_npu have no such operator.
        """
        namespace, _, name = self.operator.partition("::")
        packet, _, overload = name.partition(".")
        return getattr(getattr(getattr(torch.ops, namespace), packet), overload or "default")

    def __str__(self) -> str:
        given = [text for name, value in self.arguments.items() if (text := _shown(name, value))]
        return ", ".join(given)[:300] + (", captured" if self.captured else "")


def is_tried(operator: Any) -> bool:
    """Return whether calls of an operator are in lists: it computes, and needs no other rank."""
    infos = [result.alias_info for result in operator._schema.returns]
    is_view = any(info is not None and not info.is_write for info in infos)
    return not is_view and not operator._schema.name.startswith((*NOTHING, *COLLECTIVES))


Note = Callable[[torch.Tensor, dict[str, Any]], object]


def described(value: Any, note: Note) -> Any:
    """Describe an argument; `note` is told of tensors of whole numbers, to put their values in."""
    if isinstance(value, torch.Tensor):
        found: dict[str, Any] = {"dtype": str(value.dtype)[6:], "shape": [*value.shape]}
        if not value.is_contiguous():
            found["strides"] = [*value.stride()]
        if value.storage_offset():
            found["offset"] = value.storage_offset()
        if value.device.type == "cpu":
            found["host"] = True
        is_whole = not value.is_floating_point() and value.dtype is not torch.int8
        if is_whole and value.numel() <= MOST_VALUES:
            note(value, found)
        return found
    if isinstance(value, (list, tuple)):
        return [described(item, note) for item in value]
    if isinstance(value, torch.dtype):
        return {"type": str(value)[6:]}
    plain = value is None or isinstance(value, (bool, int, float, str))
    return value if plain else {"other": str(value)}


def made_arguments(call: Call, seed: int) -> dict[str, Any]:
    """Make all arguments of a call again on the host, the same ones for a seed."""
    random = torch.Generator().manual_seed(seed)
    found = {name: made(value, random) for name, value in call.arguments.items()}
    fit(call.name.partition(".")[0], found, random)
    return found


def told_arguments(call: Call, host: Mapping[str, Any], seed: int) -> dict[str, Any]:
    """Choose what a graph of a call may be told at a replay in place of arguments of the host."""
    random = torch.Generator().manual_seed(seed)
    return other_numbers(call.name.partition(".")[0], host, random)


def moved_arguments(
    call: Call, host: Mapping[str, Any], put: Callable[[torch.Tensor], torch.Tensor]
) -> dict[str, Any]:
    """Bring a call's arguments to where `put` takes tensors; those of the host stay."""
    return {name: moved(value, host[name], put) for name, value in call.arguments.items()}


def moved(given: Any, value: Any, put: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Bring whole storages to the device, and lay the strides of the call over them."""
    if isinstance(value, list):
        return [moved(*each, put) for each in zip(given, value)]
    if not isinstance(value, torch.Tensor) or given.get("host"):
        return value
    whole = torch.empty(0, dtype=value.dtype).set_(value.untyped_storage())
    return put(whole).as_strided(value.shape, value.stride(), value.storage_offset())


def made(value: Any, random: torch.Generator) -> Any:
    """Make an argument again on the host: floats are drawn, and whole numbers that aren't known
    count up."""
    if isinstance(value, list):
        return [made(item, random) for item in value]
    if not isinstance(value, dict):
        return value
    if "type" in value:
        return getattr(torch, value["type"])
    if "other" in value:
        return None
    shape, dtype = value["shape"], getattr(torch, value["dtype"])
    offset = value.get("offset", 0)
    strides = value.get("strides") or _contiguous(shape)
    room = 1 + sum((size - 1) * step for size, step in zip(shape, strides))
    host = _drawn(room if math.prod(shape) else 0, dtype, random)
    if offset:
        host = torch.cat((host.new_empty(offset), host))
    if "values" in value and math.prod(shape):
        given = torch.tensor(value["values"], dtype=dtype).view(shape)
        for dim, step in enumerate(strides):
            given = given if step else given.narrow(dim, 0, 1)  # an expanded dimension
        host.as_strided(given.shape, strides, offset).copy_(given)
    return host.as_strided(shape, strides, offset)


def _drawn(count: int, dtype: torch.dtype, random: torch.Generator) -> torch.Tensor:
    if dtype.is_floating_point:
        drawn = torch.empty(min(count, PERIOD)).uniform_(-SPREAD, SPREAD, generator=random)
        drawn, found = drawn.to(dtype), torch.empty(count, dtype=dtype)
        for part in found.split(PERIOD):
            part.copy_(drawn[: len(part)])
        return found
    if dtype is torch.int8:
        return torch.randint(-127, 128, (count,), dtype=dtype, generator=random)
    if dtype is torch.bool:
        return torch.ones(count, dtype=dtype)
    return torch.arange(count, dtype=dtype)


def _contiguous(shape: Iterable[int]) -> list[int]:
    steps, step = [], 1
    for size in reversed([*shape]):
        steps.append(step)
        step *= max(size, 1)
    return steps[::-1]


def _kind(value: Any) -> Any:
    if isinstance(value, dict):
        kept = {name: each for name, each in value.items() if name != "values"}
        if "offset" in kept:  # one block of a cache is like another
            kept["offset"] = math.gcd(kept["offset"], ALIGNED)
        return kept
    if isinstance(value, list):
        if value and isinstance(value[0], (dict, list)):
            return [_kind(item) for item in value]
        if len(value) > FEW and all(isinstance(item, int) for item in value):
            return ["numbers", len(value), (max(value) - 1).bit_length()]
    return value


def size_of(call: Call) -> int:
    """How large the numbers of a call are: of two calls of one kind the larger one is kept."""
    lists = [value for value in call.arguments.values() if isinstance(value, list)]
    return sum(sum(each) for each in lists if each and all(type(x) is int for x in each))


def _shown(name: str, value: Any) -> str:
    if isinstance(value, dict):
        if "shape" not in value:
            return ""
        text = f"{name} {value['dtype']}{value['shape']}"
        return text + (f" by {value['strides']}" if "strides" in value else "")
    if isinstance(value, list):
        if value and isinstance(value[0], dict):
            return ", ".join(_shown(f"{name}[{i}]", item) for i, item in enumerate(value))
        return f"{name} {value}" if len(value) <= FEW else f"{name} up to {max(value)}"
    return "" if value is None else f"{name} {value}"


def in_runs(values: list[int]) -> Any:
    """Write numbers as runs, ``[first, count, step]``, where that is shorter.

    Slots count up by 1, and tables end with zeros.
    """
    runs: list[list[int]] = []
    for value in values:
        if runs:
            first, count, step = runs[-1]
            step = value - first if count == 1 else step
            if step in (0, 1) and value == first + count * step:
                runs[-1] = [first, count + 1, step]
                continue
        runs.append([int(value), 1, 0])
    return {"runs": runs} if 3 * len(runs) < len(values) else values


def out_of_runs(values: Any) -> list[int]:
    if not isinstance(values, dict):
        return values
    return [first + step * n for first, count, step in values["runs"] for n in range(count)]


def _with_values(value: Any, change: Callable[[Any], Any]) -> Any:
    """Change what is written under ``values``, at any depth."""
    if isinstance(value, list):
        return [_with_values(item, change) for item in value]
    if not isinstance(value, dict):
        return value
    return {k: change(v) if k == "values" else _with_values(v, change) for k, v in value.items()}


def write_list(path: Path, engine: Mapping[str, Any], calls: Iterable[Call]) -> None:
    """Write a list of the calls that an engine made."""
    lines = [{"format": FORMAT, "engine": dict(engine)}, *(call.as_json() for call in calls)]
    lines = [_with_values(line, in_runs) for line in lines]
    text = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines).encode()
    path.write_bytes(gzip.compress(text, mtime=0) if path.suffix == ".gz" else text)


def read_list(path: Path) -> tuple[dict[str, Any], list[Call]]:
    """Read a list: its engine, and its calls.

    Raises
    ------
    PrepError
        If the file can't be read or is no list.
    """
    try:
        data = path.read_bytes()
        text = (gzip.decompress(data) if path.suffix == ".gz" else data).decode()
        first, *lines = [_with_values(json.loads(x), out_of_runs) for x in text.splitlines()]
        if first.get("format") != FORMAT:
            raise ValueError(f"its first line names no {FORMAT!r}")
        calls = [Call(x["operator"], x["arguments"], x.get("captured", False)) for x in lines]
        return first["engine"], calls
    except (OSError, EOFError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise PrepError(
            f"{path} is no list of calls ({error}); vllm-npu-prep verify-device --model FOLDER "
            "--record FILE writes one"
        ) from error
