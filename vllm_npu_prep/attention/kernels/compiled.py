"""The compiled family: paged attention for the CPU, which reads blocks where they are.

The loops are in `compiled_loops`. A mask tells no more than the metadata (whether attention is
causal, and its window), so no mask is read; `reference` reads them, and refuses the same.
"""

import numpy as np
import torch

from vllm_npu_prep.attention.families import COMPILED
from vllm_npu_prep.attention.kernels import AttentionCall, LayerShape
from vllm_npu_prep.attention.kernels.compiled_loops import (
    Plan,
    attend_rows,
    make_plan,
    scratch_bytes,
    write_rows,
)
from vllm_npu_prep.attention.kernels.latent import (
    Attended,
    LatentShape,
    Planes,
    Projected,
)
from vllm_npu_prep.attention.kernels.latent_reference import (
    LatentReferenceKernels,
    check_latent_rows,
)
from vllm_npu_prep.attention.kernels.reference import (
    check_cache,
    check_metadata,
    check_rows,
)
from vllm_npu_prep.attention.latent import ContextChunk, Prefills
from vllm_npu_prep.attention.metadata import AscendMetadata
from vllm_npu_prep.prep.state import AttentionState


class CompiledKernels:
    """`vllm_npu_prep.attention.kernels.AttentionKernels` in compiled loops."""

    family = COMPILED
    workspace_serves_all_lengths = True

    def write_kv(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        check_rows(key, value, kv_cache, slot_mapping)
        write_rows(key, value, kv_cache[0], kv_cache[1], slot_mapping)

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
        lse: torch.Tensor | None = None,
    ) -> None:
        del workspace
        assert query.is_contiguous() and query.shape[1:] == (layer.num_heads, layer.head_size)
        fresh = key is not None and (
            metadata.attn_state == AttentionState.PrefillNoCache or not metadata.causal
        )
        plan = plan_of(metadata, len(query), layer.num_heads // layer.num_kv_heads)
        if fresh:
            assert key is not None and value is not None
            keys, values, table, block_size = key, value, None, 0
        else:
            check_cache(kv_cache, query)
            keys, values = (plane.view(-1, *plane.shape[2:]) for plane in kv_cache)
            table, block_size = metadata.block_tables, kv_cache.shape[2]
        attend_rows(
            query,
            keys,
            values,
            output,
            plan,
            layer.scale,
            block_table=table,
            block_size=block_size,
            causal=metadata.causal,
            window=metadata.sliding_window,
            soft_cap=layer.logits_soft_cap,
            lse=lse,
        )
        output[metadata.num_actual_tokens :].zero_()  # padding attends to nothing

    def workspace(
        self, call: AttentionCall, metadata: AscendMetadata
    ) -> None: ...  # threads allocate their own

    def working_bytes(self, layer: LayerShape, itemsize: int, max_seq_len: int) -> int:
        del itemsize, max_seq_len
        size = layer.head_size
        return scratch_bytes(layer.num_heads, layer.num_kv_heads, size, size)


def plan_of(metadata: AscendMetadata, num_tokens: int, group: int) -> Plan:
    """Return the step's plan for layers with `group` query heads to a K/V head, without padding."""
    plans = metadata.kernel_plan = metadata.kernel_plan or {}
    if group not in plans:
        check_metadata(metadata, num_tokens)
        starts = metadata.query_start_loc_np[: metadata.num_reqs + 1]
        lens = metadata.seq_lens_np[: metadata.num_reqs]
        plans[group] = make_plan(starts, lens, starts[:-1], group)
    return plans[group]


class LatentCompiledKernels(LatentReferenceKernels):
    """`vllm_npu_prep.attention.kernels.latent.LatentKernels` in compiled loops.

    Gathering a context to project it, and merging, are those of the reference.
    """

    family = COMPILED

    def write(
        self,
        latent: torch.Tensor,
        rope: torch.Tensor,
        planes: Planes,
        slot_mapping: torch.Tensor,
    ) -> None:
        check_latent_rows(latent, rope, planes, slot_mapping)
        write_rows(latent.contiguous(), rope.contiguous(), planes.latent, planes.rope, slot_mapping)

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
        del workspace
        latent, rope = (plane.view(-1, *plane.shape[2:]) for plane in planes)
        attend_rows(
            query,
            latent,
            latent,
            output,
            plan_of(metadata, len(query), query.shape[1]),
            shape.scale,
            query_rope=query_rope,
            keys_rope=rope,
            block_table=metadata.block_tables,
            block_size=planes.latent.shape[1],
            causal=metadata.causal,
            lse=lse,
        )
        output[metadata.num_actual_tokens :].zero_()  # padding attends to nothing

    def attend_prompts(
        self,
        given: Projected,
        prefills: Prefills,
        metadata: AscendMetadata,
        shape: LatentShape,
        output: torch.Tensor,
        wants_lse: bool,
    ) -> Attended:
        del metadata, wants_lse
        ends = prefills.query_ends
        return _attend(given, ends, ends, shape, output, causal=True)

    def attend_context(self, given: Projected, chunk: ContextChunk, shape: LatentShape) -> Attended:
        output = given.query.new_empty(*given.query.shape[:2], shape.v_head_dim)
        return _attend(given, chunk.query_ends, chunk.kv_ends, shape, output, causal=False)

    def working_bytes(
        self, shape: LatentShape, itemsize: int, max_seq_len: int, chunk_rows: int
    ) -> int:
        of_rows = shape.kv_lora_rank + shape.qk_rope_head_dim
        decodes = scratch_bytes(shape.num_heads, 1, of_rows, shape.kv_lora_rank)
        of_heads = shape.qk_nope_head_dim + shape.qk_rope_head_dim, shape.v_head_dim
        projected = chunk_rows * shape.num_heads * (shape.qk_nope_head_dim + shape.v_head_dim)
        return max(decodes, scratch_bytes(1, 1, *of_heads)) + projected * itemsize


def _attend(
    given: Projected,
    query_ends: list[int],
    kv_ends: list[int],
    shape: LatentShape,
    output: torch.Tensor,  # [T, N, v_head_dim], written
    causal: bool,
) -> Attended:
    """Attend with each request's queries over its own rows."""
    starts, kv_starts = np.array([0, *query_ends]), np.array([0, *kv_ends])
    plan = make_plan(starts, np.diff(kv_starts), kv_starts[:-1], 1)
    lse = torch.empty(output.shape[:2], dtype=torch.float32)
    attend_rows(
        given.query.contiguous(),
        given.key.contiguous(),
        given.value.contiguous(),
        output,
        plan,
        shape.scale,
        query_rope=given.query_rope.contiguous(),
        keys_rope=given.key_rope.contiguous(),
        causal=causal,
        lse=lse,
    )
    return Attended(output, lse)
