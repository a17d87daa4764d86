"""The order of a batch: requests keep their places, so that their rows on the device stay valid."""

from collections.abc import Mapping

import numpy as np
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.worker.gpu.model_runner import BatchReqState

from vllm_npu_prep.runner.v2.block_tables import NPUBlockTables
from vllm_npu_prep.runner.v2.request_states import NPURequestState


class BatchOrder:
    """Finds a place in the batch for each request of a step.

    The device's block tables are in the order of the batch, so the whole row of a request that
    moves is sent again. Requests that stay therefore keep their places, new ones take the places of
    those that left, and places that are still empty are filled from the end. With latent attention
    or recurrent states, decodes come first, and requests keep their places within each of the two
    parts.

    Parameters
    ----------
    in_tables
        int32 ``[max_num_reqs]``: ``BatchTables.request_rows``, which gets what changes in
        `request_rows`. That is little in most steps.
    decode_threshold
        The largest number of tokens of a decode, where decodes come first
        (`prep.latent_split.LatentSplit`); 0 if the order is free.

    Attributes
    ----------
    places
        The place of each request in the last batch. A step that changes the batch makes another
        dict, because outputs keep this one.
    filled
        The places that another request got in this step.
    request_rows
        intp ``[num_reqs]``: the request row of each request of the last batch; another array after
        any change.
    decodes
        The last batch, if each of its requests generates and has as many tokens as the others;
        else None.
    """

    def __init__(self, in_tables: np.ndarray, decode_threshold: int = 0) -> None:
        self._in_tables, self._decode_threshold = in_tables, decode_threshold
        self._scheduled: list[str] = []  # in the scheduler's order
        self._num_decodes = 0  # decodes that come first
        self._req_ids: list[str] = []  # in the order of the batch
        self.places: dict[str, int] = {}
        self.filled: list[int] = []
        self.request_rows = np.empty(0, np.intp)
        self.decodes: BatchReqState | None = None

    def of_step(self, scheduled: Mapping[str, int]) -> list[str]:
        """Return the requests of a step in the order of the batch; the list is never changed later.

        `scheduled` has the number of tokens of each request, in the scheduler's order.
        """
        names, num_decodes, self.filled = list(scheduled), 0, []
        if self._decode_threshold:
            names.sort(key=lambda req_id: scheduled[req_id] > self._decode_threshold)
            num_decodes = sum(each <= self._decode_threshold for each in scheduled.values())
        if (names, num_decodes) != (self._scheduled, self._num_decodes):
            self._scheduled, self._num_decodes = names, num_decodes
            if self._decode_threshold or len(names) < len(self._req_ids):
                self._req_ids, before = self._placed(names, num_decodes), self.places
                self.places = {req_id: place for place, req_id in enumerate(self._req_ids)}
                self.filled = [p for req_id, p in self.places.items() if before.get(req_id) != p]
            else:
                self._replace(names)
        return self._req_ids

    def _replace(self, names: list[str]) -> None:
        """Put new requests where others left, then at the end, so that no other request moves."""
        places, req_ids = self.places.copy(), self._req_ids.copy()
        free = sorted(places.pop(req_id) for req_id in self.places.keys() - names)
        free.extend(range(len(req_ids), len(names)))
        req_ids.extend(names[len(req_ids) :])  # any names: the loop overwrites them
        new = [req_id for req_id in names if req_id not in places]
        for place, req_id in zip(free, new, strict=True):
            places[req_id], req_ids[place] = place, req_id
        self.places, self._req_ids, self.filled = places, req_ids, free

    def enter_rows(self, states: NPURequestState, arrived: list[str]) -> list[int]:
        """Look up the request rows that this step changes; return the places of these requests.

        `arrived` are the step's new requests. One of them may have been in the last batch, at the
        same place, but with another request row.
        """
        changed = list({*self.filled, *map(self.places.__getitem__, arrived)})
        num_reqs, before = len(self._req_ids), self.request_rows
        if changed or num_reqs != len(before):
            rows = self.request_rows = np.empty(num_reqs, np.intp)
            rows[: len(before)] = before[:num_reqs]
            for place in changed:  # few, as a rule: numpy's way takes longer
                row = states.req_id_to_index[self._req_ids[place]]
                rows[place] = self._in_tables[place] = row
        return changed

    def _placed(self, names: list[str], num_decodes: int) -> list[str]:
        places = self.places
        placed: list[str | None] = [None] * len(names)
        others = []  # in the order of the parts
        for index, req_id in enumerate(names):
            place = places.get(req_id, len(names))
            if place < len(names) and (place < num_decodes) == (index < num_decodes):
                placed[place] = req_id
            else:
                others.append(req_id)
        without = iter(others)
        return [next(without) if req_id is None else req_id for req_id in placed]


