"""Drafters whose attention metadata has exact lengths on the host, in every pass.

The first draft pass needs no counts of accepted tokens: rejected tokens stay in the batch, and
causality hides them from the accepted ones. Later passes wait for the counts
(`vllm_npu_prep.runner.v1.speculation`).
"""

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np
import torch
from vllm.config import VllmConfig
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.spec_decode.draft_model import DraftModelProposer
from vllm.v1.spec_decode.eagle import EagleProposer
from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata
from vllm.v1.spec_decode.utils import (
    PADDING_SLOT_ID,
    _eagle_prepare_next_token_padded,
    next_power_of_2,
)
from vllm.v1.worker.gpu_input_batch import CachedRequestState, InputBatch
from vllm.v1.worker.utils import AttentionGroup

from vllm_npu_prep.device.readback import ReadBack
from vllm_npu_prep.prep.draft_lengths import (
    next_draft_seq_lens,
    num_rejected_tokens,
    token_positions,
)
from vllm_npu_prep.runner.mtp_layers import warn_of_unused_layers
from vllm_npu_prep.startup.asked import DRAFT_MODEL_METHODS


class ExactLengths(SpecDecodeBaseProposer):
    """A drafter whose attention metadata has exact lengths on the host, in every pass.

    Attributes
    ----------
    num_valid_tokens
        The counts of accepted tokens of the step that is being verified, on their way to the host.
    backup_of_step
        Returns the step's ``backup_next_token_ids``: int32 ``[num_reqs_padded]`` on the device.
    block_table_of_group
        Returns a KV-cache group's block table of the step: int32 ``[num_reqs_padded,
        max_num_blocks]`` on the device.
    """

    num_valid_tokens: ReadBack
    backup_of_step: Callable[[], torch.Tensor]
    block_table_of_group: Callable[[int], torch.Tensor]
    _slots_of_group: dict[int, torch.Tensor]  # of the current pass, without the first group's slots
    _num_draft_tokens: Sequence[int] | None = None  # of the step; None: rejected ones are removed
    _seq_lens: np.ndarray  # [num_reqs] int32, of the current pass

    def prepare_next_token_ids_padded(
        self,
        sampled_token_ids: torch.Tensor,
        requests: dict[str, CachedRequestState],
        gpu_input_batch: InputBatch,
        discard_request_mask: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return each request's next token and its number of valid samples, int32 ``[num_reqs]``.

        Tokens for requests without a sample came with the step. Upstream collects them here instead
        and has two faults: it rewrites their pinned memory in the next step, even if the copy has
        not ended; and after a chunk of a prompt it continues from the prompt's last token instead
        of its next one.
        """
        del requests
        num_reqs, num_samples = sampled_token_ids.shape
        next_token_ids = torch.empty(num_reqs, dtype=torch.int32, device=sampled_token_ids.device)
        valid_counts = torch.empty_like(next_token_ids)
        _eagle_prepare_next_token_padded(
            sampled_token_ids,
            discard_request_mask,
            self.backup_of_step(),
            next_token_ids,
            valid_counts,
            gpu_input_batch.vocab_size,
            num_samples,
            num_reqs,
            sampled_token_ids.stride(0),
            BLOCK_SIZE_TOKENS=next_power_of_2(num_samples),
        )
        return next_token_ids, valid_counts

    def dummy_run(self, *args: Any, **kwargs: Any) -> None:
        """Run without writing into the cache.

        Upstream's buffer of slots has zeros, and later the slots of the last step. A latent layer
        writes without metadata, too, so a data-parallel rank that idles beside others would
        overwrite cached tokens.
        """
        self._slot_mapping_buffer.fill_(PADDING_SLOT_ID)
        self._slots_of_group.clear()
        super().dummy_run(*args, **kwargs)

    def prepare_inputs_padded(
        self,
        common_attn_metadata: CommonAttentionMetadata,
        spec_decode_metadata: SpecDecodeMetadata,
        valid_sampled_tokens_count: torch.Tensor,
    ) -> tuple[CommonAttentionMetadata, torch.Tensor, torch.Tensor]:
        """Leave rejected tokens in the first pass; later passes ask for their number."""
        self._num_draft_tokens = spec_decode_metadata.num_draft_tokens
        return super().prepare_inputs_padded(
            common_attn_metadata, spec_decode_metadata, valid_sampled_tokens_count
        )

    def build_per_group_and_layer_attn_metadata(
        self, common_attn_metadata: CommonAttentionMetadata, draft_index: int = 0
    ) -> tuple[list[object], dict[str, object]]:
        """Build the metadata of one pass with exact lengths, where upstream has upper bounds."""
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
        # This is a copy, because upstream increments the lengths in place after the pass.
        common.seq_lens_cpu_upper_bound = torch.from_numpy(self._seq_lens.copy())
        common.positions = self._sequence_positions(common)
        common._num_computed_tokens_cache = None  # it was computed from other lengths
        return self._metadata_of_groups(common, draft_index)

    def _update_positions_dependent_metadata(
        self,
        positions: torch.Tensor,
        common_attn_metadata: CommonAttentionMetadata,
        batch_size: int,
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Write the slots and positions of the next pass, one token later.

        With M-RoPE, a token after an image rotates by less than its index in the sequence. Upstream
        computes its slot from the rotation, so the drafter would overwrite cached tokens.

        Parameters
        ----------
        positions
            The rotations of the pass before, ``[num_reqs]``; for a drafter with M-RoPE ``[num_dims,
            num_reqs]``.
        common_attn_metadata
            The metadata of that pass, which is updated.
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
        """Return the positions in the sequences, for masks; M-RoPE rotates by others."""
        if not self.vllm_config.model_config.uses_mrope:
            return self._get_positions(common.num_actual_tokens)
        starts = common.query_start_loc_cpu[: common.num_reqs + 1].numpy()
        return async_tensor_h2d(token_positions(starts, self._seq_lens), device=self.device)

    def validate_same_kv_cache_group(self, kv_cache_config: KVCacheConfig) -> None:
        """Accept layers in several KV-cache groups, for which upstream has no metadata."""

    def _metadata_of_groups(
        self, common: CommonAttentionMetadata, draft_index: int
    ) -> tuple[list[object], dict[str, object]]:
        """Do what upstream's loop does, with block table and slots of each group's own."""
        of_groups: list[object] = []
        of_layers: dict[str, object] = {}
        rows: torch.Tensor | None = None
        for group in self.draft_attn_groups:
            given, index = common, group.kv_cache_group_id
            if index != self.kv_cache_gid:
                if rows is None:
                    rows = self._rows_of_tokens(common)
                given = copy(common)
                given.block_table_tensor = self.block_table_of_group(index)[: common.num_reqs]
                given.slot_mapping = self._slots_of_group[index] = slots_of_tokens(
                    given.block_table_tensor, rows, common, group.kv_cache_spec.block_size
                )
            metadata = group.build_metadata_for_drafting(
                common_attn_metadata=given, draft_index=draft_index
            )
            of_groups.append(metadata)
            of_layers |= dict.fromkeys(group.layer_names, metadata)
        return of_groups, of_layers

    def _rows_of_tokens(self, common: CommonAttentionMetadata) -> torch.Tensor:
        """Return the request of each token, int64 ``[num_actual_tokens]`` on the device."""
        starts = common.query_start_loc_cpu[: common.num_reqs + 1].numpy()
        rows = np.repeat(np.arange(common.num_reqs), np.diff(starts))
        return async_tensor_h2d(rows, device=self.device)

    def _get_slot_mapping(
        self, num_tokens: int, slot_mapping: torch.Tensor | None = None
    ) -> dict[str, torch.Tensor]:
        of_layers = super()._get_slot_mapping(num_tokens, slot_mapping)
        for group in self.draft_attn_groups:
            slots = self._slots_of_group.get(group.kv_cache_group_id)
            if slots is not None:
                padding = (0, num_tokens - len(slots))
                padded = torch.nn.functional.pad(slots, padding, value=PADDING_SLOT_ID)
                of_layers |= dict.fromkeys(group.layer_names, padded)
        return of_layers


def slots_of_tokens(
    block_table: torch.Tensor,  # [num_reqs, max_num_blocks] int32
    rows: torch.Tensor,  # [num_actual_tokens] int64
    common: CommonAttentionMetadata,
    block_size: int,
) -> torch.Tensor:
    """Return the slots of a draft pass's tokens in another group, int64 ``[num_actual_tokens]``.

    Tokens without a slot in the first KV-cache group have none here, either.
    """
    assert common.positions is not None
    positions = common.positions[: len(rows)]
    numbers = (positions // block_size).clamp_(max=block_table.shape[1] - 1)
    slots = block_table[rows, numbers].long() * block_size + positions % block_size
    return slots.masked_fill_(common.slot_mapping[: len(rows)] < 0, PADDING_SLOT_ID)


class ExactEagleProposer(ExactLengths, EagleProposer):
    """A drafter with an EAGLE or EAGLE-3 head, or with MTP layers."""

    def _maybe_share_lm_head(self, target_language_model: torch.nn.Module) -> None:
        """Share the embeddings of a tied target model that has no ``lm_head``."""
        super()._maybe_share_lm_head(target_language_model)
        own = getattr(self.model, "has_own_lm_head", True)
        if not own and not hasattr(target_language_model, "lm_head"):
            if hasattr(self.model, "lm_head"):
                del self.model.lm_head
            self.model.lm_head = target_language_model.get_submodule("model.embed_tokens")


class ExactDraftModelProposer(ExactLengths, DraftModelProposer): ...


def make_drafter(
    vllm_config: VllmConfig,
    device: torch.device,
    num_valid_tokens: ReadBack,
    backup_of_step: Callable[[], torch.Tensor],
    block_table_of_group: Callable[[int], torch.Tensor],
) -> Any:
    """Return the engine's drafter if it is a model; None for other methods and without speculation.

    `ExactLengths` says what the three last arguments are.
    """
    config = vllm_config.speculative_config
    if config is None or config.method not in DRAFT_MODEL_METHODS:
        return None
    is_model = config.method == "draft_model"
    drafter = (ExactDraftModelProposer if is_model else ExactEagleProposer)(vllm_config, device)
    warn_of_unused_layers(config)
    drafter.num_valid_tokens = num_valid_tokens
    drafter.backup_of_step = backup_of_step
    drafter.block_table_of_group = block_table_of_group
    drafter._slots_of_group = {}
    return drafter


def share_builders(drafter: ExactLengths, attn_groups: Sequence[Sequence[AttentionGroup]]) -> None:
    """Let draft passes use the builders of steps: one builder for all layers with one window.

    ``attn_groups`` has the attention groups of each KV-cache group.
    """
    names = drafter._draft_attn_layer_names
    drafter.draft_attn_groups = [
        replace(group, layer_names=drafting)
        for group in chain.from_iterable(attn_groups)
        if (drafting := [name for name in group.layer_names if name in names])
    ]
