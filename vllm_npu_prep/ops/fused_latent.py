"""A layer of latent attention in few launches: 13 for a decode, without its MLP or experts.

vLLM's layer projects into tensors that are split into slices with gaps between rows, rotates a part
of each head in place, and transposes around its products with latent weights. Operators copy such
slices first. Here projections give each part as a tensor of its own, in one launch; for that, rows
of the queries' projection are put in the order of its parts when weights are loaded. Products of
heads with latent weights transpose by themselves.

``npu_mla_prolog`` to ``_v3`` would do all from the projection to the cache write in one launch.
Their demands don't fit (Ascend/op-plugin's documentation; ``mla_prolog_tiling_check.cpp`` in CANN's
published ops-transformer): slots inside of the cache, where padding of graphs has -1; weights in
the NZ layout, which prefills and loading don't have; bfloat16, a q_lora_rank of 1536 and listed
hidden sizes. So they are not used.
"""

from functools import partial
from typing import Any

import torch
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.mla import MultiHeadLatentAttentionWrapper
from vllm.utils.torch_utils import _encode_layer_name

from vllm_npu_prep.ops.fused import is_fused
from vllm_npu_prep.ops.fused_projection import NOT_GROUPED

MAX_INNER = 65536
"""The operator takes fewer heads times inner size than this."""


