"""Random calls of an engine's life cycle between its steps: pauses, sleep, lost caches.

Requests stay in all of them, in place or to be computed again. Steps that were in flight end first,
or later.
"""

import math
from collections import Counter
from collections.abc import Callable
from typing import Any
from unittest import mock

from tests.helpers.engine import generate
from tests.helpers.traffic import Traffic

SURELY = 1e-6
"""Chance below which drafts that are all rejected are no chance any more."""


class LifeCycle:
    """Calls of one engine in this process, drawn from traffic and counted in it.

    `step` takes a step of the engine and what comes of it. Levels of sleep are drawn; 0 is a pause
    by another name. `verified` is what became of drafts (`tests.helpers.watch.count_verified`).
    """

    def __init__(
        self,
        llm: Any,
        traffic: Traffic,
        step: Callable[[], None],
        levels: tuple[int, ...] = (0,),
        verified: Counter[str] | None = None,
    ) -> None:
        self._engine, self._core = llm.llm_engine, llm.llm_engine.engine_core.engine_core
        self._llm, self._step, self._levels = llm, step, levels
        self._traffic, self.count = traffic, traffic.count
        self._verified = Counter[str]() if verified is None else verified
        self._before: Counter[str] = Counter()  # what had become of drafts at the last call
        self.lost: list[str] = []  # of each call, as `lost_acceptance` says it

    def call(self) -> None:
        """Make one call, of which requests and their answers know nothing."""
        self.lost += self.lost_acceptance()
        self._traffic.pick(self._pause, self._pause, self._sleep, self._reset)()
        self._before = Counter(self._verified)

    def lost_acceptance(self) -> list[str]:
        """What to say if no draft was accepted since the last call, though some were before, and
        that is no chance."""
        since = self._verified - self._before
        before, after = (sum(each.values()) for each in (self._before, since))
        if not after or before <= 50:
            return []
        rejected = self._before["rejected"] / before
        none_left = since["rejected"] == after
        certain = rejected < 1 and after * math.log(max(rejected, 1e-9)) < math.log(SURELY)
        said = f"of {after} requests' drafts none was accepted since {dict(self.count)}; before, "
        return [f"{said}{rejected:.0%} were rejected"] if none_left and certain else []

    def _pause(self) -> None:
        clear = self._traffic.chance(0.3)
        if clear:  # as `AsyncLLM.pause_generation` does
            self._engine.renderer.clear_mm_cache()
        if self._done(self._core.pause_scheduler, mode="keep", clear_cache=clear):
            self._wait()
            self.count["caches cleared in pauses" if clear else "pauses"] += 1
        self._core.resume_scheduler()

    def _sleep(self) -> None:
        self.sleep(self._traffic.pick(*self._levels))

    def sleep(self, level: int) -> None:
        """Sleep and wake up; after level 2, the model's weights are read again."""
        if not self._done(self._engine.sleep, level, mode="keep"):
            self._core.resume_scheduler()
            return
        self._wait(whole=level > 0)
        if level == 0:
            self._engine.wake_up(["scheduling"])
        else:
            self._engine.wake_up(["weights"])
            if level == 2:
                path = self._engine.vllm_config.model_config.model
                self._llm.collective_rpc("reload_weights", kwargs={"weights_path": path})
            self._engine.wake_up(["kv_cache"])
        self.count[f"sleeps at level {level}"] += 1

    def _reset(self) -> None:
        self.reset(whole=self._traffic.chance(0.5))

    def reset(self, whole: bool) -> None:
        """The prefix cache is emptied, if nobody uses it; `whole`: all running are preempted."""
        done = self._done(self._engine.reset_prefix_cache, reset_running_requests=whole)
        if done and whole:
            self._engine.reset_encoder_cache()
        self.count["requests reset" if whole else "prefix cache reset"] += done

    def _done(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> bool:
        """Make a call. vLLM refuses to take blocks away, by an error that the engine outlives, from
        a session between two parts, and while a connector loads or stores a request's."""
        try:
            call(*args, **kwargs)
        except RuntimeError as error:
            if "Failed to reset KV cache" not in str(error):
                raise
            self.count["caches in use"] += 1
            return False
        return True

    def _wait(self, whole: bool = False) -> None:
        """Until steps in flight have ended, or not as long; `whole`: all of them."""
        queue = self._core.batch_queue or ()
        for _ in range(len(queue) if whole or self._traffic.chance(0.6) else 0):
            self._step()
        self.count["queues drained" if not queue else "steps in flight"] += 1


def generate_with_calls(
    llm: Any, prompts: list[list[int]], params: Any, seed: int
) -> tuple[list[list[int]], Counter[str]]:
    """Tokens of requests between whose steps there are calls of the life cycle, and these calls."""
    step, outputs, traffic = llm.llm_engine.step, [], Traffic((seed, 48))
    life_cycle = LifeCycle(llm, traffic, lambda: outputs.extend(step()))
    traffic.rates = {"life-cycle calls": 0.5}
    traffic.calls = {"life-cycle calls": life_cycle.call}

    def step_after_calls() -> list[Any]:
        traffic.between_steps()
        outputs.extend(step())
        came = outputs.copy()
        outputs.clear()
        return came

    with mock.patch.object(llm.llm_engine, "step", step_after_calls):
        return generate(llm, prompts, params), traffic.count
