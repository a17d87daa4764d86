"""The order of a batch: requests stay in their places, so that their rows on the device do, too."""

from collections.abc import Iterable, Mapping

import numpy as np
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.worker.gpu.model_runner import BatchReqState

from vllm_npu_prep.v2.states import SlotStates


class BatchOrder:
    """Finds a place for each request of a step.

    The device's block tables are in the order of the batch, and a request in another place has its
    whole row sent again. So requests that stay keep their places, new ones fill the places of
    those that left, and what is still empty is filled from the end.
    """

    def __init__(self) -> None:
        self._scheduled: list[str] = []  # in the scheduler's order
        self._req_ids: list[str] = []  # in the batch's

    def of_step(
        self, scheduled: Iterable[str], slot_of: Mapping[str, int]
    ) -> tuple[list[str], np.ndarray]:
        """The requests of a step in the order of the batch, and their slots.

        Parameters
        ----------
        scheduled
            Requests of the step, in any order.
        slot_of
            Slot of each request. A name may come back with another slot.

        Returns
        -------
        req_ids, slots
            List, and int64 ``[num_reqs]``; not changed later.
        """
        names = list(scheduled)
        if names != self._scheduled:
            self._scheduled = names
            self._req_ids = self._placed(names)
        slots = np.fromiter(map(slot_of.__getitem__, self._req_ids), np.intp, len(names))
        return self._req_ids, slots

    def _placed(self, names: list[str]) -> list[str]:
        places = {req_id: place for place, req_id in enumerate(self._req_ids)}
        placed: list[str | None] = [None] * len(names)
        others = []
        for req_id in names:
            place = places.get(req_id, len(names))
            if place < len(names):
                placed[place] = req_id
            else:
                others.append(req_id)
        without = iter(others)
        return [next(without) if req_id is None else req_id for req_id in placed]


def batch_of_step(
    order: BatchOrder, states: SlotStates, scheduler_output: SchedulerOutput
) -> BatchReqState:
    """Numbers of a step's requests, in the order of its batch."""
    num_scheduled = scheduler_output.num_scheduled_tokens
    req_ids, slots = order.of_step(num_scheduled, states.req_id_to_index)
    counts = np.fromiter(map(num_scheduled.__getitem__, req_ids), np.int32, len(req_ids))
    prefill = states.prefill_len.np[slots]
    computed = states.num_computed_prefill_tokens[slots]
    is_prefilling = computed < prefill
    has_prefill = bool(is_prefilling.any())
    num_drafts: np.ndarray | None = None
    if drafts := scheduler_output.scheduled_spec_decode_tokens:
        found = (len(drafts.get(req_id, ())) for req_id in req_ids)
        num_drafts = np.fromiter(found, np.int32, len(req_ids))
    return BatchReqState(
        req_ids=req_ids,
        num_scheduled_tokens=counts,
        num_tokens=scheduler_output.total_num_scheduled_tokens,
        num_draft_tokens_np=num_drafts,
        idx_mapping_np=slots,
        prefill_len_np=prefill,
        num_computed_prefill_tokens_np=computed,
        is_prefilling_np=is_prefilling,
        max_seq_len_np=None,
        has_prefill=has_prefill,
        prefill_runs_as_decode_np=None,
        decode_graph_eligible=not has_prefill,
    )
