"""How compiled code gets the arrays that stay from step to step: by address, and under their names.

Numba looks at every array that it is handed. For two dozen of them, not used since the last step,
that takes as long as filling them for 256 decodes. So they are handed over as one array of sizes
and addresses, and a named tuple is made of these in compiled code, where it costs nothing.
"""

import hashlib
from collections import namedtuple
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numba import from_dtype, njit, types
from numba.core import cgutils
from numba.extending import intrinsic
from numba.np.arrayobj import populate_array

from vllm_npu_prep.prep.arrays import STEP_ARRAYS, ArrayType, Level, PaddingRule

SOURCES = ("arrays.py", "compiled.py", "state.py", "tables.py")
"""Files of this folder that decide what functions in other files are compiled to."""


def _digest() -> str:
    """Short digest of `SOURCES`; without them there is no cache either."""
    digest = hashlib.sha256()
    for name in SOURCES:
        path = Path(__file__).with_name(name)
        if path.exists():
            digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


DIGEST = _digest()

OPTIONS: dict[str, Any] = {"boundscheck": False, "error_model": "numpy"}


def compiled(function: Callable[..., Any]) -> Any:
    """Compile a function and keep the result on disk, beside it or in ``NUMBA_CACHE_DIR``.

    Numba's cache notices changes of the function's own file only. A function that was compiled for
    another table would write past its arrays, so what it is cached under says which table it was.
    """
    function.__qualname__ = f"{function.__qualname__}_{DIGEST}"
    return njit(cache=True, **OPTIONS)(function)


def inlined(function: Callable[..., Any]) -> Any:
    """Compile a function as part of those that call it, and into their place on disk.

    A call hands over every array of a named tuple, used or not, seven words each.
    """
    return njit(forceinline=True, **OPTIONS)(function)


@intrinsic
def pointer(typingctx, address):
    """Pointer of an address, in compiled code."""

    def codegen(context, builder, signature, args):
        return builder.inttoptr(args[0], cgutils.voidptr_t)

    return types.voidptr(address), codegen


class ArrayTuple:
    """Arrays that compiled code gets as a named tuple.

    Parameters
    ----------
    fields
        Class of the tuple, a module's attribute: its fields are the names of `arrays` and then of
        `scalars`.
    arrays
        Contiguous arrays by name.
    scalars
        Names of integers.

    Attributes
    ----------
    unpack
        For compiled code: the named tuple of what `pack` made.
    """

    def __init__(
        self, fields: Any, arrays: Mapping[str, ArrayType], scalars: Sequence[str] = ()
    ) -> None:
        self.arrays, self.scalars = dict(arrays), tuple(scalars)
        self.dims = tuple(dict.fromkeys(dim for each in arrays.values() for dim in each.dims))
        assert fields._fields == (*self.arrays, *self.scalars)
        self.unpack = intrinsic(self._unpack(fields))

    def pack(
        self, sizes: Mapping[str, int], addresses: Mapping[str, int], scalars: Mapping[str, int]
    ) -> np.ndarray:
        """Sizes, addresses and scalars as one int64 array, in the order that `unpack` reads.

        Parameters
        ----------
        sizes
            Of each dimension.
        addresses
            Of each array; the caller keeps their memory.
        scalars
            By name.
        """
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

# The buffer that travels, whole, and its variable part
_BUFFER = {
    "buffer_int32": ArrayType(np.int32, "buffer / 4"),
    "variable_int64": ArrayType(np.int64, "variable / 8"),
    "variable_int32": ArrayType(np.int32, "variable / 4"),
}
_OFFSETS = [f"{name}_offset" for name, line in STEP_ARRAYS.items() if line.sampled]
StepViews = namedtuple("StepViews", [*STEP_ARRAYS, *_BUFFER, *_OFFSETS])  # type: ignore[misc]
STEP = ArrayTuple(StepViews, {**STEP_ARRAYS, **_BUFFER}, _OFFSETS)
arrays_of = STEP.unpack
"""In compiled code: a step's arrays by name, of `vllm_npu_prep.prep.layout.StepArrays.addresses`.

Beside the table's they are ``buffer_int32``, all that travels; its variable part as
``variable_int64`` and ``variable_int32``, the same memory; and the offsets of arrays that samples
are scattered to, in elements of the buffer seen as int32.
"""


@intrinsic
def write_padding(typingctx, arrays, num_tokens, num_reqs):
    """In compiled code: fill what is past the batch with the constants of the table.

    Parameters
    ----------
    arrays
        As `arrays_of` gives them.
    num_tokens, num_reqs
        Where padding begins in arrays of tokens and of requests. Arrays of other levels are left
        alone: what writes them knows where theirs begins.
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
