"""Sparse attention (DeepSeek V3.2, GLM-5): an indexer chooses the rows to which a token attends.

An indexer has a cache of its own beside the latent rows: one key of each token, in the same slots.
vLLM's indexer rounds queries and keys to fp8 and calls kernels of CUDA. `LightningIndexer` has its
weights and its config, and keeps keys in the model's dtype. Its one operator writes the step's
keys, scores all positions, and writes what was chosen to a buffer which the attention of the layer
reads, and so does that of further layers that have no indexer of their own.
"""

from collections.abc import Callable
from typing import Any

import torch
from vllm.config import get_current_vllm_config
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention.kv_transfer_utils import maybe_transfer_kv_layer
from vllm.model_executor.layers.rotary_embedding import get_rope
from vllm.model_executor.models.deepseek_v2 import DeepseekV32IndexerCache, Indexer
from vllm.utils.torch_utils import (
    LayerNameType,
    _encode_layer_name,
    _resolve_layer_name,
    direct_register_custom_op,
)
from vllm.v1.attention.backend import AttentionBackend, AttentionImplBase

from vllm_npu_prep.attention.backend import AscendAttentionBackend
from vllm_npu_prep.attention.kernels.sparse import IndexShape, make_sparse_kernels
from vllm_npu_prep.attention.metadata import AscendMetadata
from vllm_npu_prep.attention.mla import (
    AscendMLABackend,
    AscendMLAImpl,
    AscendMLAMetadataBuilder,
    MLALayerMetadata,
)
from vllm_npu_prep.attention.prefill_context_parallel import gather_tokens
from vllm_npu_prep.config import decisions_of
from vllm_npu_prep.prep.latent_split import NO_LATENT_SPLIT


class AscendSparseMLABackend(AscendMLABackend):
    """What vLLM asks of latent attention over chosen rows."""

    @staticmethod
    def get_impl_cls() -> type[AttentionImplBase]:
        return AscendSparseMLAImpl

    @staticmethod
    def get_builder_cls() -> type["AscendSparseMLAMetadataBuilder"]:
        return AscendSparseMLAMetadataBuilder

    @classmethod
    def is_sparse(cls) -> bool:
        return True


class AscendSparseMLAMetadataBuilder(AscendMLAMetadataBuilder):
    """Builds metadata without halves: prefills attend over latent rows, too."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.latent = NO_LATENT_SPLIT


class AscendSparseMLAImpl(AscendMLAImpl):
    """The attention of one layer over the latent rows of chosen positions."""

    is_sparse = True
    supports_dense_mha_prefill = False
    supports_dcp = False

    def __init__(
        self,
        *args: Any,
        topk_indices_buffer: torch.Tensor,  # [max_num_batched_tokens, index_topk] int32
        index_group_builder: Any = None,
        indexer: Any = None,
        **kwargs: Any,
    ) -> None:
        del index_group_builder  # vLLM's translation of positions to slots on a CUDA stream
        super().__init__(*args, **kwargs)
        self.chosen = topk_indices_buffer  # what the indexer of this or an earlier layer wrote
        self._indexer = indexer
        self.sparse = make_sparse_kernels(self.kernels.family.name)

    def record_logical_topk_ready(self) -> None:
        """Do nothing: what was chosen is read on the stream that wrote it."""

    def forward_mqa(
        self,
        q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: MLALayerMetadata,
        layer: Any,
    ) -> tuple[torch.Tensor, None]:
        """Attend with all tokens; the output is zero where attention sees no token."""
        del layer
        assert isinstance(q, tuple)
        assert self._indexer is None or self._indexer.topk_indices_buffer is self.chosen
        step = attn_metadata.step
        seen, num_tokens = step.num_attended_tokens, len(q[0])
        query, query_rope = (part[:seen].contiguous() for part in q)
        if not seen:  # the step's few tokens are those of other ranks
            return torch.zeros_like(q[0]), None
        planes = self._planes(kv_c_and_k_pe_cache)
        given = query, query_rope, planes, self.chosen[:seen], step, self.shape
        output = self.sparse.attend_chosen(*given)
        if seen < num_tokens:
            output = torch.nn.functional.pad(output, (0, 0, 0, 0, 0, num_tokens - seen))
        return output, None


class AscendIndexerBackend(AscendAttentionBackend):
    """What vLLM asks of an indexer's cache, whose steps are prepared as those of attention are."""

    @classmethod
    def is_mla(cls) -> bool:
        return True


