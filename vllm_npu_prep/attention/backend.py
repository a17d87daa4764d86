"""The attention backend: it builds `AscendMetadata` and passes layers to a kernel family."""

from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import torch
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.distributed import get_dcp_group
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionImplBase,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
    MultipleOf,
)
from vllm.v1.kv_cache_interface import AttentionSpec, EncoderOnlyAttentionSpec, KVCacheSpec
from vllm.v1.kv_cache_layout import KVCacheLayout

from vllm_npu_prep.attention.context_parallel import (
    DCPStep,
    attend_dcp,
    find_dcp,
    own_of,
    rows_of,
)
from vllm_npu_prep.attention.families import DEFAULT_BLOCK_SIZE, KERNEL_FAMILIES
from vllm_npu_prep.attention.fused_calls import limits_batches
from vllm_npu_prep.attention.kernel_blocks import KernelBlockTables, blocks_per_block
from vllm_npu_prep.attention.kernels import AttentionCall, LayerShape, make_kernels
from vllm_npu_prep.attention.mask_cache import MaskCache
from vllm_npu_prep.attention.metadata import AscendMetadata, VirtualRequests
from vllm_npu_prep.attention.prefill_context_parallel import (
    find_pcp,
    gather_tokens,
    rows_of_rank,
)
from vllm_npu_prep.config import Decisions, decisions_of
from vllm_npu_prep.device.staging import StagedArrays
from vllm_npu_prep.errors import PrepError
from vllm_npu_prep.prep.batch import PreparedStep
from vllm_npu_prep.prep.latent_split import NO_LATENT_SPLIT, LatentSplit
from vllm_npu_prep.prep.mask import MaskForm, MaskKind, MaskPlan, plan_mask
from vllm_npu_prep.prep.padding import GraphMode
from vllm_npu_prep.prep.state import AttentionState, attention_state, batch_flags

ATTN_TYPES = (AttentionType.DECODER, AttentionType.ENCODER_ONLY)


class AscendAttentionBackend(AttentionBackend):
    """What vLLM asks of this plugin's attention: its classes, and what they support."""

    forward_includes_kv_cache_update = True
    supported_dtypes: ClassVar[list[torch.dtype]] = [
        torch.float16,
        torch.bfloat16,
        torch.float32,
    ]

    @staticmethod
    def get_name() -> str:
        """Return the name under which vLLM registers out-of-tree backends."""
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[AttentionImplBase]:
        return AscendAttentionImpl

    @staticmethod
    def get_builder_cls() -> type["AscendMetadataBuilder"]:
        return AscendMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(
        kv_cache_spec: KVCacheSpec | None = None,
    ) -> list[int | MultipleOf]:
        """Allow any block size: start-up checks the limits of the kernel family."""
        return [MultipleOf(1)]

    @classmethod
    def get_preferred_block_size(cls, default_block_size: int) -> int:
        return DEFAULT_BLOCK_SIZE

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        """Return the layout with one contiguous region for each layer (see `kv_cache`)."""
        return (KVCacheLayout.LBNHC,)

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_non_causal(cls) -> bool:
        return True

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        return attn_type in ATTN_TYPES


def virtual_requests(step: PreparedStep, staged: StagedArrays) -> VirtualRequests:
    """Return the virtual requests of a step (`vllm_npu_prep.prep.local_attention`).

    The padding rows after them are included in full graphs only.
    """
    arrays, host, local = staged.device, staged.np, step.local
    in_full_graph = step.padding.mode is GraphMode.FULL
    num_rows = len(host.chunk_local_seq_lens) if in_full_graph else local.num_reqs
    return VirtualRequests(
        arrays.chunk_local_query_start_loc[: num_rows + 1],
        host.chunk_local_query_start_loc[: num_rows + 1],
        arrays.chunk_local_seq_lens[:num_rows],
        host.chunk_local_seq_lens[:num_rows],
        arrays.chunk_local_num_computed_tokens[:num_rows],
        local.num_reqs,
        local.max_query_len,
        local.max_seq_len,
    )


