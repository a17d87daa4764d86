"""What checks of a step read of the batch, by the names that V1's input batch has."""

from typing import TYPE_CHECKING

import torch
from vllm.v1.worker.gpu.model_runner import BatchReqState

from vllm_npu_prep.v2.states import Found, SlotStates

if TYPE_CHECKING:
    from collections.abc import Mapping


class WatchedBatch:
    """The batch of the step in flight.

    Parameters
    ----------
    states
        The requests.

    Attributes
    ----------
    now
        The batch and the samples that it continues from.
    """

    now: tuple[BatchReqState, Found]

    def __init__(self, states: SlotStates) -> None:
        self._states = states

    @property
    def req_ids(self) -> list[str]:
        """Requests in the order of the batch."""
        return self.now[0].req_ids

    @property
    def prev_sampled_token_ids(self) -> torch.Tensor:
        """The samples that requests continue from, ``[num_rows, 1]``."""
        return self.now[1].by_row[:, :1]

    @property
    def prev_req_id_to_index(self) -> "Mapping[str, int]":
        """Row of each request past its prompt in `prev_sampled_token_ids`."""
        batch, samples = self.now
        states, found = self._states, {}
        takes_slots = samples.is_by_slot
        for req_id in batch.req_ids:
            slot = states.req_id_to_index[req_id]
            if states.num_computed_tokens_np[slot] >= states.prefill_len.np[slot]:
                found[req_id] = slot if takes_slots else int(states.samples.rows[slot])
        return found
