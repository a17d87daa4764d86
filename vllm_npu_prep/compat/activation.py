"""The only module that touches version-specific seams of vLLM; every patch names its reason."""

import contextlib
import functools
import gc
import importlib.util
import logging
import math
import multiprocessing
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from importlib import metadata
from typing import Any

import torch

from vllm_npu_prep import one_line, torchvision_import
from vllm_npu_prep.device.inert import InertEvent, InertStream
from vllm_npu_prep.errors import PrepError
from vllm_npu_prep.one_line import OneLineErrors
from vllm_npu_prep.progress import waiting
from vllm_npu_prep.server.processes import look_after_processes

SUPPORTED_VLLM = ("0.32.0",)
PLATFORM_CLASS = "vllm_npu_prep.platform.NPUPlatform"
ANY_VLLM_ENV_VAR = "NPU_PREP_ANY_VLLM"
V2_RUNNER_ENV_VAR = "VLLM_USE_V2_MODEL_RUNNER"
TORCHVISION = "torchvision==0.28.0"  # the one that belongs to torch 2.13.0
QUEUE_WAKE_MS = 500
"""How often who waits for a message of another host looks whether it is to stop, in ms."""


def check_vllm_version() -> None:
    """Refuse a vLLM whose seams were not tested.

    ``NPU_PREP_ANY_VLLM=1`` lets it be tried, with a warning.

    Raises
    ------
    PrepError
        If the installed vLLM is not among `SUPPORTED_VLLM`.
    """
    version = metadata.version("vllm").partition("+")[0]
    if version in SUPPORTED_VLLM:
        return
    if os.environ.get(ANY_VLLM_ENV_VAR) == "1":
        logging.getLogger("vllm").warning(
            "%s=1: vLLM %s was not tested with vllm_npu_prep.", ANY_VLLM_ENV_VAR, version
        )
    else:
        raise PrepError(
            f"vLLM {version} is installed, vllm_npu_prep supports {', '.join(SUPPORTED_VLLM)}: "
            f"pip install vllm=={SUPPORTED_VLLM[-1]} as the README says"
        )


def activate_platform() -> str | None:
    """Decide whether the plugin's platform is the one, and prepare for it.

    Returns
    -------
    str or None
        The platform class; None where another platform of vLLM works and nobody asked for this one.
    """
    from vllm_npu_prep.device import NPU_KIND, choose_device, requested_device

    _freeze_modules()
    try:
        if requested_device() == "auto" and _other_platform_works():
            return None
        _report_errors_in_one_line()
        check_vllm_version()
        look_after_processes()
        if choose_device() == NPU_KIND:
            # A forked process can't use a device that its parent has asked about.
            os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
        _select_v1_runner()
        _switch_off_aot_compile()
        torchvision_import.install()
    except PrepError as error:
        # vLLM would swallow it and then fail for want of a platform.
        one_line.end_with(error)
    return PLATFORM_CLASS


def _freeze_modules() -> None:
    """Spare garbage collections what was imported: a million objects that stay.

    Imports set off full collections, loading and profiling ask for more, and each looks at all of
    them: a quarter of an engine's start. In processes of vLLM's own only, nobody else's are ours
    to freeze; `NPUWorker` does so for an engine in the user's process.
    """
    if multiprocessing.parent_process() or "vllm.entrypoints.cli.main" in sys.modules:
        gc.freeze()


def _other_platform_works() -> bool:
    """Whether vLLM's own CUDA, ROCm, TPU, XPU or CPU platform can run on this machine."""
    from vllm.platforms import builtin_platform_plugins

    for detect in builtin_platform_plugins.values():
        with contextlib.suppress(Exception):
            if detect() is not None:
                return True
    return False


def _select_v1_runner() -> None:
    """Model Runner V2 is vLLM's default wherever Triton works; its scheduler output differs.

    The choice has to stand before vLLM resolves its config, and in every process of the engine,
    hence the environment variable.

    Raises
    ------
    PrepError
        If the user asked for V2.
    """
    asked = os.environ.get(V2_RUNNER_ENV_VAR, "").strip().lower()
    if asked in ("1", "true"):
        raise PrepError(
            f"{V2_RUNNER_ENV_VAR}=1: this plugin prepares inputs for vLLM's V1 model runner only; "
            f"unset {V2_RUNNER_ENV_VAR}"
        )
    os.environ[V2_RUNNER_ENV_VAR] = "0"


def _switch_off_aot_compile() -> None:
    """Compiling ahead of time needs Inductor, which this platform has not.

    vLLM would notice when it compiles, and go on to hash its whole config in every step to look for
    what was never saved (``support_torch_compile``): 10 ms a step.
    """
    os.environ["VLLM_USE_AOT_COMPILE"] = "0"


