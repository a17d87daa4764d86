"""The emulator's functions for Python code inside an emulated command.

They count the device's work, make kernels fail, and register references: Python functions that run
wherever torch_npu would launch a kernel.
"""

import ctypes
import functools
import importlib
import inspect
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from types import TracebackType
from typing import Any

from ascend_emulator import calls
from ascend_emulator.build import LAUNCHER_LIBRARY, RUNTIME_LIBRARY
from ascend_emulator.errors import EmulatorError
from ascend_emulator.options import LIBRARIES, REFERENCES

OWN_REFERENCES = "ascend_emulator.operators"
OF_A_GRAPH = 2  # what `emulator_in_launch` returns for a kernel that a graph has captured
PlacementCheck = Callable[[str, Mapping[str, bool], str], None]


@dataclass
class Counts:
    """Counts of the device's work; the fields have the order of native/runtime/report.h."""

    h2d_copies: int = 0
    h2d_bytes: int = 0
    d2h_copies: int = 0
    d2h_bytes: int = 0
    d2d_copies: int = 0
    d2d_bytes: int = 0
    staged_copies: int = 0
    """Asynchronous host-to-device copies from pageable memory, which are also in ``h2d_copies``."""
    staged_bytes: int = 0
    launches: int = 0
    """Kernels launched or captured; replaying a graph doesn't count its kernels again."""
    hidden_copies: int = 0
    """Copies that operators make of strided tensors, each by a kernel of its own; they are not in
    ``launches``."""
    graph_launches: int = 0
    syncs: int = 0
    """Waits of the host for a stream, an event or the device."""
    event_waits: int = 0
    hazards: int = 0
    errors: int = 0
    """Calls that were refused as misuse."""
    peak_memory_bytes: int = 0
    """Most memory in use since the process started, also where a region is counted."""
    sent_bytes: int = 0
    """Bytes that collectives, and operators that exchange rows, bring from this rank to others."""

    def nonzero(self) -> dict[str, int]:
        return {name: value for name, value in asdict(self).items() if value}


class count:  # noqa: N801 - used as a statement: with count() as c
    """Count what happens in a region; the fields of `Counts` are set when the region ends.

    Examples
    --------
    >>> with ascend_emulator.count() as c:
    ...     runner.execute_model(step)
    >>> c.h2d_copies, c.syncs
    """

    def __enter__(self) -> Counts:
        self._counts = Counts()
        self._start = counters()
        return self._counts

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        end = counters()
        for field in fields(Counts):
            difference = getattr(end, field.name) - getattr(self._start, field.name)
            setattr(self._counts, field.name, difference)
        self._counts.peak_memory_bytes = end.peak_memory_bytes


def counters() -> Counts:
    """Return the counters of this process since it started."""
    runtime = _runtime()
    _drain_task_queue()
    values = (ctypes.c_uint64 * len(fields(Counts)))()
    runtime.emulator_counters(values)
    return Counts(*values)


def is_active() -> bool:
    """Return whether this process runs under `ascend-emulator`."""
    return LIBRARIES in os.environ


def is_on_device(tensor: Any) -> bool:
    """Return whether a tensor that a reference was given is device memory, not a host argument."""
    return bool(_runtime().emulator_is_alias(ctypes.c_void_p(tensor.data_ptr())))


def touch(cache: Any, block_ids: Any, write: bool = False) -> None:
    """Say which blocks of a `paged` argument a reference touches, for the order between streams.

    Parameters
    ----------
    cache
        ``[num_blocks, ...]``, as the reference was given it.
    block_ids
        Integers of any shape, in any order.
    write
        Whether the reference writes the blocks.
    """
    if not is_active() or not block_ids.numel() or not is_on_device(cache):
        return
    touched = block_ids.unique().tolist()
    stride = cache.stride(0) * cache.element_size()
    begin = touched[0]
    for block, following in zip(touched, [*touched[1:], None]):
        if following != block + 1:
            address = ctypes.c_void_p(cache.data_ptr() + begin * stride)
            size = ctypes.c_size_t((block + 1 - begin) * stride)
            _runtime().emulator_touch(address, size, int(write))
            begin = following


