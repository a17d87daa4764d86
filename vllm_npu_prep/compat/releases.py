"""The supported releases of vLLM, and what they do differently where our own code has to know.

Differences that a subclass or a keyword argument doesn't bridge by itself are here, so that no
other module asks for a version. ``tests/compat`` lists functions that changed, with what answers
each.
"""

import functools
from collections.abc import Iterable
from importlib import metadata
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.request import Request

SUPPORTED_VLLM = ("0.32.0", "0.33.0")
"""Releases, oldest first; the first one is pinned."""
TORCH = "2.13.0"
"""The torch with which all of them were tested; the extra ``serve`` of setup.py pins it."""
OTHER_TORCH = {"0.33.0": "2.14.0"}
"""The torch that a supported release pins itself, where that is another one."""


def installed(package: str) -> str:
    """Return the release of an installed package, without the kind of its build."""
    return metadata.version(package).partition("+")[0]


def installed_vllm() -> str:
    return installed("vllm")


def note_on_torch(version: str | None = None) -> str:
    """Say with which torch a release was tested, if it pins another one; else return nothing.

    Without a version, it is about the installed release.
    """
    version = version or installed_vllm()
    pinned = OTHER_TORCH.get(version)
    if pinned is None:
        return ""
    return f"vLLM {version} pins torch {pinned}, and was tested here with torch {TORCH} alone"


class SchedulerRules:
    """Rules of vLLM 0.32.0's scheduler that another release changes.

    Attributes
    ----------
    counts_idle_adapters
        Whether LoRA adapters of running requests that a step leaves out count against
        ``max_loras``.
    caches_verified_tokens
        Whether a request's blocks enter the prefix cache up to the tokens that no step in flight
        computes, with synchronous speculation, too. Otherwise they enter it up to the placeholders,
        and with asynchronous scheduling only.
    """

    counts_idle_adapters = False
    caches_verified_tokens = False

    def reasons_for_upstream(self, scheduler: "Scheduler") -> dict[str, bool]:
        """Return reasons to leave an engine to upstream's methods, and whether each holds."""
        return {}

    def complete(
        self, scheduler: "Scheduler", output: "SchedulerOutput", taken: Iterable[str], entered: bool
    ) -> None:
        """Add what upstream's ``schedule`` does once a step, for requests that it didn't see.

        It is called after the whole step was put together; `taken` are the ids of requests that
        were scheduled without upstream's ``schedule``, and `entered` says whether the step is
        counted in them.
        """


class SchedulerRules033(SchedulerRules):
    """Rules of vLLM 0.33.0: ``Scheduler.schedule`` and ``update_from_output``."""

    counts_idle_adapters = True
    caches_verified_tokens = True

    def reasons_for_upstream(self, scheduler: "Scheduler") -> dict[str, bool]:
        rules: Any = scheduler
        return {
            "prefills wait for an interval": rules.local_prefill_interval > 1,
        }

    def complete(
        self, scheduler: "Scheduler", output: "SchedulerOutput", taken: Iterable[str], entered: bool
    ) -> None:
        """Count the step if upstream saw none of it, and tell the runner of encoder inputs.

        Drafts are needed if any request that was taken can use them; upstream asked the others.
        """
        rules, step = scheduler, output  # type: Any, Any
        if step.skip_drafts and rules.can_skip_drafts:
            step.skip_drafts = not any(
                _uses_drafts(
                    scheduler.requests[each], output.num_scheduled_tokens[each] if entered else 0
                )
                for each in taken
            )
        ids = dict.fromkeys(taken, 0)
        if ids and len(output.num_scheduled_tokens) == len(ids):
            rules.num_executed_steps += 1
        if rules.use_v2_model_runner:
            step.encoder_input_updates |= rules._get_encoder_input_updates(ids, [], {})


def _uses_drafts(request: "Request", num_entered: int) -> bool:
    """Tell whether a decode that was scheduled may have a step after this one.

    Upstream asks this before the step is entered in the request (``Scheduler._drafts_unused`` of
    vLLM 0.33.0). Placeholders beyond the `num_entered` of this step belong to a step in flight.
    """
    in_flight = request.num_output_placeholders > num_entered
    return request.num_output_tokens + 1 + in_flight < request.max_tokens


def scheduler_rules(version: str | None = None) -> SchedulerRules:
    newer = is_since("0.33.0", version or installed_vllm())
    return SchedulerRules033() if newer else SchedulerRules()


@functools.cache
def is_since(release: str, version: str | None = None) -> bool:
    """Return whether a release of vLLM, by default the installed one, is `release` or later."""
    return _numbers(version or installed_vllm()) >= _numbers(release)


def drafters_head_quantization(speculative: Any) -> str | None:
    """Return how a drafter's copy of the target's head is quantised; 0.33.0 can do so on V2."""
    return getattr(speculative, "draft_lm_head_quantization", None)


def ray_compiles_graphs() -> bool:
    """Return whether vLLM's first executor for Ray is asked for; vLLM 0.33 has only the second."""
    from vllm import envs

    return not getattr(envs, "VLLM_USE_RAY_V2_EXECUTOR_BACKEND", True)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2])
