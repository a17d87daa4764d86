"""How vLLM gets this plugin's scheduler, and what any scheduler keeps of a session.

A session is a request whose input comes in parts.
"""

from typing import TYPE_CHECKING, Any

from vllm_npu_prep.compat.patches import instead_of

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.request import Request, StreamingUpdate

PREFIX = "vllm_npu_prep."
"""Beginning of the names of our schedulers."""


def get_our_schedulers_quietly() -> None:
    """Keep vLLM from warning of a scheduler that it doesn't know if the scheduler is ours.

    The warning says that compatibility may not be maintained, and that asynchronous scheduling may
    be off. Neither holds for our schedulers: they belong to one release of vLLM, and there is one
    for each kind of scheduling. The warning stays for schedulers that users give.
    """
    from vllm.config import SchedulerConfig
    from vllm.utils.import_utils import resolve_obj_by_qualname

    @instead_of(SchedulerConfig, "get_scheduler_cls")
    def get_scheduler_cls(upstream: Any, self: SchedulerConfig) -> Any:
        name = self.scheduler_cls
        if isinstance(name, str) and name.startswith(PREFIX):
            return resolve_obj_by_qualname(name)
        return upstream(self)


def begin_parts_of_sessions_with_what_was_computed() -> None:
    """Let the next part of a session follow what was computed for tokens that it keeps.

    A session keeps its answer without the last token. Two things may have been computed beyond:

    - Drafts that were accepted behind the token that ended the answer. They are no tokens of the
      request, but with synchronous scheduling they count as computed: vLLM 0.32.0 then schedules
      another number of tokens than the part has, or none, and the engine ends. Here they don't
      count, as in vLLM 0.33.0.
    - Recurrent states. A step in flight has put the last token into them, a step with drafts
      perhaps more, and they can't be taken back. vLLM goes on with them, and its tokens are wrong.
      Here the request gives its blocks back and begins anew, with what the prefix cache has, as
      after a preemption.

    The patch applies to vLLM's schedulers and to ours, so that both go on deciding the same.
    """
    from vllm.v1.core.sched.scheduler import Scheduler

    @instead_of(Scheduler, "_handle_stopped_request")
    def handle_stopped_request(stop: Any, self: "Scheduler", request: "Request") -> bool:
        beyond = request.num_in_flight_tokens > 0 or self.num_spec_tokens > 0
        request.begins_anew = self.has_mamba_layers and beyond  # type: ignore[attr-defined]
        return stop(self, request)

    @instead_of(Scheduler, "_update_request_as_session")
    def update_request_as_session(
        begin: Any, self: "Scheduler", session: "Request", update: "StreamingUpdate"
    ) -> None:
        kept = max(session.num_tokens - 1, session.num_prompt_tokens)  # the prompt is kept whole
        session.num_computed_tokens = min(session.num_computed_tokens, kept)
        begin(self, session, update)
        if getattr(session, "begins_anew", False):  # no answer has ended: nothing was noted
            begin_anew(self, session)


def begin_anew(scheduler: "Scheduler", request: "Request") -> None:
    """Give back the blocks of a request that holds some and doesn't run, as if it was preempted."""
    scheduler._free_request_blocks(request)
    request.num_computed_tokens = 0
    scheduler.reset_preempted_req_ids.add(request.request_id)  # the step tells of its blocks
