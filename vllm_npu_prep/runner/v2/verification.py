"""Verification of drafts by the V2 runner: which samples of a step count."""

from typing import Any, NamedTuple

import numpy as np
import torch
from vllm.config import SpeculativeConfig
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.sample.output import SamplerOutput
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler

from vllm_npu_prep.device.staging import DeviceArrays
from vllm_npu_prep.ops.triton.drafting import (
    eagle_prepare_inputs_padded,
    eagle_prepare_next_token_padded,
)
from vllm_npu_prep.ops.triton.rejection import lengths_of, rows_until_rejected
from vllm_npu_prep.prep.batch import PreparedStep
from vllm_npu_prep.prep.bookkeeping import count_accepted_tokens
from vllm_npu_prep.runner.v2.sampler import NPUSampler, SampledDrafts


class VerifiedBatch(InputBatch):
    """A step with drafts: each request has one row of logits for each draft, and one more.

    What upstream's kernels would expand to these rows is computed when it is read. A greedy step
    without a grammar reads none of it.
    """

    step: PreparedStep
    arrays: DeviceArrays

    def of(self, step: PreparedStep, arrays: DeviceArrays) -> "VerifiedBatch":
        """Set the step and its arrays, from which the rows are computed; return this batch."""
        self.step, self.arrays = step, arrays
        return self

    @property
    def _lengths(self) -> torch.Tensor | int:
        """Return the rows of logits per request: int32 ``[num_reqs]``, or one number if all are
        equal."""
        num_reqs, num_logits = self.num_reqs, self.step.num_logits
        if num_logits == num_reqs * self.step.max_num_sampled_tokens:
            return num_logits // num_reqs
        return lengths_of(self.arrays.cu_num_sampled_tokens[:num_reqs])

    def _expanded(self, values: torch.Tensor) -> torch.Tensor:
        """Return each request's value for each of its rows, ``[num_logits]``."""
        lengths = self._lengths
        if isinstance(lengths, int):
            return values.repeat_interleave(lengths)
        return values.repeat_interleave(lengths, output_size=self.step.num_logits)

    @property
    def expanded_idx_mapping(self) -> torch.Tensor:
        """Return the request row of each row of logits, int64 ``[num_logits]``."""
        return self._expanded(self.idx_mapping)

    @expanded_idx_mapping.setter
    def expanded_idx_mapping(
        self, _: Any
    ) -> None: ...  # upstream's constructor assigns it; it is computed

    @property
    def expanded_local_pos(self) -> torch.Tensor:
        """Return the place of each row among those of its request, int32 ``[num_logits]``."""
        rows = torch.arange(self.step.num_logits, dtype=torch.int32, device=self.idx_mapping.device)
        lengths = self._lengths
        if isinstance(lengths, int):
            return rows % lengths
        starts = self.arrays.cu_num_sampled_tokens[: self.num_reqs] - lengths
        return rows - self._expanded(starts)

    @expanded_local_pos.setter
    def expanded_local_pos(
        self, _: Any
    ) -> None: ...  # upstream's constructor assigns it; it is computed

    @property
    def cu_num_logits(self) -> torch.Tensor:
        """Return the borders between the rows of requests, int32 ``[num_reqs + 1]``."""
        ends = self.arrays.cu_num_sampled_tokens[: self.num_reqs]
        return torch.nn.functional.pad(ends, (1, 0))

    @cu_num_logits.setter
    def cu_num_logits(
        self, _: Any
    ) -> None: ...  # upstream's constructor assigns it; it is computed

    @property
    def cu_num_logits_np(self) -> np.ndarray:
        """Return the same borders on the host."""
        return np.append(np.int32(0), np.cumsum(self.step.num_sampled_tokens, dtype=np.int32))

    @cu_num_logits_np.setter
    def cu_num_logits_np(
        self, _: Any
    ) -> None: ...  # upstream's constructor assigns it; it is computed


class NPURejectionSampler(RejectionSampler):
    """Verifies drafts; a stand-in for upstream's sampler, which launches five Triton kernels.

    A token is drawn from every row of logits, and drafts are accepted as long as they equal the
    tokens drawn. For drafts that were not drawn at random, this is the rule of upstream's
    ``_rejection_kernel`` and ``_resample_kernel`` (Leviathan et al., 2023): a draft is accepted
    with the target's probability of it, and the token in place of a rejected draft follows the
    target's probabilities without that draft. Greedy tokens are the same as upstream's. Random ones
    have the same probabilities, and a request with a seed gets the same tokens with and without
    speculation.

    For drafts that were drawn at random, the sampler applies the kernels' rule to each row
    (`vllm_npu_prep.ops.triton.rejection_v2`): the row's token is the draft if it is accepted, and
    another token if not.

    Of `spec_config` only the number of drafts is read; other methods and watermarks are refused at
    start-up.
    """

    sampler: NPUSampler

    def __init__(
        self,
        sampler: NPUSampler,
        spec_config: SpeculativeConfig,
        device: torch.device,
        *,
        watermark_key: int | None = None,
    ) -> None:
        self.sampler = sampler
        self.num_speculative_steps = spec_config.num_speculative_tokens

    def __call__(
        self,
        logits: torch.Tensor,
        input_batch: InputBatch,
        draft_logits: torch.Tensor | None = None,
        invalid_drafts: torch.Tensor | None = None,
    ) -> SamplerOutput:
        """Sample the tokens of each request.

        Parameters
        ----------
        logits
            ``[num_logits, vocab_size]``.
        draft_logits
            ``[max_num_reqs, num_speculative_tokens, vocab_size]``, by request row; None if drafts
            were not drawn at random.
        invalid_drafts
            bool ``[num_logits]``: rows of drafts that a grammar forbids; None if there are none.

        Returns
        -------
        SamplerOutput
            int64 ``[num_reqs, 1 + most drafts of a request]``, with -1 after a request's last
            token.
        """
        assert isinstance(input_batch, VerifiedBatch)
        step, arrays = input_batch.step, input_batch.arrays
        num_reqs, num_drafts = step.num_reqs, step.num_drafts
        targets = arrays.target_logits_indices[:num_drafts]
        draft_token_ids = arrays.draft_token_ids[:num_drafts]
        is_forbidden = None if invalid_drafts is None else invalid_drafts[targets + 1]
        drawn_drafts = None
        if draft_logits is not None:
            if is_forbidden is not None:
                draft_token_ids = draft_token_ids.masked_fill(is_forbidden, -1)
            drawn_drafts = SampledDrafts(draft_token_ids, targets.long(), draft_logits)
        output = self.sampler(logits, input_batch, drawn_drafts)
        drawn = output.sampled_token_ids[:, 0]
        tokens = drawn[targets]
        is_rejected = draft_token_ids != tokens
        if is_forbidden is not None:
            is_rejected.logical_or_(is_forbidden)
        output.sampled_token_ids = rows_until_rejected(
            tokens,
            is_rejected,
            drawn[arrays.bonus_logits_indices[:num_reqs]],
            arrays.cu_num_draft_tokens[:num_reqs],
            step.max_num_sampled_tokens,
        )
        return output


