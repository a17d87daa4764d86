"""The fused infer attention family (A2, A3): one operator for every state, compressed masks.

Sources: the schema and docstring of ``torch_npu.npu_fused_infer_attention_score``; its use in the
TND layout with a block table follows what the Ascend community runs (the docstring is stricter; to
be confirmed on hardware).
"""

from typing import Any

import torch
import torch_npu

from vllm_npu_prep.attention.families import FIA
from vllm_npu_prep.attention.kernels import AttentionCall, LayerShape
from vllm_npu_prep.attention.metadata import AscendMetadata
from vllm_npu_prep.prep.state import AttentionState

NO_MASK_MODE = 0  # sparse_mode without a mask
CAUSAL_MODE = 3  # rightDownCausal: the constant's diagonal lies on the lower right corner
BAND_MODE = 4  # the same with a lower limit, `pre_tokens` before the diagonal


class FiaKernels:
    """`vllm_npu_prep.attention.kernels.AttentionKernels` on ``npu_fused_infer_attention_score``."""

    family = FIA
    workspace_serves_all_lengths = True

    def __init__(self) -> None:
        self._kv_cache: torch.Tensor | None = None
        self._no_lse: torch.Tensor | None = None

    def write_kv(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Write K and V; ``cache_mode`` is given because its default is the layout of 310P."""
        key_cache, value_cache = self._planes(kv_cache)
        torch_npu.npu_scatter_pa_kv_cache(
            key, value, key_cache, value_cache, slot_mapping, cache_mode="Norm"
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
        workspace: torch.Tensor | None = None,
    ) -> None:
        """Attend over the step's own K and V if nothing is cached, else over the cache."""
        if self._no_lse is None:
            self._no_lse = torch.empty(0, dtype=torch.float32, device=query.device)
        torch_npu.npu_fused_infer_attention_score.out(
            query,
            **self._arguments(key, value, kv_cache, metadata, layer),
            workspace=workspace,
            out=[output, self._no_lse],
        )

    def workspace(self, call: AttentionCall, metadata: AscendMetadata) -> torch.Tensor:
        """A workspace large enough for all lengths, in elements of the query's dtype."""
        return torch_npu._npu_fused_infer_attention_score_get_max_workspace(
            call.query,
            **self._arguments(None, None, call.kv_cache, metadata, call.layer),
        )

    def _arguments(
        self,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        kv_cache: torch.Tensor,
        metadata: AscendMetadata,
        layer: LayerShape,
    ) -> dict[str, Any]:
        """Arguments after the query.

        Lengths are host lists: those of queries are cumulative; those of K and V are cumulative for
        the step's own K and V, and one for each request if K and V are paged.
        """
        query_ends, seq_lens = _host_lengths(metadata)
        paged: dict[str, Any] = {}
        if key is not None and metadata.attn_state == AttentionState.PrefillNoCache:
            kv_lengths = query_ends
        else:
            planes = self._planes(kv_cache)
            key, value = self._flat
            paged = {"block_table": metadata.block_tables, "block_size": planes[0].shape[1]}
            kv_lengths = seq_lens
        return {
            "key": key,
            "value": value,
            "atten_mask": metadata.attn_mask,
            **_sparse_mode(metadata),
            "input_layout": "TND",
            "actual_seq_lengths": query_ends,
            "actual_seq_lengths_kv": kv_lengths,
            "num_heads": layer.num_heads,
            "num_key_value_heads": layer.num_kv_heads,
            "scale": layer.scale,
            **paged,
        }

    def _planes(self, kv_cache: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """K and V of the layer's cache, ``[num_blocks, block_size, num_kv_heads, head_size]``."""
        if self._kv_cache is not kv_cache:  # views cost a device's host several microseconds each
            self._kv_cache, self._kv = kv_cache, kv_cache.unbind()
            self._flat = [plane.flatten(2) for plane in self._kv]
        return self._kv


def _sparse_mode(metadata: AscendMetadata) -> dict[str, int]:
    """How the kernel applies the constant mask to queries and keys.

    Limits of a band are inclusive: with a window of W, a token sees W - 1 tokens before itself, and
    without causality also W - 1 after itself.
    """
    window = metadata.sliding_window
    if window is not None:
        ahead = 0 if metadata.causal else window - 1
        return {"sparse_mode": BAND_MODE, "pre_tokens": window - 1, "next_tokens": ahead}
    return {"sparse_mode": NO_MASK_MODE if metadata.attn_mask is None else CAUSAL_MODE}


def _host_lengths(metadata: AscendMetadata) -> tuple[list[int], list[int]]:
    """Cumulative query lengths and sequence lengths as lists, made once for all layers."""
    if metadata.kernel_plan is None:
        metadata.kernel_plan = (
            metadata.query_start_loc_np[1:].tolist(),
            metadata.seq_lens_np.tolist(),
        )
    return metadata.kernel_plan
