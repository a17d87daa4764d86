"""Attention groups that hold states: what layers with linear attention read of a step.

A state group has neither slots nor a mask. Its layers get `StateMetadata`: each request's block,
whether it holds anything yet, and where prefills begin; all of them views of the step's arrays
(`vllm_npu_prep.prep.states`).
"""

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.model_executor.models import ModelRegistry
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionMetadata,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
)
from vllm.v1.kv_cache_interface import AttentionSpec, FullAttentionSpec, KVCacheSpec, MambaSpec

from vllm_npu_prep.attention.fused_calls import block_size_of
from vllm_npu_prep.config import Decisions, decisions_of
from vllm_npu_prep.device.staging import StagedArrays
from vllm_npu_prep.prep.batch import PreparedStep
from vllm_npu_prep.prep.mask import MaskPlan
from vllm_npu_prep.prep.padding import GraphMode
from vllm_npu_prep.prep.state import AttentionState
from vllm_npu_prep.prep.states import StateGroups


@dataclass
class StateMetadata(AttentionMetadata):
    """What layers with states read of one step.

    ``R`` is the number of requests, with padding in full graphs only. In a full graph all requests
    are decodes of one token, padding included; their states are those of the null block.
    """

    attn_state: AttentionState
    initial_state_indices: torch.Tensor  # [R] int32: blocks to read from
    state_indices: torch.Tensor  # [R] int32: blocks to write to
    has_initial_state: torch.Tensor  # [R] bool
    query_start_loc: torch.Tensor  # [R + 1] int32
    prefill_query_start_loc: torch.Tensor  # [num_prefills + 1] int32
    prefill_ends: list[int]  # the same on the host, without the first
    num_decodes: int
    num_decode_tokens: int
    num_actual_tokens: int  # tokens that were scheduled
    num_input_tokens: int  # tokens after graph padding
    in_full_graph: bool = False
    tasks: Any = None  # of graphs: a state layer's operators take no lists, and need none

    @property
    def num_prefills(self) -> int:
        """Requests after the decodes."""
        return len(self.prefill_ends)


class StateBackend(AttentionBackend):
    """vLLM's view of layers with states; none of them calls it to attend."""

    @staticmethod
    def get_name() -> str:
        """Name of upstream's backend of gated delta nets, by which vLLM knows the layers."""
        return "GDN_ATTN"

    @staticmethod
    def get_builder_cls() -> type["StateMetadataBuilder"]:
        """Class of the metadata builder."""
        return StateMetadataBuilder

    @classmethod
    def is_ssm(cls) -> bool:
        """True: its block size is not chosen with those of attention."""
        return True


