"""Triton kernels on emulated devices: each launch is one task of the current stream.

The task runs the kernel in Triton's interpreter, and again at each replay of a graph that captured
it. What a kernel reads and writes is not guessed from its arguments: its loads, stores and atomics
say so when they run, with the addresses that they use. So a pointer that a kernel finds in memory,
for example in a table of pointers, is known as exactly as one that it was given. An access to an
address without memory is a fault.

Triton itself (3.6) is interpreted. Of triton-ascend's additions to the language, those that
vllm-ascend imports are here.
"""

import ctypes
import functools
import importlib
import inspect
import itertools
import sys
import threading
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ascend_emulator import api
from ascend_emulator.profiles import cube_cores

PREFIX = "triton::"
MOST_RUNS = 512
"""Runs of bytes in which an access is described, as of a strided tensor in launcher/arguments.cpp;
more count as one range, from the first to the last byte."""

_interpreter_lock = threading.Lock()  # it patches Triton's language while a kernel runs
_launches: dict[int, "Launch"] = {}  # those that wait or were captured, by the number of the task
_numbers = itertools.count(1)


class KernelAccessError(RuntimeError):
    """A kernel touches addresses at which a device has no memory."""


class Launch(NamedTuple):
    """One launch of a kernel."""

    name: str
    kernel: Any
    arguments: Mapping[str, Any]  # by name, without tensors
    grid: tuple[int, ...]  # 1 to 3 sizes


@dataclass(frozen=True)
class Pointer:
    """A tensor argument as a kernel gets it; the interpreter asks for no more."""

    address: int
    dtype: Any

    def data_ptr(self) -> int:
        return self.address


class Memory:
    """The interpreter's own functions that touch memory, at addresses of a device."""

    def __init__(self, functions: Any) -> None:
        self._functions = functions

    def __getattr__(self, name: str) -> Any:
        return getattr(self._functions, name)

    def load(self, pointers: Any, mask: Any, other: Any, dtype: Any) -> Any:
        at = _host_addresses(pointers, mask, np.dtype(dtype).itemsize, write=False)
        return self._functions.load(at, mask, other, dtype)

    def store(self, pointers: Any, value: Any, mask: Any) -> Any:
        at = _host_addresses(pointers, mask, value.dtype.itemsize, write=True)
        return self._functions.store(at, value, mask)

    def atomic_rmw(self, operation: Any, pointers: Any, value: Any, mask: Any, order: Any) -> Any:
        at = _host_addresses(pointers, mask, value.dtype.itemsize, write=True)
        return self._functions.atomic_rmw(operation, at, value, mask, order)

    def atomic_cas(self, pointers: Any, expected: Any, value: Any, order: Any) -> Any:
        mask = np.ones_like(pointers, bool)
        at = _host_addresses(pointers, mask, value.dtype.itemsize, write=True)
        return self._functions.atomic_cas(at, expected, value, order)


def _host_addresses(pointers: Any, mask: Any, width: int, write: bool) -> Any:
    """Where the host sees the memory at these addresses; those that are masked out are not read."""
    mask = np.broadcast_to(mask, pointers.shape)
    touched = pointers[mask]
    if not touched.size:
        return pointers
    if (np.diff(touched) == width).all():  # as most kernels touch memory: there is one run
        begin = int(touched[0])
        return pointers + np.uint64(_moved(begin, int(touched[-1]) + width, write))
    begins, ends = _runs(np.unique(touched), width)
    moved = [_moved(begin, end, write) for begin, end in zip(begins.tolist(), ends.tolist())]
    run_of = np.searchsorted(begins, pointers, "right").astype(np.int64) - 1
    return pointers + np.array(moved, np.uint64)[run_of]


def _moved(begin: int, end: int, write: bool) -> int:
    """Touch these bytes, and return how far the host sees them from where the device does."""
    if not _runtime().emulator_is_allocated(begin, end - begin):
        what = "writes" if write else "reads"
        raise KernelAccessError(f"it {what} {end - begin} bytes at {begin:#x}, without memory")
    alias = _runtime().emulator_alias(begin)
    _runtime().emulator_touch(alias, end - begin, int(write))
    return int(alias - begin) % (1 << 64)


