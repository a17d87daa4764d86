"""How many tokens of each request's last step count, for recurrent states and speculation.

The state after the first token of a decode is in the request's first block, that after the second
token in the next block, and so on (`vllm_npu_prep.prep.recurrent_states`). Lengths on the host are
exact when a step is prepared, so the number of tokens that counted follows from where that step
began: nothing is read back for it, and no sampler has to tell.

Upstream takes the numbers from the sampler, for the rows of the last step. A request that was left
out of a step is added to the batch again, and upstream then takes its count for 1: it would read
the state before its accepted drafts. Here a request is known by its id, until it is resumed after
preemption, or goes on as a session with the next part of its input. Then it begins like any other
request, with the states that the prefix cache has of it (`compat.scheduler`).
"""

from collections.abc import Container, Sequence
from typing import TYPE_CHECKING

import numpy as np

from vllm_npu_prep.prep.batch import NO_COUNTS
from vllm_npu_prep.prep.tables import BatchTables

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

UNKNOWN = -1
"""What stands in place of a position if the request has computed nothing yet."""


class AcceptedTokens:
    """Finds, for each request, how many tokens of its last step count."""

    def __init__(self, max_num_reqs: int) -> None:
        # [max_num_reqs] int32: position of the token whose state is in a request's first block
        self._starts = np.full(max_num_reqs, UNKNOWN, np.int32)
        self._req_ids: list[str] = []  # of the last step, in its order
        self._left: dict[str, int] = {}  # the same of requests that are not in the batch

    def count(
        self,
        tables: BatchTables,  # the batch's tables, whose numbers of computed tokens are exact
        req_ids: Sequence[str],  # the requests of the batch, in order
        known: Container[str],  # the ids of all requests that have not ended
        num_scheduled_tokens: np.ndarray,  # int32 [num_reqs]
        scheduler_output: "SchedulerOutput",
    ) -> np.ndarray:
        """Count, and remember what this step begins with; this is called once for each step.

        Parameters
        ----------
        scheduler_output
            The step's output. A request that begins with it (because it is new, resumed after
            preemption, or a session's next part) has left no state for drafts.

        Returns
        -------
        numpy.ndarray
            int32 ``[num_reqs]``, at least 1, fresh memory; empty in an engine that needs no counts.
        """
        states = tables.shape.states
        if not states.num_drafts:
            return NO_COUNTS
        num_reqs = len(req_ids)
        if self._req_ids != req_ids:
            self._follow(req_ids, known)
        starts = self._starts[:num_reqs]
        begin = {new.req_id for new in scheduler_output.scheduled_new_reqs}
        begin |= scheduler_output.scheduled_cached_reqs.resumed_req_ids
        if begin:
            starts[[req_id in begin for req_id in req_ids]] = UNKNOWN
        computed = tables.num_computed_tokens[tables.request_rows[:num_reqs]]
        counts = np.where((starts == UNKNOWN) | (computed == 0), np.int32(1), computed - starts)
        longer = np.flatnonzero(num_scheduled_tokens > states.decode_threshold)
        num_decodes = int(longer[0]) if len(longer) else num_reqs
        starts[:num_decodes] = computed[:num_decodes]
        ends = computed[num_decodes:] + num_scheduled_tokens[num_decodes:]
        starts[num_decodes:] = ends - 1
        return counts

    def _follow(self, req_ids: Sequence[str], known: Container[str]) -> None:
        """Bring positions to the rows that their requests have now."""
        before = zip(self._req_ids, self._starts.tolist())
        self._left.update((req_id, start) for req_id, start in before)
        self._starts[: len(req_ids)] = [self._left.pop(req_id, UNKNOWN) for req_id in req_ids]
        self._left = {req_id: start for req_id, start in self._left.items() if req_id in known}
        self._req_ids = list(req_ids)
