"""Prompts that are given as embeddings, by request row."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from vllm.v1.core.sched.output import NewRequestData

from vllm_npu_prep.prep.batch import PreparedStep
from vllm_npu_prep.prep.embeds import reads_prompt
from vllm_npu_prep.runner.prompt_embeds import PromptEmbeds


class NPUPromptEmbedsState:
    """The embeddings of prompts; a stand-in for upstream's ``PromptEmbedsState``.

    Upstream keeps them on the device, and a Triton kernel finds them by pointers in each step. Here
    they stay on the host, as in the V1 runner: a step that reads some of them copies these rows and
    their indices, and other steps copy nothing. The model gets them in `dtype`.
    """

    def __init__(
        self, max_num_reqs: int, hidden_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._dtype = dtype
        self._prompts: dict[int, torch.Tensor] = {}  # [num_prompt_tokens, hidden_size] by row
        self._request_rows: dict[str, int] = {}
        self._of_step: PromptEmbeds | None = None

    def add_request(self, req_index: int, new_req_data: NewRequestData) -> None:
        if new_req_data.prompt_embeds is not None:
            self._prompts[req_index] = new_req_data.prompt_embeds
            self._request_rows[new_req_data.req_id] = req_index

    def remove_request(self, req_id: str) -> None:
        request_row = self._request_rows.pop(req_id, None)
        if request_row is not None:
            del self._prompts[request_row]

    def apply_staged_writes(self) -> None:
        """Do nothing: the device has no state of requests."""

    def follow(
        self, step: PreparedStep, request_rows: np.ndarray, is_token_ids: np.ndarray | None
    ) -> None:
        """Collect the embeddings that a step reads, and give their tokens a valid id.

        The step is not copied to the device yet. `request_rows`, int ``[num_reqs]``, are the
        request rows in the order of the batch; `is_token_ids` is the array of
        `vllm_npu_prep.runner.v2.request_states.NPURequestState`.
        """
        self._of_step = None
        rows = [
            row
            for row, request_row in enumerate(request_rows.tolist())
            if request_row in self._prompts
        ]
        if not rows or is_token_ids is None:
            return
        if reads_prompt(step.batch.tables, request_rows[rows].tolist()):
            prompts = {row: self._prompts[int(request_rows[row])] for row in rows}
            self._of_step = PromptEmbeds.of_step(step, is_token_ids, prompts, self._dtype)

    def apply(
        self, input_batch: Any, num_computed_tokens: torch.Tensor, inputs_embeds: torch.Tensor
    ) -> None:
        """Write the embeddings that `follow` collected into the model's input.

        `inputs_embeds` ``[num_tokens or more, hidden_size]`` is on the device and is changed in
        place; the other arguments are not read.
        """
        if self._of_step is not None:
            self._of_step.enter(inputs_embeds)


def ids_of(arrived: Sequence[NewRequestData]) -> dict[str, Sequence[bool]]:
    """Return, for each request with embeddings, which positions of its prompt have a token id."""
    return {
        new.req_id: new.prompt_is_token_ids or [False] * len(new.prompt_embeds)
        for new in arrived
        if new.prompt_embeds is not None
    }
