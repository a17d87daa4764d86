"""References of the operators that write K and V into the paged cache."""

import torch

from ascend_emulator import faults
from ascend_emulator.api import touch
from ascend_emulator.operators.constraint import Call, shape_of

RESHAPE_AND_CACHE = "atb::_npu_reshape_and_cache"
SCATTER_PA_KV_CACHE = "npu::npu_scatter_pa_kv_cache"
DTYPES = (torch.float16, torch.bfloat16)
PADDING_SLOT = -1
COPIED_IF_STRIDED = ("slot_mapping", "compress_lens", "compress_seq_offsets", "seq_lens")
"""Keys, values and caches are read and written by their strides, if their last dimension is
contiguous (``aclnn_scatter_pa_kv_cache.cpp`` of CANN 9.1; older releases are not known)."""


def reshape_and_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_indices: torch.Tensor,
) -> None:
    """Write ``[T, Nkv, D]`` keys and values to their int32 slots of ``[blocks, size, Nkv, D]``."""
    call = Call("cache write", RESHAPE_AND_CACHE)
    _check(call, key, value, key_cache, value_cache, slot_indices, (torch.int32,))
    _write(key, value, key_cache, value_cache, slot_indices)


def scatter_pa_kv_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    compress_lens: torch.Tensor | None = None,
    compress_seq_offsets: torch.Tensor | None = None,
    seq_lens: torch.Tensor | None = None,
    cache_mode: str | None = "PA_NZ",
) -> None:
    """Write with int32 or int64 slots, in the docstring's second scenario."""
    call = Call("cache write", SCATTER_PA_KV_CACHE, {"slot_indices": "slot_mapping"})
    call.demand("cache_mode", cache_mode in ("Norm", None), repr(cache_mode))
    compression = compress_lens, compress_seq_offsets, seq_lens
    call.demand("compression", all(given is None for given in compression), "a tensor")
    slot_dtypes = (torch.int32, torch.int64)
    _check(call, key, value, key_cache, value_cache, slot_mapping, slot_dtypes)
    _write(key, value, key_cache, value_cache, slot_mapping)


def _check(
    call: Call,
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slots: torch.Tensor,
    slot_dtypes: tuple[torch.dtype, ...],
) -> None:
    demand = call.demand
    demand("dtype", key.dtype in DTYPES, key.dtype, "key")
    planes = {"key_cache": (key, key_cache), "value_cache": (value, value_cache)}
    for argument, tensor in {"value": value, **{n: c for n, (_, c) in planes.items()}}.items():
        demand("same dtype", tensor.dtype == key.dtype, tensor.dtype, argument)
    slot_argument = call.renamed.get("slot_indices", "slot_indices")
    demand("slot dtype", slots.dtype in slot_dtypes, slots.dtype)
    for argument, tensor in {"key": key, "value": value}.items():
        demand("rank", tensor.dim() == 3, shape_of(tensor), argument)
    for argument, tensor in {"key": key, "value": value, slot_argument: slots}.items():
        demand("contiguous", tensor.is_contiguous(), f"strides {tensor.stride()}", argument)
    shapes = f"{shape_of(key)} and {shape_of(value)}"
    demand("key and value shapes", key.shape[:2] == value.shape[:2], shapes)
    for argument, (rows, cache) in planes.items():
        ok = cache.dim() == 4 and cache.shape[2:] == rows.shape[1:]
        demand("cache form", ok, f"{shape_of(cache)} for rows {shape_of(rows)}", argument)
        demand("contiguous cache", cache.is_contiguous(), f"strides {cache.stride()}", argument)
    shapes = f"{shape_of(key_cache)} and {shape_of(value_cache)}"
    demand("cache blocks", key_cache.shape[:2] == value_cache.shape[:2], shapes)
    ok = slots.dim() == 1 and len(slots) == len(key)
    demand("slot count", ok, f"{shape_of(slots)} for {len(key)} tokens")
    limit = key_cache.shape[0] * key_cache.shape[1]
    outside = slots[(slots < PADDING_SLOT) | (slots >= limit)]
    demand("slot range", not outside.numel(), f"{outside.tolist()} of {limit} slots")
    ids, counts = slots[slots >= key_cache.shape[1]].unique(return_counts=True)
    demand("distinct slots", (counts == 1).all(), f"{ids[counts > 1].tolist()} repeated")


def _write(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slots: torch.Tensor,
) -> None:
    num_blocks, block_size = key_cache.shape[:2]
    slots = faults.apply("slots", slots, num_slots=num_blocks * block_size)
    written = slots != PADDING_SLOT
    blocks, offsets = slots[written].long() // block_size, slots[written].long() % block_size
    for rows, cache in ((key, key_cache), (value, value_cache)):
        touch(cache, blocks, write=True)
        faults.apply("cache rows", cache)[blocks, offsets] = rows[written]