def prepare_process() -> None:
    """What every process of an engine needs, once the platform is known."""
    from vllm.platforms import current_platform

    _freeze_modules()
    kind = type(current_platform)
    if f"{kind.__module__}.{kind.__qualname__}" == PLATFORM_CLASS:
        _silence_accelerator_calls()
        _refuse_vision_without_torchvision()
        _tell_of_waits_for_engines()
        _tell_refusals_to_the_main_process()
        if "vllm.entrypoints.launchers.api_server.entry" in sys.modules:  # a server
            _let_servers_drain_and_stop_quietly()
            _let_servers_drain_and_fail_with_their_engine()
        _refuse_ray_where_it_is_missing()
        _keep_addresses_on_their_host()
        _wake_who_reads_from_another_host()


def _silence_accelerator_calls() -> None:
    """Let ``torch.accelerator`` calls of upstream do nothing where no accelerator exists.

    Engine, worker and API process call these at shutdown and after profiling
    (``cleanup_dist_env_and_memory``, ``GPUModelRunner.shutdown``), and they raise.
    """
    if torch.accelerator.is_available():
        return

    def synchronize(*args: object, **kwargs: object) -> None:
        """No accelerator, nothing to wait for."""

    def empty_cache(*args: object, **kwargs: object) -> None:
        """No accelerator, nothing cached."""

    def empty_host_cache(*args: object, **kwargs: object) -> None:
        """No accelerator, nothing cached."""

    # Distinct objects: Dynamo keys its handlers on them.
    torch.accelerator.synchronize = synchronize
    torch.accelerator.empty_cache = empty_cache
    torch.accelerator.empty_host_cache = empty_host_cache


def _let_servers_drain_and_stop_quietly() -> None:
    """A server that was told to stop lets its requests end, is no crash, and does stop.

    Upstream takes new requests while it drains, and fails them in one way or another; it tells no
    progress; an engine that has its requests done but not its processes ended when time is up is
    killed; and with several API servers requests are cut at once. Here `Drain` waits for the
    requests first, and the engine then has its own time to end.

    The task that reads the engine's outputs ends when the engine does. With one order of events
    upstream logs that as ``EngineDeadError`` with a traceback, although shutdown was asked for.
    With another it cancels the task, and requests whose time was up never hear of it: their
    connections stay open, and the server waits for them for ever. Here they get the error in either
    case, and nobody logs it.
    """
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.core_client import AsyncMPClient
    from vllm.v1.engine.exceptions import EngineDeadError

    from vllm_npu_prep.draining import drain_and_shut_down

    upstream, upstream_shutdown = AsyncMPClient.get_output_async, AsyncLLM.shutdown
    if getattr(upstream, "stops_quietly", False):
        return

    class EngineStoppedError(EngineDeadError):
        """The engine is gone because it was told to; who logs it as an error is not heard."""

        def __init__(self) -> None:
            super().__init__(suppress_context=True)
            for handler in logging.getLogger("vllm").handlers:  # vLLM may have renewed them
                handler.addFilter(is_news)

    @functools.wraps(upstream)
    async def get_output_async(self: AsyncMPClient) -> Any:
        try:
            return await upstream(self)
        except EngineDeadError:
            if not self._finalizer.alive:  # detached by `shutdown`
                raise EngineStoppedError from None
            raise

    @functools.wraps(upstream_shutdown)
    def shutdown(self: AsyncLLM, timeout: float | None = None) -> None:
        drain_and_shut_down(self, timeout, upstream_shutdown, EngineStoppedError, _say)

    def is_news(record: logging.LogRecord) -> bool:
        return not (record.exc_info and isinstance(record.exc_info[1], EngineStoppedError))

    get_output_async.stops_quietly = True  # type: ignore[attr-defined]
    AsyncMPClient.get_output_async = get_output_async
    AsyncLLM.shutdown = shutdown  # type: ignore[method-assign]


def _say(line: str) -> None:
    """Log a line of progress."""
    logging.getLogger(f"vllm.{__name__}").info("%s", line)


