"""Numbers of tensors in compiled code: float32, bfloat16 and float16.

numba knows neither bfloat16 nor float16 on a CPU. So compiled code sees their elements as integers,
and computes with float32.
"""

import math
from typing import Any

import numpy as np
from llvmlite import ir
from llvmlite.binding import get_host_cpu_features
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from vllm_npu_prep.prep.compiled import OPTIONS

FLOAT32, BFLOAT16, FLOAT16 = np.float32, np.uint16, np.int16
"""The types that elements have in compiled code; `widen` and `narrow` tell dtypes apart by them."""

FAST = {"reassoc", "contract", "nsz", "arcp"}
fast = njit(forceinline=True, fastmath=FAST, **OPTIONS)
exact = njit(forceinline=True, fastmath={"contract"}, **OPTIONS)


def widened(builder: Any, element: Any, value: Any) -> Any:
    """Return stored elements, one or a vector, as float32."""
    count = getattr(value.type, "count", 0)

    def kind(of_one: ir.Type) -> ir.Type:
        return ir.VectorType(of_one, count) if count else of_one

    if element == types.uint16:  # bfloat16: the upper half of a float32
        word = kind(ir.IntType(32))
        by = ir.Constant(word, [16] * count if count else 16)
        return builder.bitcast(builder.shl(builder.zext(value, word), by), kind(ir.FloatType()))
    if element == types.int16:
        return builder.fpext(builder.bitcast(value, kind(ir.HalfType())), kind(ir.FloatType()))
    return value


@intrinsic
def widen(typingctx, element):
    """Return a stored element as float32."""

    def codegen(context, builder, signature, args):
        return widened(builder, element, args[0])

    return types.float32(element), codegen


@intrinsic
def narrow(typingctx, value, like):
    """Return a float32 in the form of a stored element, rounded to the nearest, ties to even."""

    def codegen(context, builder, signature, args):
        value, word = args[0], ir.IntType(32)
        if like == types.uint16:
            bits = builder.bitcast(value, word)
            odd = builder.and_(builder.lshr(bits, word(16)), word(1))
            rounded = builder.lshr(builder.add(builder.add(bits, word(0x7FFF)), odd), word(16))
            is_nan = builder.fcmp_unordered("uno", value, value)
            return builder.trunc(builder.select(is_nan, word(0x7FC0), rounded), ir.IntType(16))
        if like == types.int16:
            return builder.bitcast(builder.fptrunc(value, ir.HalfType()), ir.IntType(16))
        return value

    return like(types.float32, like), codegen


@intrinsic
def nearest(typingctx, value):
    """Return the nearest whole number, a float32."""

    def codegen(context, builder, signature, args):
        kind = ir.FunctionType(ir.FloatType(), [ir.FloatType()])
        return builder.call(
            cgutils.get_or_insert_function(builder.module, kind, "llvm.rint.f32"), args
        )

    return types.float32(types.float32), codegen


@intrinsic
def larger(typingctx, first, second):
    """Return the larger of two float32s, neither of which is NaN; LLVM vectorises loops of it."""

    def codegen(context, builder, signature, args):
        kind = ir.FunctionType(ir.FloatType(), [ir.FloatType()] * 2)
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.maxnum.f32")
        return builder.call(function, args, fastmath=("nnan", "nsz", "reassoc"))

    return types.float32(types.float32, types.float32), codegen


@intrinsic
def times_power_of_two(typingctx, value, exponent):
    """Return ``value * 2 ** exponent`` of float32s by adding to the bits of the exponent."""

    def codegen(context, builder, signature, args):
        word = ir.IntType(32)
        power = builder.shl(builder.fptosi(args[1], word), word(23))
        return builder.bitcast(builder.add(builder.bitcast(args[0], word), power), ir.FloatType())

    return types.float32(types.float32, types.float32), codegen


# The series of 2**x; between -0.5 and 0.5 its error is below that of float32.
C1, C2, C3, C4, C5, C6 = (np.float32(math.log(2) ** k / math.factorial(k)) for k in range(1, 7))
ZERO, ONE, TWO, LOWEST = np.float32(0), np.float32(1), np.float32(2), np.float32(-125)
LOG2_E, LN_2 = np.float32(math.log2(math.e)), np.float32(math.log(2))
NONE = np.float32(-np.inf)


