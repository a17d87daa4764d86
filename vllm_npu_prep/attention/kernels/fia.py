"""The fused infer attention family (A2, A3): one operator for every state, compressed masks.

Sources: the schema and docstring of ``torch_npu.npu_fused_infer_attention_score``; its use in the
TND layout with a block table follows what the Ascend community runs (the docstring is stricter; to
be confirmed on hardware).
"""

import torch
import torch_npu

from vllm_npu_prep.attention.families import FIA
from vllm_npu_prep.attention.kernels import LayerShape
from vllm_npu_prep.attention.metadata import AscendMetadata
from vllm_npu_prep.prep.state import AttentionState

NO_MASK_MODE = 0  # sparse_mode without a mask
CAUSAL_MODE = 3  # rightDownCausal: the constant's diagonal lies on the lower right corner


class FiaKernels:
    """`vllm_npu_prep.attention.kernels.AttentionKernels` on ``npu_fused_infer_attention_score``."""

    family = FIA

    def write_kv(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Write K and V; the default ``cache_mode`` is the layout of 310P, so name this one."""
        torch_npu.npu_scatter_pa_kv_cache(
            key, value, kv_cache[0], kv_cache[1], slot_mapping, cache_mode="Norm"
        )

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        kv_cache: torch.Tensor,
        metadata: AscendMetadata,
        layer: LayerShape,
        output: torch.Tensor,
    ) -> None:
        """Attend over the step's own K and V where nothing is cached, else over the cache.

        Lengths are host lists: of queries cumulative; of K and V cumulative where they are fresh,
        and one for each request where they are paged.
        """
        query_ends, seq_lens = _host_lengths(metadata)
        if key is not None and metadata.attn_state == AttentionState.PrefillNoCache:
            paged = {}
            kv_lengths = query_ends
        else:
            key, value = (plane.flatten(2) for plane in kv_cache)
            paged = {"block_table": metadata.block_tables, "block_size": kv_cache.shape[2]}
            kv_lengths = seq_lens
        attended, _ = torch_npu.npu_fused_infer_attention_score(
            query,
            key,
            value,
            atten_mask=metadata.attn_mask,
            sparse_mode=NO_MASK_MODE if metadata.attn_mask is None else CAUSAL_MODE,
            input_layout="TND",
            actual_seq_lengths=query_ends,
            actual_seq_lengths_kv=kv_lengths,
            num_heads=layer.num_heads,
            num_key_value_heads=layer.num_kv_heads,
            scale=layer.scale,
            **paged,
        )
        output.copy_(attended.view_as(output))


def _host_lengths(metadata: AscendMetadata) -> tuple[list[int], list[int]]:
    """Cumulative query lengths and sequence lengths as lists, made once for all layers."""
    if metadata.kernel_plan is None:
        metadata.kernel_plan = (
            metadata.query_start_loc_np[1:].tolist(),
            metadata.seq_lens_np.tolist(),
        )
    return metadata.kernel_plan
