"""Prompts given as embeddings, by slot."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from vllm.v1.core.sched.output import NewRequestData

from vllm_npu_prep.prep.batch import PreparedStep
from vllm_npu_prep.prep.embeds import reads_prompt
from vllm_npu_prep.runner.prompt_embeds import PromptEmbeds


class SlotPromptEmbeds:
    """The vectors of prompts; stands in for upstream's ``PromptEmbedsState``.

    Upstream keeps them on the device, and a kernel of Triton finds them by pointers in each step.
    Here they stay on the host, as on V1: a step that reads some of them copies these rows and
    their indices, and any other step copies nothing.

    Parameters
    ----------
    max_num_reqs, hidden_size, dtype, device
        As upstream's; vectors are given to the model in `dtype`.
    """

    def __init__(
        self, max_num_reqs: int, hidden_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._dtype = dtype
        self._prompts: dict[int, torch.Tensor] = {}  # [num_prompt_tokens, hidden_size] by slot
        self._slots: dict[str, int] = {}
        self._of_step: PromptEmbeds | None = None

    def add_request(self, req_index: int, new_req_data: NewRequestData) -> None:
        """Keep the vectors of a request that is new, or resumed after preemption."""
        if new_req_data.prompt_embeds is not None:
            self._prompts[req_index] = new_req_data.prompt_embeds
            self._slots[new_req_data.req_id] = req_index

    def remove_request(self, req_id: str) -> None:
        """Forget a request."""
        slot = self._slots.pop(req_id, None)
        if slot is not None:
            del self._prompts[slot]

    def apply_staged_writes(self) -> None:
        """Does nothing: the device has no state of requests."""

    def follow(
        self, step: PreparedStep, slots: np.ndarray, is_token_ids: np.ndarray | None
    ) -> None:
        """Collect the vectors that a step reads; their tokens get a valid id.

        Parameters
        ----------
        step
            The step, before it is copied.
        slots
            int ``[num_reqs]``: slot of each request of the batch.
        is_token_ids
            See `vllm_npu_prep.v2.states.SlotStates`.
        """
        self._of_step = None
        rows = [row for row, slot in enumerate(slots.tolist()) if slot in self._prompts]
        if not rows or is_token_ids is None:
            return
        if reads_prompt(step.batch.tables, slots[rows].tolist()):
            prompts = {row: self._prompts[int(slots[row])] for row in rows}
            self._of_step = PromptEmbeds.of_step(step, is_token_ids, prompts, self._dtype)

    def apply(
        self, input_batch: Any, num_computed_tokens: torch.Tensor, inputs_embeds: torch.Tensor
    ) -> None:
        """Put the vectors of the step that `follow` has seen in their places.

        Parameters
        ----------
        input_batch, num_computed_tokens
            Not read.
        inputs_embeds
            ``[num_tokens or more, hidden_size]`` on the device, changed.
        """
        if self._of_step is not None:
            self._of_step.enter(inputs_embeds)


def ids_of(arrived: Sequence[NewRequestData]) -> dict[str, Sequence[bool]]:
    """Which places of a prompt have an id, of each request that comes with embeddings."""
    return {
        new.req_id: new.prompt_is_token_ids or [False] * len(new.prompt_embeds)
        for new in arrived
        if new.prompt_embeds is not None
    }
