"""Updates the requests of the batch before a step, many at once.

Upstream's `_update_states` updates one request at a time, with several numpy scalars each, and
compares sets of all request ids. Here requests that stay in the batch and lost neither tokens nor
blocks are updated together. Upstream's own method handles the others, and is not called at all for
a step that has none.

The result is upstream's, with two exceptions. Nothing writes ``prev_num_draft_tokens``, which only
upstream's `_prepare_inputs` reads; and a `CachedRequestState` is not updated where nothing reads
it.
"""

import copy
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from vllm.config import VllmConfig
from vllm.v1.core.sched.output import CachedRequestData
from vllm.v1.worker.gpu_input_batch import CachedRequestState, InputBatch

from vllm_npu_prep.prep.bookkeeping import write_draft_tokens
from vllm_npu_prep.wording import counted

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

PLACEHOLDER = -1
"""The token id of a sample or draft that is not on the host yet."""

NO_DRAFTS: Sequence[int] = ()


def put_drafts_among_decodes(
    scheduler_output: "SchedulerOutput", batch: InputBatch, decode_threshold: int
) -> None:
    """Move requests that come with drafts to the end of the leading decodes.

    vLLM gives placeholder drafts to a request that is admitted with one token left, so that a full
    graph of decodes fits. Its order of the batch takes a request without computed tokens for a
    prefill all the same; and prefills keep one recurrent state, where drafts want one for each.
    `batch` is in upstream's order and changed in place.
    """
    drafts, counts = (
        scheduler_output.scheduled_spec_decode_tokens,
        scheduler_output.num_scheduled_tokens,
    )
    come = [new.req_id for new in scheduler_output.scheduled_new_reqs]
    come += scheduler_output.scheduled_cached_reqs.resumed_req_ids
    for req_id in come:
        if req_id not in drafts:
            continue
        place, place_of = 0, batch.req_id_to_index
        while counts[batch.req_ids[place]] <= decode_threshold and place < place_of[req_id]:
            place += 1
        for row in range(place_of[req_id], place, -1):  # the others keep their order
            batch.swap_states(row, row - 1)


class UpdatedRequests(NamedTuple):
    """The requests whose `CachedRequestState` `RequestUpdates` has updated."""

    req_ids: list[str]
    states: list[CachedRequestState]
    num_computed_tokens: np.ndarray  # [n] int32, as the scheduler counts them
    # [n] int32: the drafts of the last step. In asynchronous scheduling, the scheduler counts all
    # of them as accepted unless it has waited for that step; in synchronous scheduling: None
    num_assumed_tokens: np.ndarray | None


