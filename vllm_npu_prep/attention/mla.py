"""Latent attention (MLA): decodes over latent rows, prefills over K and V projected from them.

The cache keeps the latent vector and the rotated key of each token, in two planes. For *decodes*,
vLLM's layer projects queries into the space of latent rows and the result out of it; in between is
attention of many query heads over one K/V head, the *absorbed* form. *Prefills* project latent rows
to K and V of every head, which takes fewer operations for many queries: first those of the step's
own tokens, then those of their context, chunk by chunk (`vllm_npu_prep.prep.latent_split`), merged
by their log-sum-exp.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.v1.attention.backend import (
    AttentionCGSupport,
    AttentionImplBase,
    AttentionMetadata,
    AttentionType,
    CommonAttentionMetadata,
    MLAAttentionImpl,
)
from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheSpec

from vllm_npu_prep.attention.backend import AscendAttentionBackend, AscendMetadataBuilder
from vllm_npu_prep.attention.fused_calls import limits_batches
from vllm_npu_prep.attention.kernels import Attended
from vllm_npu_prep.attention.kernels.latent import (
    LatentCall,
    LatentKernels,
    LatentShape,
    Planes,
    Projected,
    make_latent_kernels,
    planes_of,
    with_heads,
)
from vllm_npu_prep.attention.latent import (
    Halves,
    LatentArrays,
    Prefills,
    make_latent_split,
    split_metadata,
)
from vllm_npu_prep.attention.latent_dcp import attend_dcp_decodes, gather, share_halves
from vllm_npu_prep.attention.metadata import AscendMetadata
from vllm_npu_prep.config import decisions_of
from vllm_npu_prep.device.staging import StagedArrays
from vllm_npu_prep.prep.batch import PreparedStep
from vllm_npu_prep.prep.latent_split import LatentSplit, SplitArrays, split_prefills
from vllm_npu_prep.prep.mask import MaskPlan
from vllm_npu_prep.quantization.loaded import dequantize


@dataclass
class MLALayerMetadata(AttentionMetadata):
    """A step in the form that vLLM's MLA layer reads.

    The layer cuts its tensors at ``num_actual_tokens`` and doesn't write the rest of its output.
    Here that is the number of all tokens, so nothing is cut: `step` decides which tokens attention
    sees, and the output of all others is zero.
    """

    step: AscendMetadata
    tasks: Any = None  # where attention is captured (`vllm_npu_prep.graph.npu.AttentionTasks`)

    @property
    def _halves(self) -> Halves | None:
        return self.step.halves

    @property
    def num_actual_tokens(self) -> int:
        """Tokens that the layer hands over: all."""
        return self.step.num_input_tokens

    @property
    def num_decode_tokens(self) -> int:
        """Return the tokens on the path of decodes; without prefills all, padding included."""
        return self.step.num_input_tokens if self.prefill is None else self.prefill.first_token

    @property
    def num_decodes(self) -> int:
        return 0 if self.decode is None else len(self.decode.seq_lens_np)

    @property
    def num_prefills(self) -> int:
        return 0 if self.prefill is None else len(self.prefill.query_ends)

    @property
    def decode(self) -> AscendMetadata | None:
        """Return the decodes, or all requests if there are no prefills."""
        return self.step if self._halves is None else self._halves.decodes

    @property
    def prefill(self) -> Prefills | None:
        return None if self._halves is None else self._halves.prefills


class AscendMLABackend(AscendAttentionBackend):
    """What vLLM asks of this plugin's latent attention."""

    forward_includes_kv_cache_update = False

    @staticmethod
    def get_impl_cls() -> type[AttentionImplBase]:
        return AscendMLAImpl

    @staticmethod
    def get_builder_cls() -> type["AscendMLAMetadataBuilder"]:
        return AscendMLAMetadataBuilder

    @classmethod
    def is_mla(cls) -> bool:
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        """Return False: latent rows have no cache with a window."""
        return False

    @classmethod
    def supports_non_causal(cls) -> bool:
        return False