class StateMetadataBuilder(AttentionMetadataBuilder[StateMetadata]):
    """The only constructor of `StateMetadata`; it answers what `AscendMetadataBuilder` does.

    Attributes
    ----------
    holds_states
        True; builders of attention have False.
    """

    holds_states = True
    reorder_batch_threshold = 1  # decodes come first in the batch
    latent = sliding_window = attention_chunk_size = None
    causal = True

    def __init__(
        self,
        kv_cache_spec: MambaSpec,
        layer_names: list[str],
        vllm_config: VllmConfig,
        device: torch.device,
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.decisions: Decisions = decisions_of(vllm_config)

    @classmethod
    def get_cudagraph_support(
        cls, vllm_config: VllmConfig, kv_cache_spec: KVCacheSpec | AttentionSpec
    ) -> AttentionCGSupport:
        """Full graphs of decodes: prefills are as many products as they are long."""
        return AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE

    def for_layers(self, metadata: StateMetadata) -> StateMetadata:
        """The metadata of a prepared step in the form that layers read."""
        return metadata

    def build_step(
        self,
        step: PreparedStep,
        group: int,
        staged: StagedArrays,
        block_table: torch.Tensor | None,
        masks: dict[MaskPlan, torch.Tensor | None],
    ) -> StateMetadata:
        """Metadata of a prepared step for one state group: views, and no device read-back.

        Parameters
        ----------
        step
            The prepared step.
        group
            Index of the KV-cache group.
        staged
            The step's arrays on the host and on the device.
        block_table, masks
            Not read: the step has found the entries.
        """
        del block_table, masks
        states, arrays = step.states, staged.device
        groups = step.batch.tables.states
        assert states is not None and groups is not None
        index = groups.groups.index(group)
        in_full_graph = step.padding.mode is GraphMode.FULL
        num_reqs = step.padding.num_reqs_padded if in_full_graph else step.num_reqs
        ends = [] if in_full_graph else step.prefill_query_start_loc[1:].tolist()
        num_prefills = len(ends)
        num_tokens = step.batch.total_num_scheduled_tokens
        return StateMetadata(
            step.attn_state,
            arrays.initial_state_indices[index, :num_reqs],
            arrays.state_indices[index, :num_reqs],
            arrays.has_initial_state[:num_reqs],
            arrays.query_start_loc[: num_reqs + 1],
            arrays.prefill_query_start_loc[: num_prefills + 1],
            ends,
            num_reqs - num_prefills,
            step.num_input_tokens if in_full_graph else states.num_decode_tokens,
            num_tokens,
            step.num_input_tokens,
            in_full_graph,
        )

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> StateMetadata:
        """Metadata from vLLM's common metadata, for dummy runs: all requests are prefills."""
        common = common_attn_metadata
        num_reqs = common.num_reqs
        starts = common.query_start_loc_cpu[: num_reqs + 1]
        num_tokens = int(starts[-1])
        return StateMetadata(
            AttentionState.ChunkedPrefill,
            common.block_table_tensor[:num_reqs, 0],
            common.block_table_tensor[:num_reqs, 0],
            common.compute_num_computed_tokens()[:num_reqs] > 0,
            common.query_start_loc[: num_reqs + 1],
            common.query_start_loc[: num_reqs + 1],
            starts[1:].tolist(),
            0,
            0,
            num_tokens,
            common.num_actual_tokens,
        )


def find_state_groups(builders: Iterable[tuple[int, Any, list[str]]]) -> StateGroups | None:
    """The KV-cache groups that hold states; None for models without any.

    Parameters
    ----------
    builders
        KV-cache group, builder and layers of each attention group.
    """
    found = {
        group: builder.reorder_batch_threshold
        for group, builder, _ in builders
        if builder.holds_states
    }
    return StateGroups(tuple(found), max(found.values())) if found else None


def find_state_page(vllm_config: VllmConfig) -> "StatePage | None":
    """How blocks are sized in an engine whose model has states; None for other models.

    Parameters
    ----------
    vllm_config
        The engine's config, whose block size is the one asked for, or the default.
    """
    model = vllm_config.model_config
    if not model.is_hybrid:
        return None
    assert isinstance(model.dtype, torch.dtype)  # resolved by now
    model_class: Any
    model_class, _ = ModelRegistry.resolve_model_cls(model.architecture, model_config=model)
    spec = MambaSpec(
        shapes=model_class.get_mamba_state_shape_from_config(vllm_config),
        dtypes=model_class.get_mamba_state_dtype_from_config(vllm_config),
        block_size=1,
    )
    token = FullAttentionSpec(
        block_size=1,
        num_kv_heads=model.get_num_kv_heads(vllm_config.parallel_config),
        head_size=model.get_head_size(),
        dtype=model.dtype,
    ).page_size_bytes
    asked = block_size_of(vllm_config)
    rule = max(state_bytes(spec))
    halves = -(-2 * rule // (asked * token))
    return StatePage(asked, asked * halves, token, state_bytes(spec))


@dataclass(frozen=True)
class StatePage:
    """A block that has room for a state in its halves, and for K and V of so many tokens.

    Attributes
    ----------
    asked
        Block size that was asked for, or the default.
    block_size
        The smallest multiple of it whose K holds the larger part of a state.
    token_bytes
        K and V of one token in one layer.
    parts
        Bytes of both parts of a state.
    """

    asked: int
    block_size: int
    token_bytes: int
    parts: list[int]

    @property
    def page_bytes(self) -> int:
        """Bytes of a block in one layer."""
        return self.block_size * self.token_bytes

    def describe(self) -> str:
        """The line that tells at start-up what blocks hold, and why they have their size."""
        state, page = sum(self.parts), self.page_bytes
        why = f"asked for: {self.asked}; " if self.block_size != self.asked else ""
        return (
            f"a state of {state:,} bytes in a block of {self.block_size} tokens ({page:,} bytes; "
            f"{why}half a block holds the rule's {max(self.parts):,} bytes)"
        )


def state_bytes(spec: MambaSpec) -> list[int]:
    """Bytes of each part of a state: of the convolution's inputs, and of the recurrence."""
    return [prod(shape) * dtype.itemsize for shape, dtype in zip(spec.shapes, spec.dtypes)]