class RequestUpdates:
    """Updates plain requests of upstream's input batch together.

    Parameters
    ----------
    num_spec_tokens
        The drafts that a request can have; 0 in an engine without speculation.
    asynchronous
        True if a step is scheduled before the host knows the last one's samples (asynchronous
        scheduling).
    request_states_are_read
        True if something reads ``num_computed_tokens`` of a `CachedRequestState` in every step, so
        that updating the batch's tables is not enough (`request_states_are_read`).
    tokens_are_sent
        True if the scheduler sends sampled tokens, which upstream appends: then all requests are
        left to upstream.
    """

    def __init__(
        self,
        max_num_reqs: int,
        max_model_len: int,
        *,
        num_spec_tokens: int = 0,
        asynchronous: bool = False,
        request_states_are_read: bool = False,
        tokens_are_sent: bool = False,
    ) -> None:
        self.max_model_len, self.num_spec_tokens = max_model_len, num_spec_tokens
        self.assumes_drafts = asynchronous and num_spec_tokens > 0
        self.request_states_are_read = request_states_are_read or num_spec_tokens > 0
        self.tokens_are_sent = tokens_are_sent
        self._all_rows = np.arange(max_num_reqs)
        self._placeholders = [PLACEHOLDER] * max(1, num_spec_tokens)

    def update_plain_requests(
        self,
        scheduler_output: "SchedulerOutput",  # what the scheduler decided; it is not changed
        batch: InputBatch,
        requests: Mapping[str, CachedRequestState],
        # The requests that want log-probabilities of their prompt, which read `CachedRequestState`
        num_prompt_logprobs: Mapping[str, int],
    ) -> tuple["SchedulerOutput | None", UpdatedRequests | None]:
        """Update the requests that stay in the batch and lost no tokens or blocks.

        This changes their own rows only, so upstream may add and remove requests afterwards.

        Parameters
        ----------
        batch, requests
            Upstream's objects, which are updated.

        Returns
        -------
        rest
            The output for upstream, without the requests that are done. It is None if nothing is
            left to do: no request joined, left, was preempted or lost tokens.
        updated
            The requests whose states were updated as well; None if nothing reads states.

        Raises
        ------
        AssertionError
            If a request has no room for its drafts.
        """
        if self.tokens_are_sent:
            return scheduler_output, None
        cached = scheduler_output.scheduled_cached_reqs
        req_ids, rows = cached.req_ids, self._rows_of(cached.req_ids, batch)
        if resumed := cached.resumed_req_ids:
            rows = np.where([r in resumed for r in req_ids], -1, rows)
        outputs = np.array(cached.num_output_tokens, np.int32)
        stays = rows >= 0
        if not self.assumes_drafts:  # else the scheduler takes back drafts that it assumed
            has_outputs = batch.num_tokens_no_spec[rows] - batch.num_prompt_tokens[rows]
            stays &= has_outputs <= outputs
        computed = np.array(cached.num_computed_tokens, np.int32)
        rest, blocks = None, cached.new_block_ids
        if not stays.all():
            rest = _only(scheduler_output, np.flatnonzero(~stays).tolist())
            plain: list[int] = np.flatnonzero(stays).tolist()
            req_ids, blocks = [req_ids[i] for i in plain], [blocks[i] for i in plain]
            rows, outputs, computed = rows[stays], outputs[stays], computed[stays]
        elif not _is_quiet(scheduler_output, batch):
            rest = _only(scheduler_output, [])
        batch.num_computed_tokens_cpu[rows] = computed
        if blocks.count(None) != len(blocks):
            _append_blocks(req_ids, rows, blocks, batch, requests)
        if not (self.request_states_are_read or num_prompt_logprobs):
            return rest, None
        states = [requests[req_id] for req_id in req_ids]
        assumed = None
        if self.assumes_drafts:
            assumed = self._assume_drafts(states, rows, outputs, batch)
        if self.num_spec_tokens:
            scheduled = scheduler_output.scheduled_spec_decode_tokens
            self._follow(states, req_ids, rows, computed, batch, scheduled)
        else:
            for state, num_computed_tokens in zip(states, computed.tolist()):
                state.num_computed_tokens = num_computed_tokens
        return rest, UpdatedRequests(req_ids, states, computed, assumed)

    def _rows_of(self, req_ids: list[str], batch: InputBatch) -> np.ndarray:
        """Return the row of each request, int64; -1 for requests that are not in the batch."""
        if req_ids == batch.req_ids:
            return self._all_rows[: len(req_ids)]
        rows_by_id = batch.req_id_to_index
        return np.array([rows_by_id.get(req_id, -1) for req_id in req_ids], np.int64)

    def _assume_drafts(
        self,
        states: list[CachedRequestState],
        rows: np.ndarray,
        num_output_tokens: np.ndarray,
        batch: InputBatch,
    ) -> np.ndarray:
        """Make outputs as long as the scheduler counts them, which takes drafts for accepted.

        It returns the number of each request's drafts in the last step, int32.
        """
        outputs = [state.output_token_ids for state in states]
        count = len(states)
        assumed = np.fromiter((state.prev_num_draft_len for state in states), np.int32, count)
        known = np.fromiter(map(len, outputs), np.int32, count)
        changes = np.minimum(assumed, num_output_tokens - known)
        for output_token_ids, change in zip(outputs, changes.tolist()):
            if change > 0:
                output_token_ids.extend(self._placeholders[:change])
            elif change < 0:
                del output_token_ids[change:]
        shortened = known + assumed > num_output_tokens
        cut = rows[shortened]
        batch.num_tokens_no_spec[cut] = batch.num_prompt_tokens[cut] + num_output_tokens[shortened]
        return assumed

    def _follow(
        self,
        states: list[CachedRequestState],
        req_ids: list[str],
        rows: np.ndarray,
        num_computed_tokens: np.ndarray,
        batch: InputBatch,
        scheduled: Mapping[str, list[int]],
    ) -> None:
        """Enter numbers and drafts in each request's state, and the drafts after its tokens.

        This is one loop, so that a state is in the processor's cache once.
        """
        drafts: Sequence[Sequence[int]]
        if list(scheduled) == req_ids:
            drafts = list(scheduled.values())
        else:
            drafts = [scheduled.get(req_id, NO_DRAFTS) for req_id in req_ids]
        kept = batch.spec_token_ids
        if req_ids != batch.req_ids:
            kept = [kept[row] for row in rows.tolist()]
        for state, num_computed, draft_token_ids, spec_token_ids in zip(
            states, num_computed_tokens.tolist(), drafts, kept
        ):
            state.num_computed_tokens = num_computed
            state.prev_num_draft_len = len(draft_token_ids)
            spec_token_ids[:] = draft_token_ids
        counts = np.fromiter(map(len, drafts), np.int32, len(drafts))
        total = int(counts.sum())
        if not total:
            return
        full = write_draft_tokens(
            rows,
            counts,
            np.fromiter(chain.from_iterable(drafts), np.int32, total),
            batch.num_tokens_no_spec,
            batch.token_ids_cpu,
            batch.is_token_ids,
        )
        assert full < 0, (
            f"request {req_ids[full]} got {counted(int(counts[full]), 'draft')} past max_model_len="
            f"{self.max_model_len}"
        )

    def correct_counts(
        self,
        updated: UpdatedRequests,
        batch: InputBatch,  # upstream's batch, which is updated
        previous_rows: np.ndarray,
        last_ends: np.ndarray,  # int32, the length of each row of the last step without its drafts
        num_valid_tokens: np.ndarray,
    ) -> None:
        """Take back drafts that were assumed to be accepted and were not.

        A scheduler that has waited for the last step, for example in a pause, has taken them back
        itself.

        Parameters
        ----------
        updated
            The updated requests of this step. Rows may have moved since.
        previous_rows
            int64 ``[max_num_reqs]``: the row of each request in the last samples, -1 without one.
        num_valid_tokens
            int32, the number of tokens that each row of the last samples kept.
        """
        assumed = updated.num_assumed_tokens
        if assumed is None or not assumed.any():
            return
        rows = self._rows_of(updated.req_ids, batch)
        previous = previous_rows[rows]
        verified = np.flatnonzero((assumed > 0) & (previous >= 0))
        last = previous[verified]
        computed = np.minimum(
            updated.num_computed_tokens[verified], last_ends[last] - 1 + num_valid_tokens[last]
        )
        batch.num_computed_tokens_cpu[rows[verified]] = computed
        for index, num_computed_tokens in zip(verified.tolist(), computed.tolist()):
            updated.states[index].num_computed_tokens = num_computed_tokens


