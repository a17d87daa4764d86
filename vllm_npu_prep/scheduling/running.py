"""The batched half of ``schedule``: the decodes at the head of ``running``, in one loop.

A decode is a request that lacks one computed token, and may have drafts to verify. It is past its
prompt, so no encoder input can keep it back. Upstream asks for its blocks in every step; here a
call is made only where it changes something (`BlockNeeds`).
"""

from dataclasses import dataclass, field
from typing import cast

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request

from vllm_npu_prep.scheduling.blocks import BlockNeeds
from vllm_npu_prep.scheduling.requests import GRAMMAR, BatchedRequest


@dataclass
class DecodeBatch:
    """The head of ``running``, and what its requests compute in a step."""

    num_requests: int = 0  # the head's length; some may compute nothing in this step
    num_tokens: int = 0  # that all of them compute together
    # The requests that are scheduled; the four columns below have an entry for each
    requests: list[BatchedRequest] = field(default_factory=list)
    req_ids: list[str] = field(default_factory=list)
    num_new_tokens: list[int] = field(default_factory=list)  # to compute
    num_computed_tokens: list[int] = field(default_factory=list)  # computed before
    num_output_tokens: list[int] = field(default_factory=list)  # those under way included
    # The last token of each, which pipeline stages without asynchronous scheduling are sent
    new_token_ids: list[list[int]] = field(default_factory=list)
    # New blocks by KV-cache group, by index of the request; only of requests that got some
    new_block_ids: dict[int, tuple[list[int], ...]] = field(default_factory=dict)
    drafts: dict[str, list[int]] = field(default_factory=dict)  # the tokens to verify, by id
    # The tokens of requests that the last step didn't have, by id; for Model Runner V1
    all_token_ids: dict[str, list[int]] = field(default_factory=dict)
    grammar: bool = False  # whether any request has structured output
    grammar_pending: bool = False  # whether tokens that its grammar needs are still computed
    entered: bool = False  # whether the step is counted in the requests
    # What upstream's method scheduled of the step, tokens by id; None before `join`
    others: dict[str, int] | None = None

    def loras(self) -> set[int]:
        return loras_of(self.requests)

    def join(self, output: SchedulerOutput) -> None:
        """Put these requests before those that upstream's method scheduled."""
        self.others = output.num_scheduled_tokens
        scheduled = dict(zip(self.req_ids, self.num_new_tokens, strict=True))
        scheduled.update(self.others)
        output.num_scheduled_tokens = scheduled
        output.total_num_scheduled_tokens += self.num_tokens
        if self.drafts:
            self.drafts.update(output.scheduled_spec_decode_tokens)
            output.scheduled_spec_decode_tokens = self.drafts
        cached = output.scheduled_cached_reqs
        blocks: list[tuple[list[int], ...] | None] = [None] * len(self.req_ids)
        for index, ids in self.new_block_ids.items():
            blocks[index] = ids
        cached.req_ids = self.req_ids + cached.req_ids
        cached.new_token_ids = self.new_token_ids + cached.new_token_ids
        cached.new_block_ids = blocks + cached.new_block_ids
        cached.num_computed_tokens = self.num_computed_tokens + cached.num_computed_tokens
        cached.num_output_tokens = self.num_output_tokens + cached.num_output_tokens
        if self.all_token_ids:
            cached.all_token_ids = self.all_token_ids | cached.all_token_ids
        if output.kv_connector_block_state is not None:
            output.kv_connector_block_state.req_ids.update(self.req_ids)

    def tell_of_grammars(self, output: SchedulerOutput) -> None:
        """Note structured output, which upstream does once the step is counted in its requests."""
        output.has_structured_output_requests |= self.grammar
        output.pending_structured_output_tokens |= self.grammar_pending