class AcceptedCounts(NamedTuple):
    """Which of a step's tokens verification has accepted; all arrays are on the device.

    Attributes
    ----------
    next_token_ids
        int32 ``[num_reqs]``: the last token that counts; where nothing was sampled, the prompt's
        next token.
    num_valid_tokens
        int32 ``[num_reqs]``: the number of sampled tokens that count, 0 for a discarded sample.
    num_rejected_tokens
        int32 ``[num_reqs]``: the number of the step's drafts that were rejected.
    last_token_indices
        int32 ``[num_reqs]``: each request's last token of the step that was not rejected.
    """

    next_token_ids: torch.Tensor
    num_valid_tokens: torch.Tensor
    num_rejected_tokens: torch.Tensor
    last_token_indices: torch.Tensor


def count_accepted(
    sampled_token_ids: torch.Tensor, step: PreparedStep, arrays: DeviceArrays, vocab_size: int
) -> AcceptedCounts:
    """Count a step's accepted tokens, on NPUs with the kernels of V1's drafters.

    Upstream's V2 runner does this in ``_get_num_sampled_and_rejected_kernel``,
    ``_post_update_kernel`` and ``_prepare_prefill_inputs_kernel``. `sampled_token_ids` are int64
    ``[num_reqs, width]`` with -1 after a request's last token.
    """
    if sampled_token_ids.is_cpu:
        return _counted_on_host(sampled_token_ids, step)
    return counted_on_device(sampled_token_ids, step, arrays, vocab_size)


def counted_on_device(
    sampled_token_ids: torch.Tensor, step: PreparedStep, arrays: DeviceArrays, vocab_size: int
) -> AcceptedCounts:
    """Do what `count_accepted` does, with operators of torch."""
    num_reqs, width = sampled_token_ids.shape
    if step.num_logits == num_reqs * width and not np.count_nonzero(step.discard_request_mask):
        return _all_verified(sampled_token_ids, arrays)
    numbers = torch.empty(4, num_reqs, dtype=torch.int32, device=sampled_token_ids.device)
    next_token_ids, num_valid, num_rejected, last_tokens = numbers.unbind()
    eagle_prepare_next_token_padded(
        sampled_token_ids.to(torch.int32),
        arrays.discard_request_mask,
        arrays.backup_next_token_ids,
        next_token_ids,
        num_valid,
        vocab_size,
        width,
        num_reqs,
        sampled_token_ids.stride(0),
        BLOCK_SIZE_TOKENS=width,
    )
    eagle_prepare_inputs_padded(
        arrays.cu_num_draft_tokens[:num_reqs],
        num_valid,
        arrays.query_start_loc[: num_reqs + 1],
        last_tokens,
        num_rejected,
        num_reqs,
    )
    return AcceptedCounts(next_token_ids, num_valid, num_rejected, last_tokens)


def _all_verified(sampled_token_ids: torch.Tensor, arrays: DeviceArrays) -> AcceptedCounts:
    """Count accepted tokens where requests have equally many drafts, and all samples count.

    Most steps are like that, and this takes half as many launches.
    """
    num_reqs, width = sampled_token_ids.shape
    num_valid = (sampled_token_ids >= 0).sum(1, dtype=torch.int32)
    last = num_valid.long().sub_(1)[:, None]
    next_token_ids = sampled_token_ids.gather(1, last).view(-1).to(torch.int32)
    num_rejected = width - num_valid
    last_token_indices = arrays.query_start_loc[1 : num_reqs + 1].sub(num_rejected).sub_(1)
    return AcceptedCounts(next_token_ids, num_valid, num_rejected, last_token_indices)


def _counted_on_host(sampled_token_ids: torch.Tensor, step: PreparedStep) -> AcceptedCounts:
    """Count accepted tokens in one compiled loop; on the CPU fallback the host has the samples."""
    host = step.arrays
    counted = torch.empty(4, sampled_token_ids.shape[0], dtype=torch.int32)
    count_accepted_tokens(
        sampled_token_ids.numpy(),
        host.discard_request_mask,
        step.batch.num_draft_tokens,
        host.backup_next_token_ids,
        host.query_start_loc,
        counted.numpy(),
    )
    return AcceptedCounts(*counted.unbind())