def _append_blocks(
    req_ids: list[str],
    rows: np.ndarray,
    new_block_ids: list[tuple[list[int], ...] | None],
    batch: InputBatch,
    requests: Mapping[str, CachedRequestState],
) -> None:
    for req_id, row, of_groups in zip(req_ids, rows.tolist(), new_block_ids):
        if of_groups is not None:
            for block_ids, new_ids in zip(requests[req_id].block_ids, of_groups):
                block_ids.extend(new_ids)
            batch.block_table.append_row(of_groups, row)


def _only(scheduler_output: "SchedulerOutput", others: list[int]) -> "SchedulerOutput":
    """Return the output with some of its cached requests, given by index."""
    cached = scheduler_output.scheduled_cached_reqs

    def of_others(values: list[Any]) -> list[Any]:
        return [values[index] for index in others]

    scheduler_output = copy.copy(scheduler_output)
    scheduler_output.scheduled_cached_reqs = CachedRequestData(
        req_ids=of_others(cached.req_ids),
        resumed_req_ids=cached.resumed_req_ids,
        new_token_ids=[],
        all_token_ids=cached.all_token_ids,
        new_block_ids=of_others(cached.new_block_ids),
        num_computed_tokens=of_others(cached.num_computed_tokens),
        num_output_tokens=of_others(cached.num_output_tokens),
    )
    return scheduler_output


def _is_quiet(scheduler_output: "SchedulerOutput", batch: InputBatch) -> bool:
    """Return whether a step whose cached requests all stay has nothing else to update.

    Then its requests are those of the batch: upstream would look for others and find none.
    """
    return (
        len(scheduler_output.num_scheduled_tokens) == batch.num_reqs
        and len(scheduler_output.scheduled_cached_reqs.req_ids) == batch.num_reqs
        and not scheduler_output.scheduled_new_reqs
        and not scheduler_output.finished_req_ids
        and not scheduler_output.free_encoder_mm_hashes
        and not scheduler_output.new_block_ids_to_zero
        and not scheduler_output.kv_cache_block_copies
    )


def request_states_are_read(vllm_config: VllmConfig) -> bool:
    """Return whether `CachedRequestState` is read in every step.

    Drafters read it, and so do models with recurrent states.
    """
    return vllm_config.speculative_config is not None or vllm_config.model_config.is_hybrid
