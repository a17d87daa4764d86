"""References of the operators that write K and V into the paged cache."""

from functools import partial

import torch

from ascend_emulator import faults
from ascend_emulator.api import touch
from ascend_emulator.operators.constraint import (
    Call,
    Constraint,
    Enforced,
    Family,
    shape_of,
)

RESHAPE_AND_CACHE = "atb::_npu_reshape_and_cache"
SCATTER_PA_KV_CACHE = "npu::npu_scatter_pa_kv_cache"
DTYPES = (torch.float16, torch.bfloat16)
PADDING_SLOT = -1
COPIED_IF_STRIDED = ("slot_mapping", "compress_lens", "compress_seq_offsets", "seq_lens")
"""Keys, values and caches are read and written by their strides, if their last dimension is
contiguous (``aclnn_scatter_pa_kv_cache.cpp`` of CANN 9.1; older releases are not known)."""

NAME = "cache write"
record = partial(Constraint, NAME)
ATB = "hicann/ascend-transformer-boost, `reshape_and_cache` kernels"
WHEEL = "`AtTensor2AtbTensor` in the wheel's libop_plugin_atb.so"
ADAPTER = f"{WHEEL} refuses tensors that are not contiguous"
NOT_STATED = "no docstring for the atb operator"

# In each record: argument, name, demand, docstring_says, practice, source, enforced, why.
CACHE_WRITE = Family(
    NAME,
    [
        record(
            "key, value, key_cache, value_cache",
            "dtype",
            "float16 or bfloat16",
            "many dtypes (scatter); " + NOT_STATED,
            "the model's dtype",
            "none needed",
            Enforced.READING,
            "quantised caches are outside of this reference",
        ),
        record(
            "value, key_cache, value_cache",
            "same dtype",
            "the dtype of key",
            "all four agree (scatter); " + NOT_STATED,
            "the same",
            "none needed",
            Enforced.AGREED,
        ),
        record(
            "key, value",
            "rank",
            "[tokens, num_kv_heads, head_size]",
            "rank 3, or 4 for compressed caches (scatter); " + NOT_STATED,
            "rank 3",
            ATB,
            Enforced.AGREED,
            "compressed caches are outside of this reference",
        ),
        record(
            "value",
            "key and value shapes",
            "the tokens and heads of key",
            "the first two dimensions agree (scatter); " + NOT_STATED,
            "the same",
            "none needed",
            Enforced.AGREED,
        ),
        record(
            "key_cache, value_cache",
            "cache form",
            "[num_blocks, block_size, num_kv_heads, head_size] with the heads of key and value",
            "rank 4 (scatter); " + NOT_STATED,
            "the same",
            ATB,
            Enforced.AGREED,
        ),
        record(
            "value_cache",
            "cache blocks",
            "the blocks and block size of key_cache",
            "the same num_blocks and block_size (scatter); " + NOT_STATED,
            "the same",
            "none needed",
            Enforced.AGREED,
        ),
        record(
            "key, value, slots",
            "contiguous",
            "a contiguous tensor",
            "not contiguous is not supported (scatter); " + NOT_STATED,
            "scatter runs without framework-side normalisation; the atb adapter refuses",
            f"vllm-project/vllm-ascend 11713; {ADAPTER}",
            Enforced.DOCSTRING,
        ),
        record(
            "key_cache, value_cache",
            "contiguous cache",
            "a contiguous plane for K and for V",
            "not contiguous is not supported (scatter); " + NOT_STATED,
            "interleaved planes need another operator",
            "vllm-project/vllm-ascend 8814",
            Enforced.AGREED,
        ),
        record(
            "slot_indices",
            "slot dtype",
            "int32; the scatter operator also takes int64",
            "int32 and int64 (scatter); " + NOT_STATED,
            "the atb kernel reads the bytes as int32",
            ATB,
            Enforced.AGREED,
        ),
        record(
            "slot_indices",
            "slot count",
            "one slot for each token, rank 1",
            "[tokens] (scatter); " + NOT_STATED,
            "one slot read for each row of key",
            ATB,
            Enforced.AGREED,
        ),
        record(
            "slot_indices",
            "slot range",
            "slots of existing blocks, or -1",
            "0 to num_blocks * block_size - 1 (scatter); " + NOT_STATED,
            "negative slots are skipped by both; elsewhere -1 wrapped to the last block",
            f"{ATB}: `slotValue < 0`; vllm-project/vllm-ascend 11713; vllm-project/vllm 43810",
            Enforced.PRACTICE,
            "other negative slots are skipped too, but are a mistake; refused",
        ),
        record(
            "slot_indices",
            "distinct slots",
            "no slot twice, -1 aside",
            "not repeated, else nothing is guaranteed (scatter); " + NOT_STATED,
            "tokens are written by several cores in no order",
            ATB,
            Enforced.DOCSTRING,
            "padding that repeats a slot of the null block would be refused: use -1",
        ),
        record(
            "cache_mode",
            "cache_mode",
            "'Norm' or None for caches that are not NZ",
            "'Norm' or None for ND caches; the default is 'PA_NZ' (scatter)",
            "'Norm' has to be passed",
            "vllm-project/vllm-ascend 8845",
            Enforced.AGREED,
            "this reference has no NZ caches",
        ),
        record(
            "compress_lens, compress_seq_offsets, seq_lens",
            "compression",
            "None",
            "for compressed caches alone (scatter)",
            "not used by the plugin",
            "none needed",
            Enforced.READING,
        ),
        record(
            "slot_indices",
            "padding slot",
            "-1 as: write nothing for this token",
            "out of the documented range (scatter)",
            "skipped",
            f"{ATB}; vllm-project/vllm-ascend 11713",
            Enforced.PRACTICE,
            "the first thing to try on hardware: graphs pad with it",
            refused=False,
        ),
    ],
)


def reshape_and_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_indices: torch.Tensor,
) -> None:
    """Write ``[T, Nkv, D]`` keys and values to their int32 slots of ``[blocks, size, Nkv, D]``."""
    call = CACHE_WRITE.call(RESHAPE_AND_CACHE)
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
    call = CACHE_WRITE.call(SCATTER_PA_KV_CACHE, {"slot_indices": "slot_mapping"})
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
    ids, counts = slots[slots != PADDING_SLOT].unique(return_counts=True)
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