class FusedMultiHeadLatentAttentionWrapper(MultiHeadLatentAttentionWrapper):
    """vLLM's layer, whose projections give parts."""

    q_b_proj: Any  # None where the model has `q_proj`
    fused_qkv_a_proj: Any
    q_proj: Any
    kv_a_proj_with_mqa: Any
    q_a_layernorm: Any
    kv_a_layernorm: Any
    rotary_emb: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._is_fused = is_fused("latent") and self._suits()
        if not self._is_fused:
            return
        heads, size = self.num_heads, self.qk_head_dim
        by_head = torch.arange(heads * size).view(heads, size)
        parts = by_head.split([self.qk_nope_head_dim, self.qk_rope_head_dim], -1)
        order = torch.cat([part.flatten() for part in parts])
        of_queries = SplitProjection([part.numel() for part in parts], order)
        rows = [self.kv_lora_rank, self.qk_rope_head_dim]
        if self.q_lora_rank is not None:
            self.q_b_proj.quant_method = of_queries
            self.fused_qkv_a_proj.quant_method = SplitProjection([self.q_lora_rank, *rows])
        else:
            self.q_proj.quant_method = of_queries
            self.kv_a_proj_with_mqa.quant_method = SplitProjection(rows)
        # vLLM has no hook for the layer inside of this one
        attend = partial(attend_parts, self.mla_attn)
        self.mla_attn.forward_impl = attend  # type: ignore[method-assign]

    def _suits(self) -> bool:
        """Whether the model's layer is one whose parts these are."""
        if self.q_lora_rank is not None:
            projections = [self.q_b_proj, self.fused_qkv_a_proj]
        else:
            projections = [self.q_proj, self.kv_a_proj_with_mqa]
        extras = self.indexer, self.g_proj
        return (
            extras == (None, None)
            and not (self.is_sparse or self.dcp_q_replicate or self.fuse_qkv_rmsnorm)
            and self.rotary_emb is not None
            and all(
                type(each.quant_method) is UnquantizedLinearMethod
                and getattr(each, "bias", None) is None
                and each.params_dtype in (torch.float16, torch.bfloat16)
                for each in projections
            )
        )

    def forward(
        self,
        positions: torch.Tensor,
        hidden_states: torch.Tensor,  # [T, hidden_size]
        llama_4_scaling: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """As vLLM's."""
        if not self._is_fused:
            return super().forward(positions, hidden_states, llama_4_scaling)
        assert llama_4_scaling is None, "no model with latent attention scales its queries so"
        if self.q_lora_rank is not None:
            q_c, kv_c, k_pe = project(self.fused_qkv_a_proj, hidden_states)
            queries = project(self.q_b_proj, self.q_a_layernorm(q_c))
        else:
            kv_c, k_pe = project(self.kv_a_proj_with_mqa, hidden_states)
            queries = project(self.q_proj, hidden_states)
        latent = self.kv_a_layernorm(kv_c)
        heads = (len(hidden_states), self.num_heads, -1)
        query, query_rope = (part.view(heads) for part in queries)
        query_rope, key_rope = self.rotary_emb(positions, query_rope, k_pe.unsqueeze(1))
        output = self._attend(query, query_rope, latent, key_rope)
        return self.o_proj(output)[0]

    def _attend(
        self,
        query: torch.Tensor,  # [T, num_heads, qk_nope_head_dim]
        query_rope: torch.Tensor,  # [T, num_heads, qk_rope_head_dim], rotated
        latent: torch.Tensor,  # [T, kv_lora_rank]
        key_rope: torch.Tensor,  # [T, 1, qk_rope_head_dim], rotated
    ) -> torch.Tensor:
        """Write the cache and attend, as vLLM's layer inside does.

        Its operator has a place for a second tensor of queries: ours are the rotated halves.
        """
        attn: Any = self.mla_attn
        output = query.new_empty(len(query), self.num_heads * self.v_head_dim)
        if not attn.use_direct_call:
            name = _encode_layer_name(attn.layer_name)
            written = torch.ops.vllm.unified_mla_kv_cache_update(
                latent, key_rope, name, attn.kv_cache_dtype, attn._k_scale
            )
            torch.ops.vllm.unified_mla_attention_with_output(
                query,
                latent,
                key_rope,
                output,
                name,
                kv_cache_dummy_dep=written,
                q_dcp_replicated=query_rope,
            )
            return output
        context = get_forward_context()
        metadata: Any = context.attn_metadata
        if isinstance(metadata, dict):
            metadata = metadata[attn.layer_name]
        slots = context.slot_mapping
        assert isinstance(slots, dict)
        attn.update_kv_cache(
            latent,
            key_rope,
            attn.kv_cache,
            slots.get(attn.layer_name),
            metadata,
            attn.kv_cache_dtype,
            attn._k_scale,
        )
        attend_parts(
            attn,
            query,
            latent,
            key_rope,
            attn.kv_cache,
            metadata,
            output=output,
            q_dcp_replicated=query_rope,
        )
        return output


class SplitProjection(UnquantizedLinearMethod):
    """Weights of parts of a projection, as views of the layer's.

    Parameters
    ----------
    sizes
        Of each part, as this rank has it.
    order
        Rows of the weight in the order of the parts; None: they are.
    """

    def __init__(self, sizes: list[int], order: torch.Tensor | None = None) -> None:
        super().__init__()
        self.sizes, self.order = sizes, order

    def process_weights_after_loading(self, layer: Any) -> None:
        """As vLLM's; the operator wants weights ``[inner, columns]``."""
        super().process_weights_after_loading(layer)
        weight = layer.weight.data
        assert isinstance(weight, torch.Tensor)
        if self.order is not None:
            weight.copy_(weight[self.order.to(weight.device)])
        layer.part_weights = [part.t() for part in weight.split(self.sizes)]


def project(layer: Any, x: torch.Tensor) -> list[torch.Tensor]:
    """The parts of a projection, each contiguous, in one launch."""
    weights = layer.part_weights
    return torch.ops.npu.npu_grouped_matmul(
        [x] * len(weights), weights, split_item=0, group_type=NOT_GROUPED
    )


def attend_parts(
    attn: Any,  # vLLM's `MLAAttention`
    q: torch.Tensor,  # [T, num_heads, qk_nope_head_dim]
    k_c_normed: torch.Tensor,  # [T, kv_lora_rank]
    k_pe: torch.Tensor,  # [T, 1, qk_rope_head_dim]
    kv_cache: torch.Tensor,
    attn_metadata: Any,
    output: torch.Tensor,  # [T, num_heads * v_head_dim], written
    output_scale: torch.Tensor | None = None,
    output_block_scale: torch.Tensor | None = None,
    q_dcp_replicated: torch.Tensor | None = None,  # [T, num_heads, qk_rope_head_dim]
    **more: Any,
) -> torch.Tensor:
    """In place of ``MLAAttention.forward_impl``: queries come as two tensors.

    Parameters
    ----------
    attn
        The layer.
    q, q_dcp_replicated
        Queries, and their rotated halves.
    k_c_normed, k_pe, kv_cache, attn_metadata, output
        As vLLM's.
    output_scale, output_block_scale, more
        Of quantised results, which nothing here asks for.
    """
    del output_scale, output_block_scale, more
    if attn_metadata is None:  # no cache exists yet, or a piecewise graph is being captured
        return type(attn).forward_impl(
            attn, q, k_c_normed, k_pe, kv_cache, attn_metadata, output=output
        )
    assert q_dcp_replicated is not None
    seen = attn_metadata.num_actual_tokens
    if seen < len(q):  # a draft pass, padded to the size of a graph
        output[seen:].zero_()
        output, q, q_dcp_replicated = output[:seen], q[:seen], q_dcp_replicated[:seen]
        k_c_normed, k_pe = k_c_normed[:seen], k_pe[:seen]
    count = attn_metadata.num_decode_tokens
    if count < len(q):
        attn.impl.attend_prefills(
            q[count:],
            q_dcp_replicated[count:],
            k_c_normed[count:],
            k_pe[count:],
            kv_cache,
            attn_metadata,
            output[count:],
        )
    if count:
        query = multiply(q[:count], attn.W_UK_T)
        attended, _ = attn.impl.forward_mqa(
            (query, q_dcp_replicated[:count]), kv_cache, attn_metadata, attn
        )
        output[:count].copy_(multiply(attended, attn.W_UV).flatten(1))
    return output


def multiply(
    heads: torch.Tensor,  # [T, N, K]
    weights: torch.Tensor,  # [N, K, L]
) -> torch.Tensor:
    """Each head's rows times its weights, ``[T, N, L]``."""
    if weights.shape[0] * weights.shape[1] >= MAX_INNER:
        return torch.bmm(heads.transpose(0, 1), weights).transpose(0, 1).contiguous()
    return torch.ops.npu.npu_transpose_batchmatmul(
        heads, weights, perm_x1=[1, 0, 2], perm_x2=[0, 1, 2], perm_y=[1, 0, 2]
    )