@exact
def exp2(x):
    """Return ``2 ** x`` for `x` up to 0; below -125 about 0."""
    x = larger(x, LOWEST)
    whole = nearest(x)
    x -= whole
    series = ONE + x * (C1 + x * (C2 + x * (C3 + x * (C4 + x * (C5 + x * C6)))))
    return times_power_of_two(series, whole)


@fast
def rounded(value, like):
    """Round a float32 to the precision of an element."""
    return widen(narrow(value, like))


HAS_512_BITS = bool(get_host_cpu_features().get("avx512f"))
LANES, VECTORS = (16, 4) if HAS_512_BITS else (8, 2)
COLUMNS = LANES * VECTORS
"""The columns of `add_products`, whose sums for four rows fill half of the vector registers."""


@intrinsic
def add_products(
    typingctx,
    sums,
    place,
    row,
    weights,
    first_weight,
    weights_row,
    rows,
    slots,
    row_size,
    at,
    count,
):
    """Add weighted rows of stored elements to `COLUMNS` columns of four rows of float32 sums.

    ``sums[place + i * row + c] += weights[first_weight + i * weights_row + j] *
    rows[slots[j] * row_size + at + c]`` for each `i` below 4, `j` below `count` and column `c`, of
    arrays seen as flat ones. The sums stay in registers, which LLVM can't do with arrays.
    """
    element, intp = rows.dtype, types.intp

    def codegen(context, builder, signature, args):
        def data(index):
            return context.make_array(signature.args[index])(context, builder, args[index]).data

        sums, weights, rows, slots = (data(index) for index in (0, 3, 6, 7))
        place, row, first_weight, weights_row, row_size, at, count = (
            args[index] for index in (1, 2, 4, 5, 8, 9, 10)
        )
        word, vector = ir.IntType(64), ir.VectorType(ir.FloatType(), LANES)
        stored = ir.VectorType(context.get_data_type(element), LANES)
        nothing = ir.Constant(vector, ir.Undefined)
        to_all = ir.Constant(ir.VectorType(ir.IntType(32), LANES), [0] * LANES)
        kind = ir.FunctionType(vector, [vector] * 3)
        name = f"llvm.fmuladd.v{LANES}f32"
        multiply = cgutils.get_or_insert_function(builder.module, kind, name)

        def vectors(array, start, of_type):
            """Return addresses of `VECTORS` vectors, one after the other."""
            starts = (builder.add(start, word(v * LANES)) for v in range(VECTORS))
            return [
                builder.bitcast(builder.gep(array, [each]), of_type.as_pointer()) for each in starts
            ]

        def nth_row(start, size, i):
            return builder.add(start, builder.mul(size, word(i)))

        kept = [at for i in range(4) for at in vectors(sums, nth_row(place, row, i), vector)]
        totals = [cgutils.alloca_once_value(builder, builder.load(at, align=4)) for at in kept]
        with cgutils.for_range(builder, count) as loop:
            slot = builder.load(builder.gep(slots, [loop.index]))
            start = builder.add(builder.mul(slot, row_size), at)
            parts = [
                widened(builder, element, builder.load(each, align=element.bitwidth // 8))
                for each in vectors(rows, start, stored)
            ]
            for i in range(4):
                index = builder.add(nth_row(first_weight, weights_row, i), loop.index)
                weight = builder.load(builder.gep(weights, [index]))
                weight = builder.insert_element(nothing, weight, word(0))
                weight = builder.shuffle_vector(weight, nothing, to_all)
                for part, total in zip(parts, totals[i * VECTORS :]):
                    product = builder.call(multiply, [weight, part, builder.load(total)])
                    builder.store(product, total)
        for each, total in zip(kept, totals):
            builder.store(builder.load(total), each, align=4)
        return context.get_dummy_value()

    sizes = intp, intp
    return types.none(sums, *sizes, weights, *sizes, rows, slots, intp, *sizes), codegen
