"""What checks of a step read of the batch, under the names that V1's input batch has."""

from typing import TYPE_CHECKING

import numpy as np
import torch
from vllm.v1.worker.gpu.model_runner import BatchReqState

from vllm_npu_prep.runner.v2.request_states import AwaitedSamples, NPURequestState

if TYPE_CHECKING:
    from collections.abc import Mapping

NOBODY = ""
"""Stands for a request whose sample was discarded."""


class CheckedBatch:
    """The batch of the step in flight.

    Attributes
    ----------
    requests_and_samples
        The requests of the step, and the samples from which they continue.
    """

    requests_and_samples: tuple[BatchReqState, AwaitedSamples]

    def __init__(self, states: NPURequestState) -> None:
        self._states = states
        self._sampled: list[str] = []  # request of each row of samples, in the full check

    def follow(self, req_ids: list[str], discard: np.ndarray) -> None:
        """Note by name which requests sampled in a step; `Samples` notes it by request row.

        The full check compares the two. `discard`, bool ``[num_reqs]``, marks samples that don't
        count.
        """
        known = self._states.req_id_to_index.keys() - req_ids
        sampled = [NOBODY if thrown else name for name, thrown in zip(req_ids, discard)]
        self._sampled = [name for name in self._sampled if name in known] + sampled

    def forget(self, req_ids: set[str]) -> None:
        """Forget the samples of requests that arrive: a session comes back under the same name."""
        self._sampled = [NOBODY if name in req_ids else name for name in self._sampled]

    @property
    def req_ids(self) -> list[str]:
        return self.requests_and_samples[0].req_ids

    @property
    def prev_sampled_token_ids(self) -> torch.Tensor:
        """Return the samples from which requests continue, ``[num_rows, 1]``."""
        return self.requests_and_samples[1].by_row[:, :1]

    @property
    def prev_req_id_to_index(self) -> "Mapping[str, int]":
        """Return the row in `prev_sampled_token_ids` of each request past its prompt."""
        states, batch = self._states, set(self.req_ids)
        found = {req_id: row for row, req_id in enumerate(self._sampled) if req_id in batch}
        request_rows = {req_id: states.req_id_to_index[req_id] for req_id in found}
        return {
            req_id: found[req_id]
            for req_id, request_row in request_rows.items()
            if states.num_computed_tokens_np[request_row] >= states.prefill_len.np[request_row]
        }
