"""Attention over the rows of a cache where they are, compiled by numba for the CPU.

A *tile* is consecutive query tokens of one request. With one K/V head it is one piece of work:
query heads that share the K/V head are further rows of the same products, so that K and V are
read once for all of them. Keys come `KEYS` at a time: their scores, the softmax as far as it is
known (FlashAttention), and the sum of the values, so that memory does not grow with a context.
Threads take the pieces one after the other.

Half precision is for storage: scores and sums are float32, and rounded once. Both products keep
sums of four rows in registers. A tile of few rows waits for memory: it reads keys where they are,
while those that follow are fetched. For one of many rows the keys are written as columns first.
"""

import ctypes
import functools
from collections import namedtuple
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import carray, cfunc, njit, types
from numba.extending import intrinsic

from vllm_npu_prep.prep.arrays import ArrayType
from vllm_npu_prep.prep.compiled import DIGEST, OPTIONS, ArrayTuple, compiled, prefetch
from vllm_npu_prep.prep.elements import (
    BFLOAT16,
    COLUMNS,
    FLOAT16,
    FLOAT32,
    LN_2,
    LOG2_E,
    NONE,
    ONE,
    TWO,
    ZERO,
    add_products,
    exact,
    exp2,
    fast,
    larger,
    narrow,
    widen,
)

ROWS = 192
"""The most rows of a tile (its tokens times the query heads of a K/V head), unless a token has
more."""

FEW_ROWS, NEAR_BYTES = 16, 128 << 10
"""Tiles of up to so many rows wait for memory, and not for the processor: they take all K/V heads
together, if a run of keys then has at most so many bytes of K and V."""

LINE = 64
"""Bytes of a line of the processor's caches; with longer ones some are fetched twice."""

KEYS = 64
"""The keys whose scores are computed at once."""

ELEMENTS = {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16, torch.float16: FLOAT16}

once = njit(inline="always", **OPTIONS)


@intrinsic
def take_next(typingctx, counter):
    """Return the first element of an array and add one to it, as one step for all threads."""

    def codegen(context, builder, signature, args):
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        return builder.atomic_rmw("add", data, ir.IntType(64)(1), "monotonic")

    return types.int64(counter), codegen


@exact
def tanh(x):
    power = exp2(-TWO * LOG2_E * abs(x))
    size = (ONE - power) / (ONE + power)
    return size if x >= ZERO else -size


# ----------------------------------------------------------------- products