class IndexKeys(DeepseekV32IndexerCache):
    """The cache of an indexer, one key of each token in the model's dtype, and its kernels."""

    def __init__(self, shape: IndexShape, *args: Any) -> None:
        super().__init__(shape.head_dim, *args)
        self.shape = shape
        self.kernels = make_sparse_kernels(decisions_of(get_current_vllm_config()).attention)
        # Called with the cache's name, what was chosen, and the metadata (`observe.choices`)
        self.watch_choices: Callable[[str, torch.Tensor, AscendMetadata], None] | None = None

    def bind_kv_cache(self, kv_cache: torch.Tensor) -> None:
        """Keep the cache: one plane, ``[1, num_blocks, block_size, 1, head_dim]``."""
        self.kv_cache = kv_cache

    def get_attn_backend(self) -> type[AttentionBackend]:
        return AscendIndexerBackend

    def choosing_bytes(self, max_seq_len: int, num_tokens: int) -> int:
        """Return the most bytes that choosing takes, in steps of up to `num_tokens` tokens."""
        return self.kernels.choosing_bytes(self.shape, max_seq_len, num_tokens)

    def choose(
        self,
        query: torch.Tensor,  # [T, H, D]
        keys: torch.Tensor,  # [T, D]
        weights: torch.Tensor,  # [T, H]
        chosen: torch.Tensor,  # [max_num_batched_tokens, index_topk] int32, written
    ) -> None:
        """Write the step's keys, and choose; without metadata, as in a dummy run, do nothing."""
        by_layer: Any = get_forward_context().attn_metadata
        if not isinstance(by_layer, dict):
            return
        metadata: AscendMetadata = by_layer[self.prefix]
        seen, (plane,) = metadata.num_attended_tokens, self.kv_cache
        (keys,) = gather_tokens((keys,)) if metadata.gathers else (keys[:seen].contiguous(),)
        self.kernels.write_keys(keys, plane, metadata)
        if not seen:  # the step's few tokens are those of other ranks
            return
        queries = query[:seen].contiguous(), weights[:seen].contiguous()
        self.kernels.choose(*queries, plane, metadata, chosen[:seen])
        if self.watch_choices is not None:
            self.watch_choices(self.prefix, chosen[:seen], metadata)


class LightningIndexer(Indexer):
    """vLLM's indexer with keys that are not rounded, and the kernels of this plugin."""

    k_cache: Any
    topk_indices_buffer: torch.Tensor

    def __init__(self, vllm_config: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        """Make vLLM's indexer, and put another cache in the place of its own."""
        super().__init__(vllm_config, config, *args, **kwargs)
        del self.indexer_op
        name, of_vllm = self.k_cache.prefix, self.k_cache
        del vllm_config.compilation_config.static_forward_context[name]
        dtype = vllm_config.model_config.dtype
        shape = IndexShape(self.n_head, self.head_dim, self.topk_tokens, dtype.itemsize)
        self.k_cache = IndexKeys(shape, dtype, name, of_vllm.cache_config)
        # As vLLM's for this layer, which rotates the first part of a head cut out of it
        self.rotary = get_rope(
            self.head_dim,
            max_position=config.max_position_embeddings,
            rope_parameters={**config.rope_parameters, "rope_dim": self.rope_dim},
            is_neox_style=not getattr(config, "indexer_rope_interleave", False),
        )

    def forward(
        self,
        hidden_states: torch.Tensor,  # [T, hidden_size]
        qr: torch.Tensor,  # [T, q_lora_rank]: the layer's latent queries
        positions: torch.Tensor,  # [T]
        rotary_emb: Any,
    ) -> torch.Tensor:
        """Choose positions for each token, and return the buffer that has them."""
        del rotary_emb
        query = self.wq_b(qr)[0].view(-1, self.n_head, self.head_dim)
        keys_weights = self.wk_weights_proj(hidden_states)[0]
        keys, weights = keys_weights.split([self.head_dim, self.n_head], -1)
        query, keys = self.rotary(positions, query, self.k_norm(keys).unsqueeze(1))
        torch.ops.vllm.npu_prep_choose_positions(
            query,
            keys.squeeze(1),
            weights,  # vLLM scales them; a factor of all changes no choice
            self.topk_indices_buffer,
            _encode_layer_name(self.k_cache.prefix),
        )
        return self.topk_indices_buffer


@maybe_transfer_kv_layer
def choose_positions(
    query: torch.Tensor,
    keys: torch.Tensor,
    weights: torch.Tensor,
    chosen: torch.Tensor,
    layer_name: LayerNameType,
) -> None:
    """Call `IndexKeys.choose` of the cache with this name; torch.compile splits the model here.

    vLLM's decorator lets KV connectors load the cache before it and store it afterwards.
    """
    cache: Any = get_forward_context().no_compile_layers[_resolve_layer_name(layer_name)]
    cache.choose(query, keys, weights, chosen)


def _choose_positions_fake(
    query: torch.Tensor,
    keys: torch.Tensor,
    weights: torch.Tensor,
    chosen: torch.Tensor,
    layer_name: LayerNameType,
) -> None: ...


direct_register_custom_op(
    op_name="npu_prep_choose_positions",
    op_func=choose_positions,
    mutates_args=["chosen"],
    fake_impl=_choose_positions_fake,
)
