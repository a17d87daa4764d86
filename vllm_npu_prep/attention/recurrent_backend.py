"""Attention groups that hold recurrent states: what layers with linear attention read of a step.

Such a group has neither slots nor a mask. Its layers get `RecurrentMetadata`: each request's block,
whether the block holds a state yet, and where prefills begin. All of it is views of the step's
arrays (`vllm_npu_prep.prep.recurrent_states`).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from vllm.config import VllmConfig
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionMetadata,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
)
from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheSpec, MambaSpec

from vllm_npu_prep.config import Decisions, decisions_of
from vllm_npu_prep.device.staging import StagedArrays
from vllm_npu_prep.prep.batch import PreparedStep
from vllm_npu_prep.prep.mask import MaskPlan
from vllm_npu_prep.prep.padding import GraphMode
from vllm_npu_prep.prep.recurrent_states import NO_RECURRENT_GROUPS, RecurrentGroups
from vllm_npu_prep.prep.state import AttentionState


class DecodeRows(NamedTuple):
    """Where decodes of one token keep the inputs of their convolution."""

    both: torch.Tensor  # int64: rows to read and to write
    query_lens: torch.Tensor  # [num_decodes] int32, 1


class DraftRows(NamedTuple):
    """Where decodes with drafts keep the inputs of their convolution."""

    to_read: torch.Tensor  # int64
    to_write: torch.Tensor  # int64
    query_lens: torch.Tensor  # [num_decodes] int32
    accepted: torch.Tensor  # [num_decodes] int32: at most `query_lens`


class PrefillRows(NamedTuple):
    """Where prefills keep the inputs of their convolution, and their states."""

    to_read: torch.Tensor  # int64
    to_write: torch.Tensor  # int64
    query_lens: torch.Tensor  # [num_prefills] int32
    is_empty: torch.Tensor  # [num_prefills, 1, 1] bool
    blocks: torch.Tensor  # [num_prefills] int64: of states to write


@dataclass
class RecurrentMetadata(AttentionMetadata):
    """What layers with recurrent states read of one step.

    ``R`` is the number of requests, with padding in full graphs only. In a full graph all requests
    are decodes, of one token or with speculation of ``1 + num_drafts`` tokens, padding included;
    the states of padding are those of the null block.
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
    # For decodes with speculation: the block to which the state after each token is written, how
    # many tokens of a request's last step count, and the tokens of each request, on the host
    token_state_indices: torch.Tensor | None = None  # [num_decode_tokens] int32
    num_accepted_tokens: torch.Tensor | None = None  # [R] int32
    decode_lens: list[int] | None = None
    # What the first layer of a group makes for all its layers (`attention.kernels.fused_delta`)
    decode_rows: DecodeRows | None = None
    draft_rows: DraftRows | None = None
    prefill_rows: PrefillRows | None = None

    @property
    def num_prefills(self) -> int:
        return len(self.prefill_ends)

    @property
    def uniform_decode_len(self) -> int:
        """Return the tokens of each decode; 0 if they have different numbers of drafts."""
        lens = self.decode_lens
        return 0 if not lens or min(lens) != max(lens) else lens[0]


class RecurrentBackend(AttentionBackend):
    """What vLLM asks of layers with recurrent states; none of them attends through it."""

    @staticmethod
    def get_name() -> str:
        """Return the name of upstream's backend of gated delta nets, by which vLLM knows the
        layers."""
        return "GDN_ATTN"

    @staticmethod
    def get_builder_cls() -> type["RecurrentMetadataBuilder"]:
        return RecurrentMetadataBuilder

    @classmethod
    def is_ssm(cls) -> bool:
        """Return True, so that its block size is not chosen with those of attention."""
        return True