@fast
def fetch(rows, head, heads, slots, count):
    """Let the processor fetch `heads` heads of rows that are read next."""
    size = rows.shape[2]
    for j in range(count):
        place = (slots[j] * rows.shape[1] + head) * size
        for d in range(0, heads * size, LINE // rows.itemsize):
            prefetch(rows, place + d)


@fast
def add_scores(scores, rows, query, base, keys, head, slots, j):
    """Add products of four keys, from the `j`-th one on, and of queries from row `base` on."""
    k0, k1 = keys[slots[j], head], keys[slots[j + 1], head]
    k2, k3 = keys[slots[j + 2], head], keys[slots[j + 3], head]
    for i in range(0, rows, 4):
        q0, q1 = query[base + i], query[base + i + 1]
        q2, q3 = query[base + i + 2], query[base + i + 3]
        s00 = s01 = s02 = s03 = s10 = s11 = s12 = s13 = ZERO
        s20 = s21 = s22 = s23 = s30 = s31 = s32 = s33 = ZERO
        for d in range(len(k0)):
            x0, x1, x2, x3 = widen(k0[d]), widen(k1[d]), widen(k2[d]), widen(k3[d])
            a0, a1, a2, a3 = q0[d], q1[d], q2[d], q3[d]
            s00, s01, s02, s03 = s00 + a0 * x0, s01 + a0 * x1, s02 + a0 * x2, s03 + a0 * x3
            s10, s11, s12, s13 = s10 + a1 * x0, s11 + a1 * x1, s12 + a1 * x2, s13 + a1 * x3
            s20, s21, s22, s23 = s20 + a2 * x0, s21 + a2 * x1, s22 + a2 * x2, s23 + a2 * x3
            s30, s31, s32, s33 = s30 + a3 * x0, s31 + a3 * x1, s32 + a3 * x2, s33 + a3 * x3
        r0, r1, r2, r3 = scores[i], scores[i + 1], scores[i + 2], scores[i + 3]
        r0[j], r0[j + 1] = r0[j] + s00, r0[j + 1] + s01
        r0[j + 2], r0[j + 3] = r0[j + 2] + s02, r0[j + 3] + s03
        r1[j], r1[j + 1] = r1[j] + s10, r1[j + 1] + s11
        r1[j + 2], r1[j + 3] = r1[j + 2] + s12, r1[j + 3] + s13
        r2[j], r2[j + 1] = r2[j] + s20, r2[j + 1] + s21
        r2[j + 2], r2[j + 3] = r2[j + 2] + s22, r2[j + 3] + s23
        r3[j], r3[j + 1] = r3[j] + s30, r3[j + 1] + s31
        r3[j + 2], r3[j + 3] = r3[j + 2] + s32, r3[j + 3] + s33


@fast
def turn(turned, keys, head, slots, count):
    """Write keys as columns."""
    for j in range(count):
        key = keys[slots[j], head]
        for d in range(len(key)):
            turned[d, 0, j] = widen(key[d])


@fast
def add_weighted(sums, base, rows, weights, weights_base, values, head, slots, count):
    """Add weighted rows of `values` to sums; both numbers are rounded up to four."""
    size = values.shape[2]
    whole = size // COLUMNS * COLUMNS
    for i in range(0, rows, 4):
        for column in range(0, whole, COLUMNS):
            add_products(
                sums,
                (base + i) * size + column,
                size,
                weights,
                (weights_base + i) * weights.shape[1],
                weights.shape[1],
                values,
                slots,
                values.shape[1] * size,
                head * size + column,
                count,
            )
        if whole == size:
            continue  # LLVM keeps the empty loops below, which take half as long as the products
        c0, c1 = sums[base + i, whole:], sums[base + i + 1, whole:]
        c2, c3 = sums[base + i + 2, whole:], sums[base + i + 3, whole:]
        w0, w1 = weights[weights_base + i], weights[weights_base + i + 1]
        w2, w3 = weights[weights_base + i + 2], weights[weights_base + i + 3]
        for j in range(0, count, 4):
            v0, v1 = values[slots[j], head, whole:], values[slots[j + 1], head, whole:]
            v2, v3 = values[slots[j + 2], head, whole:], values[slots[j + 3], head, whole:]
            w00, w01, w02, w03 = w0[j], w0[j + 1], w0[j + 2], w0[j + 3]
            w10, w11, w12, w13 = w1[j], w1[j + 1], w1[j + 2], w1[j + 3]
            w20, w21, w22, w23 = w2[j], w2[j + 1], w2[j + 2], w2[j + 3]
            w30, w31, w32, w33 = w3[j], w3[j + 1], w3[j + 2], w3[j + 3]
            for d in range(len(v0)):
                x0, x1, x2, x3 = widen(v0[d]), widen(v1[d]), widen(v2[d]), widen(v3[d])
                c0[d] += w00 * x0 + w01 * x1 + w02 * x2 + w03 * x3
                c1[d] += w10 * x0 + w11 * x1 + w12 * x2 + w13 * x3
                c2[d] += w20 * x0 + w21 * x1 + w22 * x2 + w23 * x3
                c3[d] += w30 * x0 + w31 * x1 + w32 * x2 + w33 * x3


@fast
def weigh(scores, begin, end, sums, largest):
    """Turn the scores of a row, in base 2, into weights between `begin` and `end`, and 0 outside.

    Sums so far are scaled down if there is a larger score. Returns the largest score so far, by
    how much sums were scaled, and the sum of the weights.
    """
    before = largest
    seen = scores[begin:end]
    for j in range(len(seen)):
        largest = larger(largest, seen[j])
    scale = exp2(before - largest) if before > NONE else ZERO
    if scale != ONE:
        for d in range(len(sums)):
            sums[d] *= scale
    total = ZERO
    for j in range(len(seen)):
        weight = exp2(seen[j] - largest)
        seen[j] = weight
        total += weight
    for j in range(begin):
        scores[j] = ZERO
    for j in range(end, len(scores)):
        scores[j] = ZERO
    return largest, scale, total


# ----------------------------------------------------------------- pieces


Call = namedtuple(
    "Call",
    "query query_rope keys keys_rope values output lse tile_tokens tile_requests query_starts "
    "seq_lens kv_starts table factors counter causal window block_size table_width max_rows "
    "together",
)
SCALARS = Call._fields[-6:]
STORED = {  # of the dtype of the model
    "query": "tokens, heads, width",
    "query_rope": "tokens, heads, rope_width",
    "keys": "slots, kv_heads, width",
    "keys_rope": "slots, rope_heads, rope_width",
    "values": "slots, kv_heads, value_width",
    "output": "tokens, heads, value_width",
}
OTHERS = {
    "lse": (np.float32, "lse_tokens, heads"),
    "tile_tokens": (np.int32, "tiles, 2"),  # the first token, and the last one plus 1
    "tile_requests": (np.int32, "tiles"),
    "query_starts": (np.int32, "requests + 1"),
    "seq_lens": (np.int32, "requests"),
    "kv_starts": (np.int32, "requests"),
    "table": (np.int32, "table"),
    "factors": (np.float32, "2"),
    "counter": (np.int64, "1"),
}


@fast
def clear(array, begin, end, columns):
    for i in range(begin, end):
        for j in range(columns):
            array[i, j] = ZERO


@fast
def list_key_rows(call, request, begin, end, slots):
    """Write the rows in which positions are, and the last one again up to a multiple of four.

    Returns how many were written.
    """
    count = (end - begin + 3) // 4 * 4
    if count <= 0:
        return 0
    if call.block_size == 0:
        for j in range(end - begin):
            slots[j] = call.kv_starts[request] + begin + j
    else:
        row = request * call.table_width
        block, offset = begin // call.block_size, begin % call.block_size
        slot = np.int64(call.table[row + block]) * call.block_size + offset
        for j in range(end - begin):
            if offset == call.block_size:
                block, offset = block + 1, 0
                slot = np.int64(call.table[row + block]) * call.block_size
            slots[j] = slot
            slot, offset = slot + 1, offset + 1
    for j in range(end - begin, count):
        slots[j] = slots[end - begin - 1]
    return count


@fast
def load(query, base, call_query, first, last, head, heads, factor):
    """Copy the query rows of a K/V head, and zeros up to a multiple of four rows."""
    row = base
    for token in range(first, last):
        for each in range(head, head + heads):
            given, kept = call_query[token, each], query[row]
            for d in range(len(given)):
                kept[d] = widen(given[d]) * factor
            row += 1
    clear(query, row, base + (row - base + 3) // 4 * 4, query.shape[1])


@once
def attend_piece(call, tile, kv_first, kv_heads, skipped, heads, scratch):
    """Attend with a tile over some K/V heads: with `heads` of the query heads that share each,
    after those that are skipped."""
    query, query_rope, scores, sums, largest, totals, slots, next_slots, turned, numbers = scratch
    request = call.tile_requests[tile]
    first, last = call.tile_tokens[tile, 0], call.tile_tokens[tile, 1]
    seq_len = call.seq_lens[request]
    # The position of a token, less its place in the step
    ahead = seq_len - call.query_starts[request + 1]
    group = call.query.shape[1] // call.keys.shape[1]
    count = (last - first) * heads
    rows = (count + 3) // 4 * 4
    rope_heads = call.keys_rope.shape[1]
    scale, cap = call.factors[0], call.factors[1]
    width, rope_width = call.query.shape[2], call.query_rope.shape[2]
    in_columns = rows > FEW_ROWS and width % 4 == 0 and rope_width % 4 == 0
    in_scores = scale if cap > ZERO else scale * LOG2_E
    for kv_head in range(kv_first, kv_first + kv_heads):
        base, head = (kv_head - kv_first) * rows, kv_head * group + skipped
        load(query, base, call.query, first, last, head, heads, in_scores)
        if rope_heads > 0:
            load(query_rope, base, call.query_rope, first, last, head, heads, in_scores)
    clear(sums, 0, rows * kv_heads, sums.shape[1])
    for row in range(rows * kv_heads):
        largest[row], totals[row] = NONE, ZERO

    begin, end = 0, seq_len
    if call.window > 0:
        begin = max(0, first + ahead - call.window + 1)
        end = min(seq_len, last - 1 + ahead + call.window)
    if call.causal:
        end = last + ahead
    keys = list_key_rows(call, request, begin, min(begin + KEYS, end), slots)
    fetch(call.keys, kv_first, kv_heads, slots, keys)
    fetch(call.values, kv_first, kv_heads, slots, keys)
    for start in range(begin, end, KEYS):
        stop = min(start + KEYS, end)
        next_keys = list_key_rows(call, request, stop, min(stop + KEYS, end), next_slots)
        for kv_head in range(kv_first, kv_first + kv_heads):
            base = (kv_head - kv_first) * rows
            rope = min(kv_head, rope_heads - 1)
            if in_columns:
                clear(scores, 0, rows, KEYS)
                turn(turned, call.keys, kv_head, slots, keys)
                add_weighted(scores, 0, rows, query, base, turned, 0, numbers, width)
                if rope_heads > 0:
                    turn(turned, call.keys_rope, rope, slots, keys)
                    add_weighted(scores, 0, rows, query_rope, base, turned, 0, numbers, rope_width)
            else:
                clear(scores, 0, rows, keys)
                for j in range(0, keys, 4):
                    if j < next_keys:
                        fetch(call.keys, kv_head, 1, next_slots[j : j + 4], 4)
                        fetch(call.values, kv_head, 1, next_slots[j : j + 4], 4)
                    add_scores(scores, rows, query, base, call.keys, kv_head, slots, j)
                    if rope_heads > 0:
                        add_scores(scores, rows, query_rope, base, call.keys_rope, rope, slots, j)
            row = 0
            for token in range(first, last):
                low, high = start, stop
                if call.window > 0:
                    low = max(low, token + ahead - call.window + 1)
                    high = min(high, token + ahead + call.window)
                if call.causal:
                    high = min(high, token + ahead + 1)
                low, high = low - start, max(low, high) - start
                for _ in range(heads):
                    line, so_far = scores[row, :keys], base + row
                    if cap > ZERO:
                        for j in range(low, high):
                            line[j] = tanh(line[j] / cap) * (cap * LOG2_E)
                    most, shrunk, total = weigh(line, low, high, sums[so_far], largest[so_far])
                    largest[so_far], totals[so_far] = most, totals[so_far] * shrunk + total
                    row += 1
            clear(scores, count, rows, keys)
            add_weighted(sums, base, rows, scores, 0, call.values, kv_head, slots, keys)
        slots, next_slots, keys = next_slots, slots, next_keys

    for kv_head in range(kv_first, kv_first + kv_heads):
        row, head = (kv_head - kv_first) * rows, kv_head * group + skipped
        for token in range(first, last):
            for each in range(head, head + heads):
                inverse = ONE / totals[row]
                result, summed = call.output[token, each], sums[row]
                for d in range(len(result)):
                    result[d] = narrow(summed[d] * inverse, result[d])
                if len(call.lse) > 0:
                    call.lse[token, each] = (largest[row] + np.log2(totals[row])) * LN_2
                row += 1


@once
def attend_pieces(call):
    """Attend with one piece after the other, beside other threads."""
    kv_heads = call.keys.shape[1]
    group = call.query.shape[1] // kv_heads
    parts = (group + ROWS - 1) // ROWS
    heads = (group + parts - 1) // parts
    rows = call.max_rows * call.together
    width = max(call.query.shape[2], call.query_rope.shape[2])
    scratch = (
        np.empty((rows, call.keys.shape[2]), np.float32),
        np.empty((rows, call.keys_rope.shape[2]), np.float32),
        np.empty((call.max_rows, KEYS), np.float32),
        np.empty((rows, call.values.shape[2]), np.float32),
        np.empty(rows, np.float32),
        np.empty(rows, np.float32),
        np.empty(KEYS, np.int64),
        np.empty(KEYS, np.int64),
        np.zeros((width, 1, KEYS), np.float32),
        np.arange(width),
    )
    of_tile = kv_heads // call.together * parts
    pieces = len(call.tile_requests) * of_tile
    piece = take_next(call.counter)
    while piece < pieces:
        tile, part = piece // of_tile, piece % of_tile
        kv_first, skipped = part // parts * call.together, part % parts * heads
        count = min(heads, group - skipped)
        attend_piece(call, tile, kv_first, call.together, skipped, count, scratch)
        piece = take_next(call.counter)


# ----------------------------------------------------------------- the entry of each dtype


def _form(dtype: torch.dtype) -> ArrayTuple:
    arrays = {name: ArrayType(ELEMENTS[dtype], dims) for name, dims in STORED.items()}
    arrays |= {name: ArrayType(kind, dims) for name, (kind, dims) in OTHERS.items()}
    return ArrayTuple(Call, arrays, SCALARS)


FORMS = {dtype: _form(dtype) for dtype in ELEMENTS}
as_float32, as_bfloat16, as_float16 = (form.unpack for form in FORMS.values())
NUM_WORDS = len(FORMS[torch.float32].dims) + len(Call._fields)


def attend_float32(words: Any) -> None:
    attend_pieces(as_float32(carray(words, NUM_WORDS)))


def attend_bfloat16(words: Any) -> None:
    attend_pieces(as_bfloat16(carray(words, NUM_WORDS)))


def attend_float16(words: Any) -> None:
    attend_pieces(as_float16(carray(words, NUM_WORDS)))


LOOP = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
kept: list[Any] = []  # compiled code, which lives as long as its object


@functools.cache
def loop_of(dtype: torch.dtype) -> Any:
    """Compile the loop for tensors of this dtype, or read it from numba's cache."""
    loop = dict(zip(ELEMENTS, (attend_float32, attend_bfloat16, attend_float16)))[dtype]
    loop.__qualname__ = f"{loop.__name__}_{DIGEST}"
    code = cfunc(types.void(types.CPointer(types.int64)), cache=True, **OPTIONS)(loop)
    kept.append(code)
    return LOOP(code.address)


# ----------------------------------------------------------------- writing


Written = namedtuple("Written", "first second first_plane second_plane slots")
WRITTEN = ArrayTuple(
    Written,
    {
        "first": ArrayType(np.uint8, "tokens, first_bytes"),
        "second": ArrayType(np.uint8, "tokens, second_bytes"),
        "first_plane": ArrayType(np.uint8, "all, first_bytes"),
        "second_plane": ArrayType(np.uint8, "all, second_bytes"),
        "slots": ArrayType(np.int32, "tokens"),
    },
)
as_written = WRITTEN.unpack


@compiled
def copy_to_slots(words):
    call = as_written(words)
    for token in range(len(call.slots)):
        slot = call.slots[token]
        if slot >= 0:
            for d in range(call.first.shape[1]):
                call.first_plane[slot, d] = call.first[token, d]
            for d in range(call.second.shape[1]):
                call.second_plane[slot, d] = call.second[token, d]


def write_rows(
    first: torch.Tensor,  # [T, ...]
    second: torch.Tensor,  # [T, ...]
    first_plane: torch.Tensor,  # [num_blocks, block_size, ...]
    second_plane: torch.Tensor,  # [num_blocks, block_size, ...]
    slots: torch.Tensor,  # [T] int32
) -> None:
    """Copy rows to their slots of two planes; slots below 0 are skipped."""
    if len(slots):
        sizes = {
            "tokens": len(slots),
            "first_bytes": first.nbytes // len(slots),
            "second_bytes": second.nbytes // len(slots),
            "all": first_plane.shape[0] * first_plane.shape[1],
        }
        tensors = Written(first, second, first_plane, second_plane, slots)
        addresses = {name: tensor.data_ptr() for name, tensor in tensors._asdict().items()}
        copy_to_slots(WRITTEN.pack(sizes, addresses, {}))


# ----------------------------------------------------------------- before they are needed


def compile_loops(dtype: torch.dtype) -> None:
    """Compile the loops for models of this dtype, or load them, so that no request waits for it."""
    loop_of(dtype)
    rows, plane = torch.empty(1, 1), torch.empty(1, 1, 1)
    write_rows(rows, rows, plane, plane, torch.tensor([-1], dtype=torch.int32))  # writes nothing
