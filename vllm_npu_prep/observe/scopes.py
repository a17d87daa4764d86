"""The host's phases of a step in vLLM's profile, as scopes of ``torch.profiler``.

A runner is wrapped only while a profile runs, so that steps cost nothing extra otherwise.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch.profiler import record_function

from vllm_npu_prep.prep.batch import PreparedStep
from vllm_npu_prep.prep.padding import GraphMode

if TYPE_CHECKING:
    from vllm_npu_prep.runner.common import CommonRunner

PREFIX = "npu_prep: "
PHASES = ("padding", "layout", "fused pass", "copy", "metadata")
"""The scopes of the six stages of a preparation; "fused pass" includes the stage of the state."""

UPDATES = ("_update_states", "update_requests")
"""The method that takes in the scheduler's output, of V1's runner and of V2's."""

STEP = "step "
"""The beginning of a scope's name that has the step's numbers. This scope is the last one of each
preparation, and of zero length.
"""


class StepScopes:
    """Scopes around a runner's host phases, named ``npu_prep: <phase>``.

    Every profiler sees them. A step's numbers are in a scope's name, because torch records
    arguments of scopes only together with the shapes of all operators.
    """

    def __init__(self, runner: "CommonRunner") -> None:
        self.runner = runner
        self._open: list[record_function] = []
        self._replaced: list[tuple[Any, str]] = []

    def install(self) -> None:
        runner, preparer = self.runner, self.runner.preparer
        update = next(name for name in UPDATES if hasattr(runner, name))
        self._wrap(runner, update, self._around("update_states"))
        self._wrap(runner, "_prepare_inputs", self._around_step)
        self._wrap(runner.padding, "decide", self._before("layout"))
        self._wrap(preparer.staging, "acquire", self._before("fused pass"))
        self._wrap(preparer.staging, "send", self._at("copy"))
        self._wrap(preparer, "build_metadata", self._at("metadata"))

    def remove(self) -> None:
        for target, name in self._replaced:
            delattr(target, name)
        self._replaced.clear()

    # ----------------------------------------------------------------- around methods

    def _wrap(self, target: Any, name: str, around: Callable[[Callable], Callable]) -> None:
        """Wrap a method, by an attribute of the object that hides its class's method."""
        setattr(target, name, around(getattr(target, name)))
        self._replaced.append((target, name))

    def _around(self, scope: str) -> Callable[[Callable], Callable]:
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
        """Open a scope of the whole preparation, and its first phase. Each phase ends the one
        before.
        """

        def scoped(*args: Any, **kwargs: Any) -> Any:
            depth = len(self._open)
            self._enter("prepare_inputs")
            self._enter(PHASES[0])
            try:
                prepared = prepare_inputs(*args, **kwargs)
                in_flight = self.runner.in_flight
                assert in_flight is not None
                self._next(_numbers(in_flight.step, self.runner.preparer.staging.waits))
                return prepared
            finally:
                while len(self._open) > depth:
                    self._leave()

        return scoped

    def _before(self, phase: str) -> Callable[[Callable], Callable]:
        """Begin the phase when the method returns."""

        def wrap(method: Callable) -> Callable:
            def scoped(*args: Any, **kwargs: Any) -> Any:
                result = method(*args, **kwargs)
                self._next(phase)
                return result

            return scoped

        return wrap

    def _at(self, phase: str) -> Callable[[Callable], Callable]:
        """Begin the phase when the method is called."""

        def wrap(method: Callable) -> Callable:
            def scoped(*args: Any, **kwargs: Any) -> Any:
                self._next(phase)
                return method(*args, **kwargs)

            return scoped

        return wrap

    # ----------------------------------------------------------------- scopes

    def _next(self, phase: str) -> None:
        if not self._open:  # a dummy run isn't a step
            return
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