class Decodes:
    """Schedules the decodes of one scheduler as upstream would.

    ``asynchronous`` says whether the next step is scheduled before the last tokens are known.
    """

    def __init__(self, scheduler: Scheduler, needs: BlockNeeds, *, asynchronous: bool) -> None:
        self.scheduler, self.needs, self.asynchronous = scheduler, needs, asynchronous

    def take(self, running: list[Request], end: int) -> DecodeBatch:
        """Schedule the decodes among the first `end` requests, up to the first that isn't one.

        The loop also ends at a request for which the token budget or the blocks don't suffice:
        upstream's method then cuts it, or preempts others. Each rule names its source in vLLM's
        ``v1/core/sched``.

        Where somebody looks at requests before a step is counted in them (`_counts_later`), the
        caller has to call `enter` once they have.
        """
        scheduler, needs = self.scheduler, self.needs
        allocate = scheduler.kv_cache_manager.allocate_slots
        lookahead = scheduler.num_lookahead_tokens
        longest = scheduler.max_model_len - scheduler.num_sampled_tokens_per_step
        asynchronous, speculates = self.asynchronous, scheduler.num_spec_tokens > 0
        step = scheduler.current_step + 1
        eligible = step + cast("AsyncScheduler", scheduler).decode_stagger if self._staggers else 0
        next_drafts = [-1] * scheduler.num_spec_tokens if asynchronous else []
        at_once = not self._counts_later
        budget = scheduler.max_num_scheduled_tokens
        taken = DecodeBatch(entered=at_once)
        add_request, add_id = taken.requests.append, taken.req_ids.append
        add_new, add_computed = taken.num_new_tokens.append, taken.num_computed_tokens.append
        add_output = taken.num_output_tokens.append
        num_waiting = 0
        for request in cast("list[BatchedRequest]", running[:end]):
            computed = request.num_computed_tokens
            placeholders = request.num_output_placeholders
            known = len(request._all_token_ids)
            if known + placeholders - computed != 1 or request.is_prefill_chunk:
                if known + placeholders > computed or request.spec_token_ids:
                    break
                num_waiting += 1  # for tokens, and drafts, that a pipeline stage has in flight
                continue
            if eligible and step < request.next_decode_eligible_step:
                num_waiting += 1
                continue
            drafts = request.spec_token_ids if speculates else None
            new = 1 + len(drafts) if drafts else 1
            is_quiet = computed + new + lookahead < request.quiet_until
            if not is_quiet:
                # Scheduler.schedule: enough tokens are on their way, or not past max_model_len
                enough = placeholders and computed + 2 - placeholders >= request.last_length
                new = min(new, longest - computed)
                if enough or new <= 0:
                    num_waiting += 1
                    continue
            if new > budget:
                break
            in_flight = request.num_in_flight_tokens
            if not is_quiet:
                if (
                    computed + new + lookahead > request.blocks_until
                    or computed + 1 - placeholders >= request.cached_until
                    or computed - in_flight >= request.window_until
                ):
                    blocks = allocate(request, new, num_lookahead_tokens=lookahead)
                    if blocks is None:
                        break
                    needs.note(request)
                    ids = blocks.get_block_ids(allow_none=True)
                    if ids is not None:
                        taken.new_block_ids[len(taken.req_ids)] = ids
                if request.traits & GRAMMAR:  # _update_after_schedule of both of vLLM's schedulers
                    taken.grammar = True
                    taken.grammar_pending |= asynchronous and placeholders > 0
            request_id = request.request_id
            add_request(request)
            add_id(request_id)
            add_new(new)
            add_computed(computed)
            # Scheduler._make_cached_request_data
            add_output(len(request._output_token_ids) + placeholders)
            budget -= new
            if drafts:  # Scheduler.schedule
                if new > 1:
                    whole = len(drafts) == new - 1
                    taken.drafts[request_id] = drafts if whole else drafts[: new - 1]
                request.spec_token_ids = []
            if at_once:  # as `enter`
                request.num_computed_tokens = computed + new
                request.num_in_flight_tokens = in_flight + new
                if asynchronous:
                    request.num_output_placeholders = placeholders + new
                    if speculates:
                        request.spec_token_ids = next_drafts
                    if eligible:
                        request.next_decode_eligible_step = eligible
        taken.num_requests = len(taken.req_ids) + num_waiting
        taken.num_tokens = scheduler.max_num_scheduled_tokens - budget
        self._note_new(taken)
        if scheduler.use_pp and not scheduler.scheduler_config.async_scheduling:
            taken.new_token_ids = [  # Scheduler._make_cached_request_data
                request._all_token_ids[computed : computed + 1]
                for request, computed in zip(taken.requests, taken.num_computed_tokens)
            ]
        return taken

    @property
    def _counts_later(self) -> bool:
        """Whether a step is counted in requests after upstream's ``schedule`` was through them.

        A connector may read the requests that it was told of, and blocks that are freed late wait
        for the number of the step, which upstream's method gives.
        """
        return self.scheduler.connector is not None or self.scheduler.defer_block_free

    def enter(self, taken: DecodeBatch) -> None:
        """Count the step in its requests, unless `take` has.

        This is ``_update_after_schedule`` of both of vLLM's schedulers.
        """
        if taken.entered:
            return
        taken.entered = True
        scheduler = self.scheduler
        asynchronous, speculates = self.asynchronous, scheduler.num_spec_tokens > 0
        fenced, sequence = scheduler.defer_block_free, scheduler.sched_step_seq
        eligible = 0
        if self._staggers:
            eligible = scheduler.current_step + cast("AsyncScheduler", scheduler).decode_stagger
        next_drafts = [-1] * scheduler.num_spec_tokens if asynchronous else []
        for request, new in zip(taken.requests, taken.num_new_tokens):
            request.num_computed_tokens += new
            request.num_in_flight_tokens += new
            if fenced:
                request.last_sched_seq = sequence
            if asynchronous:
                request.num_output_placeholders += new
                if speculates:
                    request.spec_token_ids = next_drafts
                if eligible:
                    request.next_decode_eligible_step = eligible

    def give_back(self, taken: DecodeBatch) -> None:
        """Undo the counts of `take`; blocks that requests got are theirs."""
        if not taken.entered:
            for request in taken.requests:
                request.spec_token_ids = taken.drafts.get(request.request_id, [])
            return
        for request, computed, new in zip(
            taken.requests, taken.num_computed_tokens, taken.num_new_tokens
        ):
            request.num_computed_tokens = computed
            request.num_in_flight_tokens -= new
            request.spec_token_ids = taken.drafts.get(request.request_id, [])
            if self.asynchronous:
                request.num_output_placeholders -= new
            if self._staggers:
                request.next_decode_eligible_step = 0

    @property
    def _staggers(self) -> bool:
        """Whether steps between two decodes of a request are counted (Model Runner V2)."""
        return self.asynchronous and self.scheduler.use_v2_model_runner

    def _note_new(self, taken: DecodeBatch) -> None:
        """Note the tokens of requests that the last step didn't have, for Model Runner V1."""
        if self.scheduler.use_v2_model_runner:
            return
        had = self.scheduler.prev_step_scheduled_req_ids
        if not had.issuperset(taken.req_ids):
            for request in taken.requests:
                if request.request_id not in had:
                    taken.all_token_ids[request.request_id] = request._all_token_ids.copy()

    def waits(self, request: Request) -> bool:
        """Return whether a decode has nothing to compute in this step."""
        noted = cast("BatchedRequest", request)
        computed, placeholders = request.num_computed_tokens, request.num_output_placeholders
        longest = self.scheduler.max_model_len - self.scheduler.num_sampled_tokens_per_step
        return (
            bool(placeholders and computed + 2 - placeholders >= noted.last_length)
            or (
                self._staggers and self.scheduler.current_step + 1 < noted.next_decode_eligible_step
            )
            or computed >= longest
            or computed >= request.num_tokens_with_spec + placeholders
        )

    def last_to_schedule(self, running: list[Request]) -> int:
        """Return the index of the last decode that has something to compute; 0 if there is none."""
        for index in range(len(running) - 1, 0, -1):
            if not running[index].is_prefill_chunk and not self.waits(running[index]):
                return index
        return 0


def loras_of(requests: list[BatchedRequest]) -> set[int]:
    loras = (request.lora_request for request in requests)
    return {lora.lora_int_id for lora in loras if lora is not None}
