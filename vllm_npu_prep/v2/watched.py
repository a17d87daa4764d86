"""What checks of a step read of the batch, by the names that V1's input batch has."""

from typing import TYPE_CHECKING

import numpy as np
import torch
from vllm.v1.worker.gpu.model_runner import BatchReqState

from vllm_npu_prep.v2.states import Found, SlotStates

if TYPE_CHECKING:
    from collections.abc import Mapping

NOBODY = ""
"""In place of a request whose sample was discarded."""


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
        self._sampled: list[str] = []  # request of each row of samples, in the full check

    def follow(self, req_ids: list[str], discard: np.ndarray) -> None:
        """Take note of who sampled in a step, by name, where `Samples` does by slot.

        Parameters
        ----------
        req_ids
            Of the batch.
        discard
            bool ``[num_reqs]``: requests whose sample doesn't count.
        """
        known = self._states.req_id_to_index.keys() - req_ids
        sampled = [NOBODY if thrown else name for name, thrown in zip(req_ids, discard)]
        self._sampled = [name for name in self._sampled if name in known] + sampled

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
        states, batch = self._states, set(self.req_ids)
        found = {req_id: row for row, req_id in enumerate(self._sampled) if req_id in batch}
        slots = {req_id: states.req_id_to_index[req_id] for req_id in found}
        return {
            req_id: found[req_id]
            for req_id, slot in slots.items()
            if states.num_computed_tokens_np[slot] >= states.prefill_len.np[slot]
        }