def fail_kernel(name: str, skip: int = 0, times: int = 1) -> None:
    """Let a kernel fail when it runs, as those of a device do: no call that launches it is told.

    It writes nothing. The host hears of it at its next sync, as a device error (507015). A graph's
    kernels count at each replay. Another call replaces what is left of the last one.

    Parameters
    ----------
    name
        Name of the kernel in reports: ``aten::add`` say, or ``npu::npu_rms_norm``.
    skip
        How many runs of it succeed before; runs that were launched earlier and wait in their stream
        count, too.
    times
        How many runs fail then; with 0, none fails that an earlier call asked for.

    Raises
    ------
    EmulatorError
        If a number is negative.
    """
    if skip < 0 or times < 0:
        raise EmulatorError(
            f"fail_kernel({name!r}, skip={skip}, times={times}): give numbers of runs, 0 or more"
        )
    _runtime().emulator_fail_kernel(name.encode(), skip, times)


def let_run() -> None:
    """Wait until the current device has run what was launched, without ordering anything.

    The program is like one that has waited long enough: everything has run, and it can't know. No
    sync is counted, and none of the device's errors is raised.
    """
    _drain_task_queue()
    _runtime().emulator_let_run()


def host_ns() -> int:
    """Return this thread's processor time in the emulator while streams were held, in nanoseconds.

    A program's own host time is its processor time (`time.thread_time_ns`) without this.
    """
    return int(_runtime().emulator_host_ns())


def hold_streams(hold: bool) -> None:
    """Let streams run only while the host waits for one, so that its own time can be measured.

    A query of an event or a stream then says "not ready" until something was waited for.
    """
    _runtime().emulator_hold_streams(int(hold))


def register_reference(
    name: str,
    function: Callable[..., Any],
    overload: str = "",
    written: Sequence[str] = (),
    check_placement: PlacementCheck | None = None,
    on_host: Callable[..., Any] | None = None,
    contiguous: Sequence[str] | None = None,
    paged: Sequence[str] = (),
    block_ids: Sequence[str] = (),
) -> None:
    """Run a Python function wherever torch_npu would run a device kernel.

    The function gets CPU tensors: views of device memory for device tensors, copies made at the
    call for host tensors (`is_on_device` tells them apart). It runs in stream order on the stream's
    worker, and again at each replay of a graph that captured it. It is called with every argument
    of the operator's schema by name, as far as its signature takes them; an argument that it
    doesn't take must have its default value. A positional parameter whose name isn't in the schema
    stands for the argument at its position.

    Results are returned, as many as the schema has and of its types. Their shapes and dtypes must
    be those of torch_npu's Meta function; `None` leaves a tensor unwritten. An operator without a
    Meta function makes the caller wait for its results. Arguments that the schema marks as written,
    and `out`, are written in place. An exception surfaces at the next sync.

    Parameters
    ----------
    name
        Operator with its namespace, ``npu::npu_rms_norm`` say.
    function
        The reference.
    overload
        ``out`` for the variant ``.out``.
    written
        Arguments that the operator writes although its schema doesn't say so.
    check_placement
        Is called before the function with the operator's name, whether each tensor is on the host
        (by argument name), and the overload; it raises when a tensor is on the wrong side.
    on_host
        For an operator that launches nothing, for example one that sizes a workspace: takes the
        device's tensors, whose values it can't see, and returns device tensors. The reference then
        serves calls with tensors of the CPU only.
    contiguous
        Tensor arguments that the operator copies if they are strided, each by a kernel of its own,
        which `Counts.hidden_copies` counts. None means all that it doesn't write, as most operators
        do.
    paged
        Caches in blocks, of which the operator touches only some. The function calls `touch` with
        them; otherwise an operator counts as touching all that it is given.
    block_ids
        Arguments that say which blocks; without one of them a call touches everything.

    Raises
    ------
    EmulatorError
        If torch_npu has no such operator.
    """
    import torch

    launcher = _launcher()
    namespace, operator = name.split("::")
    packet = getattr(getattr(torch.ops, namespace), operator, None)
    overloaded = getattr(packet, overload or "default", None)
    if overloaded is None:
        raise EmulatorError(f"torch_npu has no operator {name}{overload and '.' + overload}")
    schema = overloaded._schema
    if contiguous is None:
        contiguous = [a.name for a in schema.arguments if not _is_written(a, written)]
    error = launcher.emulator_install_reference(
        name.encode(),
        overload.encode(),
        *(",".join(names).encode() for names in (written, contiguous, paged, block_ids)),
    )
    if error:
        raise EmulatorError(f"torch_npu has no operator {name}{overload and '.' + overload}")
    kernel = _cpu_kernel(schema, function, check_placement, launcher)
    full_name = f"{operator}.{overload}" if overload else operator
    _library(namespace).impl(full_name, kernel, "CPU", allow_override=True)
    if on_host is not None:
        checked = _checked(schema, on_host)
        _library(namespace).impl(full_name, checked, "PrivateUse1", allow_override=True)


