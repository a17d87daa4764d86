"""The host's phases of a step while a profiler runs: named scopes, and a trace with counters.

A runner is wrapped when a profile starts and unwrapped when it stops, so that steps cost nothing
more at any other time.
"""

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.profiler import record_function
from vllm.logger import init_logger

from vllm_npu_prep.prep.batch import PreparedStep
from vllm_npu_prep.prep.padding import GraphMode

if TYPE_CHECKING:
    from vllm_npu_prep.runner.model_runner import NPUModelRunner

logger = init_logger(f"vllm.{__name__}")  # vLLM configures loggers below its own only

PREFIX = "npu_prep: "
PHASES = ("padding", "layout", "kernel", "copy", "metadata")
"""Of `NPUModelRunner._prepare_inputs`, where kernel and state are one pass."""

MOST_EVENTS = 1 << 20
"""Spans and counters that are kept, of about 100,000 steps; scopes go on beyond."""

Event = dict[str, Any]


class StepScopes:
    """Scopes around a runner's host phases.

    Each is seen by whatever profiler runs, under ``npu_prep: <phase>``, and kept for a trace.

    Parameters
    ----------
    runner
        The runner to watch.
    """

    def __init__(self, runner: "NPUModelRunner") -> None:
        self.runner = runner
        self.events: list[Event] = []
        self._open: list[tuple[str, int, record_function]] = []
        self._replaced: list[tuple[Any, str]] = []
        self._epoch = time.time_ns() - time.perf_counter_ns()

    def install(self) -> None:
        """Begin to watch."""
        runner, preparer = self.runner, self.runner.preparer
        self._wrap(runner, "_update_states", self._around("update_states"))
        self._wrap(runner, "_prepare_inputs", self._around_step)
        self._wrap(runner.padding, "decide", self._before("layout"))
        self._wrap(preparer.staging, "acquire", self._before("kernel"))
        self._wrap(preparer.staging, "send", self._at("copy"))
        self._wrap(preparer, "build_metadata", self._at("metadata"))

    def remove(self) -> None:
        """Leave the runner as it was."""
        for target, name in self._replaced:
            delattr(target, name)
        self._replaced.clear()

    def write_trace(self, path: Path) -> None:
        """Write a Chrome trace: a span for each phase, and counters at the end of each step.

        Raises
        ------
        OSError
            If it can't be written.
        """
        with path.open("w") as file:
            json.dump({"traceEvents": self.events, "displayTimeUnit": "ms"}, file)

    # ----------------------------------------------------------------- around methods

    def _wrap(self, target: Any, name: str, around: Callable[[Callable], Callable]) -> None:
        """An attribute of the object hides its class's method."""
        setattr(target, name, around(getattr(target, name)))
        self._replaced.append((target, name))

    def _around(self, scope: str) -> Callable[[Callable], Callable]:
        """A scope of a whole method."""

        def wrap(method: Callable) -> Callable:
            def scoped(*args: Any, **kwargs: Any) -> Any:
                self._enter(scope)
                try:
                    return method(*args, **kwargs)
                finally:
                    self._leave()

            return scoped

        return wrap

    def _around_step(self, prepare_inputs: Callable) -> Callable:
        """All of the preparation, and its first phase; the following ones end one another."""

        def scoped(*args: Any, **kwargs: Any) -> Any:
            depth = len(self._open)
            self._enter("prepare_inputs")
            self._enter(PHASES[0])
            try:
                prepared = prepare_inputs(*args, **kwargs)
            finally:
                while len(self._open) > depth:
                    self._leave()
            assert self.runner.in_flight is not None
            self._count(self.runner.in_flight.step)
            return prepared

        return scoped

    def _before(self, phase: str) -> Callable[[Callable], Callable]:
        """The phase begins when the method returns."""

        def wrap(method: Callable) -> Callable:
            def scoped(*args: Any, **kwargs: Any) -> Any:
                result = method(*args, **kwargs)
                self._next(phase)
                return result

            return scoped

        return wrap

    def _at(self, phase: str) -> Callable[[Callable], Callable]:
        """The phase begins when the method is called."""

        def wrap(method: Callable) -> Callable:
            def scoped(*args: Any, **kwargs: Any) -> Any:
                self._next(phase)
                return method(*args, **kwargs)

            return scoped

        return wrap

    # ----------------------------------------------------------------- scopes and counters

    def _next(self, phase: str) -> None:
        if not self._open:  # a dummy run, which is no step
            return
        self._leave()
        self._enter(phase)

    def _enter(self, scope: str) -> None:
        recorded = record_function(PREFIX + scope)
        recorded.__enter__()
        self._open.append((scope, time.perf_counter_ns(), recorded))

    def _leave(self) -> None:
        scope, started, recorded = self._open.pop()
        duration = time.perf_counter_ns() - started
        recorded.__exit__(None, None, None)
        self._keep(scope, "X", started, dur=duration / 1000)

    def _count(self, step: PreparedStep) -> None:
        """Counters of a step, which a viewer draws as curves."""
        tokens, padded = step.total_num_scheduled_tokens, step.num_input_tokens
        replays = step.padding.mode is not GraphMode.NONE
        now = time.perf_counter_ns()
        for name, values in {
            "tokens": {"real": tokens, "padding": padded - tokens},
            "graph size": {"tokens": padded if replays else 0},
            "copy": {"bytes": step.nbytes},
            "waits": {"so far": self.runner.preparer.staging.waits},
        }.items():
            self._keep(name, "C", now, args=values)

    def _keep(self, name: str, kind: str, at: int, **more: Any) -> None:
        if len(self.events) < MOST_EVENTS:
            stamp = (self._epoch + at) / 1000
            event = {"name": PREFIX + name, "ph": kind, "ts": stamp, "pid": os.getpid(), "tid": 0}
            self.events.append(event | more)