class AscendMLAMetadataBuilder(AscendMetadataBuilder):
    """Builds `AscendMetadata` with its halves; layers get it as `MLALayerMetadata`."""

    def __init__(
        self,
        kv_cache_spec: AttentionSpec,
        layer_names: list[str],
        vllm_config: VllmConfig,
        device: torch.device,
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._device = device
        self._init_reorder_batch_threshold(1, supports_spec_as_decode=True)
        assert self.reorder_batch_threshold is not None
        sizes = (
            self.reorder_batch_threshold,
            self.dcp.tokens_per_block(kv_cache_spec.block_size),
        )
        self.latent = make_latent_split(vllm_config, *sizes)

    @classmethod
    def get_cudagraph_support(
        cls, vllm_config: VllmConfig, kv_cache_spec: KVCacheSpec
    ) -> AttentionCGSupport:
        """Allow full graphs of decodes only, with or without drafts: prefills need values of the
        host."""
        support = super().get_cudagraph_support(vllm_config, kv_cache_spec)
        return min(support, AttentionCGSupport.UNIFORM_BATCH, key=lambda level: level.value)

    def for_layers(self, metadata: AscendMetadata) -> MLALayerMetadata:
        return MLALayerMetadata(metadata)

    def build_step(
        self,
        step: PreparedStep,
        group: int,
        staged: StagedArrays,
        block_table: torch.Tensor | None,
        masks: dict[MaskPlan, torch.Tensor | None],
    ) -> AscendMetadata:
        metadata = super().build_step(step, group, staged, block_table, masks)
        latent = step.latent
        if latent.num_prefills and not metadata.in_full_graph:
            sizes = latent.num_prefills + 1, *(latent.num_pieces,) * 4
            host, device = (
                LatentArrays(*(getattr(each, n)[:size] for n, size in zip(LATENT_ARRAYS, sizes)))
                for each in (staged.np, staged.device)
            )
            metadata.halves = split_metadata(metadata, latent.num_decodes, host, device)
        if self.dcp.world_size > 1:
            share_halves(metadata, self.dcp, staged)
        return metadata

    def _share(self, metadata: AscendMetadata, staged: StagedArrays) -> None:
        """Do nothing: `build_step` shares the halves once they are known."""

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> Any:
        metadata = super().build(common_prefix_len, common_attn_metadata, fast_build)
        if self.latent:
            num_decodes, arrays = split_common(metadata, self.latent)
            if num_decodes < len(metadata.seq_lens_np):
                tensors = [torch.from_numpy(each).to(self._device) for each in arrays]
                device = LatentArrays(*tensors)
                metadata.halves = split_metadata(metadata, num_decodes, arrays, device)
        return self.for_layers(metadata)


LATENT_ARRAYS = LatentArrays._fields


def split_common(
    metadata: AscendMetadata, latent: LatentSplit
) -> tuple[int, LatentArrays[np.ndarray]]:
    """Split a step that the runner has not prepared, such as a dummy run's.

    Return the number of decodes, which come first, and the split on the host, without padding.
    """
    num_reqs = len(metadata.seq_lens_np)
    most = latent.max_pieces(metadata.num_input_tokens, num_reqs)
    arrays = [np.empty(num_reqs + 1, np.int32), *(np.empty(most, np.int32) for _ in range(4))]
    computed = (metadata.seq_lens_np - metadata.query_lens).astype(np.int32)
    num_decodes, _, num_prefills, num_pieces, _ = split_prefills(
        SplitArrays(metadata.query_start_loc_np, computed, *arrays),
        num_reqs,
        latent.decode_threshold,
        latent.workspace_tokens,
        latent.block_size,
    )
    sizes = num_prefills + 1, *(num_pieces,) * 4
    return num_decodes, LatentArrays(*(each[:size] for each, size in zip(arrays, sizes)))


def attend_prefills(
    kernels: LatentKernels,
    shape: LatentShape,
    planes: Planes,
    own: Projected,
    prefills: Prefills,
    metadata: AscendMetadata,
    output: torch.Tensor,  # [num_tokens, num_heads, v_head_dim], written
    project: Callable[..., Projected],
) -> None:
    """Attend over a step's own K and V, then over contexts, which are merged chunk by chunk.

    Parameters
    ----------
    own
        Queries, keys and values of the prefills' tokens.
    output
        ``[num_tokens, num_heads, v_head_dim]``, written.
    project
        Takes both parts of queries, latent rows ``[S, kv_lora_rank]`` and rotated keys, and returns
        these queries with the keys and values that the rows stand for.
    """
    wants_lse = bool(prefills.chunks)
    attended = kernels.attend_prompts(own, prefills, metadata, shape, output, wants_lse)
    for chunk in prefills.chunks:
        latent, rope = gather(kernels, planes, chunk)
        queries = own.query[chunk.tokens], own.query_rope[chunk.tokens]
        given = project(*queries, latent.flatten(1), rope)
        context = kernels.attend_context(given, chunk, shape)
        so_far = Attended(attended.output[chunk.tokens], attended.lse[chunk.tokens])
        for part, merged in zip(so_far, kernels.merge(so_far, context)):
            part.copy_(merged)


class AscendMLAImpl(MLAAttentionImpl[MLALayerMetadata]):
    """The attention of one layer over latent rows, through the kernel family."""

    can_return_lse_for_decode = True
    supports_dcp = True

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None,
        sliding_window: int | None,
        kv_cache_dtype: str,
        logits_soft_cap: float | None,
        attn_type: str,
        kv_sharing_target_layer_name: str | None,
        q_lora_rank: int | None,
        kv_lora_rank: int,
        qk_nope_head_dim: int,
        qk_rope_head_dim: int,
        qk_head_dim: int,
        v_head_dim: int,
        kv_b_proj: Any,
        indexer: Any = None,
    ) -> None:
        del q_lora_rank, qk_head_dim, indexer  # vLLM's layer projects, and calls indexers
        assert num_kv_heads == 1 and attn_type == AttentionType.DECODER
        extras = alibi_slopes, sliding_window, logits_soft_cap, kv_sharing_target_layer_name
        assert extras == (None,) * 4, "vLLM's MLA layer has none of these"
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = scale
        self.num_kv_heads = 1
        self.kv_cache_dtype = kv_cache_dtype
        self.kv_b_proj = kv_b_proj
        self.shape = LatentShape(
            num_heads, kv_lora_rank, qk_rope_head_dim, qk_nope_head_dim, v_head_dim, scale
        )
        config = get_current_vllm_config()
        self.kernels = make_latent_kernels(decisions_of(config).attention, limits_batches(config))
        self.decode_shape = self.shape._replace(num_heads=self.kernels.decode_heads(num_heads))
        self._kv_cache: torch.Tensor | None = None
        # Else vLLM's layer would exchange queries and results, and merge them by Triton kernels
        self.dcp_world_size, self.dcp_rank = 1, 0

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Dequantise the weights that make K and V of latent rows; vLLM's layer reads them next.

        Decodes absorb these weights into queries and results, so the activations that they multiply
        can't be rounded. Prefills use the same numbers, so that a token has the same K and V in
        both halves of a step.
        """
        del act_dtype
        dequantize(self.kv_b_proj)

    def _planes(self, kv_cache: torch.Tensor) -> Planes:
        if self._kv_cache is not kv_cache:  # views cost a device's host several microseconds each
            self._kv_cache, self._of_cache = kv_cache, planes_of(kv_cache, self.shape)
        return self._of_cache

    def do_kv_cache_update(
        self,
        kv_c_normed: torch.Tensor,  # [num_input_tokens, kv_lora_rank]
        k_pe: torch.Tensor,  # [num_input_tokens, 1, qk_rope_head_dim]
        kv_cache: torch.Tensor,  # see `planes_of`
        slot_mapping: torch.Tensor,  # [num_input_tokens], padding below 0
        kv_cache_dtype: str,
        k_scale: torch.Tensor,
        skip_scale: bool = False,  # from vLLM 0.33 on
    ) -> None:
        del kv_cache_dtype, k_scale, skip_scale
        if kv_cache.numel() == 0:  # no cache exists yet
            return
        if len(slot_mapping) > len(kv_c_normed):
            return  # a run without attention, which gathers no tokens of other ranks: all padding
        latent, rope = kv_c_normed.unsqueeze(1).contiguous(), k_pe.contiguous()
        self.kernels.write(latent, rope, self._planes(kv_cache), slot_mapping.to(torch.int32))

    def forward_mqa(
        self,
        # [num_decode_tokens, num_heads, kv_lora_rank] and rope; one tensor on other backends only
        q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        kv_c_and_k_pe_cache: torch.Tensor,  # see `planes_of`
        attn_metadata: MLALayerMetadata,
        layer: Any,
    ) -> tuple[torch.Tensor, None]:
        """Attend with decodes over the cache, which has the step's own rows already.

        The output is ``[num_decode_tokens, num_heads, kv_lora_rank]``, zero where attention sees no
        token. There is no log-sum-exp, because nothing is left to merge.
        """
        assert isinstance(q, tuple)
        step = attn_metadata.decode
        assert step is not None
        if attn_metadata.step.shared is not None:
            planes, own = self._planes(kv_c_and_k_pe_cache), self.num_heads
            queries = [part[: step.num_attended_tokens, :own] for part in q]
            given = self.kernels, self.shape, planes, queries, attn_metadata.step.shared
            return attend_dcp_decodes(*given, len(q[0])), None
        query, query_rope = (with_heads(part, self.decode_shape.num_heads) for part in q)
        output, seen = torch.empty_like(query), step.num_attended_tokens
        if not seen:  # the step's few tokens are those of other ranks
            return output.zero_()[:, : self.num_heads], None
        planes = self._planes(kv_c_and_k_pe_cache)
        call = LatentCall(
            str(layer.layer_name),
            self.kernels,
            query[:seen],
            query_rope[:seen],
            planes,
            self.decode_shape,
            output[:seen],
        )
        if attn_metadata.tasks is not None:
            attn_metadata.tasks.capture(call, attn_metadata)
        else:
            call(attn_metadata)
        if seen < len(output):
            output[seen:].zero_()
        return output[:, : self.num_heads], None

    def forward_mha(
        self,
        q: torch.Tensor,  # [num_tokens, num_heads, qk_nope_head_dim + qk_rope_head_dim]
        kv_c_normed: torch.Tensor,  # [num_tokens, kv_lora_rank]
        k_pe: torch.Tensor,  # [num_tokens, 1, qk_rope_head_dim]
        kv_c_and_k_pe_cache: torch.Tensor,  # see `planes_of`
        attn_metadata: MLALayerMetadata,
        k_scale: torch.Tensor,
        output: torch.Tensor,  # [num_tokens, num_heads * v_head_dim], written
        output_scale: torch.Tensor | None = None,
    ) -> None:
        del k_scale, output_scale
        sizes = [self.shape.qk_nope_head_dim, self.shape.qk_rope_head_dim]
        query, query_rope = q.split(sizes, -1)
        self.attend_prefills(
            query, query_rope, kv_c_normed, k_pe, kv_c_and_k_pe_cache, attn_metadata, output
        )

    def attend_prefills(
        self,
        query: torch.Tensor,  # [num_tokens, num_heads, qk_nope_head_dim]
        query_rope: torch.Tensor,  # [num_tokens, num_heads, qk_rope_head_dim]
        latent: torch.Tensor,  # [num_tokens, kv_lora_rank]
        rope: torch.Tensor,  # [num_tokens, 1, qk_rope_head_dim]
        kv_cache: torch.Tensor,  # see `planes_of`
        attn_metadata: MLALayerMetadata,
        output: torch.Tensor,  # [num_tokens, num_heads * v_head_dim], written
    ) -> None:
        prefills, shape = attn_metadata.prefill, self.shape
        assert prefills is not None
        seen = prefills.num_tokens  # padding tokens come after them
        if seen < len(output):
            output[seen:].zero_()
        queries = query[:seen].contiguous(), query_rope[:seen].contiguous()
        attend_prefills(
            self.kernels,
            shape,
            self._planes(kv_cache),
            self._project(*queries, latent[:seen], rope[:seen]),
            prefills,
            attn_metadata.step,
            output[:seen].view(seen, shape.num_heads, -1),
            self._project,
        )

    def _project(
        self,
        query: torch.Tensor,
        query_rope: torch.Tensor,
        latent: torch.Tensor,
        rope: torch.Tensor,
    ) -> Projected:
        """Return the queries, with the K and V that latent rows stand for."""
        shape = self.shape
        projected = self.kv_b_proj(latent)[0].unflatten(1, (shape.num_heads, -1))
        key, value = projected.split([shape.qk_nope_head_dim, shape.v_head_dim], dim=-1)
        return Projected(query, query_rope, key, rope, value)