def install() -> None:
    """Replace the npu kernels in this process; the import hook calls it after torch_npu."""
    if not is_active():
        return
    replaced = _launcher().emulator_install()
    if replaced == 0:
        raise EmulatorError("torch_npu registered no kernels that the emulator could replace")
    _load_atb()
    _flush_at_hard_exit()
    for module in filter(None, (OWN_REFERENCES, *os.environ.get(REFERENCES, "").split(","))):
        _install_references(importlib.import_module(module))


def _install_references(module: Any) -> None:
    """Let a module register its references, if it hasn't done so when it was imported."""
    if hasattr(module, "install"):
        check = getattr(module, "check_placement", None)
        module.install(functools.partial(register_reference, check_placement=check))


def _cpu_kernel(
    schema: Any,
    function: Callable[..., Any],
    check_placement: PlacementCheck | None,
    launcher: Any,
) -> Callable[..., Any]:
    """Make a CPU kernel from a reference: it binds the arguments, and refuses direct calls."""
    bind = _binder(schema, inspect.signature(function))
    # Not every operator that takes `out` returns it: one computes the workspace of another.
    is_out = schema.overload_name == "out" or any(r.alias_info is not None for r in schema.returns)
    written = [argument.name for argument in schema.arguments if _is_written(argument, ())]
    returned = "out" if "out" in written else "".join(written[:1])  # the latter works in place

    @functools.wraps(function)
    def kernel(*given: Any, **keywords: Any) -> Any:
        launched = launcher.emulator_in_launch()
        if not launched:
            raise NotImplementedError(f"{schema.name} was called with tensors of the CPU only")
        arguments = {a.name: a.default_value for a in schema.arguments}
        arguments.update(zip((a.name for a in schema.arguments), given))
        arguments.update(keywords)
        if os.environ.get(calls.CALLS):
            calls.record(schema, arguments, launched == OF_A_GRAPH, _is_host_memory)
        if check_placement is not None:
            check_placement(schema.name, _on_host(arguments), schema.overload_name)
        result = function(**bind(arguments))
        if is_out and schema.returns:
            out = arguments[returned]
            return tuple(out) if len(schema.returns) > 1 else out
        return _without_none(_as_in_schema(schema, result, may_be_none=True), len(schema.returns))

    return kernel


def _is_written(argument: Any, also: Sequence[str]) -> bool:
    written = argument.alias_info is not None and argument.alias_info.is_write
    return written or argument.name == "out" or argument.name in also