class RecurrentMetadataBuilder(AttentionMetadataBuilder[RecurrentMetadata]):
    """The only constructor of `RecurrentMetadata`, with the interface of `AscendMetadataBuilder`.

    `num_drafts` is the most drafts of a request, each of which has a state; 0 without speculation.
    """

    holds_states = True
    reorder_batch_threshold = 1  # decodes come first in the batch
    latent = sliding_window = attention_chunk_size = index_topk = None
    causal = True

    def __init__(
        self,
        kv_cache_spec: MambaSpec,
        layer_names: list[str],
        vllm_config: VllmConfig,
        device: torch.device,
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.num_drafts = kv_cache_spec.num_speculative_blocks
        self._init_reorder_batch_threshold(1, supports_spec_as_decode=True)
        self.decisions: Decisions = decisions_of(vllm_config)
        self._layers = vllm_config.compilation_config.static_forward_context
        self._moves = device.type == "npu"  # its operator writes a state where it reads it
        self.num_moved = 0  # requests whose states were moved, in all steps together

    @classmethod
    def get_cudagraph_support(
        cls, vllm_config: VllmConfig, kv_cache_spec: KVCacheSpec | AttentionSpec
    ) -> AttentionCGSupport:
        """Allow full graphs of decodes only: a prefill is as many products as it is long."""
        if vllm_config.speculative_config is not None:
            return AttentionCGSupport.UNIFORM_BATCH
        return AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE

    def for_layers(self, metadata: RecurrentMetadata) -> RecurrentMetadata:
        return metadata

    def build_step(
        self,
        step: PreparedStep,
        group: int,
        staged: StagedArrays,
        block_table: torch.Tensor | None,
        masks: dict[MaskPlan, torch.Tensor | None],
    ) -> RecurrentMetadata:
        """Build the metadata of a prepared step for one state group: views, and no read-back.

        `block_table` and `masks` are not read, because the step has found the entries already.
        """
        del block_table, masks
        states, arrays = step.states, staged.device
        groups = step.shape.states
        index = groups.groups.index(group)
        in_full_graph = step.padding.mode is GraphMode.FULL
        num_reqs = step.padding.num_reqs_padded if in_full_graph else step.num_reqs
        ends = [] if in_full_graph else step.prefill_query_start_loc[1:].tolist()
        num_prefills = len(ends)
        num_tokens = step.batch.total_num_scheduled_tokens
        if self._moves and states.num_decodes:
            self._move_states(states.num_decodes, index, staged)
        num_decode_tokens = step.num_input_tokens if in_full_graph else states.num_decode_tokens
        of_drafts: dict[str, Any] = {}
        if groups.num_drafts:
            lens = step.query_lens[: states.num_decodes].tolist()
            if in_full_graph:
                lens = [step.padding.decode_query_len] * num_reqs
            of_drafts = {
                "token_state_indices": arrays.token_state_indices[index, :num_decode_tokens],
                "num_accepted_tokens": arrays.num_accepted_tokens[:num_reqs],
                "decode_lens": lens,
            }
        return RecurrentMetadata(
            step.attn_state,
            arrays.initial_state_indices[index, :num_reqs],
            arrays.state_indices[index, :num_reqs],
            arrays.has_initial_state[:num_reqs],
            arrays.query_start_loc[: num_reqs + 1],
            arrays.prefill_query_start_loc[: num_prefills + 1],
            ends,
            num_reqs - num_prefills,
            num_decode_tokens,
            num_tokens,
            step.num_input_tokens,
            in_full_graph,
            **of_drafts,
        )

    def _move_states(self, num_decodes: int, index: int, staged: StagedArrays) -> None:
        """Copy states of decodes to the blocks that the step writes, before its forward pass."""
        host, rows = staged.np, slice(num_decodes)
        target = host.state_indices[index, rows]
        if self.num_drafts:  # the operator reads it from the block of one of the step's tokens
            starts, lens = (
                host.query_start_loc[rows],
                np.diff(host.query_start_loc[: num_decodes + 1]),
            )
            kept = np.minimum(host.num_accepted_tokens[rows], lens)
            target = host.token_state_indices[index][starts + kept - 1]
        parts: list[Any] = [
            part for name in self.layer_names for part in self._layers[name].kv_cache
        ]
        self.num_moved += move_states(
            parts,
            host.initial_state_indices[index, rows],
            target,
            host.has_initial_state[rows],
        )

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> RecurrentMetadata:
        """Build metadata from vLLM's common metadata for dummy runs; all requests are prefills."""
        common = common_attn_metadata
        num_reqs = common.num_reqs
        starts = common.query_start_loc_cpu[: num_reqs + 1]
        num_tokens = int(starts[-1])
        return RecurrentMetadata(
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


def find_recurrent_groups(builders: Iterable[tuple[int, Any, list[str]]]) -> RecurrentGroups:
    """Return the KV-cache groups that hold recurrent states.

    `builders` has the KV-cache group, the builder and the layers of each attention group.
    """
    found = {group: builder for group, builder, _ in builders if builder.holds_states}
    if not found:
        return NO_RECURRENT_GROUPS
    threshold = max(builder.reorder_batch_threshold for builder in found.values())
    drafts = max(builder.num_drafts for builder in found.values())
    return RecurrentGroups(tuple(found), threshold, drafts)


def move_states(
    parts: Sequence[torch.Tensor],  # of all layers of a group, each [num_blocks, ...]
    source: np.ndarray,  # [R] int32: where decodes find their states
    target: np.ndarray,  # [R] int32: where they leave them
    has_state: np.ndarray,  # [R] bool
) -> int:
    """Copy states of decodes that enter another block, and zero those of decodes without a state.

    Block ids are the host's, so nothing is read back or sent. Return the number of requests whose
    states were copied or zeroed.
    """
    rows = np.flatnonzero((source != target) | ~has_state)
    for row in rows.tolist():
        old, new = int(source[row]), int(target[row])
        for part in parts:
            if has_state[row]:
                part[new].copy_(part[old])
            else:
                part[new].zero_()
    return len(rows)
