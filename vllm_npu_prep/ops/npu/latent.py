"""A layer of latent attention in few launches: 12 for a decode, without its MLP or experts.

vLLM's layer projects into tensors that are split into slices with gaps between rows, rotates a part
of each head in place, and transposes around its products with latent weights. Operators copy such
slices first. Here a projection gives each part as a tensor of its own, in one launch; for that, the
rows of the queries' projection are put in the order of its parts when weights are loaded. The
operator that multiplies heads by latent weights transposes by itself. int8 products have one result
only, whose parts are then copied one by one.

``npu_mla_prolog`` to ``_v3`` would do everything from the projection to the cache write in one
launch. They are not used, because their demands don't fit (Ascend/op-plugin's documentation;
``mla_prolog_tiling_check.cpp`` in CANN's published ops-transformer): slots inside of the cache,
where the padding of graphs has -1; weights in the NZ layout, which prefills and loading don't have;
bfloat16, a q_lora_rank of 1536 and listed hidden sizes.
"""

from functools import partial
from typing import Any, NamedTuple

import torch
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.mla import MultiHeadLatentAttentionWrapper
from vllm.utils.torch_utils import _encode_layer_name

from vllm_npu_prep.ops.npu.projection import NOT_GROUPED
from vllm_npu_prep.ops.npu.switches import is_fused

MAX_INNER = 65536
"""The operator takes products whose number of heads times inner size is below this."""


