"""Speculative decoding: counts that are exact on the host when a step is prepared.

Attention kernels of NPUs take lengths from the host. Upstream counts every draft of the last step
as accepted and corrects that on the device only. Here one small copy sends the numbers of accepted
tokens to the host *before* the drafter runs. The host waits for them only when it needs them:
before the second draft pass (`vllm_npu_prep.runner.v1.drafters`), or before the next step.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata
from vllm.v1.worker.gpu_input_batch import InputBatch

from vllm_npu_prep.device import Device
from vllm_npu_prep.device.readback import ReadBack
from vllm_npu_prep.device.staging import DeviceArrays
from vllm_npu_prep.prep.batch import PreparedStep
from vllm_npu_prep.runner.accepted import AcceptedTokens


class LastSamples(NamedTuple):
    """The last step's samples, if they are on the device only (asynchronous scheduling)."""

    # [num_rows * (1 + 2 * num_drafts)] int32 on the device, as `StepLayout` orders their targets
    token_ids: torch.Tensor | None
    num_rows: int  # requests of the last step
    num_drafts: int  # drafts that were made for each request since


NO_SAMPLES = LastSamples(None, 0, 0)


class Speculation:
    """The drafts from one step to the next, and what the sampler verifies in a step.

    Parameters
    ----------
    num_spec_tokens
        The drafts that a request can have; 0 in an engine without speculation.
    asynchronous
        True if the next step is prepared before the host knows drafts and their verification
        (asynchronous scheduling).

    Attributes
    ----------
    num_valid_tokens
        The number of tokens that verification accepted for each request of the last step, on their
        way to the host.
    accepted
        The same for layers with recurrent states, known when the next step is prepared.
    last_ends
        The length of each row of the last step without its drafts, int32.
    """

    def __init__(
        self,
        device: Device,
        max_num_reqs: int,
        *,
        num_spec_tokens: int = 0,
        asynchronous: bool = False,
        pin_memory: bool = False,
    ) -> None:
        self.num_spec_tokens, self.asynchronous = num_spec_tokens, asynchronous
        self.num_valid_tokens = ReadBack(device, max_num_reqs, pin_memory)
        self.accepted = AcceptedTokens(max_num_reqs)
        self.last_ends = np.zeros(0, np.int32)
        self._drafted_samples: torch.Tensor | None = None

    # ----------------------------------------------------------------- before a step

    def set_known_tokens(self, batch: InputBatch, previous_rows: np.ndarray) -> None:
        """Count the tokens of requests whose sample is still on the device.

        Parameters
        ----------
        batch
            Its numbers of computed tokens are exact; this makes ``num_tokens_no_spec`` exact, too.
        previous_rows
            int64 ``[max_num_reqs]``: the row of each request in the last samples, -1 without one.
        """
        rows = np.flatnonzero(previous_rows[: batch.num_reqs] >= 0)
        batch.num_tokens_no_spec[rows] = batch.num_computed_tokens_cpu[rows] + 1

    def num_draft_tokens(
        self, scheduled: Mapping[str, Sequence[int]], req_ids: Sequence[str]
    ) -> np.ndarray:
        """Return how many drafts of each request a step verifies, int32 ``[num_reqs]``."""
        if list(scheduled) == req_ids:
            return np.fromiter(map(len, scheduled.values()), np.int32, len(req_ids))
        counts = [len(scheduled.get(req_id, ())) for req_id in req_ids]
        return np.array(counts, np.int32)

    def last_samples(
        self,
        sampled_token_ids: torch.Tensor | None,
        draft_token_ids: torch.Tensor | list[list[int]] | None,
    ) -> LastSamples:
        """Return the last step's samples, if they are on the device only.

        Parameters
        ----------
        sampled_token_ids
            ``[num_reqs, 1]`` on the device; None if the host has them.
        draft_token_ids
            The drafts made after the last step; ``[num_reqs, num_drafts]`` on the device in
            asynchronous scheduling.
        """
        if sampled_token_ids is None:
            return NO_SAMPLES
        num_rows = sampled_token_ids.shape[0]
        if self.asynchronous and draft_token_ids is not None:
            assert isinstance(draft_token_ids, torch.Tensor)
            return LastSamples(self._drafted_samples, num_rows, draft_token_ids.shape[1])
        return LastSamples(sampled_token_ids[:, 0].to(torch.int32), num_rows, 0)

    # ----------------------------------------------------------------- the step

    def sampling_inputs(
        self, step: PreparedStep, arrays: DeviceArrays
    ) -> tuple[torch.Tensor, SpecDecodeMetadata | None, int]:
        """Return the inputs of the sampler, as upstream's ``_prepare_inputs`` returns them.

        Returns
        -------
        logits_indices, spec_decode_metadata, max_num_sampled_tokens
            The tensors are views of the step's arrays.
        """
        if not self.num_spec_tokens:
            logits_indices, num_logits = arrays.logits_indices, step.num_logits
            if num_logits != step.layout.max_logits:
                logits_indices = logits_indices[:num_logits]
            return logits_indices, None, 1
        num_reqs, num_drafts, layout = step.num_reqs, step.num_drafts, step.layout
        num_draft_tokens = step.batch.num_draft_tokens[:num_reqs]
        self.last_ends = step.arrays.seq_lens[:num_reqs] - num_draft_tokens
        drafts, reqs = (num_drafts, layout.max_drafts), (num_reqs, layout.num_reqs_padded)
        metadata = SpecDecodeMetadata(
            draft_token_ids=_leading(arrays.draft_token_ids, *drafts),
            num_draft_tokens=num_draft_tokens.tolist(),
            cu_num_draft_tokens=_leading(arrays.cu_num_draft_tokens, *reqs),
            cu_num_sampled_tokens=_leading(arrays.cu_num_sampled_tokens, *reqs),
            target_logits_indices=_leading(arrays.target_logits_indices, *drafts),
            bonus_logits_indices=_leading(arrays.bonus_logits_indices, *reqs),
            logits_indices=_leading(arrays.logits_indices, step.num_logits, layout.max_logits),
        )
        return metadata.logits_indices, metadata, metadata.max_spec_len + 1

    # ----------------------------------------------------------------- after its samples

    def count_kept_tokens(self, num_valid_tokens: torch.Tensor) -> None:
        """Start the one copy to the host; a synchronous step with one draft pass needs none.

        ``num_valid_tokens`` is int32 ``[num_reqs]`` on the device.
        """
        if self.asynchronous or self.num_spec_tokens > 1:
            self.num_valid_tokens.start(num_valid_tokens)

    def keep_samples(
        self,
        sampled_token_ids: torch.Tensor,  # int32 [num_reqs, 1]
        draft_token_ids: torch.Tensor,  # [num_reqs, num_drafts]
    ) -> None:
        """Put new samples and drafts in the order in which the next step scatters them."""
        drafts = draft_token_ids.to(torch.int32)
        samples = torch.cat((sampled_token_ids, drafts, drafts), 1)
        self._drafted_samples = samples.flatten()


def _leading(array: torch.Tensor, count: int, size: int) -> torch.Tensor:
    """Return the first elements, or `array` itself if these are all: a view takes 1 microsecond."""
    return array if count == size else array[:count]
