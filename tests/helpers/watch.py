"""What happens inside an engine while it serves: attention states, preemptions."""

from collections import Counter
from collections.abc import Callable
from typing import Any

from tests.helpers.engine import runner_of


def on_prepared(llm: Any, do: Callable[[Any], None]) -> None:
    """Call a function with each `PreparedStep` that is served from now on."""
    runner = runner_of(llm)
    prepare_inputs = runner._prepare_inputs

    def watched(*args: Any) -> Any:
        result = prepare_inputs(*args)
        if runner.last_step.num_reqs:  # else a dummy run
            do(runner.last_step)
        return result

    runner._prepare_inputs = watched


def record_states(llm: Any) -> list[str]:
    """Attention states of all later steps, in order."""
    states: list[str] = []
    on_prepared(llm, lambda step: states.append(step.attn_state.name))
    return states


def count_states(llm: Any) -> Counter:
    """Count the attention states of all later steps."""
    states: Counter = Counter()
    on_prepared(llm, lambda step: states.update([step.attn_state.name]))
    return states


def count_preemptions(llm: Any) -> Counter:
    """Count all later preemptions, under ``"preempted"``."""
    scheduler, count = llm.llm_engine.engine_core.engine_core.scheduler, Counter()
    preempt = scheduler._preempt_request

    def counted(*args: Any, **kwargs: Any) -> Any:
        count["preempted"] += 1
        return preempt(*args, **kwargs)

    scheduler._preempt_request = counted
    return count