def _checked(schema: Any, function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the form of an operator that runs on the host, so that its results are checked."""

    @functools.wraps(function)
    def checked(*given: Any, **keywords: Any) -> Any:
        if os.environ.get(calls.CALLS):
            named = dict(zip((argument.name for argument in schema.arguments), given)) | keywords
            calls.record(schema, named, False, lambda tensor: tensor.device.type == "cpu")
        _runtime().emulator_enter()
        try:
            return _as_in_schema(schema, function(*given, **keywords), may_be_none=False)
        finally:
            _runtime().emulator_leave()

    return checked


def _as_in_schema(schema: Any, result: Any, may_be_none: bool) -> Any:
    """Return the results of a reference, if they are what the schema says.

    The dispatcher takes them unchecked: too few of them end the process.

    Raises
    ------
    EmulatorError
        If they are not. It names the operator, what was returned and what the schema has.
    """
    import torch

    operator = f"{schema.name}{schema.overload_name and '.' + schema.overload_name}"
    wanted = len(schema.returns)
    several = (tuple, list) if wanted > 1 else tuple  # one result may be a list of tensors
    if wanted == 0 and result is None:
        return None
    results = list(result) if isinstance(result, several) else [result]
    if len(results) != wanted:
        kind = "tensor" if all(isinstance(r, torch.Tensor) for r in results) else "result"
        returned = f"{len(results)} {kind}{'' if len(results) == 1 else 's'}"
        raise EmulatorError(f"reference of {operator} returned {returned}, schema has {wanted}")
    for position, (value, declared) in enumerate(zip(results, schema.returns)):
        if value is None and may_be_none and str(declared.type) == "Tensor":
            continue
        if not _is_of_type(value, str(declared.type)):
            raise EmulatorError(
                f"reference of {operator} returned {type(value).__name__} as result {position}, "
                f"schema has {declared.type}"
            )
    return results[0] if wanted == 1 else result


def _is_of_type(value: Any, declared: str) -> bool:
    import torch

    if declared == "Tensor":
        return isinstance(value, torch.Tensor)
    if declared.startswith("List[Tensor]"):
        return isinstance(value, (list, tuple)) and all(isinstance(v, torch.Tensor) for v in value)
    plain: dict[str, Any] = {"int": int, "float": (int, float), "bool": bool, "str": str}
    return declared not in plain or isinstance(value, plain[declared])


def _binder(
    schema: Any, signature: inspect.Signature
) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Make a function that passes a schema's arguments by name, if the reference takes them."""
    parameters = list(signature.parameters.values())
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
    names = {argument.name for argument in schema.arguments}
    passed_as = {}
    for argument, parameter in zip(schema.arguments, parameters):
        by_position = parameter.kind is parameter.POSITIONAL_OR_KEYWORD
        if by_position and not argument.kwarg_only and parameter.name not in names:
            passed_as[argument.name] = parameter.name  # the reference names it differently
    for name in names:
        if name in signature.parameters or (takes_all and name not in passed_as):
            passed_as[name] = name

    def bind(arguments: dict[str, Any]) -> dict[str, Any]:
        bound = {}
        for argument in schema.arguments:
            value = arguments[argument.name]
            if argument.name in passed_as:
                bound[passed_as[argument.name]] = value
            elif not _is_default(value, argument):
                raise NotImplementedError(f"the reference of {schema.name} has no {argument.name}")
        return bound

    return bind


def _on_host(arguments: dict[str, Any]) -> dict[str, bool]:
    import torch

    tensors = {name: value for name, value in arguments.items() if isinstance(value, torch.Tensor)}
    return {name: _is_host_memory(value) for name, value in tensors.items() if value.numel()}


def _is_host_memory(tensor: Any) -> bool:
    # An empty tensor has no address that would tell.
    return bool(tensor.numel()) and not is_on_device(tensor)


def _is_default(value: Any, argument: Any) -> bool:
    if value is None or argument.default_value is None:
        return value is None
    return bool(value == argument.default_value)


def _without_none(result: Any, count_of_results: int) -> Any:
    import torch

    if count_of_results == 0:
        return None
    if count_of_results == 1:
        return torch.empty(0) if result is None else result
    return tuple(torch.empty(0) if item is None else item for item in result)


def _load_atb() -> None:
    """Load the atb operators now, not at their first use, because references need their schemas."""
    try:
        from torch_npu.op_plugin.atb import _atb_ops
    except ImportError:
        return
    load = getattr(_atb_ops, "_register_atb_extensions", None)
    if load is not None:
        load()


def _flush_at_hard_exit() -> None:
    """Let os._exit write the report, too: most of vLLM's processes end by it."""
    hard_exit = os._exit

    def flush_and_exit(status: int) -> None:
        _runtime().emulator_write_report()
        hard_exit(status)

    os._exit = flush_and_exit  # type: ignore[assignment]


def _drain_task_queue() -> None:
    """Wait until torch_npu has issued its queued tasks; asking for the raw stream does that."""
    torch = sys.modules.get("torch")
    npu = getattr(torch, "npu", None)
    if npu is not None and npu.is_initialized():
        _ = npu.current_stream().npu_stream


@functools.cache
def _library(namespace: str) -> Any:
    import torch

    return torch.library.Library(namespace, "IMPL")


@functools.cache
def _runtime() -> ctypes.CDLL:
    if not is_active():
        raise EmulatorError("no emulated NPU here: run the command under ascend-emulator --")
    runtime = ctypes.CDLL(str(Path(os.environ[LIBRARIES]) / RUNTIME_LIBRARY))
    runtime.emulator_is_alias.argtypes = [ctypes.c_void_p]
    runtime.emulator_host_ns.restype = ctypes.c_uint64
    return runtime


@functools.cache
def _launcher() -> ctypes.CDLL:
    _runtime()
    return ctypes.CDLL(str(Path(os.environ[LIBRARIES]) / LAUNCHER_LIBRARY))
