"""Latent attention on the second version of the fused infer attention operator (A2, A3).

Sources: the schema and docstring of ``torch_npu.npu_fused_infer_attention_score_v2``; CANN's
published checks of calls with rope (``rope_checker.cpp``, branch 9.1.0); vllm-project/vllm-ascend,
``attention/mla_v1.py``. Decodes pass latent rows as keys and as values, with one K/V head, and
heads of zeros up to a power of two; prefills pass K and V of every head. Contexts are gathered by
``npu_gather_pa_kv_cache`` and merged by ``npu_attention_update``.
"""

from typing import Any

import torch
import torch_npu

from vllm_npu_prep.attention.families import FIA
from vllm_npu_prep.attention.fused_releases import MAX_LENGTHS
from vllm_npu_prep.attention.kernels import Attended
from vllm_npu_prep.attention.kernels.fia import CAUSAL_MODE, NO_MASK_MODE, Part, plan_of, split
from vllm_npu_prep.attention.kernels.latent import (
    LatentCall,
    LatentShape,
    Planes,
    Projected,
)
from vllm_npu_prep.attention.latent import ContextChunk, Prefills
from vllm_npu_prep.attention.latent_releases import HEAD_SIZE
from vllm_npu_prep.attention.metadata import AscendMetadata


class LatentFiaKernels:
    """`vllm_npu_prep.attention.kernels.latent.LatentKernels` on the fused operator."""

    family = FIA
    workspace_serves_all_lengths = True

    def __init__(self, limits_batches: bool = False) -> None:
        self.limits_batches = limits_batches
        self._no_lse: torch.Tensor | None = None

    def decode_heads(self, num_heads: int) -> int:
        """Return the next power of two."""
        return 1 << (num_heads - 1).bit_length()

    def write(
        self,
        latent: torch.Tensor,
        rope: torch.Tensor,
        planes: Planes,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Write both planes in one launch. ``cache_mode``'s default is the layout of 310P."""
        torch_npu.npu_scatter_pa_kv_cache(latent, rope, *planes, slot_mapping, cache_mode="Norm")

    def attend_latent(
        self,
        query: torch.Tensor,
        query_rope: torch.Tensor,
        planes: Planes,
        metadata: AscendMetadata,
        shape: LatentShape,
        output: torch.Tensor,
        workspace: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
    ) -> None:
        if self._no_lse is None:
            self._no_lse = torch.empty(0, dtype=torch.float32, device=query.device)
        sums = self._no_lse if lse is None else lse.unsqueeze(-1)
        if metadata.kernel_plan is None and self.limits_batches and not metadata.in_full_graph:
            metadata.kernel_plan = split(metadata, MAX_LENGTHS, *planes.latent.shape[:2])
        for part in plan_of(metadata):
            tokens = part.tokens
            torch_npu.npu_fused_infer_attention_score_v2.out(
                query if tokens is None else query[tokens],
                **_absorbed(query_rope, planes, metadata, shape, part),
                return_softmax_lse=lse is not None,
                workspace=workspace,
                out=[
                    output if tokens is None else output[tokens],
                    sums if tokens is None or lse is None else sums[tokens],
                ],
            )

    def attend_prompts(
        self,
        given: Projected,
        prefills: Prefills,
        metadata: AscendMetadata,
        shape: LatentShape,
        output: torch.Tensor,
        wants_lse: bool,
    ) -> Attended:
        ends = prefills.query_ends
        query, arguments = _projected(given, shape, ends, ends)
        lse = torch.empty(
            (*query.shape[:2], 1) if wants_lse else 0, dtype=torch.float32, device=query.device
        )
        torch_npu.npu_fused_infer_attention_score_v2.out(
            query,
            **arguments,
            atten_mask=metadata.attn_mask,
            sparse_mode=CAUSAL_MODE,
            return_softmax_lse=wants_lse,
            out=[output, lse],
        )
        return Attended(output, lse.squeeze(-1) if wants_lse else lse)

    def attend_context(self, given: Projected, chunk: ContextChunk, shape: LatentShape) -> Attended:
        query, arguments = _projected(given, shape, chunk.query_ends, chunk.kv_ends)
        output, lse = torch_npu.npu_fused_infer_attention_score_v2(
            query, **arguments, sparse_mode=NO_MASK_MODE, return_softmax_lse=True
        )
        return Attended(output, lse.squeeze(-1))

    def gather(self, planes: Planes, chunk: ContextChunk) -> tuple[torch.Tensor, torch.Tensor]:
        latent, rope = (plane.new_empty(chunk.num_rows, *plane.shape[2:]) for plane in planes)
        torch_npu.npu_gather_pa_kv_cache(
            *planes, chunk.block_tables, chunk.lens, latent, rope, seq_offset=chunk.starts
        )
        return latent, rope

    def merge(self, first: Attended, second: Attended) -> Attended:
        parts = first, second
        output, lse = torch_npu.npu_attention_update(
            [part.lse.reshape(-1) for part in parts],
            [part.output.flatten(0, 1) for part in parts],
            1,
        )
        return Attended(output.view_as(first.output), lse.view_as(first.lse))

    def workspace(self, call: LatentCall, metadata: Any) -> torch.Tensor:
        """Return a workspace for all lengths, in elements of the query's dtype."""
        decodes = metadata.decode
        arguments = call.query_rope, call.planes, decodes, call.layer, plan_of(decodes)[0]
        return torch_npu._npu_fused_infer_attention_score_v2_get_max_workspace(
            call.query, **_absorbed(*arguments)
        )

    def working_bytes(
        self, shape: LatentShape, itemsize: int, max_seq_len: int, chunk_rows: int
    ) -> int:
        """Count a context chunk twice, as parts may be joined: latent rows, and K and V of every
        head."""
        latent = shape.kv_lora_rank + shape.qk_rope_head_dim
        of_head = shape.qk_nope_head_dim + shape.qk_rope_head_dim + shape.v_head_dim
        return 2 * chunk_rows * itemsize * (latent + shape.num_heads * of_head)


def _absorbed(
    query_rope: torch.Tensor,
    planes: Planes,
    metadata: AscendMetadata,
    shape: LatentShape,
    part: Part,
) -> dict[str, Any]:
    """Return the arguments after the query, for attention over latent rows."""
    table = metadata.block_tables
    if part.requests is not None:
        assert table is not None
        table, query_rope = table[part.requests], query_rope[part.tokens]
    latent, rope = (plane.flatten(2) for plane in planes)
    has_mask = metadata.max_query_len > 1 and metadata.attn_mask is not None
    return {
        "key": latent,
        "value": latent,
        "query_rope": query_rope,
        "key_rope": rope,
        "atten_mask": metadata.attn_mask if has_mask else None,
        "sparse_mode": CAUSAL_MODE if has_mask else NO_MASK_MODE,
        "input_layout": "TND",
        "actual_seq_qlen": part.query_ends,
        "actual_seq_kvlen": part.seq_lens,
        "num_query_heads": shape.num_heads,
        "num_key_value_heads": 1,
        "softmax_scale": shape.scale,
        "block_table": table,
        "block_size": planes.latent.shape[1],
    }


def _projected(
    given: Projected, shape: LatentShape, query_ends: list[int], kv_ends: list[int]
) -> tuple[torch.Tensor, dict[str, Any]]:
    """Return the query and the arguments of attention over projected K and V, without the mask.

    Rotated parts are separate arguments if the operator takes heads of this size in that form.
    Other heads, as those of GLM-4.7-Flash, are joined with them, which makes them as wide as the
    values.
    """
    query, query_rope = given.query.contiguous(), given.query_rope.contiguous()
    key, key_rope = given.key, given.key_rope.expand(-1, shape.num_heads, -1)
    arguments: dict[str, Any] = {
        "value": given.value.contiguous(),
        "input_layout": "TND",
        "actual_seq_qlen": query_ends,
        "actual_seq_kvlen": kv_ends,
        "num_query_heads": shape.num_heads,
        "num_key_value_heads": shape.num_heads,
        "softmax_scale": shape.scale,
    }
    if shape.qk_nope_head_dim != HEAD_SIZE:
        return torch.cat((query, query_rope), -1), {
            "key": torch.cat((key, key_rope), -1),
            **arguments,
        }
    rope = {"query_rope": query_rope, "key_rope": key_rope.contiguous()}
    return query, {"key": key.contiguous(), **rope, **arguments}
