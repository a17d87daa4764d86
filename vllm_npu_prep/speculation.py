"""Speculative decoding: drafters and counts that are exact on the host when a step is prepared.

Attention kernels of NPUs take lengths from the host. Upstream counts every draft of the step before
as accepted and corrects that on the device only. Here the number of tokens that verification kept
travels to the host *before* the drafter runs, in one small copy, and is waited for where it is
needed: in front of the second draft pass, or of the next step. The first draft pass needs none of
it: tokens that were rejected stay in its batch behind those that count, which don't see them.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.config import VllmConfig
from vllm.utils.platform_utils import is_pin_memory_available
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.spec_decode.draft_model import DraftModelProposer
from vllm.v1.spec_decode.eagle import EagleProposer
from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata
from vllm.v1.spec_decode.utils import _eagle_prepare_next_token_padded, next_power_of_2
from vllm.v1.worker.gpu_input_batch import CachedRequestState, InputBatch

from vllm_npu_prep.bookkeeping import BookkeepingRunner
from vllm_npu_prep.device import Device
from vllm_npu_prep.device.readback import ReadBack
from vllm_npu_prep.errors import PrepError
from vllm_npu_prep.prep.drafting import (
    next_draft_seq_lens,
    num_rejected_tokens,
    token_positions,
)
from vllm_npu_prep.startup.asked import DRAFT_MODEL_METHODS

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput


class ExactLengths(SpecDecodeBaseProposer):
    """A drafter whose attention metadata has exact lengths on the host, in every pass.

    ``num_valid_tokens`` is what the host learns of the step that is being verified.
    """

    num_valid_tokens: ReadBack
    runner: "SpeculativeRunner"
    _num_draft_tokens: Sequence[int] | None = None  # of the step; None: rejected ones are taken out
    _seq_lens: np.ndarray  # [num_reqs] int32, of the present pass

    def prepare_next_token_ids_padded(
        self,
        sampled_token_ids: torch.Tensor,
        requests: dict[str, CachedRequestState],
        gpu_input_batch: InputBatch,
        discard_request_mask: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Next token of each request, and how many of its samples count, int32 ``[num_reqs]``.

        Tokens for requests without a sample came with the step. Upstream collects them here and
        copies them from pinned memory that it rewrites in the next step, whatever became of the
        copy; and behind a chunk of a prompt it goes on from the prompt's last token, instead of the
        next.
        """
        del requests, gpu_input_batch
        num_reqs, num_samples = sampled_token_ids.shape
        next_token_ids = torch.empty(num_reqs, dtype=torch.int32, device=sampled_token_ids.device)
        valid_counts = torch.empty_like(next_token_ids)
        _eagle_prepare_next_token_padded(
            sampled_token_ids,
            discard_request_mask,
            self.runner.backup_next_token_ids,
            next_token_ids,
            valid_counts,
            self.runner.input_batch.vocab_size,
            num_samples,
            num_reqs,
            sampled_token_ids.stride(0),
            BLOCK_SIZE_TOKENS=next_power_of_2(num_samples),
        )
        return next_token_ids, valid_counts

    def prepare_inputs_padded(
        self,
        common_attn_metadata: CommonAttentionMetadata,
        spec_decode_metadata: SpecDecodeMetadata,
        valid_sampled_tokens_count: torch.Tensor,
    ) -> tuple[CommonAttentionMetadata, torch.Tensor, torch.Tensor]:
        """Rejected tokens stay in the first pass; how many there are is asked for later."""
        self._num_draft_tokens = spec_decode_metadata.num_draft_tokens
        return super().prepare_inputs_padded(
            common_attn_metadata, spec_decode_metadata, valid_sampled_tokens_count
        )

    def build_per_group_and_layer_attn_metadata(
        self, common_attn_metadata: CommonAttentionMetadata, draft_index: int = 0
    ) -> tuple[list[object], dict[str, object]]:
        """Metadata of one pass; upstream keeps upper bounds of the lengths."""
        common = common_attn_metadata
        assert common.seq_lens_cpu_upper_bound is not None
        if draft_index == 0:
            extra = self.net_num_new_slots_per_request
            self._seq_lens = common.seq_lens_cpu_upper_bound.numpy() + np.int32(extra)
        else:
            if self._num_draft_tokens is not None:
                valid = self.num_valid_tokens.read()
                self._seq_lens -= num_rejected_tokens(self._num_draft_tokens, valid)
                self._num_draft_tokens = None
            self._seq_lens = next_draft_seq_lens(self._seq_lens, self.max_model_len)
        # Upstream counts these up in place after the pass.
        common.seq_lens_cpu_upper_bound = torch.from_numpy(self._seq_lens.copy())
        common.positions = self._sequence_positions(common)
        common._num_computed_tokens_cache = None  # of other lengths
        return super().build_per_group_and_layer_attn_metadata(common, draft_index)

    def _update_positions_dependent_metadata(
        self,
        positions: torch.Tensor,
        common_attn_metadata: CommonAttentionMetadata,
        batch_size: int,
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Slots and positions of the next pass, one token on.

        Under M-RoPE a token behind an image rotates by less than its place in the sequence.
        Upstream takes its slot from that: the drafter would overwrite what it has cached before.

        Parameters
        ----------
        positions
            What the pass before rotates by, ``[num_reqs]``, of a drafter with M-RoPE
            ``[num_dims, num_reqs]``.
        common_attn_metadata
            Of that pass; updated.
        batch_size
            Requests.
        """
        if not self.vllm_config.model_config.uses_mrope:
            return super()._update_positions_dependent_metadata(
                positions, common_attn_metadata, batch_size, *args, **kwargs
            )
        following = positions + 1  # now: `positions` is the buffer that is about to be written
        in_sequence = (common_attn_metadata.seq_lens[:batch_size] - 1).to(positions.dtype)
        buffer = super()._update_positions_dependent_metadata(
            in_sequence.expand_as(positions), common_attn_metadata, batch_size, *args, **kwargs
        )
        return buffer.copy_(following)

    def _sequence_positions(self, common: CommonAttentionMetadata) -> torch.Tensor:
        """Positions in the sequences, which masks are made of; M-RoPE rotates by other ones."""
        if not self.vllm_config.model_config.uses_mrope:
            return self._get_positions(common.num_actual_tokens)
        starts = common.query_start_loc_cpu[: common.num_reqs + 1].numpy()
        return async_tensor_h2d(token_positions(starts, self._seq_lens), device=self.device)

    def validate_same_kv_cache_group(self, kv_cache_config: KVCacheConfig) -> None:
        """One metadata serves all passes; upstream asserts it.

        Raises
        ------
        PrepError
            If the drafter's layers fall into several KV-cache groups.
        """
        groups = kv_cache_config.kv_cache_groups
        ids = [
            i for i, each in enumerate(groups) if self._draft_attn_layer_names & {*each.layer_names}
        ]
        if len(ids) != 1:
            raise PrepError(
                f"the drafter's {len(self._draft_attn_layer_names)} layers fall into KV-cache "
                f"groups {ids}, and drafters read one: use --disable-hybrid-kv-cache-manager, or a "
                "drafter with fewer layers"
            )


class ExactEagleProposer(ExactLengths, EagleProposer):
    """EAGLE and EAGLE-3 heads."""

    def _maybe_share_lm_head(self, target_language_model: torch.nn.Module) -> None:
        """As upstream's, which takes the target's ``lm_head`` for granted.

        Raises
        ------
        PrepError
            If neither the head nor the target has one.
        """
        own = getattr(self.model, "has_own_lm_head", True)
        if not own and not hasattr(target_language_model, "lm_head"):
            raise PrepError(
                f"the head {self.draft_model_config.model} has no lm_head, and its target ties its "
                "own to the embeddings: use a head with an lm_head of its own"
            )
        super()._maybe_share_lm_head(target_language_model)


class ExactDraftModelProposer(ExactLengths, DraftModelProposer):
    """A model of its own as the drafter."""


DRAFTERS: dict[Any, type[Any]] = {
    method: ExactDraftModelProposer if method == "draft_model" else ExactEagleProposer
    for method in DRAFT_MODEL_METHODS
}


class SpeculativeRunner(BookkeepingRunner):
    """Upstream's runner with exact counts under speculation, asynchronous scheduling included."""

    prep_device: Device
    # Upstream's other ones run no model and are not asked for what these have.
    drafter: ExactEagleProposer | ExactDraftModelProposer
    backup_next_token_ids: torch.Tensor  # [num_reqs_padded] int32, of the present step

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        super().__init__(vllm_config, device)
        method = vllm_config.speculative_config and vllm_config.speculative_config.method
        self._runs_draft_model = method in DRAFTERS
        if self._runs_draft_model:
            self.drafter = DRAFTERS[method](vllm_config, device, self)
            self.drafter.runner = self
            self.num_valid_tokens = self.drafter.num_valid_tokens = ReadBack(
                self.prep_device, self.max_num_reqs, is_pin_memory_available()
            )

    def _update_states(self, scheduler_output: "SchedulerOutput") -> None:
        """Correct the scheduler's optimistic counts now, on the host; upstream does it later."""
        correct_counts = super()._update_states(scheduler_output)
        if not self.use_async_spec_decode:
            return
        if correct_counts is not None:
            correct_counts()
        # Tokens of requests whose sample is still on the device: those computed, and that one.
        batch = self.input_batch
        rows = np.flatnonzero(self.block_tables.previous_rows[: batch.num_reqs] >= 0)
        batch.num_tokens_no_spec[rows] = batch.num_computed_tokens_cpu[rows] + 1

    def _copy_valid_sampled_token_count(
        self, next_token_ids: torch.Tensor, valid_sampled_tokens_count: torch.Tensor
    ) -> None:
        """The one copy to the host; a synchronous step with one draft pass needs none."""
        if self.use_async_spec_decode or self.num_spec_tokens > 1:
            self.num_valid_tokens.start(valid_sampled_tokens_count)
        if self.use_async_spec_decode:
            self.input_batch.prev_sampled_token_ids = next_token_ids.unsqueeze(1)

    def _get_valid_sampled_token_count(self) -> list[int]:
        """Tokens that the last step kept of each request in it."""
        if self.input_batch.prev_sampled_token_ids is None:
            return []
        return self.num_valid_tokens.read().tolist()

    def _copy_draft_token_ids_to_cpu(
        self, scheduler_output: "SchedulerOutput", zeros_only: bool = False
    ) -> None:
        """Drafts are made: line up what the next step places among its tokens."""
        super()._copy_draft_token_ids_to_cpu(scheduler_output, zeros_only)
        if self.use_async_spec_decode:
            assert isinstance(self._draft_token_ids, torch.Tensor)
            drafts = self._draft_token_ids.to(torch.int32)
            sampled = self.input_batch.prev_sampled_token_ids
            assert sampled is not None
            self._drafted_samples = torch.cat((sampled, drafts, drafts), 1).flatten()

    def _last_samples(self) -> torch.Tensor:
        """The last step's samples on the device, int32, as `StepLayout` orders their places."""
        if self._num_sampled_drafts:
            return self._drafted_samples
        sampled = self.input_batch.prev_sampled_token_ids
        assert sampled is not None
        return sampled[:, 0].to(torch.int32)

    @property
    def _drafting_group(self) -> int:
        """KV-cache group of the drafter's layers; the first one for drafters without a cache."""
        return self.drafter.kv_cache_gid if self._runs_draft_model else 0

    def _share_builders(self) -> None:
        """Draft passes get their metadata where steps do: one builder for layers of one window."""
        if self._runs_draft_model:
            names = self.drafter._draft_attn_layer_names
            self.drafter.draft_attn_groups = [
                replace(group, layer_names=drafting)
                for group in self.attn_groups[self._drafting_group]
                if (drafting := [name for name in group.layer_names if name in names])
            ]

    @property
    def _num_sampled_drafts(self) -> int:
        """Drafts behind each sample that is still on the device."""
        if not self.use_async_spec_decode or self._draft_token_ids is None:
            return 0
        assert isinstance(self._draft_token_ids, torch.Tensor)
        return self._draft_token_ids.shape[1]
