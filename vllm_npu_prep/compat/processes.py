"""Patches of vLLM's processes: errors reach the user in one line, and the processes end quickly."""

import functools
import gc
import logging
import sys
from collections.abc import Callable
from typing import Any

from vllm_npu_prep.compat.patches import instead_of
from vllm_npu_prep.progress import log_while_waiting
from vllm_npu_prep.server import one_line
from vllm_npu_prep.server.one_line import OneLineErrors
from vllm_npu_prep.server.processes import Child


def report_errors_in_one_line() -> None:
    """Show a bad config as one line: ``vllm serve`` would end with a traceback."""
    if not isinstance(sys.excepthook, OneLineErrors):
        sys.excepthook = OneLineErrors()


def tell_of_waits_for_engines() -> None:
    """Log progress while engines import, load and warm up.

    A refusal by an engine is raised here, in the process that the user started.
    """
    from vllm.v1.engine import utils

    @instead_of(utils, "wait_for_engine_startup")
    @one_line.raising_what_was_left
    def wait_for_engine_startup(upstream: Any, *args: Any, **kwargs: Any) -> Any:
        with log_while_waiting("Waiting for the engine to start", _log):
            return upstream(*args, **kwargs)


def let_engines_end_by_themselves() -> None:
    """Keep vLLM from killing engines that have ended in time, and from logging that it did.

    A thread of vLLM's client waits for them beside the one that stops them.
    """
    from vllm.v1.engine import utils

    @instead_of(utils, "shutdown")
    def shutdown(upstream: Any, procs: list[Any], timeout: float | None = None) -> None:
        children: list[Any] = [Child(each) for each in procs]
        upstream(children, timeout)


def run_engine_core(*args: Any, **kwargs: Any) -> None:
    tell_refusals_to_the_main_process()
    end_without_collecting()
    with one_line.ending_without_traceback():
        run_engine_core.__wrapped__(*args, **kwargs)  # type: ignore[attr-defined]


def run_worker(*args: Any, **kwargs: Any) -> None:
    tell_refusals_to_the_main_process()
    end_without_collecting()
    run_worker.__wrapped__(*args, **kwargs)  # type: ignore[attr-defined]


def tell_refusals_to_the_main_process() -> None:
    """Let engines and ranks leave a `PrepError` to the process that the user started (`one_line`).

    Their processes run functions of this module, so that they are set up before anything else.
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
    EngineCore.__init__ = one_line.raising_what_was_left(EngineCore.__init__)
    WorkerProc.__init__ = one_line.leaving_refusals(WorkerProc.__init__)
    WorkerProc.handle_output = one_line.leaving_refusals(WorkerProc.handle_output)


def end_without_collecting() -> None:
    """Leave the objects of this process, an engine's or a rank's, to the operating system.

    When such a process ends, vLLM thaws a million objects of modules and of the model and looks for
    garbage among them, and Python does so again. On a busy host, a rank had spent 1.4 s of a
    processor on it when its nine seconds were nearly over, and its engine was killed after fifteen.
    """
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.executor.multiproc_executor import WorkerProc

    EngineCore.shutdown = _freezing(EngineCore.shutdown)
    WorkerProc.shutdown = _freezing(WorkerProc.shutdown)


def _freezing(shutdown: Callable[[Any], None]) -> Callable[[Any], None]:
    """Wrap the method so that it leaves frozen what it would thaw, and freezes the rest."""

    @functools.wraps(shutdown)
    def frozen(self: Any) -> None:
        gc.unfreeze = gc.freeze  # vLLM calls it several times; nothing is left for Python's end
        shutdown(self)

    return frozen


def _log(line: str) -> None:
    logging.getLogger(f"vllm.{__name__}").info("%s", line)
