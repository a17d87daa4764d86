"""The way in which compiled code gets arrays: by address, as a named tuple.

Numba unboxes every array argument. For two dozen arrays that are no longer in the processor's
cache, this takes as long as filling them for 256 decodes. So one array of sizes and addresses is
passed, and a named tuple is built from it inside compiled code, where that costs nothing.
"""

import hashlib
from collections import namedtuple
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from llvmlite import ir
from numba import from_dtype, njit, types
from numba.core import cgutils
from numba.extending import intrinsic
from numba.np.arrayobj import populate_array

from vllm_npu_prep.prep.arrays import STEP_ARRAYS, ArrayType, Level, PaddingRule

SOURCES = (
    "arrays.py",
    "checks.py",
    "checks_pcp.py",
    "compiled.py",
    "elements.py",
    "latent_split.py",
    "local_attention.py",
    "pcp.py",
    "state.py",
    "recurrent_states.py",
    "tables.py",
)
"""The files of this folder that change what functions in other files compile to."""


def _digest() -> str:
    """Return a short digest of `SOURCES`; without source files there is no cache either."""
    digest = hashlib.sha256()
    for name in SOURCES:
        path = Path(__file__).with_name(name)
        if path.exists():
            digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


DIGEST = _digest()

OPTIONS: dict[str, Any] = {"boundscheck": False, "error_model": "numpy"}


def compiled(function: Callable[..., Any]) -> Any:
    """Compile a function and cache the result on disk, beside its file or in ``NUMBA_CACHE_DIR``.

    Numba's cache notices changes of the function's own file only. A function that was compiled for
    another table of arrays would write past their ends, so the cache key includes a digest of
    `SOURCES`.
    """
    function.__qualname__ = f"{function.__qualname__}_{DIGEST}"
    return njit(cache=True, **OPTIONS)(function)


def inlined(function: Callable[..., Any]) -> Any:
    """Compile a function into its callers, and cache it with them.

    A real call would pass every array of a named tuple, used or not, as seven words each.
    """
    return njit(forceinline=True, **OPTIONS)(function)


@intrinsic
def pointer(typingctx, address):
    """In compiled code, turn an address into a pointer."""

    def codegen(context, builder, signature, args):
        return builder.inttoptr(args[0], cgutils.voidptr_t)

    return types.voidptr(address), codegen


@intrinsic
def prefetch(typingctx, array, index):
    """In compiled code, let the processor fetch an element of the flattened array.

    It goes to the second-level cache of the core: the first level is too small for what comes next.
    """

    def codegen(context, builder, signature, args):
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        place = builder.bitcast(builder.gep(data, [args[1]]), cgutils.voidptr_t)
        word = ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [cgutils.voidptr_t, word, word, word])
        fetch = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch")
        builder.call(fetch, [place, word(0), word(2), word(1)])  # to read, second level, data
        return context.get_dummy_value()

    return types.none(array, types.intp), codegen


