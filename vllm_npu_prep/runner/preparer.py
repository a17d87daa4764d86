"""Prepares steps with objects that are kept: tables, layouts, staging ring, metadata builders."""

from collections.abc import Sequence
from typing import Any, Protocol, TypeAlias, cast

import numpy as np
import torch
from vllm.v1.worker.utils import AttentionGroup

from vllm_npu_prep.attention.backend import AscendMetadataBuilder
from vllm_npu_prep.attention.local_attention import LocalBlockTables
from vllm_npu_prep.attention.metadata import AscendMetadata
from vllm_npu_prep.attention.mla import AscendMLAMetadataBuilder
from vllm_npu_prep.device import Device
from vllm_npu_prep.device.staging import DeviceArrays, StagedArrays, StagingRing
from vllm_npu_prep.prep.batch import BatchTables, PreparedStep, StepBatch, prepare_step
from vllm_npu_prep.prep.layout import StepLayout, largest_step, step_layout
from vllm_npu_prep.prep.mask import MaskPlan
from vllm_npu_prep.prep.padding import Padding

NO_REQUESTS = np.empty(0, np.int32)


class StepBlockTables(Protocol):
    """The device's block tables, whoever keeps the host's."""

    block_table_flat: torch.Tensor  # int32, the tables of all groups one after the other

    def device_rows(self, num_reqs: int) -> tuple[torch.Tensor, ...]:
        """Return leading rows on the device, int32 ``[num_reqs, max_num_blocks]`` by group."""


Builders: TypeAlias = Sequence[tuple[int, AscendMetadataBuilder, list[str]]]
"""KV-cache group, builder and layers of each attention group."""


class Preparer:
    """All that is needed to prepare steps; it is made when the KV cache is allocated.

    Parameters
    ----------
    block_tables
        The block tables, on the host and on the device.
    max_logits_per_req
        The most rows of logits of one request: one for each draft, and one after them.
    pin_memory
        Whether host buffers are page-locked.
    has_slots
        Whether steps tell the device the request rows of their requests (vLLM's V2 runner).

    Attributes
    ----------
    staging
        The ring of host buffers, and the one device buffer.
    no_drafts
        int32 ``[max_num_reqs]``, 0.
    """

    def __init__(
        self,
        device: Device,
        tables: BatchTables,
        block_tables: StepBlockTables,
        builders: Builders,
        *,
        max_num_tokens: int,
        max_num_reqs: int,
        max_logits_per_req: int = 1,
        pin_memory: bool = False,
        has_slots: bool = False,
    ) -> None:
        self.tables, self.block_tables, self.builders = tables, block_tables, builders
        self.mrope_dims = 0 if tables.mrope is None else tables.mrope.num_dims
        self.no_drafts = np.zeros(max_num_reqs, np.int32)
        num_groups, dims, local = tables.num_groups, self.mrope_dims, tables.local
        kinds = local, tables.latent, tables.states, has_slots, tables.dcp
        self._layout_sizes = num_groups, max_logits_per_req, dims, *kinds
        num_entries = len(block_tables.block_table_flat)
        sizes = max_num_tokens, max_num_reqs, num_groups, max_logits_per_req, num_entries
        nbytes = largest_step(*sizes, dims, *kinds)
        self.staging = StagingRing(
            device, nbytes, block_tables=block_tables.block_table_flat, pin_memory=pin_memory
        )
        self._wraps = any(isinstance(each, AscendMLAMetadataBuilder) for _, each, _ in builders)
        self._local_tables: LocalBlockTables | None = None
        if local is not None:
            # Each virtual request has at least one token, also in padding
            self._local_tables = LocalBlockTables(
                device, block_tables.block_table_flat, local, max_num_tokens
            )
        self._slots: tuple[
            DeviceArrays | None, dict[int, torch.Tensor], dict[str, torch.Tensor]
        ] = (None, {}, {})

    def layout(self, padding: Padding) -> StepLayout:
        return step_layout(padding.num_input_tokens, padding.num_reqs_padded, *self._layout_sizes)

    def build_metadata(self, step: PreparedStep, staged: StagedArrays) -> dict[str, AscendMetadata]:
        """Build attention metadata by layer, one object for all layers of an attention group.

        The arrays of `staged` are on the device or on their way.
        """
        by_layer: dict[str, AscendMetadata] = {}
        masks: dict[MaskPlan, torch.Tensor | None] = {}  # groups of one window share their mask
        block_tables = self.block_tables.device_rows(step.padding.num_reqs_padded)
        local_tables: dict[int, torch.Tensor] = {}
        if self._local_tables is not None:
            local_tables = self._local_tables.gather(staged.device.chunk_local_table_rows)
        for group, builder, layer_names in self.builders:
            block_table = block_tables[group] if builder.causal else None
            if builder.attention_chunk_size is not None:
                block_table = local_tables[group]
            metadata = builder.build_step(step, group, staged, block_table, masks)
            by_layer |= dict.fromkeys(layer_names, metadata)
        return by_layer

    def for_layers(self, metadata: dict[str, AscendMetadata]) -> dict[str, Any]:
        """Return a step's metadata in the form in which layers read it: MLA has one of its own."""
        if not self._wraps:
            return metadata
        return {
            name: builder.for_layers(metadata[name])
            for _, builder, names in self.builders
            for name in names
            if name in metadata  # not in a dummy run without attention
        }

    def prepare_padding_only(
        self, padding: Padding
    ) -> tuple[PreparedStep, StagedArrays, dict[str, AscendMetadata]]:
        """Prepare a step that is all padding, and so safe to run."""
        batch = StepBatch(self.tables, NO_REQUESTS, self.no_drafts, 0)
        layout = self.layout(padding)
        staged = self.staging.acquire(layout)
        step = prepare_step(batch, padding, layout, staged.np)
        self.staging.send(step)
        return step, staged, self.build_metadata(step, staged)

    def slot_mappings(
        self, staged: StagedArrays
    ) -> tuple[dict[int, torch.Tensor], dict[str, torch.Tensor]]:
        """Return slots of a step's tokens by KV-cache group and by layer, for layers with a cache.

        Returns
        -------
        by_group, by_layer
            int32 ``[num_input_tokens]`` each; the same dicts are returned for the same layout.
        """
        arrays, by_group, by_layer = self._slots
        if arrays is not staged.device:  # the layout has changed since the last step
            arrays, by_group, by_layer = staged.device, {}, {}
            for group, builder, layer_names in self.builders:
                if builder.causal:
                    slots = by_group[group] = arrays.slot_mappings[group]
                    by_layer |= dict.fromkeys(layer_names, slots)
            self._slots = arrays, by_group, by_layer
        return by_group, by_layer


def builders_of(attn_groups: Sequence[Sequence[AttentionGroup]]) -> Builders:
    """Return the metadata builders of an engine, and let them share their masks.

    ``attn_groups`` has the attention groups of each KV-cache group.
    """
    builders = [
        (
            group,
            cast(AscendMetadataBuilder, attn_group.get_metadata_builder()),
            attn_group.layer_names,
        )
        for group, attn_groups_of_one in enumerate(attn_groups)
        for attn_group in attn_groups_of_one
    ]
    attend = [builder for _, builder, _ in builders if not builder.holds_states]
    for builder in attend:  # one causal matrix for each window
        builder.masks = attend[0].masks
    return builders
