"""MLA in its absorbed form: attention of many query heads over one head of latent rows.

The cache keeps one row for each token, its latent vector and its rotated key side by side. vLLM's
layer projects queries into the space of these rows, and the result out of it. In between is plain
attention with one K/V head, whose value is the latent part of the same row. So the states, masks
and kernels of standard attention serve MLA, for prompts and decodes. (vLLM's own backends expand
the latent rows of prompts instead, which takes fewer operations for long prompts.)
"""

from dataclasses import dataclass
from typing import Any

import torch
from vllm.v1.attention.backend import (
    AttentionImplBase,
    AttentionMetadata,
    AttentionType,
    CommonAttentionMetadata,
    MLAAttentionImpl,
)

from vllm_npu_prep.attention.backend import AscendAttentionBackend, AscendMetadataBuilder
from vllm_npu_prep.attention.kernels import LayerShape, make_kernels
from vllm_npu_prep.attention.metadata import AscendMetadata
from vllm_npu_prep.config import decisions_of


@dataclass
class MLALayerMetadata(AttentionMetadata):
    """A step as vLLM's MLA layer reads it: every token takes the path of decodes.

    The layer cuts its tensors at ``num_actual_tokens`` and doesn't write the rest of its output. We
    report all tokens, so nothing is cut: the step decides which tokens attention sees, and the
    output of all others is zero.
    """

    step: AscendMetadata
    num_prefills: int = 0

    @property
    def num_actual_tokens(self) -> int:
        """Tokens that the layer hands over: all."""
        return self.step.num_input_tokens

    @property
    def num_decode_tokens(self) -> int:
        """Tokens that take the path of decodes: all."""
        return self.step.num_input_tokens

    @property
    def num_decodes(self) -> int:
        """Requests that attention sees."""
        return len(self.step.seq_lens_np)

    @property
    def decode(self) -> AscendMetadata:
        """The layer takes the path of decodes if this is not None."""
        return self.step


class AscendMLABackend(AscendAttentionBackend):
    """vLLM's view of this plugin's attention over latent rows."""

    forward_includes_kv_cache_update = False

    @staticmethod
    def get_impl_cls() -> type[AttentionImplBase]:
        """Class of a layer's attention."""
        return AscendMLAImpl

    @staticmethod
    def get_builder_cls() -> type["AscendMLAMetadataBuilder"]:
        """Class of the metadata builder."""
        return AscendMLAMetadataBuilder

    @classmethod
    def is_mla(cls) -> bool:
        """It serves vLLM's MLA layers, and no others."""
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        """Unsupported: latent rows have no cache with a window."""
        return False

    @classmethod
    def supports_non_causal(cls) -> bool:
        """Unsupported: attention over latent rows is causal."""
        return False


class AscendMLAMetadataBuilder(AscendMetadataBuilder):
    """Builds the same `AscendMetadata`; layers get it as `MLALayerMetadata`."""

    def for_layers(self, metadata: AscendMetadata) -> MLALayerMetadata:
        """The metadata of a prepared step in the form that MLA layers read."""
        return MLALayerMetadata(metadata)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> Any:
        """Metadata from vLLM's common metadata, as a `MLALayerMetadata`."""
        metadata = super().build(common_prefix_len, common_attn_metadata, fast_build)
        return self.for_layers(metadata)


class AscendMLAImpl(MLAAttentionImpl[MLALayerMetadata]):
    """One layer's attention over latent rows, through the kernel family."""

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
        kv_lora_rank: int,
        **dimensions: Any,
    ) -> None:
        del dimensions  # vLLM's layer projects
        assert num_kv_heads == 1 and attn_type == AttentionType.DECODER
        extras = alibi_slopes, sliding_window, logits_soft_cap, kv_sharing_target_layer_name
        assert extras == (None,) * 4, "vLLM's MLA layer has none of these"
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = scale
        self.num_kv_heads = 1
        self.kv_cache_dtype = kv_cache_dtype
        self.kv_lora_rank = kv_lora_rank
        self.layer_shape = LayerShape(num_heads, 1, head_size, scale)
        self.kernels = make_kernels(decisions_of(None).attention)

    def do_kv_cache_update(
        self,
        kv_c_normed: torch.Tensor,  # [num_input_tokens, kv_lora_rank]
        k_pe: torch.Tensor,  # [num_input_tokens, 1, qk_rope_head_dim]
        kv_cache: torch.Tensor,  # [1, num_blocks, block_size, 1, head_size]
        slot_mapping: torch.Tensor,  # [num_input_tokens], padding below 0
        kv_cache_dtype: str,
        k_scale: torch.Tensor,
    ) -> None:
        """Write the step's rows."""
        del kv_cache_dtype, k_scale
        if kv_cache.numel() == 0:  # no cache exists yet
            return
        rows = torch.cat([kv_c_normed.unsqueeze(1), k_pe], dim=-1)
        self.kernels.write_kv(rows, rows, kv_cache, slot_mapping.to(torch.int32))

    def forward_mqa(
        self,
        # [num_input_tokens, num_heads, kv_lora_rank] and rope; one tensor on other backends only
        q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        kv_c_and_k_pe_cache: torch.Tensor,  # [1, num_blocks, block_size, 1, head_size]
        attn_metadata: MLALayerMetadata,
        layer: Any,
    ) -> tuple[torch.Tensor, None]:
        """Attend over the cache, which has the step's own rows already.

        Returns
        -------
        torch.Tensor
            ``[num_input_tokens, num_heads, kv_lora_rank]``, zero where attention sees no token.
        None
            No log-sum-exp: nothing is merged.
        """
        del layer
        step = attn_metadata.step
        assert isinstance(q, tuple)
        query = torch.cat(q, dim=-1)
        output = torch.zeros_like(query)
        seen = slice(0, step.num_attended_tokens)
        self.kernels.attend(
            query[seen], None, None, kv_c_and_k_pe_cache, step, self.layer_shape, output[seen]
        )
        return output[..., : self.kv_lora_rank], None
