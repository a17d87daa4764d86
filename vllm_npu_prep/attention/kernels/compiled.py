"""The compiled family: paged attention for the CPU, which reads blocks where they are.

The loops are in `compiled_loops`. A mask tells no more than the metadata (whether attention is
causal, and its window), so no mask is read; `reference` reads them, and refuses the same.
"""

import ctypes
import functools
from typing import Any, NamedTuple

import numpy as np
import torch

from vllm_npu_prep.attention.families import COMPILED
from vllm_npu_prep.attention.kernels import Attended, AttentionCall, KeyValue, LayerShape
from vllm_npu_prep.attention.kernels.compiled_loops import (
    FEW_ROWS,
    FORMS,
    KEYS,
    LOOP,
    NEAR_BYTES,
    ROWS,
    Call,
    loop_of,
    write_rows,
)
from vllm_npu_prep.attention.kernels.latent import (
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

# ----------------------------------------------------------------- calls of the loops


class Plan(NamedTuple):
    """How the tokens of a step are cut into tiles: ``R`` requests, whose last tokens are those of
    their sequences."""

    tile_tokens: np.ndarray  # [tiles, 2] int32: the first token, and the last one plus 1
    tile_requests: np.ndarray  # [tiles] int32
    query_starts: np.ndarray  # [R + 1] int32
    seq_lens: np.ndarray  # [R] int32
    kv_starts: np.ndarray  # [R] int32: first rows of K and V that are not in blocks
    max_rows: int
    # What `attend_rows` passes to the loop; layers of one form differ in addresses alone
    calls: dict["CallForm", "PackedCall"]


class CallForm(NamedTuple):
    dtype: torch.dtype
    shapes: tuple[Any, ...]  # of the tensors that `Call` begins with
    table: tuple[int, ...] | None  # elements and strides of the block table
    scale: float
    block_size: int
    causal: bool
    window: int | None
    soft_cap: float | None


class PackedCall(NamedTuple):
    words: np.ndarray  # int64, as `compiled_loops.FORMS` packs them
    factors: np.ndarray  # [2] float32: scale and soft cap
    counter: np.ndarray  # [1] int64: the next piece of work


def make_plan(
    query_starts: np.ndarray,  # [R + 1]
    seq_lens: np.ndarray,  # [R]
    kv_starts: np.ndarray,  # [R]
    group: int,  # query heads of a K/V head
) -> Plan:
    parts = -(-group // ROWS)
    heads = -(-group // parts)
    longest = max(1, ROWS // heads)
    starts = query_starts.astype(np.int32)
    lens = np.diff(starts)
    counts = -(-lens // longest)
    requests = np.repeat(np.arange(len(lens), dtype=np.int32), counts)
    within = np.arange(len(requests)) - np.repeat(np.cumsum(counts) - counts, counts)
    first = starts[requests] + within * longest
    last = np.minimum(first + longest, starts[requests + 1])
    tokens = np.stack((first, last), 1).astype(np.int32)
    rows = min(longest, int(lens.max(initial=1))) * heads
    whole = seq_lens.astype(np.int32), kv_starts.astype(np.int32)
    return Plan(tokens, requests, starts, *whole, -(-rows // 4) * 4, {})


def scratch_bytes(num_heads: int, num_kv_heads: int, key_width: int, value_width: int) -> int:
    """Return the most memory that all threads take for their tiles."""
    group = num_heads // num_kv_heads
    heads = -(-group // -(-group // ROWS))
    rows = max(-(-max(ROWS, heads) // 4) * 4, FEW_ROWS * num_kv_heads)
    of_rows = rows * 4 * (key_width + value_width + KEYS + 2)
    return torch.get_num_threads() * (of_rows + key_width * (4 * KEYS + 8))


def attend_rows(
    query: torch.Tensor,  # [T, H, D]
    keys: torch.Tensor,  # [S, Hkv, D]
    values: torch.Tensor,  # [S, Hkv, Dv]
    output: torch.Tensor,  # [T, H, Dv], written
    plan: Plan,
    scale: float,
    *,
    query_rope: torch.Tensor | None = None,  # [T, H, Dr]: a further part of queries and of keys
    keys_rope: torch.Tensor | None = None,  # [S, Hkv or 1, Dr]
    block_table: torch.Tensor | None = None,  # [R, max_num_blocks] int32
    block_size: int = 0,  # 0: the rows are those of `Plan.kv_starts`
    causal: bool = True,
    window: int | None = None,
    soft_cap: float | None = None,
    lse: torch.Tensor | None = None,  # [T, H] float32, written: log-sum-exp, base e
) -> None:
    """Attend with the tokens of a plan over rows of K and V."""
    stored = query, query_rope, keys, keys_rope, values, output, lse  # as `Call` has them
    assert all(tensor is None or tensor.is_contiguous() for tensor in stored)
    shapes = tuple(None if tensor is None else tensor.shape for tensor in stored)
    table = None if block_table is None else (block_table.numel(), *block_table.stride())
    form = CallForm(query.dtype, shapes, table, scale, block_size, causal, window, soft_cap)
    call = plan.calls.get(form)
    if call is None:
        call = plan.calls[form] = _pack(plan, form)
    call.counter[0] = 0
    addresses = call.words[NUM_SIZES:]
    for index, tensor in enumerate(stored):
        if tensor is not None:
            addresses[index] = tensor.data_ptr()
    if block_table is not None:
        addresses[TABLE] = block_table.data_ptr()
    run(loop_of(query.dtype), call.words)


NUM_SIZES = len(FORMS[torch.float32].dims)
TABLE = Call._fields.index("table")


def _pack(plan: Plan, form: CallForm) -> PackedCall:
    """Return a call without the addresses of tensors."""
    dtype, (query, query_rope, keys, keys_rope, values, _, lse) = form.dtype, form.shapes
    elements, row, column = form.table or (0, 0, 1)
    assert column == 1
    factors = np.array([form.scale, form.soft_cap or 0.0], np.float32)
    counter = np.zeros(1, np.int64)
    arrays = {**plan._asdict(), "factors": factors, "counter": counter}
    addresses = dict.fromkeys(FORMS[dtype].arrays, 0)
    addresses |= {name: arrays[name].ctypes.data for name in addresses if name in arrays}
    # Rows have all heads one after the other: narrow ones are read once for all of them.
    row_bytes = keys[1] * (keys[2] + values[2]) * dtype.itemsize
    few = plan.max_rows <= FEW_ROWS and len(plan.tile_requests) >= 2 * torch.get_num_threads()
    sizes = {
        "tokens": query[0],
        "heads": query[1],
        "width": query[2],
        "rope_width": query_rope[2] if query_rope else 0,
        "slots": keys[0],
        "kv_heads": keys[1],
        "rope_heads": keys_rope[1] if keys_rope else 0,
        "value_width": values[2],
        "lse_tokens": lse[0] if lse else 0,
        "tiles": len(plan.tile_requests),
        "2": 2,
        "requests": len(plan.seq_lens),
        "requests + 1": len(plan.query_starts),
        "table": elements,
        "1": 1,
    }
    scalars = {
        "causal": int(form.causal),
        "window": form.window or 0,
        "block_size": form.block_size,
        "table_width": row,
        "max_rows": plan.max_rows,
        "together": keys[1] if few and KEYS * row_bytes <= NEAR_BYTES else 1,
    }
    return PackedCall(FORMS[dtype].pack(sizes, addresses, scalars), factors, counter)


def run(loop: Any, words: np.ndarray) -> None:
    """Run a loop on torch's threads: libgomp's, so that both never compete for a processor."""
    threads = torch.get_num_threads()
    if threads > 1 and (parallel := openmp()) is not None:
        parallel(loop, words.ctypes.data, threads, 0)
    else:
        loop(words.ctypes.data)


@functools.cache
def openmp() -> Any:
    """Return ``GOMP_parallel`` of the OpenMP library that torch runs on; None if it is another."""
    parallel = getattr(ctypes.CDLL(torch._C.__file__), "GOMP_parallel", None)
    if parallel is not None:
        parallel.argtypes = [LOOP, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
        parallel.restype = None
    return parallel


# ----------------------------------------------------------------- kernels


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
        own: KeyValue | None,
        kv_cache: torch.Tensor,
        metadata: AscendMetadata,
        layer: LayerShape,
        output: torch.Tensor,
        workspace: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
    ) -> None:
        del workspace
        assert query.is_contiguous() and query.shape[1:] == (layer.num_heads, layer.head_size)
        fresh = own is not None and (
            metadata.attn_state == AttentionState.PrefillNoCache or not metadata.causal
        )
        plan = plan_of(metadata, len(query), layer.num_heads // layer.num_kv_heads)
        if own is not None and fresh:
            (keys, values), table, block_size = own, None, 0
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