class AscendMetadataBuilder(AttentionMetadataBuilder[AscendMetadata]):
    """The only constructor of `AscendMetadata`.

    `build_step` serves the steps that the runner prepared. `build` serves vLLM's own callers (dummy
    runs and drafters), which know a step only as `CommonAttentionMetadata`.

    Attributes
    ----------
    latent
        How steps are split for latent attention.
    holds_states
        False: recurrent states have another builder (`attention.recurrent_backend`).
    num_drafts
        0: K and V of a draft are in the slot of its position, while a recurrent state of a draft
        needs a block of its own.
    index_topk
        The most positions to which a token attends; None without sparse attention.
    kernel_block_size
        The number of tokens of a block as kernels see it (`attention.kernel_blocks`).
    """

    latent: LatentSplit = NO_LATENT_SPLIT
    holds_states = False
    num_drafts = 0

    def __init__(
        self,
        kv_cache_spec: AttentionSpec,
        layer_names: list[str],
        vllm_config: VllmConfig,
        device: torch.device,
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.decisions: Decisions = decisions_of(vllm_config)
        self.sliding_window = getattr(kv_cache_spec, "sliding_window", None)
        self.attention_chunk_size = getattr(kv_cache_spec, "attention_chunk_size", None)
        # Encoder-only groups attend both ways over fresh K and V: no cache, no mask.
        self.causal = not isinstance(kv_cache_spec, EncoderOnlyAttentionSpec)
        self.chunked_prefill = vllm_config.scheduler_config.enable_chunked_prefill
        self.dcp = find_dcp(vllm_config.parallel_config)
        self.pcp = find_pcp(vllm_config)
        model = vllm_config.model_config
        self.index_topk: int | None = getattr(model.hf_text_config, "index_topk", None)
        assert isinstance(model.dtype, torch.dtype)  # resolved by now
        self.masks = MaskCache(
            device,
            model.max_model_len,
            self.decisions.mask_budget_bytes,
            model.dtype,
            KERNEL_FAMILIES[self.decisions.attention].mask_values_of(model.dtype),
        )
        count = 1 if not self.causal else blocks_per_block(vllm_config, kv_cache_spec.block_size)
        self.kernel_block_size = kv_cache_spec.block_size // count
        rows = vllm_config.scheduler_config.max_num_seqs
        self._kernel_blocks = KernelBlockTables(count, rows, device) if count > 1 else None
        # For each attention state, the mask's plan if it is the same for all sizes, else None
        plans = [self._plan(state, 1, 1, self.causal) for state in AttentionState]
        of_any_size = (MaskKind.NONE, MaskKind.COMPRESSED)
        self._plans_of_any_size = [plan if plan.kind in of_any_size else None for plan in plans]

    @classmethod
    def get_cudagraph_support(
        cls, vllm_config: VllmConfig, kv_cache_spec: KVCacheSpec
    ) -> AttentionCGSupport:
        """Allow attention in full graphs only where the mask has a constant shape.

        Encoder-only layers are excluded, because graphs read K and V from the cache; decode context
        parallelism is, because ranks exchange queries and results between kernels.
        """
        if vllm_config.parallel_config.decode_context_parallel_size > 1:
            return AttentionCGSupport.NEVER
        if isinstance(kv_cache_spec, EncoderOnlyAttentionSpec):
            return AttentionCGSupport.NEVER
        if vllm_config.parallel_config.prefill_context_parallel_size > 1:
            return AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
        if decisions_of(vllm_config).mask_form == MaskForm.COMPRESSED:
            return AttentionCGSupport.ALWAYS
        if getattr(kv_cache_spec, "sliding_window", None) is not None:
            return AttentionCGSupport.NEVER
        return AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE

    def _plan(
        self, state: AttentionState, num_input_tokens: int, max_seq_len: int, causal: bool = True
    ) -> MaskPlan:
        return plan_mask(
            state,
            self.decisions.mask_form,
            num_input_tokens,
            max_seq_len,
            sliding_window=self.sliding_window,
            attention_chunk_size=self.attention_chunk_size,
            causal=causal,
        )

    def for_layers(self, metadata: AscendMetadata) -> Any:
        """Return the metadata of a prepared step in the form that layers read."""
        return metadata

    def build_step(
        self,
        step: PreparedStep,
        group: int,
        staged: StagedArrays,
        block_table: torch.Tensor | None,
        masks: dict[MaskPlan, torch.Tensor | None],
    ) -> AscendMetadata:
        """Build the metadata of a prepared step for one KV-cache group: views, and no read-back.

        Parameters
        ----------
        group
            The index of the KV-cache group.
        block_table
            int32 ``[num_reqs_padded, max_num_blocks]`` on the device; with chunked local attention,
            the table of virtual requests; None for encoder-only groups, which have no slots either.
        masks
            Masks that other groups made for this step; this group's mask is added.
        """
        arrays, host, batch, padding = staged.device, staged.np, step.batch, step.padding
        num_tokens, num_input_tokens = batch.total_num_scheduled_tokens, padding.num_input_tokens
        requests: tuple[Any, ...]  # in the order of `VirtualRequests`
        if self.pcp.world_size > 1:
            requests = rows_of_rank(step, staged)
            num_tokens, num_input_tokens = step.pcp.num_tokens, step.num_rank_tokens
        elif self.attention_chunk_size is None:
            requests = (  # the layout has exactly the rows that attention sees
                arrays.query_start_loc,
                host.query_start_loc,
                arrays.seq_lens,
                host.seq_lens,
                arrays.num_computed_tokens,
                batch.num_reqs,
                step.max_query_len,
                step.max_seq_len,
            )
        else:
            requests = virtual_requests(step, staged)
            assert block_table is not None
            block_table = block_table[: len(requests.seq_lens_np)]
        if self._kernel_blocks is not None and block_table is not None:
            block_table = self._kernel_blocks.of(block_table)
        plan = self._plans_of_any_size[step.attn_state]
        if plan is not None:
            mask = self.masks.constant() if plan.kind is MaskKind.COMPRESSED else None
        else:
            max_seq_len = requests[-1]
            plan = self._plan(step.attn_state, num_input_tokens, max_seq_len, self.causal)
            mask = masks.get(plan)
            if mask is None:
                positions = arrays.model_positions[:num_tokens]
                mask = masks[plan] = self.masks.build(plan, positions)
        metadata = AscendMetadata(
            step.attn_state,
            mask,
            block_table,
            None if block_table is None else arrays.slot_mappings[group],
            *requests,  # in the order of its fields: by name, this takes three times as long
            num_tokens,
            num_input_tokens,
            plan.sliding_window,
            self.attention_chunk_size,
            self.causal,
            padding.mode is GraphMode.FULL,
        )
        if self.dcp.world_size > 1:
            metadata.shared = self._share(metadata, staged)
        metadata.gathers = self.pcp.world_size > 1
        return metadata

    def _share(self, metadata: AscendMetadata, staged: StagedArrays) -> DCPStep | None:
        """Return what decode context parallelism needs for the step; None if it reads no context.

        A decode's own token is in the cache of one rank. Prompts attend over their own tokens
        separately.
        """
        arrays, host = staged.device, staged.np
        if metadata.attn_state is AttentionState.PrefillNoCache:
            return None
        if metadata.attn_state is AttentionState.DecodeOnly:
            return rows_of(metadata, arrays.dcp_local_seq_lens, host.dcp_local_seq_lens)
        shared = rows_of(metadata, arrays.dcp_local_context_lens, host.dcp_local_context_lens)
        longest = metadata.max_query_len
        plan = self._plan(AttentionState.PrefillNoCache, metadata.num_input_tokens, longest)
        mask = self.masks.build(plan, arrays.positions[: metadata.num_actual_tokens])
        return replace(shared, own=own_of(metadata, mask))

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> AscendMetadata:
        """Build metadata from vLLM's common metadata and its host values.

        The common metadata doesn't tell which tokens are drafts, so a batch with drafts gets the
        general attention state.
        """
        del common_prefix_len, fast_build
        assert self.attention_chunk_size is None, "drafters have no chunks"
        common = common_attn_metadata
        num_reqs = common.num_reqs
        assert common.seq_lens_cpu_upper_bound is not None and common.positions is not None
        query_start_loc_np = common.query_start_loc_cpu[: num_reqs + 1].numpy()
        query_lens = np.diff(query_start_loc_np)
        seq_lens_np = common.seq_lens_cpu_upper_bound[:num_reqs].numpy()
        num_tokens = int(query_start_loc_np[-1])
        no_drafts = np.zeros_like(query_lens)
        flags = batch_flags(seq_lens_np - query_lens, query_lens, no_drafts, seq_lens_np)
        state = attention_state(flags, self.chunked_prefill)
        max_seq_len = int(seq_lens_np.max())
        plan = self._plan(state, num_tokens, max_seq_len, bool(common.causal))
        block_table = common.block_table_tensor[:num_reqs]
        if self._kernel_blocks is not None:
            block_table = self._kernel_blocks.of(block_table)
        return AscendMetadata(
            attn_state=state,
            attn_mask=self.masks.build(plan, common.positions[:num_tokens]),
            block_tables=block_table,
            slot_mapping=common.slot_mapping.to(torch.int32),
            query_start_loc=common.query_start_loc[: num_reqs + 1],
            query_start_loc_np=query_start_loc_np,
            seq_lens=common.seq_lens[:num_reqs],
            seq_lens_np=seq_lens_np,
            num_computed_tokens=common.compute_num_computed_tokens()[:num_reqs],
            num_reqs=int(np.count_nonzero(query_lens)),
            max_query_len=common.max_query_len,
            max_seq_len=max_seq_len,
            num_actual_tokens=num_tokens,
            num_input_tokens=common.num_actual_tokens,
            sliding_window=plan.sliding_window,
            causal=bool(common.causal),
        )


class AscendAttentionImpl(AttentionImpl[AscendMetadata]):
    """The attention of one layer: it writes K and V, then attends, both through the kernel family.

    Raises
    ------
    PrepError
        If the layer asks for attention that the kernels don't have.
    """

    can_return_lse_for_decode = True
    supports_dcp = True
    supports_pcp = True

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        **unsupported: Any,
    ) -> None:
        asked = [name for name, value in unsupported.items() if value is not None]
        asked += ["alibi_slopes"] * (alibi_slopes is not None)
        asked += [f"attn_type {attn_type}"] * (attn_type not in ATTN_TYPES)
        if asked:
            raise PrepError(
                f"attention with {', '.join(asked)} is not supported by vllm_npu_prep: its kernels "
                "have causal attention over K and V and encoders' attention, in full, in windows "
                "or in chunks; use another model"
            )
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = scale
        self.num_kv_heads = num_kv_heads or num_heads
        self.kv_cache_dtype = kv_cache_dtype
        self.sliding_window = sliding_window
        self.attention_chunk_size: int | None = None  # `unwrap_backends` sets it from the layer
        self.shares_kv = kv_sharing_target_layer_name is not None
        self.has_cache = attn_type == AttentionType.DECODER
        self.layer_shape = LayerShape(
            num_heads, self.num_kv_heads, head_size, scale, logits_soft_cap
        )
        config = get_current_vllm_config()
        self.kernels = make_kernels(decisions_of(config).attention, limits_batches(config))
        if self.shares_kv and not self.kernels.family.kv_sharing:
            raise PrepError(
                f'layers that share K and V do not run with "{self.kernels.family.name}" kernels: '
                'use {"npu_prep": {"attention": "fia"}}'
            )

    def forward(
        self,
        layer: Any,  # vLLM's `Attention`, of which its protocol has only a part
        query: torch.Tensor,  # [num_input_tokens, num_heads, head_size]
        key: torch.Tensor | None,  # [num_input_tokens, num_kv_heads, head_size]
        value: torch.Tensor | None,
        # [2, num_blocks, block_size, num_kv_heads, head_size]; empty for encoder-only layers
        kv_cache: torch.Tensor,
        attn_metadata: AscendMetadata | None,
        output: torch.Tensor,  # [num_input_tokens, num_heads, head_size]
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Compute a layer's attention. Padding is never cached, and is attended to in full graphs
        only."""
        del output_scale, output_block_scale
        if attn_metadata is None:  # no cache exists yet, or a piecewise graph is being captured
            return output.zero_()
        assert attn_metadata.sliding_window == self.sliding_window, "metadata of another window"
        chunk_size = attn_metadata.attention_chunk_size
        assert chunk_size == self.attention_chunk_size, "metadata of other chunks"
        num_tokens = attn_metadata.num_attended_tokens
        query = query[:num_tokens].contiguous()
        own = None
        if attn_metadata.gathers:  # attention finds all of them in the cache
            assert key is not None and value is not None and attn_metadata.slot_mapping is not None
            keys, values = gather_tokens((key, value))
            self.kernels.write_kv(keys, values, kv_cache, attn_metadata.slot_mapping)
            if not num_tokens:  # the step's few tokens are those of other ranks
                return output.zero_()
        elif key is not None and value is not None and not self.shares_kv:
            own = key[:num_tokens].contiguous(), value[:num_tokens].contiguous()
            if self.has_cache:
                assert attn_metadata.slot_mapping is not None
                slots = attn_metadata.slot_mapping[:num_tokens]
                self.kernels.write_kv(*own, kv_cache, slots)
        attended = output[:num_tokens]
        if attn_metadata.shared is not None:
            assert own is not None, "shared contexts beside shared K and V"
            given = self.kernels, query, own, kv_cache, attn_metadata.shared
            attend_dcp(*given, self.layer_shape, attended, get_dcp_group())
            if num_tokens < len(output):
                output[num_tokens:].zero_()
            return output
        if attn_metadata.tasks is not None:
            call = AttentionCall(
                str(layer.layer_name),
                self.kernels,
                query,
                kv_cache,
                self.layer_shape,
                attended,
            )
            attn_metadata.tasks.capture(call, attn_metadata)
            return output
        self.kernels.attend(query, own, kv_cache, attn_metadata, self.layer_shape, attended)
        if num_tokens < len(output):
            output[num_tokens:].zero_()
        return output
