"""Norms and rotary embeddings as compiled functions, for float32 and bfloat16.

They compute what vLLM's own operators compute, with the same roundings, in one call in place of
several of torch's. Arrays come by address: to unbox them takes longer than a decode's norm.
bfloat16, which numba doesn't know, is read and written as the upper half of a float32.
"""

from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import carray, float32, njit, types, uint16, uint32
from numba.extending import intrinsic

from vllm_npu_prep.prep.compiled import pointer

DTYPES = (torch.float32, torch.bfloat16)

# Sums in another order are no less exact; NaN and infinity keep their meaning.
_OPTIONS: dict[str, Any] = {
    "error_model": "numpy",
    "boundscheck": False,
    "fastmath": {"reassoc", "contract", "arcp"},
}


@intrinsic
def _bits(typingctx, value):
    """Return the bits of a float32."""

    def codegen(context, builder, signature, args):
        return builder.bitcast(args[0], ir.IntType(32))

    return types.uint32(types.float32), codegen


@intrinsic
def _number(typingctx, bits):
    """Return the float32 of these bits."""

    def codegen(context, builder, signature, args):
        return builder.bitcast(args[0], ir.FloatType())

    return types.float32(types.uint32), codegen


@njit(inline="always", **_OPTIONS)
def _widened(value):
    return _number(uint32(uint32(value) << uint32(16)))


@njit(inline="always", **_OPTIONS)
def _rounded(value):
    """Round to the nearest bfloat16, to the even one of two, as torch does."""
    bits = _bits(float32(value))
    nearest = (bits + uint32(0x7FFF) + ((bits >> uint32(16)) & uint32(1))) >> uint32(16)
    return uint16(nearest) if value == value else uint16(0x7FC0)


@njit(cache=True, **_OPTIONS)
def _norm_float32(x, x_row, weight, out, rows, size, epsilon):
    xs, ws = (
        carray(pointer(x), (rows, x_row), np.float32),
        carray(pointer(weight), size, np.float32),
    )
    outs = carray(pointer(out), (rows, size), np.float32)
    for row in range(rows):
        total = float32(0)
        for i in range(size):
            total += xs[row, i] * xs[row, i]
        factor = float32(1 / np.sqrt(float32(total / size + epsilon)))
        for i in range(size):
            outs[row, i] = xs[row, i] * factor * ws[i]


@njit(cache=True, **_OPTIONS)
def _norm_bfloat16(x, x_row, weight, out, rows, size, epsilon):
    xs, ws = carray(pointer(x), (rows, x_row), np.uint16), carray(pointer(weight), size, np.uint16)
    outs = carray(pointer(out), (rows, size), np.uint16)
    for row in range(rows):
        total = float32(0)
        for i in range(size):
            value = _widened(xs[row, i])
            total += value * value
        factor = float32(1 / np.sqrt(float32(total / size + epsilon)))
        for i in range(size):
            normed = _widened(_rounded(_widened(xs[row, i]) * factor))
            outs[row, i] = _rounded(normed * _widened(ws[i]))


@njit(cache=True, **_OPTIONS)
def _add_norm_float32(
    x, x_row, residual, residual_row, weight, out, total_out, rows, size, epsilon
):
    xs, ws = (
        carray(pointer(x), (rows, x_row), np.float32),
        carray(pointer(weight), size, np.float32),
    )
    before = carray(pointer(residual), (rows, residual_row), np.float32)
    outs = carray(pointer(out), (rows, size), np.float32)
    sums = carray(pointer(total_out), (rows, size), np.float32)
    for row in range(rows):
        total = float32(0)
        for i in range(size):
            value = xs[row, i] + before[row, i]
            sums[row, i] = value
            total += value * value
        factor = float32(1 / np.sqrt(float32(total / size + epsilon)))
        for i in range(size):
            outs[row, i] = sums[row, i] * factor * ws[i]


@njit(cache=True, **_OPTIONS)
def _add_norm_bfloat16(
    x, x_row, residual, residual_row, weight, out, total_out, rows, size, epsilon
):
    xs, ws = carray(pointer(x), (rows, x_row), np.uint16), carray(pointer(weight), size, np.uint16)
    before = carray(pointer(residual), (rows, residual_row), np.uint16)
    outs = carray(pointer(out), (rows, size), np.uint16)
    sums = carray(pointer(total_out), (rows, size), np.uint16)
    exact = np.empty(size, np.float32)  # the norm is of the sum before it is rounded
    for row in range(rows):
        total = float32(0)
        for i in range(size):
            value = _widened(xs[row, i]) + _widened(before[row, i])
            exact[i] = value
            sums[row, i] = _rounded(value)
            total += value * value
        factor = float32(1 / np.sqrt(float32(total / size + epsilon)))
        for i in range(size):
            normed = _widened(_rounded(exact[i] * factor))
            outs[row, i] = _rounded(normed * _widened(ws[i]))


