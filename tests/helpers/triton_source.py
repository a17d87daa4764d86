"""Runs the source of vLLM's Triton kernels on the host, program by program, with numpy.

The source is that of a kernel's file: an engine may have replaced the kernel itself.
"""

import ast
import functools
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch


class _Pointer:
    """An address: an element of a tensor, or several."""

    def __init__(self, elements: np.ndarray, offsets: Any = 0) -> None:
        self.elements, self.offsets = elements, offsets
        self.dtype = SimpleNamespace(element_ty=elements.dtype)

    @classmethod
    def to(cls, value: Any) -> Any:
        """Memory from a tensor's first element on; anything else stays as it is."""
        if not isinstance(value, torch.Tensor):
            return value
        size = value.untyped_storage().nbytes() // value.element_size() - value.storage_offset()
        return cls(value.as_strided((size,), (1,)).numpy())

    def __add__(self, offsets: Any) -> "_Pointer":
        return _Pointer(self.elements, self.offsets + offsets)

    def __sub__(self, offsets: Any) -> "_Pointer":
        return self + -offsets


def _places(pointer: _Pointer, mask: Any) -> Any:
    """Where the elements that are meant are: in the tensor's memory."""
    if mask is None:
        places = pointer.offsets
    else:
        offsets = np.asarray(pointer.offsets)
        places = offsets[np.broadcast_to(np.asarray(mask, bool), offsets.shape)]
    assert np.size(places) == 0 or 0 <= np.min(places) <= np.max(places) < len(pointer.elements)
    return places


def _load(pointer: _Pointer, mask: Any = None, other: Any = 0) -> Any:
    places = _places(pointer, mask)
    if mask is None:
        return pointer.elements[places]
    values = np.full(np.shape(pointer.offsets), other, pointer.elements.dtype)
    values[np.broadcast_to(np.asarray(mask, bool), values.shape)] = pointer.elements[places]
    return values[()]


def _meant(values: Any, pointer: _Pointer, mask: Any) -> Any:
    """Those of the values that are written."""
    if mask is None:
        return values
    shape = np.shape(pointer.offsets)
    return np.broadcast_to(values, shape)[np.broadcast_to(np.asarray(mask, bool), shape)]


def _store(pointer: _Pointer, values: Any, mask: Any = None) -> None:
    pointer.elements[_places(pointer, mask)] = _meant(values, pointer, mask)


def _atomic(update: np.ufunc) -> Any:
    def atomic(pointer: _Pointer, values: Any, mask: Any = None) -> None:
        update.at(pointer.elements, _places(pointer, mask), _meant(values, pointer, mask))

    return atomic


def _max(values: Any, axis: int | None = None, return_indices: bool = False) -> Any:
    most = np.max(values, axis=axis)
    return (most, np.argmax(values, axis=axis)) if return_indices else most


def _nothing(*_: Any, **__: Any) -> None: ...


SAME = ("argmax", "cumsum", "exp", "log", "maximum", "minimum", "reshape", "sum", "where")
SAME += ("float32", "float64", "int32", "int64", "uint8", "uint32", "uint64", "zeros_like")
"""Names of ``tl`` that mean the same in numpy."""
LANGUAGE = SimpleNamespace(
    **{name: getattr(np, name) for name in SAME},
    int1=np.bool_,
    constexpr=int,
    arange=lambda start, end: np.arange(start, end, dtype=np.int32),
    atomic_add=_atomic(np.add),
    atomic_or=_atomic(np.bitwise_or),
    cast=lambda value, dtype: np.asarray(value).astype(dtype)[()],
    cdiv=lambda a, b: -(-a // b),
    debug_barrier=_nothing,
    full=lambda shape, value, dtype: np.full(shape, value, dtype)[()],
    load=_load,
    max=_max,
    range=range,
    static_assert=_nothing,
    static_range=range,
    store=_store,
    zeros=lambda shape, dtype: np.zeros(shape, dtype)[()],
)
"""As much of ``tl`` as the kernels use; `Source` adds the number of the program."""


class _Casts(ast.NodeTransformer):
    """Writes ``x.to(dtype)`` as ``tl.cast(x, dtype)``: numbers of numpy have no such method."""

    def visit_Call(self, node: ast.Call) -> ast.Call:
        self.generic_visit(node)
        match node.func:
            case ast.Attribute(value, "to"):
                cast = ast.Attribute(ast.Name("tl", ast.Load()), "cast", ast.Load())
                return ast.Call(cast, [value, *node.args], [])
        return node


@functools.cache
def kernels_of(module: ModuleType) -> dict[str, Any]:
    """The functions for Triton of a module by name, and those of others that they call."""
    tree = ast.parse(Path(str(module.__file__)).read_text())
    kernels = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef)
        and any("triton.jit" in ast.unparse(each) for each in node.decorator_list)
    ]
    called = {node.id for each in kernels for node in ast.walk(each) if isinstance(node, ast.Name)}
    found: dict[str, Any] = {}
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("vllm."):
            names = called & {alias.name for alias in node.names}
            theirs = kernels_of(sys.modules[node.module]) if names else {}
            found |= {name: theirs[name] for name in names & theirs.keys()}
    namespace = {**vars(module), **found, "tl": LANGUAGE}
    for node in kernels:
        node.decorator_list = []
    code = ast.fix_missing_locations(_Casts().visit(ast.Module(kernels, [])))
    exec(compile(code, str(module.__file__), "exec"), namespace)
    return found | {node.name: namespace[node.name] for node in kernels}


class Source:
    """A kernel of a module, launched as Triton's: ``Source(module, name)[grid](*args)``."""

    def __init__(self, module: ModuleType, name: str) -> None:
        self.kernel = kernels_of(module)[name]
        self.arg_names = tuple(inspect.signature(self.kernel).parameters)

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*args: Any, **more: Any) -> None:
            given = [_Pointer.to(each) for each in args]
            named = {name: _Pointer.to(each) for name, each in more.items()}
            LANGUAGE.num_programs = lambda axis: grid[axis]
            with np.errstate(all="ignore"):
                for program in np.ndindex(*grid):
                    LANGUAGE.program_id = lambda axis, program=program: np.int32(program[axis])
                    self.kernel(*given, **named)

        return launch


def assert_same(
    ours: Callable[..., None], source: Source, grid: tuple[int, ...], *given: Any, **constants: Any
) -> None:
    """What our function leaves in its tensors is what the source leaves there, but for rounding."""
    theirs = [each.clone() if isinstance(each, torch.Tensor) else each for each in given]
    source[grid](*theirs, **constants)
    ours(*given, **constants)
    for one, other in zip(given, theirs):
        if isinstance(one, torch.Tensor):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5, equal_nan=True)
