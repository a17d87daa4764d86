"""Attention of vision towers by one operator, whose lengths never leave the host.

vLLM computes the lengths of images on the host and sends them to the device. Its own form for
devices without a kernel reads them back in each layer, to attend image by image.
"""

from itertools import pairwise
from typing import Any

import numpy as np
import torch
from vllm.model_executor.layers.attention.mm_encoder_attention import MMEncoderAttention

from vllm_npu_prep.ops.npu.switches import is_fused

MAX_LENGTHS = 1024
"""How many sequences a call in the layout TND takes (op-plugin's documentation)."""

MAX_HEADS = 256
MAX_HEAD_SIZE = 768
MAX_TOKENS = 1 << 20


class FusedMMEncoderAttention(MMEncoderAttention):
    """Attention in which each token sees all tokens of its own image, window or frame."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._is_fused = (
            is_fused("vision_attention")
            and self.num_heads <= MAX_HEADS
            and self.head_size <= MAX_HEAD_SIZE
        )

    @classmethod
    def maybe_compute_seq_lens(cls, *args: Any, **kwargs: Any) -> None:
        """Return None: cumulative lengths say it all."""

    @classmethod
    def maybe_recompute_cu_seqlens(
        cls,
        attn_backend: Any,
        cu_seqlens: np.ndarray,  # [sequences + 1], cumulative from 0
        hidden_size: int,
        tp_size: int,
        device: torch.device,
        fp8_padded_hidden_size: int | None = None,
    ) -> torch.Tensor:
        """Return cumulative lengths, int32, on the host, where each layer reads them."""
        del attn_backend, hidden_size, tp_size, device, fp8_padded_hidden_size
        return torch.from_numpy(np.ascontiguousarray(cu_seqlens, dtype=np.int32))

    def forward_oot(
        self,
        query: torch.Tensor,  # [B, S, N * D] or [B, S, N, D]
        key: torch.Tensor,  # [B, Skv, Nkv * D] or [B, Skv, Nkv, D]
        value: torch.Tensor,  # the same
        cu_seqlens: torch.Tensor | None = None,  # [sequences + 1]; None: B sequences
        max_seqlen: torch.Tensor | None = None,
        sequence_lengths: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend in one launch for up to `MAX_LENGTHS` sequences."""
        del max_seqlen, sequence_lengths
        batch, query_len = query.shape[:2]
        if not self._is_fused or max(batch * query_len, batch * key.shape[1]) > MAX_TOKENS:
            return self.forward_native(query, key, value, cu_seqlens)
        if cu_seqlens is None:
            ends = [query_len * (row + 1) for row in range(batch)]
            key_ends = [key.shape[1] * (row + 1) for row in range(batch)]
        else:
            ends = key_ends = cu_seqlens.tolist()[1:]
        packed = [
            each.reshape(-1, heads, self.head_size).contiguous()
            for each, heads in (
                (query, self.num_heads),
                (key, self.num_kv_heads),
                (value, self.num_kv_heads),
            )
        ]
        return self._attend(packed, ends, key_ends).view(query.shape)

    def _attend(
        self, packed: list[torch.Tensor], ends: list[int], key_ends: list[int]
    ) -> torch.Tensor:
        firsts = [*range(0, len(ends), MAX_LENGTHS), len(ends)]
        outputs = []
        for first, last in pairwise(firsts):
            start, key_start = ([0, *each][first] for each in (ends, key_ends))
            tokens, keys = slice(start, ends[last - 1]), slice(key_start, key_ends[last - 1])
            query, key, value = packed
            outputs.append(
                torch.ops.npu.npu_fusion_attention(
                    query[tokens],
                    key[keys],
                    value[keys],
                    self.num_heads,
                    "TND",
                    scale=self.scale,
                    actual_seq_qlen=[end - start for end in ends[first:last]],
                    actual_seq_kvlen=[end - key_start for end in key_ends[first:last]],
                )[0]
            )
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)
