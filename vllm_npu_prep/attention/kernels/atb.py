"""The ATB family (A2, A3): one operator per attention state, and dense masks.

Sources: the schemas of ``torch_npu._npu_flash_attention``, ``_npu_paged_attention`` and
``_npu_paged_attention_splitfuse``. They take lengths as host tensors.
"""

import torch
import torch_npu

from vllm_npu_prep.attention.families import ATB
from vllm_npu_prep.attention.kernels import AttentionCall, KeyValue, LayerShape
from vllm_npu_prep.attention.metadata import AscendMetadata
from vllm_npu_prep.prep.mask import MaskKind
from vllm_npu_prep.prep.state import AttentionState


class AtbKernels:
    """`vllm_npu_prep.attention.kernels.AttentionKernels` on the operators of ATB."""

    family = ATB
    workspace_serves_all_lengths = False

    def write_kv(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        torch_npu._npu_reshape_and_cache(
            key=key,
            value=value,
            key_cache=kv_cache[0],
            value_cache=kv_cache[1],
            slot_indices=slot_mapping,
        )

    def attend(
        self,
        query: torch.Tensor,
        own: KeyValue | None,
        kv_cache: torch.Tensor,
        metadata: AscendMetadata,
        layer: LayerShape,
        output: torch.Tensor,
        workspace: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
    ) -> None:
        assert lse is None, "these operators return no log-sum-exp"
        shape = {
            "num_heads": layer.num_heads,
            "num_kv_heads": layer.num_kv_heads,
            "scale_value": layer.scale,
            "out": output,
        }
        query_lens, seq_lens = _host_lengths(metadata)
        state = metadata.attn_state
        if state == AttentionState.PrefillNoCache and own is not None:
            torch_npu._npu_flash_attention(
                query=query,
                key=own[0],
                value=own[1],
                mask=_square_mask(metadata, query),
                seq_len=seq_lens,
                **shape,
            )
            return
        paged = {
            "query": query,
            "key_cache": kv_cache[0],
            "value_cache": kv_cache[1],
            "block_table": metadata.block_tables,
            "context_lens": seq_lens,
            **shape,
        }
        if state == AttentionState.DecodeOnly and metadata.sliding_window is None:
            torch_npu._npu_paged_attention(**paged, workspace=workspace)
            return
        # Decodes with a window, too: paged attention takes no mask.
        torch_npu._npu_paged_attention_splitfuse(
            mask=metadata.attn_mask, seq_len=query_lens, **paged
        )

    def workspace(self, call: AttentionCall, metadata: AscendMetadata) -> torch.Tensor:
        """Return the workspace of paged attention for these lengths; only decodes are captured."""
        _, seq_lens = _host_lengths(metadata)
        return torch_npu._npu_paged_attention_get_workspace(
            query=call.query,
            key_cache=call.kv_cache[0],
            value_cache=call.kv_cache[1],
            num_kv_heads=call.layer.num_kv_heads,
            num_heads=call.layer.num_heads,
            scale_value=call.layer.scale,
            block_table=metadata.block_tables,
            context_lens=seq_lens,
            out=call.output,
        )

    def working_bytes(self, layer: LayerShape, itemsize: int, max_seq_len: int) -> int:
        """Return 0: the operators read the cache in place."""
        return 0


def _square_mask(metadata: AscendMetadata, query: torch.Tensor) -> torch.Tensor:
    """Return the mask of flash attention, which demands one: zeros mask nothing.

    In float16 the mask is added to the scores; in bfloat16 its entries are flags. It is made once
    per step for all layers of a group; the budget of dense masks includes it at start-up.
    """
    if metadata.attn_mask is None:
        metadata.attn_mask = query.new_zeros(metadata.max_seq_len, metadata.max_seq_len)
        if metadata.sliding_window is not None:  # an encoder's, which reaches both ways
            near = torch.ones_like(metadata.attn_mask, dtype=torch.bool)
            near = near.triu_(1 - metadata.sliding_window).tril_(metadata.sliding_window - 1)
            value = ATB.mask_values[query.dtype][MaskKind.MATRIX]
            metadata.attn_mask.masked_fill_(~near, value)
    return metadata.attn_mask


def _host_lengths(metadata: AscendMetadata) -> tuple[torch.Tensor, torch.Tensor]:
    """Return query and sequence lengths as int32 host tensors, made once for all layers."""
    if metadata.kernel_plan is None:
        metadata.kernel_plan = (
            torch.from_numpy(metadata.query_lens),
            torch.from_numpy(metadata.seq_lens_np),
        )
    return metadata.kernel_plan
