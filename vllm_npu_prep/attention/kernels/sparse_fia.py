"""Sparse attention on NPUs: the operators of the lightning indexer and of attention over rows.

Both read lengths and block tables as tensors of the device, so a graph's replay needs no update.

Sources: the pages of both operators in Ascend/op-plugin and the wheel's docstrings; their checks in
CANN's published ops-transformer (tags v8.5.0 and v9.0.0, branch 9.1.0), which `docs/changing/
operators.md` lists. Keys are written by ``npu_scatter_nd_update_``, as vllm-project/vllm-ascend
does it (``attention/sfa_v1.py``); it takes no slot below 0, so padding goes to the null block.
"""

import torch
import torch_npu

from vllm_npu_prep.attention.families import FIA
from vllm_npu_prep.attention.kernels.latent import LatentShape, Planes, with_heads
from vllm_npu_prep.attention.kernels.sparse import IndexShape
from vllm_npu_prep.attention.metadata import AscendMetadata

CAUSAL_MODE = 3
ABSORBED_MODE = 2
"""The ``attention_mode`` in which keys are latent rows with a rotated part, the only one."""


class SparseFiaKernels:
    """`vllm_npu_prep.attention.kernels.sparse.SparseKernels` on torch_npu's operators."""

    family = FIA

    def write_keys(self, keys: torch.Tensor, plane: torch.Tensor, metadata: AscendMetadata) -> None:
        assert metadata.slot_mapping is not None
        slots = metadata.slot_mapping[: len(keys)].clamp_min(0)
        rows = plane.view(-1, plane.shape[-1])
        torch_npu.npu_scatter_nd_update_(rows, slots.unsqueeze(1), keys)

    def choose(
        self,
        query: torch.Tensor,
        weights: torch.Tensor,
        plane: torch.Tensor,
        metadata: AscendMetadata,
        chosen: torch.Tensor,
    ) -> None:
        found, _ = torch_npu.npu_lightning_indexer(
            query,
            plane,
            weights,
            actual_seq_lengths_query=metadata.query_start_loc[1:],
            actual_seq_lengths_key=metadata.seq_lens,
            block_table=metadata.block_tables,
            layout_query="TND",
            layout_key="PA_BSND",
            sparse_count=chosen.shape[1],
            sparse_mode=CAUSAL_MODE,
        )
        chosen.copy_(found.squeeze(1))

    def attend_chosen(
        self,
        query: torch.Tensor,
        query_rope: torch.Tensor,
        planes: Planes,
        chosen: torch.Tensor,
        metadata: AscendMetadata,
        shape: LatentShape,
    ) -> torch.Tensor:
        heads = 1 << (shape.num_heads - 1).bit_length()
        output, *_ = torch_npu.npu_sparse_flash_attention(
            with_heads(query, heads),
            planes.latent,
            planes.latent,
            chosen.unsqueeze(1),
            shape.scale,
            block_table=metadata.block_tables,
            actual_seq_lengths_query=metadata.query_start_loc[1:],
            actual_seq_lengths_kv=metadata.seq_lens,
            query_rope=with_heads(query_rope, heads),
            key_rope=planes.rope,
            layout_query="TND",
            layout_kv="PA_BSND",
            sparse_mode=CAUSAL_MODE,
            attention_mode=ABSORBED_MODE,
        )
        of_layer: torch.Tensor = output[:, : shape.num_heads]
        return of_layer

    def choosing_bytes(self, shape: IndexShape, max_seq_len: int, num_tokens: int) -> int:
        """Return the bytes of what the indexer gives; what it takes for itself is not known."""
        del max_seq_len
        return 4 * shape.topk * num_tokens