@njit(inline="always", **_OPTIONS)
def _product(left, right):
    return _widened(_rounded(left * right))


@njit(cache=True, **_OPTIONS)
def _rotate_float32(x, x_row, out, positions, factors, rows, heads, size, rotary, is_neox):
    xs = carray(pointer(x), (rows, x_row), np.float32)
    outs = carray(pointer(out), (rows, heads * size), np.float32)
    places, half = carray(pointer(positions), rows, np.int64), rotary // 2
    for row in range(rows):
        # Cosines before sines, of the row's position
        at = carray(pointer(factors + 4 * rotary * places[row]), rotary, np.float32)
        for first in range(0, heads * size, size):
            head, turned = xs[row, first : first + size], outs[row, first : first + size]
            if is_neox:
                for i in range(half):
                    turned[i] = head[i] * at[i] - head[half + i] * at[half + i]
                for i in range(half):
                    turned[half + i] = head[half + i] * at[i] + head[i] * at[half + i]
            else:
                for i in range(half):
                    turned[2 * i] = head[2 * i] * at[i] - head[2 * i + 1] * at[half + i]
                    turned[2 * i + 1] = head[2 * i + 1] * at[i] + head[2 * i] * at[half + i]
            for i in range(rotary, size):
                turned[i] = head[i]


@njit(cache=True, **_OPTIONS)
def _rotate_bfloat16(x, x_row, out, positions, factors, rows, heads, size, rotary, is_neox):
    xs = carray(pointer(x), (rows, x_row), np.uint16)
    outs = carray(pointer(out), (rows, heads * size), np.uint16)
    places, half = carray(pointer(positions), rows, np.int64), rotary // 2
    second, step = (half, 1) if is_neox else (1, 2)
    cos, sin = np.empty(half, np.float32), np.empty(half, np.float32)
    left, right = np.empty(half, np.float32), np.empty(half, np.float32)
    for row in range(rows):
        at = carray(pointer(factors + 2 * rotary * places[row]), rotary, np.uint16)
        for i in range(half):
            cos[i], sin[i] = _widened(at[i]), _widened(at[half + i])
        for first in range(0, heads * size, size):
            head, turned = xs[row, first : first + size], outs[row, first : first + size]
            for i in range(half):
                left[i], right[i] = _widened(head[step * i]), _widened(head[step * i + second])
            if is_neox:
                for i in range(half):
                    turned[i] = _rounded(_product(left[i], cos[i]) - _product(right[i], sin[i]))
                for i in range(half):
                    turned[half + i] = _rounded(
                        _product(right[i], cos[i]) + _product(left[i], sin[i])
                    )
            else:
                for i in range(half):
                    turned[2 * i] = _rounded(_product(left[i], cos[i]) - _product(right[i], sin[i]))
                    turned[2 * i + 1] = _rounded(
                        _product(right[i], cos[i]) + _product(left[i], sin[i])
                    )
            for i in range(rotary, size):
                turned[i] = head[i]


_NORMS = {torch.float32: _norm_float32, torch.bfloat16: _norm_bfloat16}
_ADD_NORMS = {torch.float32: _add_norm_float32, torch.bfloat16: _add_norm_bfloat16}
_ROTATIONS = {torch.float32: _rotate_float32, torch.bfloat16: _rotate_bfloat16}


def _empty(x: torch.Tensor) -> torch.Tensor:
    return torch.empty(x.shape, dtype=x.dtype)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """Normalise rows ``[T, D]``; each row of `x` and `weight` ``[D]`` are contiguous."""
    out = _empty(x)
    rows, size = x.shape
    _NORMS[x.dtype](
        x.data_ptr(), x.stride(0), weight.data_ptr(), out.data_ptr(), rows, size, epsilon
    )
    return out


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, epsilon: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the norm of ``x + residual``, both ``[T, D]``, and this sum."""
    out, total = _empty(x), _empty(x)
    rows, size = x.shape
    _ADD_NORMS[x.dtype](
        x.data_ptr(),
        x.stride(0),
        residual.data_ptr(),
        residual.stride(0),
        weight.data_ptr(),
        out.data_ptr(),
        total.data_ptr(),
        rows,
        size,
        epsilon,
    )
    return out, total


def rotate(
    positions: torch.Tensor,  # int64 [T], contiguous
    x: torch.Tensor,  # [T, N * D], each row contiguous
    factors: torch.Tensor,  # [max positions, rotary_dim], cosines before sines, contiguous
    head_size: int,
    is_neox_style: bool,
) -> torch.Tensor:
    out = _empty(x)
    rows, width = x.shape
    _ROTATIONS[x.dtype](
        x.data_ptr(),
        x.stride(0),
        out.data_ptr(),
        positions.data_ptr(),
        factors.data_ptr(),
        rows,
        width // head_size,
        head_size,
        factors.shape[1],
        is_neox_style,
    )
    return out
