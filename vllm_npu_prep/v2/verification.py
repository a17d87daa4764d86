"""Verification of drafts by the V2 runner: which samples of a step count."""

from typing import Any, NamedTuple

import torch
from vllm.config import SpeculativeConfig
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.sample.output import SamplerOutput
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler

from vllm_npu_prep.device.staging import DeviceArrays
from vllm_npu_prep.ops.drafting import eagle_prepare_inputs_padded, eagle_prepare_next_token_padded
from vllm_npu_prep.ops.rejection import lengths_of, rows_until_rejected
from vllm_npu_prep.prep.batch import PreparedStep
from vllm_npu_prep.v2.sampler import DrawnDrafts, SlotSampler


class VerifiedBatch(InputBatch):
    """A step with drafts: its rows of logits, of which a request has one for each draft and one.

    What upstream's kernels would expand is computed when somebody asks for it: a greedy step
    without a grammar asks for nothing.
    """

    step: PreparedStep
    arrays: DeviceArrays

    def of(self, step: PreparedStep, arrays: DeviceArrays) -> "VerifiedBatch":
        """This batch, with the step and its arrays."""
        self.step, self.arrays = step, arrays
        return self

    @property
    def _lengths(self) -> torch.Tensor | int:
        """Rows of logits of each request: int32 ``[num_reqs]``, or one number for all."""
        num_reqs, num_logits = self.num_reqs, self.step.num_logits
        if num_logits == num_reqs * self.step.max_num_sampled_tokens:
            return num_logits // num_reqs
        return lengths_of(self.arrays.cu_num_sampled_tokens[:num_reqs])

    def _expanded(self, values: torch.Tensor) -> torch.Tensor:
        """Each request's value for each of its rows, ``[num_logits]``."""
        lengths = self._lengths
        if isinstance(lengths, int):
            return values.repeat_interleave(lengths)
        return values.repeat_interleave(lengths, output_size=self.step.num_logits)

    @property
    def expanded_idx_mapping(self) -> torch.Tensor:
        """Slot of each row of logits, int64 ``[num_logits]``."""
        return self._expanded(self.idx_mapping)

    @expanded_idx_mapping.setter
    def expanded_idx_mapping(self, _: Any) -> None:
        """Computed."""

    @property
    def expanded_local_pos(self) -> torch.Tensor:
        """Place of each row among its request's, int32 ``[num_logits]``."""
        rows = torch.arange(self.step.num_logits, dtype=torch.int32, device=self.idx_mapping.device)
        lengths = self._lengths
        if isinstance(lengths, int):
            return rows % lengths
        starts = self.arrays.cu_num_sampled_tokens[: self.num_reqs] - lengths
        return rows - self._expanded(starts)

    @expanded_local_pos.setter
    def expanded_local_pos(self, _: Any) -> None:
        """Computed."""

    @property
    def cu_num_logits(self) -> torch.Tensor:
        """Borders between the rows of requests, int32 ``[num_reqs + 1]``."""
        ends = self.arrays.cu_num_sampled_tokens[: self.num_reqs]
        return torch.nn.functional.pad(ends, (1, 0))

    @cu_num_logits.setter
    def cu_num_logits(self, _: Any) -> None:
        """Computed."""


class SlotRejectionSampler(RejectionSampler):
    """Verifies drafts; stands in for upstream's, which launches five kernels of Triton.

    A token is drawn from every row of logits, and drafts are accepted while they are what was
    drawn. For drafts that were not drawn themselves this is the rule of upstream's
    ``_rejection_kernel`` and ``_resample_kernel`` (Leviathan et al., 2023): a draft is accepted
    with the target's probability of it, and the token in place of a rejected one has the target's
    probabilities without the draft. Greedy tokens are upstream's; random ones have the same
    probabilities, and those of a request with a seed are the same with and without speculation.

    For drafts that were drawn the sampler applies the kernels' rule to each row
    (`vllm_npu_prep.ops.slot_rejection`): its token is the draft if that is accepted, and else
    another one.

    Parameters
    ----------
    sampler
        Draws tokens.
    spec_config, device, watermark_key
        As upstream's; what they ask for beside this is refused.
    """

    sampler: SlotSampler

    def __init__(
        self,
        sampler: SlotSampler,
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
        """Sample each request's tokens.

        Parameters
        ----------
        logits
            ``[num_logits, vocab_size]``.
        input_batch
            A `VerifiedBatch`.
        draft_logits
            ``[max_num_reqs, num_speculative_tokens, vocab_size]``, by slot; None: drafts were not
            drawn.
        invalid_drafts
            bool ``[num_logits]``: rows of drafts that a grammar forbids; None: there are none.

        Returns
        -------
        SamplerOutput
            int64 ``[num_reqs, 1 + most drafts of a request]``, -1 after a request's last token.
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
            drawn_drafts = DrawnDrafts(draft_token_ids, targets.long(), draft_logits)
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


class Accepted(NamedTuple):
    """What verification left of a step's tokens; everything is on the device.

    Attributes
    ----------
    next_token_ids
        int32 ``[num_reqs]``: the last token that counts; where nothing was sampled, the next one of
        the prompt.
    num_valid_tokens
        int32 ``[num_reqs]``: sampled tokens that count, 0 for a discarded sample.
    num_rejected_tokens
        int32 ``[num_reqs]``: drafts of the step that were rejected.
    last_token_indices
        int32 ``[num_reqs]``: each request's last token of the step that wasn't rejected.
    """

    next_token_ids: torch.Tensor
    num_valid_tokens: torch.Tensor
    num_rejected_tokens: torch.Tensor
    last_token_indices: torch.Tensor


def count_accepted(
    sampled_token_ids: torch.Tensor, step: PreparedStep, arrays: DeviceArrays, vocab_size: int
) -> Accepted:
    """Count a step's accepted tokens, by the kernels of V1's drafters.

    Upstream's V2 has them in ``_get_num_sampled_and_rejected_kernel``, ``_post_update_kernel`` and
    ``_prepare_prefill_inputs_kernel``.

    Parameters
    ----------
    sampled_token_ids
        int64 ``[num_reqs, width]``, -1 after a request's last token.
    step, arrays
        The step.
    vocab_size
        Tokens.
    """
    num_reqs, width = sampled_token_ids.shape
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
    return Accepted(next_token_ids, num_valid, num_rejected, last_tokens)
