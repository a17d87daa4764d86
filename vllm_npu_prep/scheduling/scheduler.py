"""vLLM's `Scheduler` and `AsyncScheduler`, batched where requests are plain."""

import copy
import functools
from collections import Counter
from typing import Any, cast

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
)
from vllm.logger import init_logger
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.request_queue import SchedulingPolicy
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request, StreamingUpdate
from vllm.v1.spec_decode.metrics import SpecDecodingStats

from vllm_npu_prep.compat.releases import scheduler_rules
from vllm_npu_prep.scheduling.blocks import BlockNeeds
from vllm_npu_prep.scheduling.outputs import Rows, add_drafts
from vllm_npu_prep.scheduling.requests import GRAMMAR, BatchedRequest, forget_blocks, note
from vllm_npu_prep.scheduling.running import DecodeBatch, Decodes, loras_of

logger = init_logger(f"vllm.{__name__}")  # vLLM configures loggers below its own only


class BatchedMixin(Scheduler):
    """The batched ways through ``schedule`` and ``update_from_output``.

    ``schedule`` takes the decodes at the head of ``running`` in one loop (`Decodes`). For all other
    requests, the waiting queues and everything after them it calls upstream's method, with limits
    lowered by what is taken, and joins the outputs. It calls upstream's method alone where a decode
    could preempt another one, or the step is of another kind.

    ``update_from_output`` appends the tokens of plain rows in one loop and hands upstream's method
    the others in their places (`outputs.Rows`).

    What may change in a release of vLLM is guarded by ``tests/compat/bodies.txt``.
    """

    asynchronous = False
    fewest = 4  # steps of fewer requests than this are left to upstream's methods

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.rules = scheduler_rules()  # what the installed release of vLLM does differently
        self.needs = BlockNeeds(self.kv_cache_manager, self.max_model_len)
        self.decodes = Decodes(self, self.needs, asynchronous=self.asynchronous)
        self.counts_nans = False  # of logits, for debugging: upstream makes the outputs then
        # During upstream's `schedule`: what was taken out of `running`, how many requests were left
        # there (those that upstream admits follow), and, if any waits, the running adapters
        self.taken: DecodeBatch | None = None
        self.num_left = 0
        self.active_loras: set[int] | None = None
        self.plain_drafts: Counter[tuple[int, int]] = Counter()

    @functools.cached_property
    def reason(self) -> str:
        """The reason why this engine is left to upstream's methods; empty if it isn't.

        It is found at the first step, when subclasses have set what they do differently.
        """
        reason = self._reason_for_upstream()
        if reason:
            logger.info_once("Scheduling is not batched: %s.", reason)
        return reason

    def _reason_for_upstream(self) -> str:
        speculation = self.vllm_config.speculative_config
        draft_slots = speculation.max_num_new_slots_for_drafting if speculation else 0
        input_tokens = self.scheduler_config.max_num_batched_tokens
        threshold = self.scheduler_config.long_prefill_token_threshold
        reasons = {
            "an encoder connector reads every step": self.ec_connector is not None,
            "routed experts are returned": self.aux_output_connector is not None,
            "the model samples no tokens": self.num_sampled_tokens_per_step != 1,
            "the model has an encoder": self.is_encoder_decoder or self.is_mm_encoder_only,
            "the number of drafts follows the batch": self.dynamic_sd_lookup is not None,
            "drafts need input slots of their own": draft_slots * self.max_num_running_reqs
            > input_tokens - self.max_num_scheduled_tokens,
            "--long-prefill-token-threshold cuts drafts": 0 < threshold <= self.num_spec_tokens,
            **self.rules.reasons_for_upstream(self),
        }
        return ", ".join(reason for reason, holds in reasons.items() if holds)

    def add_request(self, request: Request) -> None:
        super().add_request(request)
        if self.requests.get(request.request_id) is request:
            note(request, self.max_model_len)

    def _update_request_as_session(self, session: Request, update: StreamingUpdate) -> None:
        super()._update_request_as_session(session, update)
        note(session, self.max_model_len)

    def _preempt_request(self, request: Request, *args: Any, **kwargs: Any) -> None:
        super()._preempt_request(request, *args, **kwargs)
        forget_blocks(cast("BatchedRequest", request))

    # ---------------------------------------------------------------------------------- schedule

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        running = self.running
        if (
            self.reason
            or len(running) < self.fewest
            or self._pause_state == PauseState.PAUSED_ALL
            or not self._no_victims_can_be_needed()
        ):
            return super().schedule(throttle_prefills)
        anyone_waits = bool(self.waiting) or bool(self.kv_holding_waiting)
        if anyone_waits and self._admission_may_differ(throttle_prefills):
            return super().schedule(throttle_prefills)
        self.kv_cache_manager.new_step_starts()  # before any decode enters blocks in the cache
        taken = self.decodes.take(running, self._end_of_prefix(anyone_waits, throttle_prefills))
        if not taken.num_requests:
            return super().schedule(throttle_prefills)
        rest = cast("list[BatchedRequest]", running[taken.num_requests :])
        if self.lora_config is not None and anyone_waits:
            self.active_loras = self._adapters_of_running(taken, rest)
        self.num_left = len(rest)
        self._take_out(taken)
        try:
            output = super().schedule(throttle_prefills)
        except BaseException:
            self.decodes.give_back(taken)
            raise
        finally:
            self._put_back(running, taken)
            self.active_loras = None
        if self.lora_config is not None:  # as Scheduler.schedule asserts of the running requests
            others = output.scheduled_cached_reqs
            ids = set(others.req_ids) - others.resumed_req_ids
            loras = loras_of([cast("BatchedRequest", self.requests[each]) for each in ids])
            assert len(taken.loras() | loras) <= self.lora_config.max_loras
        if taken.others is None:
            self._join(taken, output)
        taken.tell_of_grammars(output)
        if not self.use_v2_model_runner:
            self.prev_step_scheduled_req_ids.update(output.num_scheduled_tokens)
        return output

    def _adapters_of_running(self, taken: DecodeBatch, rest: list[BatchedRequest]) -> set[int]:
        """Return the adapters of running requests, which leave fewer to those that wait."""
        if self.rules.counts_idle_adapters:
            return loras_of(cast("list[BatchedRequest]", self.running))
        left = [request for request in rest if not self.decodes.waits(request)]
        return taken.loras() | loras_of(left)

    def _no_victims_can_be_needed(self) -> bool:
        """Return whether no running request can be preempted in this step.

        By priority, a victim may be a request that was scheduled before in the same step, which
        upstream takes back. In order of arrival, victims are the last requests, never those that we
        have taken.
        """
        return self.policy is not SchedulingPolicy.PRIORITY or self._blocks_suffice()

    def _blocks_suffice(self) -> bool:
        """Return whether there are blocks for all that any request may get in this step."""
        managers = self.kv_cache_manager.coordinator.single_type_managers
        tokens = 1 + self.num_spec_tokens + self.num_lookahead_tokens
        most = sum(
            len(self.running) * (2 + tokens // manager.block_size)
            + self.max_num_scheduled_tokens // manager.block_size
            for manager in managers
        )
        return self.kv_cache_manager.block_pool.get_num_free_blocks() >= most

    def _end_of_prefix(self, anyone_waits: bool, throttle_prefills: bool) -> int:
        """Return how many of the running requests may be taken.

        Upstream asks whether any decode was scheduled: when it throttles prefills, and when it
        admits other requests, for the watermark and to pad their first step like that of a request
        with drafts. So the last decode is left to it.
        """
        if throttle_prefills or (anyone_waits and self._admission_asks_for_decodes):
            return self.decodes.last_to_schedule(self.running)
        return len(self.running)

    @property
    def _admission_asks_for_decodes(self) -> bool:
        """Whether upstream admits requests otherwise if it has scheduled a decode."""
        return self.num_spec_tokens > 0 or self.kv_cache_manager.watermark_blocks > 0

    def _admission_may_differ(self, throttle_prefills: bool) -> bool:
        """Return whether it may depend on a request left out of this step who else is admitted.

        A prompt may be left out, and its adapter with it. Where blocks come back late, so may any
        request, since upstream then waits for them and preempts nobody.
        """
        adapters = self.lora_config is not None
        if adapters and (throttle_prefills or self._prompts_may_be_left()):
            return True
        late = self.connector is not None or self.defer_block_free
        asks = adapters or self._admission_asks_for_decodes
        return late and asks and not self._blocks_suffice()

    def _prompts_may_be_left(self) -> bool:
        """Return whether a running prompt, and its adapter, may be kept from this step.

        An encoder may do so, a drafter that reads several tokens ahead, and recurrent states that
        are kept at the ends of blocks.
        """
        always = self.num_prefill_lookahead > 1 or self.need_mamba_block_aligned_split
        return any(each.is_prefill_chunk and (always or each.mm_features) for each in self.running)

    def _take_out(self, taken: DecodeBatch) -> None:
        """Let upstream see the rest of ``running``, and what is left of the limits."""
        self.running = self.running[taken.num_requests :]
        self.taken = taken
        vars(self.kv_cache_manager)["new_step_starts"] = lambda: None  # it has, in `schedule`
        self.max_num_scheduled_tokens -= taken.num_tokens
        self.max_num_active_reqs -= taken.num_requests
        self.max_num_running_reqs -= taken.num_requests

    def _put_back(self, running: list[Request], taken: DecodeBatch) -> None:
        """Undo `_take_out`; upstream has added requests at the end, or preempted some there."""
        del running[taken.num_requests :]
        running += self.running
        self.running = running
        self.taken = None
        del vars(self.kv_cache_manager)["new_step_starts"]
        self.max_num_scheduled_tokens += taken.num_tokens
        self.max_num_active_reqs += taken.num_requests
        self.max_num_running_reqs += taken.num_requests

    def _build_kv_connector_meta(
        self, connector: KVConnectorBase_V1, scheduler_output: SchedulerOutput
    ) -> KVConnectorMetadata:
        """Show a connector the whole step, before it is counted in any request."""
        if self.taken is not None:
            self._join(self.taken, scheduler_output)
        return super()._build_kv_connector_meta(connector, scheduler_output)

    def _join(self, taken: DecodeBatch, output: SchedulerOutput) -> None:
        """Make an output of upstream's method, which saw the rest, that of the whole step."""
        taken.join(output)
        self.rules.complete(self, output, taken.req_ids, taken.entered)

    def _update_after_schedule(self, scheduler_output: SchedulerOutput) -> None:
        """Count the step in its requests; upstream does so with those that it scheduled."""
        taken = self.taken
        if taken is None or taken.entered:
            super()._update_after_schedule(scheduler_output)
            return
        whole = scheduler_output.num_scheduled_tokens
        others = whole if taken.others is None else taken.others
        if self.defer_block_free and taken.num_tokens and not others:
            self.sched_step_seq += 1  # Scheduler.schedule, which saw none of the step's tokens
        scheduler_output.num_scheduled_tokens = others
        super()._update_after_schedule(scheduler_output)
        scheduler_output.num_scheduled_tokens = whole
        self.decodes.enter(taken)

    def _mamba_block_aligned_split(self, *args: Any, **kwargs: Any) -> int:
        """Cut a prompt by all tokens that a step may have, those of `taken` included."""
        num_taken = 0 if self.taken is None else self.taken.num_tokens
        self.max_num_scheduled_tokens += num_taken
        split = super()._mamba_block_aligned_split(*args, **kwargs)
        self.max_num_scheduled_tokens -= num_taken
        return split

    def get_request_counts(self) -> tuple[int, int]:
        num_running, num_waiting = super().get_request_counts()
        num_taken = 0 if self.taken is None else self.taken.num_requests
        return num_running + num_taken, num_waiting

    def _handle_blocked_waiting_request(self, request: Request) -> bool:
        """Refuse a waiting request that brings one LoRA adapter too many.

        Upstream counts the adapters of the requests that it scheduled itself.
        """
        ready = super()._handle_blocked_waiting_request(request)
        if not ready or self.active_loras is None or request.lora_request is None:
            return ready
        assert self.lora_config is not None
        admitted = cast("list[BatchedRequest]", self.running[self.num_left :])
        active = self.active_loras | loras_of(admitted)
        return (
            len(active) < self.lora_config.max_loras or request.lora_request.lora_int_id in active
        )

    # ------------------------------------------------------------------------ update_from_output

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        result = model_runner_output
        if result.num_nans_in_logits:  # a request's outputs repeat its count from then on
            self.counts_nans = True
        transfers = result.kv_connector_output
        if (
            self.reason
            or self.counts_nans
            or len(scheduler_output.num_scheduled_tokens) < self.fewest
            or not result.sampled_token_ids
            or self.return_sampling_mask
            # Rows of requests whose blocks were not loaded are skipped
            or (transfers is not None and (transfers.invalid_block_ids or transfers.failed_recving))
        ):
            return super().update_from_output(scheduler_output, model_runner_output)
        rows = Rows(self, scheduler_output, model_runner_output)
        step = copy.copy(scheduler_output)
        step.num_scheduled_tokens = cast("Any", rows)
        self.plain_drafts = rows.drafts
        outputs = super().update_from_output(step, model_runner_output)
        self.plain_drafts = Counter()
        return rows.join(outputs)

    def make_stats(
        self, spec_decoding_stats: SpecDecodingStats | None = None, *args: Any, **kwargs: Any
    ) -> SchedulerStats | None:
        if self.log_stats:
            spec_decoding_stats = add_drafts(
                spec_decoding_stats, self.plain_drafts, self.num_spec_tokens
            )
        return super().make_stats(spec_decoding_stats, *args, **kwargs)

    def update_draft_token_ids(self, draft_token_ids: DraftTokenIds) -> None:
        """Give requests the drafts to verify next; upstream's method does those under a grammar."""
        find = self.requests.get
        left: list[tuple[str, list[int]]] = []
        for request_id, drafts in zip(
            draft_token_ids.req_ids, draft_token_ids.draft_token_ids, strict=False
        ):
            request = cast("BatchedRequest", find(request_id))
            if (
                request is None
                or request.traits & GRAMMAR
                or request.is_prefill_chunk
                or request.is_finished()
            ):
                left.append((request_id, drafts))
            else:
                request.spec_token_ids = drafts
        if left:
            ids, tokens = zip(*left)
            super().update_draft_token_ids(DraftTokenIds([*ids], [*tokens]))


class BatchedScheduler(BatchedMixin): ...


class BatchedAsyncScheduler(BatchedMixin, AsyncScheduler):
    asynchronous = True