class FusedMultiHeadLatentAttentionWrapper(MultiHeadLatentAttentionWrapper):
    """vLLM's layer of latent attention, whose projections give their parts as separate tensors."""

    q_b_proj: Any  # None where the model has `q_proj`
    fused_qkv_a_proj: Any
    q_proj: Any
    kv_a_proj_with_mqa: Any
    q_a_layernorm: Any
    kv_a_layernorm: Any
    rotary_emb: Any
    refresh: Any  # function that splits new weights anew; only int8 ones have one

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.is_split = False
        self.may_be_split = is_fused("latent") and self._suits()
        if not self.may_be_split:
            return
        parts = self.parts()
        if all(type(each.layer.quant_method) is UnquantizedLinearMethod for each in parts):
            for each in parts:
                each.layer.quant_method = SplitProjection(each)
            self.use_parts()

    def parts(self) -> "list[ProjectionParts]":
        """Return what the layer's projections are split into; that of the queries comes last."""
        heads, size = self.num_heads, self.qk_head_dim
        by_head = torch.arange(heads * size).view(heads, size)
        halves = by_head.split([self.qk_nope_head_dim, self.qk_rope_head_dim], -1)
        order = torch.cat([half.flatten() for half in halves])
        of_queries, rows = [h.numel() for h in halves], [self.kv_lora_rank, self.qk_rope_head_dim]
        # Decodes want heads of zeros, too; the rotated halves' are projected with them, at no cost.
        attention: Any = self.mla_attn.impl
        zeros = (attention.decode_shape.num_heads - heads) * self.qk_rope_head_dim
        if self.q_lora_rank is not None:
            return [
                ProjectionParts(self.fused_qkv_a_proj, [self.q_lora_rank, *rows]),
                ProjectionParts(self.q_b_proj, of_queries, order, zeros),
            ]
        return [
            ProjectionParts(self.kv_a_proj_with_mqa, rows),
            ProjectionParts(self.q_proj, of_queries, order, zeros),
        ]

    def readers(self) -> list[Any]:
        return [each.layer for each in self.parts() if each.layer is not self.q_b_proj]

    def use_parts(self) -> None:
        """Let projections give parts from now on.

        Each projection must have ``part_weights`` and ``part_sizes`` by then.
        """
        self.is_split = True
        # vLLM has no hook for the layer inside of this one
        attend = partial(attend_parts, self.mla_attn)
        self.mla_attn.forward_impl = attend  # type: ignore[method-assign]

    def _suits(self) -> bool:
        return (
            self.g_proj is None
            and not (self.dcp_q_replicate or self.fuse_qkv_rmsnorm)
            and self.rotary_emb is not None
            and all(
                getattr(each.layer, "bias", None) is None
                and each.layer.params_dtype in (torch.float16, torch.bfloat16)
                for each in self.parts()
            )
        )

    def forward(
        self,
        positions: torch.Tensor,
        hidden_states: torch.Tensor,  # [T, hidden_size], or such rows rounded to int8
        llama_4_scaling: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if not self.is_split:
            return super().forward(positions, hidden_states, llama_4_scaling)
        assert llama_4_scaling is None, "no model with latent attention scales its queries so"
        if self.q_lora_rank is not None:
            q_c, kv_c, k_pe = project(self.fused_qkv_a_proj, hidden_states)
            q_c = self.q_a_layernorm(q_c)
            queries = project(self.q_b_proj, q_c)
            if self.indexer is not None and not self.skip_topk:
                self.indexer(hidden_states, q_c, positions, self.indexer_rope_emb)
        else:
            kv_c, k_pe = project(self.kv_a_proj_with_mqa, hidden_states)
            queries = project(self.q_proj, hidden_states)
        latent = self.kv_a_layernorm(kv_c)
        sizes = self.qk_nope_head_dim, self.qk_rope_head_dim
        query, query_rope = (p.view(len(latent), -1, size) for p, size in zip(queries, sizes))
        query_rope, key_rope = self.rotary_emb(positions, query_rope, k_pe.unsqueeze(1))
        output = self._attend(query, query_rope, latent, key_rope)
        return self.o_proj(output)[0]

    def _attend(
        self,
        query: torch.Tensor,  # [T, num_heads, qk_nope_head_dim]
        query_rope: torch.Tensor,  # [T, at least num_heads, qk_rope_head_dim], rotated
        latent: torch.Tensor,  # [T, kv_lora_rank]
        key_rope: torch.Tensor,  # [T, 1, qk_rope_head_dim], rotated
    ) -> torch.Tensor:
        """Write the cache and attend, as vLLM's inner layer does.

        vLLM's custom operator has an argument for a second tensor of queries, ``q_dcp_replicated``;
        the rotated halves are passed in it.
        """
        attn: Any = self.mla_attn
        if not attn.use_direct_call:
            output = query.new_empty(len(query), self.num_heads * self.v_head_dim)
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
        return attend_parts(
            attn, query, latent, key_rope, attn.kv_cache, metadata, q_dcp_replicated=query_rope
        )


def keep_weights_contiguous(model: torch.nn.Module) -> None:
    """Lay out the latent weights of a loaded model's layers as their operator reads them.

    vLLM keeps views of one projection's weights, and the operator would copy them in every step.
    The contiguous copies take as much memory as that projection does.
    """
    for module in model.modules():
        if isinstance(module, FusedMultiHeadLatentAttentionWrapper) and module.may_be_split:
            attn: Any = module.mla_attn
            for weight in (attn.W_UK_T, attn.W_UV):
                weight.data = weight.data.contiguous()


class ProjectionParts(NamedTuple):
    """What a projection's result is split into.

    Attributes
    ----------
    order
        The order into which the rows of the weight are put, so that parts are contiguous; None if
        they are already.
    """

    layer: Any  # vLLM's projection
    sizes: list[int]  # number of columns of each part on this rank
    order: torch.Tensor | None = None
    # Number of columns of zeros that are appended to the last part, if weights are float
    num_zeros: int = 0


class SplitProjection(UnquantizedLinearMethod):
    """The method of a projection that keeps views of its weight, one for each part."""

    def __init__(self, parts: ProjectionParts) -> None:
        super().__init__()
        self.parts = parts

    def process_weights_after_loading(self, layer: Any) -> None:
        super().process_weights_after_loading(layer)
        keep_part_weights(self.parts)


def keep_part_weights(parts: ProjectionParts) -> None:
    """Put the rows of a layer's weight in the order of its parts, and keep a view of each part."""
    layer, sizes, order, num_zeros = parts
    weight = layer.weight.data
    if order is not None:
        weight.copy_(weight[order.to(weight.device)])
    if num_zeros:
        padded = weight.new_zeros(len(weight) + num_zeros, weight.shape[1])
        padded[: len(weight)] = weight
        layer.weight.data = padded[: len(weight)]  # the size of the files' weight, for a reload
        weight, sizes = padded, [*sizes[:-1], sizes[-1] + num_zeros]
    layer.part_sizes, layer.part_weights = sizes, [part.t() for part in weight.split(sizes)]


def project(layer: Any, x: Any) -> list[torch.Tensor]:
    """Return the parts of a projection, each contiguous.

    Float weights take one launch. With int8 weights a copy of each part follows the product, which
    has a single result: ``npu_grouped_matmul`` refuses several int8 inputs with scales for each
    token (cann/ops-transformer 9.1.0, ``CheckPerTokenScale`` in ``aclnn_grouped_matmul.cpp``).
    """
    weights = layer.part_weights
    if weights is None:
        return split_columns(layer.quant_method.apply(layer, x, None), layer.part_sizes)
    return torch.ops.npu.npu_grouped_matmul(
        [x] * len(weights), weights, split_item=0, group_type=NOT_GROUPED
    )


def split_columns(rows: torch.Tensor, sizes: list[int]) -> list[torch.Tensor]:
    """Copy columns of rows ``[T, sum(sizes)]`` into tensors of their own.

    Each part is a launch, for up to 32 parts (op-plugin, ``SplitWithSizesCopyNpuOpApi.cpp``). The
    operators that read the parts would copy strided slices, too.
    """
    parts = [rows.new_empty(len(rows), size) for size in sizes]
    torch.ops.aten.split_with_sizes_copy.out(rows, sizes, -1, out=parts)
    return parts


def attend_parts(
    attn: Any,  # vLLM's `MLAAttention`
    q: torch.Tensor,  # [T, num_heads, qk_nope_head_dim]
    k_c_normed: torch.Tensor,  # [T, kv_lora_rank]
    k_pe: torch.Tensor,  # [T, 1, qk_rope_head_dim]
    kv_cache: torch.Tensor,
    attn_metadata: Any,
    output: torch.Tensor | None = None,  # [T, num_heads * v_head_dim], written
    output_scale: torch.Tensor | None = None,
    output_block_scale: torch.Tensor | None = None,
    q_dcp_replicated: torch.Tensor | None = None,  # [T, at least num_heads, qk_rope_head_dim]
    **more: Any,
) -> torch.Tensor:
    """Attend with queries in two tensors, in place of ``MLAAttention.forward_impl``.

    `q_dcp_replicated` are the queries' rotated halves, which may have the heads of zeros that
    decodes want. Without a tensor to write to, a step of decodes alone saves the copy into it.
    Arguments for quantised results, which nothing here asks for, are not read.
    """
    del output_scale, output_block_scale, more
    count = len(q) if attn_metadata is None else attn_metadata.num_decode_tokens
    is_whole = attn_metadata is not None and attn_metadata.num_actual_tokens == count == len(q)
    if output is None and not is_whole:
        output = q.new_empty(len(q), attn.num_heads * attn.v_head_dim)
    if attn_metadata is None:  # no cache exists yet, or a piecewise graph is being captured
        return type(attn).forward_impl(
            attn, q, k_c_normed, k_pe, kv_cache, attn_metadata, output=output
        )
    assert q_dcp_replicated is not None
    if output is None:
        return _attend_decodes(attn, q, q_dcp_replicated, kv_cache, attn_metadata)
    seen, whole = attn_metadata.num_actual_tokens, output
    if seen < len(q):  # a draft pass, padded to the size of a graph
        output[seen:].zero_()
        output, q, q_dcp_replicated = output[:seen], q[:seen], q_dcp_replicated[:seen]
        k_c_normed, k_pe = k_c_normed[:seen], k_pe[:seen]
    if count < len(q):
        attn.impl.attend_prefills(
            q[count:],
            q_dcp_replicated[count:, : q.shape[1]],
            k_c_normed[count:],
            k_pe[count:],
            kv_cache,
            attn_metadata,
            output[count:],
        )
    if count:
        rows = q[:count], q_dcp_replicated[:count]
        output[:count].copy_(_attend_decodes(attn, *rows, kv_cache, attn_metadata))
    return whole


def _attend_decodes(
    attn: Any, q: torch.Tensor, q_rope: torch.Tensor, kv_cache: torch.Tensor, attn_metadata: Any
) -> torch.Tensor:
    query = multiply(q, attn.W_UK_T), q_rope
    attended, _ = attn.impl.forward_mqa(query, kv_cache, attn_metadata, attn)
    return multiply(attended, attn.W_UV).flatten(1)


def multiply(
    heads: torch.Tensor,  # [T, N, K]
    weights: torch.Tensor,  # [N, K, L]
) -> torch.Tensor:
    """Multiply each head's rows by its weights, ``[T, N, L]``."""
    if weights.shape[0] * weights.shape[1] >= MAX_INNER:
        return torch.bmm(heads.transpose(0, 1), weights).transpose(0, 1).contiguous()
    return torch.ops.npu.npu_transpose_batchmatmul(
        heads, weights, perm_x1=[1, 0, 2], perm_x2=[0, 1, 2], perm_y=[1, 0, 2]
    )