def _runs(addresses: Any, width: int) -> tuple[Any, Any]:
    """First and last bytes of the runs in sorted addresses of `width` bytes each."""
    gaps = np.flatnonzero(np.diff(addresses) > width)
    if gaps.size >= MOST_RUNS:
        gaps = gaps[:0]
    begins = addresses[np.concatenate(([0], gaps + 1)).astype(np.int64)]
    ends = addresses[np.concatenate((gaps, [addresses.size - 1])).astype(np.int64)]
    return begins, ends + np.uint64(width)


def run(kernel: Any, *given: Any, grid: Any, warmup: bool, **keywords: Any) -> None:
    """Launch a kernel, as ``kernel[grid](...)`` does; stands for ``InterpretedFunction.run``."""
    if warmup:
        return
    _runtime().emulator_enter()
    try:
        _launch(kernel, given, grid, keywords)
    finally:
        _runtime().emulator_leave()


def _launch(kernel: Any, given: tuple[Any, ...], grid: Any, keywords: dict[str, Any]) -> None:
    keywords = {name: value for name, value in keywords.items() if name in kernel.arg_names}
    arguments = inspect.getcallargs(kernel.fn, *given, **keywords)
    tensors = dict(_tensors_in(arguments))
    name = PREFIX + kernel.fn.__name__
    if on_host := [each for each, tensor in tensors.items() if tensor.device.type == "cpu"]:
        # In Triton's words, which its drivers for cards have
        raise ValueError(f"{name}: {on_host[0]} cannot be accessed from Triton (cpu tensor?)")
    sizes = grid(arguments) if callable(grid) else grid
    sizes = tuple(sizes) if isinstance(sizes, (tuple, list)) else (sizes,)
    device = next((tensor.device for tensor in tensors.values()), None)
    stream = _npu().current_stream(device).npu_stream
    passed = {each: _without_tensors(value) for each, value in arguments.items()}
    number = next(_numbers)
    _launches[number] = Launch(name, kernel, passed, sizes)
    # No accesses are stated: the kernel says what it touches when it runs.
    if _runtime().emulator_launch(stream, name.encode(), _run, _forget, number, None, 0):
        raise RuntimeError(_runtime().aclGetRecentErrMsg().decode())


def _interpret(launch: Launch) -> None:
    from triton.runtime import interpreter

    class Executor(interpreter.GridExecutor):
        def _init_args_hst(self, given: Any, keywords: Any) -> Any:
            return given, keywords

        def _restore_args_dev(self, *_: Any) -> None:
            pass

    with _interpreter_lock:
        kernel = launch.kernel
        executor = Executor(kernel.rewrite(), kernel.arg_names, launch.grid, kernel.pre_run_hooks)
        executor(**launch.arguments)