def batch_of_step(
    order: BatchOrder,
    states: NPURequestState,
    block_tables: NPUBlockTables,
    scheduler_output: SchedulerOutput,
) -> BatchReqState:
    """Return what upstream's code reads of a step's requests, in the order of the batch.

    Rows of the block tables are sent whole where the batch has changed. A step that decodes what
    the last one decoded gets the same object.
    """
    req_ids = order.of_step(scheduler_output.num_scheduled_tokens)
    last, num_tokens = order.decodes, scheduler_output.total_num_scheduled_tokens
    arrived = scheduler_output.scheduled_new_reqs
    if (
        last is not None
        and req_ids is last.req_ids
        and num_tokens == last.num_tokens
        and not arrived
        and not states.some_prefill
    ):
        return last
    block_tables.send_whole(order.enter_rows(states, [new.req_id for new in arrived]))
    request_rows = order.request_rows
    prefill = states.prefill_len.np[request_rows]
    computed = states.num_computed_prefill_tokens[request_rows]
    is_prefilling = computed < prefill
    has_prefill = bool(np.count_nonzero(is_prefilling))  # `any` calls Python
    counts, num_drafts = _counts(scheduler_output, req_ids, states, has_prefill)
    batch = BatchReqState(
        req_ids=req_ids,
        num_scheduled_tokens=counts,
        num_tokens=num_tokens,
        num_draft_tokens_np=num_drafts,
        idx_mapping_np=request_rows,
        prefill_len_np=prefill,
        num_computed_prefill_tokens_np=computed,
        is_prefilling_np=is_prefilling,
        max_seq_len_np=None,
        has_prefill=has_prefill,
        prefill_runs_as_decode_np=None,
        decode_graph_eligible=not has_prefill,
    )
    fewest = len(req_ids)
    are_equal = num_tokens in (fewest, fewest * (1 + states.num_speculative_steps))
    order.decodes = batch if are_equal and not has_prefill else None
    return batch


def _counts(
    scheduler_output: SchedulerOutput,
    req_ids: list[str],
    states: NPURequestState,
    has_prefill: bool,
) -> tuple[np.ndarray, np.ndarray | None]:
    """Return the tokens and the drafts of each request, int32 ``[num_reqs]``; None: no drafts.

    If all requests have as many as a decode can have, they are not looked up one by one.
    """
    num_scheduled = scheduler_output.num_scheduled_tokens
    drafts = scheduler_output.scheduled_spec_decode_tokens
    num_reqs, num_tokens = len(req_ids), scheduler_output.total_num_scheduled_tokens
    if num_tokens == num_reqs:
        return states.one_token_each[:num_reqs], None
    most = num_reqs * (1 + states.num_speculative_steps)
    if len(drafts) == num_reqs and num_tokens == most and not has_prefill:
        return states.all_drafts_and_one[:num_reqs], states.all_drafts[:num_reqs]
    counts = np.fromiter(map(num_scheduled.__getitem__, req_ids), np.int32, num_reqs)
    if not drafts:
        return counts, None
    found = [len(drafts[req_id]) if req_id in drafts else 0 for req_id in req_ids]
    return counts, np.array(found, np.int32)