def _let_servers_drain_and_fail_with_their_engine() -> None:
    """Requests are counted for `Drain`, and records written when asked for.

    A server whose engine died ends with code 1 and says so.

    Upstream's watchdog lets it end as if it had been told to, with code 0: whoever restarts what
    fails would not. With several API servers their parent notices on its own.
    """
    from vllm_npu_prep.draining import END_SECONDS, Drain, DrainMiddleware, cause_of_death
    from vllm_npu_prep.server.record_server import answering

    entry = sys.modules.get("vllm.entrypoints.launchers.api_server.entry")
    if entry is None or hasattr(entry.serve_http, "__wrapped__"):
        return
    upstream = entry.serve_http

    @functools.wraps(upstream)
    async def serve_http(app: Any, *args: Any, **kwargs: Any) -> Any:
        engine = app.state.engine_client
        engine.drain = Drain()
        # vLLM has had it built by now, after which `add_middleware` refuses.
        served = app.middleware_stack or app.build_middleware_stack()
        app.middleware_stack = DrainMiddleware(served, engine.drain)
        # A client that does not read its answer would keep the server for ever.
        kwargs.setdefault("timeout_graceful_shutdown", END_SECONDS)
        async with answering(engine, kwargs.get("port")):
            stopped = await upstream(app, *args, **kwargs)
        if not engine.errored or getattr(engine, "was_told_to_stop", False):
            return stopped

        async def fail() -> None:
            await stopped
            print(
                "vllm_npu_prep: error: the engine died, and the server ends with it; "
                + cause_of_death(engine),
                file=sys.stderr,
            )
            raise SystemExit(1)

        return fail()

    entry.serve_http = serve_http  # type: ignore[attr-defined]


def _tell_of_waits_for_engines() -> None:
    """A process that starts engines says so while they import, load and warm up.

    What they refuse is raised here, for their user.
    """
    from vllm.v1.engine import utils

    upstream = utils.wait_for_engine_startup
    if hasattr(upstream, "__wrapped__"):
        return

    @functools.wraps(upstream)
    @one_line.raising_what_was_left
    def wait_for_engine_startup(*args: Any, **kwargs: Any) -> Any:
        with waiting("Waiting for the engine to start", _say):
            return upstream(*args, **kwargs)

    utils.wait_for_engine_startup = wait_for_engine_startup


def _refuse_vision_without_torchvision() -> None:
    """Say what a model that sees lacks, before upstream fails to inspect it without saying why."""
    from vllm.model_executor.models.registry import _ModelRegistry

    upstream = _ModelRegistry.inspect_model_cls
    if importlib.util.find_spec("torchvision") or hasattr(upstream, "__wrapped__"):
        return

    @functools.wraps(upstream)
    def inspect_model_cls(self: _ModelRegistry, architectures: Any, model_config: Any) -> Any:
        if hasattr(model_config.hf_config, "vision_config"):
            raise PrepError(
                f"{model_config.model} reads images or videos: that needs torchvision, which is "
                f"not installed; pip install --no-deps {TORCHVISION}"
            )
        return upstream(self, architectures, model_config)

    _ModelRegistry.inspect_model_cls = inspect_model_cls  # type: ignore[method-assign]


def _refuse_ray_where_it_is_missing() -> None:
    """Say what to install in one line: upstream says it in a traceback of pydantic's."""
    if importlib.util.find_spec("ray"):
        return
    from vllm.v1.executor import ray_utils

    def assert_ray_available() -> None:
        raise PrepError(
            "--distributed-executor-backend ray: Ray is not installed; on every host "
            "pip install 'vllm_npu_prep[ray]'"
        )

    ray_utils.assert_ray_available = assert_ray_available


def _keep_addresses_on_their_host() -> None:
    """What names a host's own devices and address is not given to workers on other hosts.

    Upstream gives Ray's workers every variable of the server that their host doesn't set, but for a
    list that knows those of CUDA and ROCm.
    """
    from vllm.v1.executor.ray_utils import WORKER_SPECIFIC_ENV_VARS

    WORKER_SPECIFIC_ENV_VARS.update(("ASCEND_RT_VISIBLE_DEVICES", "HCCL_IF_IP"))


def _wake_who_reads_from_another_host() -> None:
    """An executor that shuts down wakes who waits for a worker on another host, too.

    Upstream's `MessageQueue.shutdown` wakes readers of shared memory. A reader of a socket, as the
    engine is where the last pipeline stage runs on another host, goes on to wait for a worker that
    Ray has long reported dead, until ``VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS`` are over.
    """
    from vllm.distributed.device_communicators.shm_broadcast import MessageQueue

    upstream = MessageQueue.dequeue
    if hasattr(upstream, "__wrapped__"):
        return

    def until(deadline: float) -> int:
        return int(min(QUEUE_WAKE_MS, max(0.0, 1000 * (deadline - time.monotonic()))))

    @functools.wraps(upstream)
    def dequeue(self: MessageQueue, timeout: float | None = None, indefinite: bool = False) -> Any:
        if self._is_remote_reader:
            deadline = math.inf if timeout is None else time.monotonic() + timeout
            while not self.remote_socket.poll(until(deadline)):
                if self.shutting_down:
                    raise RuntimeError("cancelled")  # as readers of shared memory
                if time.monotonic() >= deadline:
                    raise TimeoutError
        return upstream(self, timeout, indefinite)

    MessageQueue.dequeue = dequeue  # type: ignore[method-assign]


