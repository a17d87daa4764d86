"""Runs the source of a Triton kernel of vLLM on the host, program by program, with numpy."""

import ast
import inspect
import textwrap
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch


class _Values(np.ndarray):
    """What a program loads."""

    def to(self, dtype: Any) -> "_Values":
        return self.astype(np.int64).view(_Values)


class _Pointer:
    """An address: an element of a tensor, or several."""

    def __init__(self, elements: np.ndarray, offsets: Any = 0) -> None:
        self.elements, self.offsets = elements, offsets

    def __add__(self, offsets: Any) -> "_Pointer":
        return _Pointer(self.elements, self.offsets + np.asarray(offsets))


def _load(pointer: _Pointer, mask: Any = True, other: int = 0) -> _Values:
    offsets = np.asarray(pointer.offsets)
    read = np.broadcast_to(mask, offsets.shape)
    values = np.full(offsets.shape, other, pointer.elements.dtype)
    values[read] = pointer.elements[offsets[read]]
    return values.view(_Values)


def _store(pointer: _Pointer, values: Any, mask: Any = True) -> None:
    offsets = np.asarray(pointer.offsets)
    written = np.broadcast_to(mask, offsets.shape)
    pointer.elements[offsets[written]] = np.broadcast_to(values, offsets.shape)[written]


def run_source(module: Any, wrapper: type, num_programs: int, *args: Any) -> None:
    """Run the ``kernel`` of a wrapper of vLLM, as its file has it: an engine may have replaced it.

    Parameters
    ----------
    module, wrapper
        Where it is from; the module's namespace is what the kernel knows beside ``tl``.
    num_programs
        Of its grid, which has one dimension.
    args
        Its arguments in order; tensors, which must be contiguous, become pointers.
    """
    given = [
        _Pointer(each.numpy().reshape(-1)) if isinstance(each, torch.Tensor) else each
        for each in args
    ]
    language = SimpleNamespace(
        constexpr=int,
        num_programs=lambda axis: num_programs,
        arange=np.arange,
        load=_load,
        store=_store,
        where=np.where,
        int64=np.int64,
    )
    namespace = {**vars(module), "tl": language}
    (whole,) = ast.parse(textwrap.dedent(inspect.getsource(wrapper))).body
    (kernel,) = (
        each
        for each in ast.walk(whole)
        if isinstance(each, ast.FunctionDef) and each.name == "kernel"
    )
    kernel.decorator_list = []
    exec(compile(ast.Module([kernel], []), f"{wrapper.__name__}.kernel", "exec"), namespace)
    for program in range(num_programs):
        language.program_id = lambda axis, program=program: program
        namespace["kernel"](*given)