def _tensors_in(arguments: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Tensors of a call, and the arguments that hold them."""
    for name, value in arguments.items():
        if isinstance(value, tuple):
            yield from _tensors_in({f"{name}[{i}]": each for i, each in enumerate(value)})
        elif hasattr(value, "data_ptr"):
            yield name, getattr(value, "base", value)
        elif hasattr(value, "block_shape"):
            yield name, value.base


def _without_tensors(value: Any) -> Any:
    """An argument that keeps no device memory alive, as those of a launched kernel don't."""
    if isinstance(value, tuple):
        return (
            type(value)(*map(_without_tensors, value))
            if hasattr(value, "_fields")
            else tuple(map(_without_tensors, value))
        )
    if hasattr(value, "data_ptr"):
        return Pointer(value.data_ptr(), value.dtype)
    if hasattr(value, "block_shape"):
        return type(value)(
            _without_tensors(value.base),
            value.shape,
            value.strides,
            value.block_shape,
            value.padding,
        )
    return value


@ctypes.CFUNCTYPE(None, ctypes.c_void_p)
def _run(number: int) -> None:
    launch = _launches[number]
    try:
        _interpret(launch)
    except Exception as error:
        cause = error.__cause__ or error
        message = (str(cause).splitlines() or [type(cause).__name__])[0]
        _runtime().emulator_fault(f"{launch.name}: {message}".encode())


@ctypes.CFUNCTYPE(None, ctypes.c_void_p)
def _forget(number: int) -> None:
    _launches.pop(number, None)


def _npu() -> Any:
    """torch.npu, which torch_npu adds."""
    import torch

    return vars(torch)["npu"]


@functools.cache
def _runtime() -> ctypes.CDLL:
    runtime = api._runtime()
    runtime.emulator_alias.restype = ctypes.c_void_p
    runtime.emulator_alias.argtypes = [ctypes.c_void_p]
    runtime.emulator_is_allocated.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    runtime.emulator_touch.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    runtime.emulator_launch.argtypes = [
        *(ctypes.c_void_p, ctypes.c_char_p, type(_run), type(_forget), ctypes.c_void_p),
        *(ctypes.c_void_p, ctypes.c_size_t),
    ]
    runtime.aclGetRecentErrMsg.restype = ctypes.c_char_p
    return runtime


def install() -> None:
    """Let Triton launch kernels onto emulated devices; the import hook calls it after Triton."""
    if not api.is_active():
        return
    from triton.runtime import interpreter

    # Triton imports it at the first launch. vllm-ascend puts an empty module in its place, since
    # triton-ascend has none, unless it is there.
    importlib.import_module("triton.experimental.gluon.nvidia.hopper")
    interpreter.InterpretedFunction.run = run
    interpreter._interpreter = Memory(interpreter._interpreter)
    _add_driver()
    _add_language()


def _add_driver() -> None:
    """Give Triton a driver, which programs ask for properties of the device."""
    from triton.backends import Backend, backends
    from triton.backends.compiler import GPUTarget
    from triton.backends.driver import DriverBase

    class Utils:
        def get_device_properties(self, device: int) -> dict[str, int]:
            cores = cube_cores()
            return {"num_aicore": cores, "num_vectorcore": 2 * cores, "multiprocessor_count": cores}

    class Driver(DriverBase):
        def __init__(self) -> None:
            self.utils = Utils()

        @classmethod
        def is_active(cls) -> bool:
            return True

        def map_python_to_cpp_type(self, ty: str) -> str:
            return ty

        def get_current_target(self) -> Any:
            return GPUTarget("npu", "Ascend910B1", 0)

        def get_active_torch_device(self) -> Any:
            import torch

            return torch.device("npu", _npu().current_device())

        def get_device_interface(self) -> Any:
            return _npu()

        def get_current_device(self) -> int:
            return int(_npu().current_device())

        def get_benchmarker(self) -> Callable[..., Any]:
            # An emulated card's times mean nothing: the first configuration is as good as any.
            return lambda call, quantiles=None, **_: [0.0] * len(quantiles or [1])

    backends.clear()
    backends["npu"] = Backend(compiler=None, driver=Driver)


def _add_language() -> None:
    """Add triton-ascend's ``triton.language.extra.cann``: slices and elements of a block."""
    import triton.language as tl
    from triton.language import extra
    from triton.language.extra import libdevice
    from triton.runtime.interpreter import TensorHandle

    def number(value: Any) -> int:
        if isinstance(value, tl.core.tensor):
            return int(np.asarray(value.handle.data).reshape(-1)[0])
        return int(getattr(value, "value", value))

    def block(data: Any, dtype: Any) -> Any:
        scalar = dtype.scalar
        shaped = tl.block_type(scalar, list(data.shape)) if data.shape else scalar
        return tl.core.tensor(TensorHandle(data, scalar), shaped)

    def part(offsets: Any, sizes: Any, strides: Any) -> tuple[slice, ...]:
        numbers = ([number(each) for each in values] for values in (offsets, sizes, strides))
        return tuple(slice(at, at + size * step, step) for at, size, step in zip(*numbers))

    def extract_slice(ful: Any, offsets: Any, sizes: Any, strides: Any, **_: Any) -> Any:
        return block(ful.handle.data[part(offsets, sizes, strides)].copy(), ful.dtype)

    def insert_slice(ful: Any, sub: Any, offsets: Any, sizes: Any, strides: Any, **_: Any) -> Any:
        data = ful.handle.data.copy()
        data[part(offsets, sizes, strides)] = sub.handle.data
        return block(data, ful.dtype)

    def get_element(src: Any, indice: Any, **_: Any) -> Any:
        value = src.handle.data[tuple(number(each) for each in indice)]
        scalar = src.dtype.scalar
        return tl.core.tensor(TensorHandle(np.array([value]), scalar), scalar)

    extension = types.ModuleType("triton.language.extra.cann.extension")
    vars(extension).update(
        extract_slice=extract_slice, insert_slice=insert_slice, get_element=get_element
    )
    cann = types.ModuleType("triton.language.extra.cann")
    vars(cann).update(extension=extension, libdevice=libdevice, __path__=[])
    extra.cann = cann
    for module in (cann, extension):
        sys.modules[module.__name__] = module
    sys.modules["triton.language.extra.cann.libdevice"] = libdevice
