"""Prepares steps with objects that are kept: tables, layouts, staging ring, metadata builders."""

from collections.abc import Sequence
from functools import lru_cache, partial
from typing import Any, Protocol, TypeAlias, cast

import numpy as np
import torch
from vllm.config import VllmConfig
from vllm.v1.worker.utils import AttentionGroup

from vllm_npu_prep.attention.backend import AscendMetadataBuilder
from vllm_npu_prep.attention.context_parallel import find_dcp
from vllm_npu_prep.attention.latent import find_latent_split
from vllm_npu_prep.attention.local_block_tables import LocalBlockTables, find_local_groups
from vllm_npu_prep.attention.metadata import AscendMetadata
from vllm_npu_prep.attention.mla import AscendMLAMetadataBuilder
from vllm_npu_prep.attention.prefill_context_parallel import RankBlockTables, find_pcp
from vllm_npu_prep.attention.recurrent_backend import find_recurrent_groups
from vllm_npu_prep.device import Device
from vllm_npu_prep.device.staging import DeviceArrays, StagedArrays, StagingRing
from vllm_npu_prep.prep.arrays import PADDING_ROWS
from vllm_npu_prep.prep.batch import PreparedStep, StepBatch, prepare_step
from vllm_npu_prep.prep.layout import StepLayout, largest_step
from vllm_npu_prep.prep.mask import MaskPlan
from vllm_npu_prep.prep.mrope import NO_MROPE, MropeTables
from vllm_npu_prep.prep.padding import Padding
from vllm_npu_prep.prep.shape import EngineShape
from vllm_npu_prep.prep.tables import BatchTables

NO_REQUESTS = np.empty(0, np.int32)


class StepBlockTables(Protocol):
    """The block tables of all groups; `BatchTables` explains the host's arrays."""

    block_table_flat: torch.Tensor  # int32, the device's tables of all groups, one after the other
    block_table_flat_np: np.ndarray
    max_num_blocks: np.ndarray
    block_sizes: np.ndarray
    num_blocks: np.ndarray
    num_synced_blocks: np.ndarray
    num_device_blocks: np.ndarray

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
    pin_memory
        Whether host buffers are page-locked.

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
        pin_memory: bool = False,
    ) -> None:
        self.tables, self.block_tables, self.builders = tables, block_tables, builders
        max_num_reqs, shape = len(tables.token_ids), tables.shape
        self.no_drafts = np.zeros(max_num_reqs, np.int32)
        self._layout = lru_cache(maxsize=1024)(partial(StepLayout, shape=shape))
        num_entries = len(block_tables.block_table_flat)
        nbytes = largest_step(shape, max_num_tokens, max_num_reqs, num_entries)
        self.staging = StagingRing(
            device, nbytes, block_tables=block_tables.block_table_flat, pin_memory=pin_memory
        )
        self._wraps = any(isinstance(each, AscendMLAMetadataBuilder) for _, each, _ in builders)
        self._local_tables: LocalBlockTables | None = None
        if shape.local:
            # Each virtual request has at least one token, also in padding
            self._local_tables = LocalBlockTables(
                device, block_tables.block_table_flat, shape.local, max_num_tokens
            )
        self._rank_tables: RankBlockTables | None = None
        if shape.pcp:
            all_rows = block_tables.device_rows(max_num_reqs + PADDING_ROWS)
            self._rank_tables = RankBlockTables(device, all_rows, shape.pcp.most_rows)
        self._slots: tuple[
            DeviceArrays | None, dict[int, torch.Tensor], dict[str, torch.Tensor]
        ] = (None, {}, {})

    def layout(self, padding: Padding) -> StepLayout:
        """Return the layout of these sizes from a cache: the same sizes find the same addresses."""
        return self._layout(padding.num_input_tokens, padding.num_reqs_padded)

    def build_metadata(self, step: PreparedStep, staged: StagedArrays) -> dict[str, AscendMetadata]:
        """Build attention metadata by layer, one object for all layers of an attention group.

        The arrays of `staged` are on the device or on their way.
        """
        by_layer: dict[str, AscendMetadata] = {}
        masks: dict[MaskPlan, torch.Tensor | None] = {}  # groups of one window share their mask
        if self._rank_tables is not None:
            block_tables = self._rank_tables.gather(step, staged)
        else:
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


def make_tables(
    blocks: StepBlockTables,  # the block tables of all KV-cache groups
    attn_groups: Sequence[Sequence[AttentionGroup]],
    builders: Builders,
    vllm_config: VllmConfig,
    *,
    has_request_rows: bool = False,
    mrope: MropeTables = NO_MROPE,  # the positions of prompts of a model with M-RoPE
    **of_requests: np.ndarray,
) -> BatchTables:
    """Return the tables that the fused pass reads: views, which show every later change.

    Parameters
    ----------
    attn_groups, builders
        The attention groups of each KV-cache group, and what `builders_of` makes of them.
    has_request_rows
        Whether steps tell the device the request rows of their requests (vLLM's V2 runner).
    **of_requests
        The other arrays of `BatchTables`, which the runner keeps by request.
    """
    shape = EngineShape(
        num_groups=len(blocks.block_sizes),
        max_logits_per_req=vllm_config.uniform_decode_query_len,
        mrope_dims=mrope.num_dims,
        local=find_local_groups(attn_groups),
        latent=find_latent_split(builders),
        states=find_recurrent_groups(builders),
        dcp=find_dcp(vllm_config.parallel_config),
        pcp=find_pcp(vllm_config),
        has_request_rows=has_request_rows,
    )
    return BatchTables(
        block_table_flat=blocks.block_table_flat_np,
        max_num_blocks=blocks.max_num_blocks,
        block_sizes=blocks.block_sizes,
        num_blocks=blocks.num_blocks,
        num_synced_blocks=blocks.num_synced_blocks,
        num_device_blocks=blocks.num_device_blocks,
        shape=shape,
        chunked_prefill=vllm_config.scheduler_config.enable_chunked_prefill,
        mrope=mrope,
        **of_requests,
    )


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
