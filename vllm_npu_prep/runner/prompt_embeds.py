"""Prompts that come as embeddings: their vectors are found in a step and given to the model."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.exceptions import VLLMValidationError
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.core.sched.output import NewRequestData

from vllm_npu_prep.prep.batch import PreparedStep
from vllm_npu_prep.prep.embeds import embedded_tokens

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput


def without_unknown_ids(
    new: NewRequestData,  # a request that enters the batch
    no_token: int,  # the size of the vocabulary, which penalties use to pad prompts
) -> NewRequestData:
    """Return the request with an invalid token id wherever its prompt has an embedding.

    Upstream leaves the ids of the row's last request there, which penalties take for the prompt.
    """
    if new.prompt_embeds is None:
        return new
    is_token_ids = new.prompt_is_token_ids or [False] * len(new.prompt_embeds)
    known = new.prompt_token_ids or is_token_ids
    ids = [token if is_id else no_token for token, is_id in zip(known, is_token_ids)]
    return replace(new, prompt_token_ids=ids, prompt_is_token_ids=is_token_ids)


def refuse_non_finite(prompt_embeds: torch.Tensor) -> None:
    """Refuse a prompt with NaN or an infinity, for which every output would be meaningless.

    This is one pass over the values, without a temporary tensor of their size.

    Parameters
    ----------
    prompt_embeds
        ``[num_tokens, hidden_size]`` on the host.

    Raises
    ------
    VLLMValidationError
        Servers answer it with status 400.
    """
    if not prompt_embeds.numel() or all(x.isfinite() for x in torch.aminmax(prompt_embeds)):
        return
    row = int((~prompt_embeds.isfinite()).any(dim=-1).nonzero()[0, 0])
    raise VLLMValidationError(
        f"`prompt_embeds` must be finite in the model's dtype: row {row} has NaN or an infinity",
        parameter="prompt_embeds",
    )


def with_known_ids(scheduler_output: "SchedulerOutput", no_token: int) -> "SchedulerOutput":
    """Return the scheduler's output with `without_unknown_ids` of each request that enters."""
    scheduler_output = copy.copy(scheduler_output)
    scheduler_output.scheduled_new_reqs = [
        without_unknown_ids(new, no_token) for new in scheduler_output.scheduled_new_reqs
    ]
    return scheduler_output


@dataclass(frozen=True)
class PromptEmbeds:
    """The vectors that replace token ids in one step, on the host."""

    token_indices: np.ndarray  # [num_embeds] int64, which of the step's tokens
    rows: torch.Tensor  # [num_embeds, hidden_size]

    @classmethod
    def of_step(
        cls,
        step: PreparedStep,
        is_token_ids: np.ndarray,  # [max_num_reqs, max_model_len] bool
        prompt_embeds: Mapping[int, torch.Tensor],
        dtype: torch.dtype,
    ) -> "PromptEmbeds":
        """Collect the step's vectors, and give their tokens a valid id, since theirs is unknown."""
        token_indices, reqs, positions = embedded_tokens(step, is_token_ids)
        step.input_ids[token_indices] = 0
        rows = [
            prompt_embeds[req][torch.from_numpy(positions[reqs == req])].to(dtype)
            for req in np.unique(reqs).tolist()  # ascending, like tokens of a step
        ]
        return cls(token_indices, torch.cat(rows) if rows else torch.empty(0, dtype=dtype))

    def inputs_embeds(self, model: Any, input_ids: torch.Tensor) -> torch.Tensor:
        """Return the embeddings of all tokens, ``[num_input_tokens, hidden_size]`` on the device.

        ``input_ids`` is int32 ``[num_input_tokens]`` on the device.
        """
        embeds = model.embed_input_ids(input_ids)
        self.enter(embeds)
        return embeds

    def enter(self, embeds: torch.Tensor) -> None:
        """Put the vectors in their places in ``embeds``: ``[num_tokens or more, hidden_size]``.

        It is on the device and changed in place.
        """
        if len(self.token_indices):
            indices = async_tensor_h2d(self.token_indices, device=embeds.device)
            rows = async_tensor_h2d(self.rows, device=embeds.device)
            embeds.index_copy_(0, indices, rows)