def _report_errors_in_one_line() -> None:
    """Bad config is no crash, and ``vllm serve`` lets exceptions through to the interpreter."""
    if not isinstance(sys.excepthook, OneLineErrors):
        sys.excepthook = OneLineErrors()


def run_engine_core(*args: Any, **kwargs: Any) -> None:
    """``EngineCoreProc.run_engine_core``, the process of an engine, which may refuse to start."""
    _tell_refusals_to_the_main_process()
    with one_line.ending_without_traceback():
        run_engine_core.__wrapped__(*args, **kwargs)  # type: ignore[attr-defined]


def run_worker(*args: Any, **kwargs: Any) -> None:
    """``WorkerProc.worker_main``, the process of a rank, which may refuse to start."""
    _tell_refusals_to_the_main_process()
    run_worker.__wrapped__(*args, **kwargs)  # type: ignore[attr-defined]


def _tell_refusals_to_the_main_process() -> None:
    """Engines and ranks leave a `PrepError` to the process that the user started (`one_line`).

    Their processes run functions of this module, to be prepared before they start anything.
    """
    from vllm.v1.engine.core import EngineCore, EngineCoreProc
    from vllm.v1.executor.multiproc_executor import WorkerProc

    if hasattr(run_engine_core, "__wrapped__"):
        return
    one_line.log_refusals_in_one_line()
    run_engine_core.__wrapped__ = EngineCoreProc.run_engine_core  # type: ignore[attr-defined]
    run_worker.__wrapped__ = WorkerProc.worker_main  # type: ignore[attr-defined]
    EngineCoreProc.run_engine_core = staticmethod(run_engine_core)
    WorkerProc.worker_main = staticmethod(run_worker)
    EngineCore.__init__ = one_line.raising_what_was_left(EngineCore.__init__)  # type: ignore[method-assign]
    WorkerProc.__init__ = one_line.leaving_refusals(WorkerProc.__init__)
    WorkerProc.handle_output = one_line.leaving_refusals(WorkerProc.handle_output)


def override_triton_kernels(overrides: dict[str, Callable[..., Any]]) -> None:
    """Register replacements of Triton kernels with vLLM's dispatcher, once for each process.

    The dispatcher then looks for copies of the kernels in every attribute of every module:
    deprecated ones warn, and llvmlite's library object breaks the scan by answering to any name.
    """
    from vllm.triton_utils import dispatcher

    new = {name: kernel for name, kernel in overrides.items() if name not in dispatcher._registry}
    if not new:
        return
    llvmlite_ffi = sys.modules.pop("llvmlite.binding.ffi", None)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            dispatcher.register_kernels(new)
    finally:
        if llvmlite_ffi is not None:
            sys.modules["llvmlite.binding.ffi"] = llvmlite_ffi


def let_profiler_run(device_type: str) -> None:
    """vLLM's profiler refuses devices that it doesn't know: torch's records the host on any.

    What torch_npu records under ``PrivateUse1`` was not tried.
    """
    from vllm.config.profiler import TorchProfilerActivity
    from vllm.profiler import wrapper

    if device_type not in wrapper._SUPPORTED_PROFILER_KINDS:
        wrapper._SUPPORTED_PROFILER_KINDS[device_type] = frozenset(("torch",))
        wrapper._DEFAULT_TORCH_PROFILER_ACTIVITIES[device_type] = ("CPU",)
        known: frozenset[TorchProfilerActivity] = frozenset(("CPU", "PrivateUse1"))
        wrapper._SUPPORTED_TORCH_PROFILER_ACTIVITIES[device_type] = known


def inert_cuda_streams() -> contextlib.AbstractContextManager[None]:
    """Streams and events for upstream's runner on a machine without any."""
    return cuda_names(
        Event=InertEvent,
        Stream=InertStream,
        current_stream=InertStream,
        stream=lambda stream: contextlib.nullcontext(),
    )


@contextlib.contextmanager
def cuda_names(**stand_ins: Any) -> Iterator[None]:
    """Give names of ``torch.cuda`` to another device's streams and events.

    Upstream's runner names ``torch.cuda`` directly in its constructor and in its asynchronous
    outputs. Scoped to those calls, so that nothing else in the process sees the stand-ins.
    """
    saved = {name: getattr(torch.cuda, name) for name in stand_ins}
    saved_event = torch.Event
    try:
        for name, stand_in in stand_ins.items():
            setattr(torch.cuda, name, stand_in)
        torch.Event = stand_ins["Event"]  # type: ignore[misc]
        yield
    finally:
        for name, original in saved.items():
            setattr(torch.cuda, name, original)
        torch.Event = saved_event  # type: ignore[misc]