class ArrayTuple:
    """Arrays that compiled code gets as a named tuple.

    Parameters
    ----------
    fields
        The class of the tuple, which must be an attribute of a module. Its fields are the names of
        `arrays`, then those of `scalars`.
    arrays
        The contiguous arrays by name.
    scalars
        The names of integers.

    Attributes
    ----------
    unpack
        The function that compiled code calls to make the named tuple from the result of `pack`.
    """

    def __init__(
        self, fields: Any, arrays: Mapping[str, ArrayType], scalars: Sequence[str] = ()
    ) -> None:
        self.arrays, self.scalars = dict(arrays), tuple(scalars)
        self.dims = tuple(dict.fromkeys(dim for each in arrays.values() for dim in each.dims))
        assert fields._fields == (*self.arrays, *self.scalars)
        self.unpack = intrinsic(self._unpack(fields))

    def pack(
        self,
        sizes: Mapping[str, int],  # the size of each dimension
        addresses: Mapping[str, int],  # the address of each array, whose memory the caller keeps
        scalars: Mapping[str, int],  # the integers by name
    ) -> np.ndarray:
        """Return all of them as one int64 array, in the order that `unpack` reads."""
        values = [
            *(sizes[dim] for dim in self.dims),
            *(addresses[name] for name in self.arrays),
            *(scalars[name] for name in self.scalars),
        ]
        return np.array(values, np.int64)

    def _unpack(self, fields: Any) -> Callable[..., Any]:
        arrays, dims, num_scalars = self.arrays, self.dims, len(self.scalars)
        array_types = [
            types.Array(from_dtype(each.dtype), len(each.dims), "C") for each in arrays.values()
        ]
        tuple_type = types.NamedTuple([*array_types, *[types.int64] * num_scalars], fields)

        def codegen(context, builder, signature, args):
            packed = context.make_array(signature.args[0])(context, builder, args[0])

            def word(index):
                place = context.get_constant(types.intp, index)
                return builder.load(builder.gep(packed.data, [place]))

            sizes = {dim: word(index) for index, dim in enumerate(dims)}
            values = []
            for index, (each, array_type) in enumerate(zip(arrays.values(), array_types)):
                made = context.make_array(array_type)(context, builder)
                shape = [sizes[dim] for dim in each.dims]
                strides = [context.get_constant(types.intp, each.dtype.itemsize)]
                for size in reversed(shape[1:]):
                    strides.insert(0, builder.mul(size, strides[0]))
                data = builder.inttoptr(word(len(dims) + index), made.data.type)
                populate_array(made, data, shape, strides, each.dtype.itemsize, None)
                values.append(made._getvalue())
            first = len(dims) + len(arrays)
            values += [word(first + index) for index in range(num_scalars)]
            return context.make_tuple(builder, tuple_type, values)

        def unpack(typingctx, packed):
            return tuple_type(packed), codegen

        return unpack


# ---------------------------------------------------------------------- a step's arrays

# The whole buffer that travels, and two views of its variable part
_BUFFER = {
    "buffer_int32": ArrayType(np.int32, "buffer / 4"),
    "variable_int64": ArrayType(np.int64, "variable / 8"),
    "variable_int32": ArrayType(np.int32, "variable / 4"),
}
_OFFSETS = [f"{name}_offset" for name, line in STEP_ARRAYS.items() if line.sampled]
StepViews = namedtuple("StepViews", [*STEP_ARRAYS, *_BUFFER, *_OFFSETS])  # type: ignore[misc]
STEP = ArrayTuple(StepViews, {**STEP_ARRAYS, **_BUFFER}, _OFFSETS)
arrays_of = STEP.unpack
"""In compiled code, return a step's arrays by name from
`vllm_npu_prep.prep.layout.StepArrays.addresses`.

The tuple has the arrays of the table; ``buffer_int32``, the whole buffer; ``variable_int64`` and
``variable_int32``, two views of its variable part; and the offsets of arrays to which samples are
scattered, in elements of the buffer viewed as int32."""


@intrinsic
def write_padding(typingctx, arrays, num_tokens, num_reqs):
    """In compiled code, fill all elements past the batch with the constants of the table.

    Parameters
    ----------
    arrays
        The tuple that `arrays_of` returns.
    num_tokens, num_reqs
        Where padding begins in token-level and request-level arrays. Arrays of other levels are not
        touched: the code that writes them also pads them.
    """

    def codegen(context, builder, signature, args):
        def fill(array_type, value, padding, start):
            array = context.make_array(array_type)(context, builder, value)
            *rows, columns = cgutils.unpack_tuple(builder, array.shape, array_type.ndim)
            constant = context.get_constant(array_type.dtype, padding)
            stored = context.get_value_as_data(builder, array_type.dtype, constant)
            count = rows[0] if rows else context.get_constant(types.intp, 1)
            with cgutils.for_range(builder, count) as row:
                first = builder.mul(row.index, columns)
                with cgutils.for_range(builder, columns, start=start) as column:
                    place = builder.gep(array.data, [builder.add(first, column.index)])
                    builder.store(stored, place)

        starts = {Level.TOKEN: args[1], Level.REQUEST: args[2]}
        for index, line in enumerate(STEP_ARRAYS.values()):
            if line.level in starts and not isinstance(line.padding, PaddingRule):
                value = builder.extract_value(args[0], index)
                fill(arrays.types[index], value, line.padding, starts[line.level])
        return context.get_dummy_value()

    return types.none(arrays, types.intp, types.intp), codegen
