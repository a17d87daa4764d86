"""The host's phases of a step in vLLM's profile, as scopes of ``torch.profiler``.

A runner is wrapped only while a profile runs, so that steps cost nothing extra otherwise.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch.profiler import record_function

from vllm_npu_prep.prep.batch import PreparedStep
from vllm_npu_prep.prep.padding import GraphMode

PREFIX = "npu_prep: "
PHASES = ("padding", "layout", "fused pass", "copy", "metadata")
"""The scopes of the six stages of a preparation; "fused pass" includes the stage of the state."""

UPDATES = ("_update_states", "update_requests")
"""The method that takes in the scheduler's output, of V1's runner and of V2's."""

STEP = "step "
"""The beginning of a scope's name that has the step's numbers. This scope is the last one of each
preparation, and of zero length.
"""


def _nothing() -> None: ...


class StepScopes:
    """Scopes around a runner's host phases, named ``npu_prep: <phase>``.

    Every profiler sees them. A step's numbers are in a scope's name, because torch records
    arguments of scopes only together with the shapes of all operators.
    """

    def __init__(self, runner: Any) -> None:
        self.runner = runner  # `vllm_npu_prep.runner.common.CommonRunner`
        self._open: list[record_function] = []
        self._replaced: list[tuple[Any, str]] = []

    def install(self) -> None:
        runner, preparer = self.runner, self.runner.preparer
        update = next(name for name in UPDATES if hasattr(runner, name))
        self._wrap(runner, update, partial(self._enter, "update_states"), self._leave)
        self._wrap(runner, "_prepare_inputs", self._begin_step, self._end_step)
        self._wrap(runner.padding, "decide", after=partial(self._next, "layout"))
        self._wrap(preparer.staging, "acquire", after=partial(self._next, "fused pass"))
        self._wrap(preparer.staging, "send", partial(self._next, "copy"))
        self._wrap(preparer, "build_metadata", partial(self._next, "metadata"))

    def remove(self) -> None:
        for target, name in self._replaced:
            delattr(target, name)
        self._replaced.clear()

    def _wrap(
        self,
        target: Any,
        name: str,
        before: Callable[[], object] = _nothing,
        after: Callable[[], object] = _nothing,
    ) -> None:
        """Wrap a method, by an attribute of the object that hides its class's method.

        If the method fails, the scopes that were opened since its call are closed.
        """
        method = getattr(target, name)

        def scoped(*args: Any, **kwargs: Any) -> Any:
            depth = len(self._open)
            before()
            try:
                result = method(*args, **kwargs)
                after()
            except BaseException:
                while len(self._open) > depth:
                    self._leave()
                raise
            return result

        setattr(target, name, scoped)
        self._replaced.append((target, name))

    def _begin_step(self) -> None:
        """Open a scope of the whole preparation, and its first phase; each phase ends the last."""
        self._enter("prepare_inputs")
        self._enter(PHASES[0])

    def _end_step(self) -> None:
        self._next(_numbers(self.runner.in_flight.step, self.runner.preparer.staging.waits))
        self._leave()
        self._leave()

    def _next(self, phase: str) -> None:
        if self._open:  # a dummy run isn't a step
            self._leave()
            self._enter(phase)

    def _enter(self, scope: str) -> None:
        self._open.append(record_function(PREFIX + scope).__enter__())

    def _leave(self) -> None:
        self._open.pop().__exit__(None, None, None)


def _numbers(step: PreparedStep, num_waits: int) -> str:
    num_tokens, padded = step.total_num_scheduled_tokens, step.num_input_tokens
    numbers = {
        "tokens": num_tokens,
        "padding": padded - num_tokens,
        "graph": 0 if step.padding.mode is GraphMode.NONE else padded,
        "bytes": step.nbytes,
        "waits": num_waits,
    }
    return STEP + " ".join(f"{name}={value}" for name, value in numbers.items())
