"""Norms, rotary embeddings and activations as compiled functions.

They compute what vLLM's own operators compute, with the same roundings, in one call in place of
several of torch's. Tensors come by address: to unbox them takes longer than a decode's norm.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numba import carray

from vllm_npu_prep.prep.compiled import compiled, pointer
from vllm_npu_prep.prep.elements import (
    BFLOAT16,
    FLOAT16,
    FLOAT32,
    LOG2_E,
    ONE,
    ZERO,
    exp2,
    fast,
    narrow,
    rounded,
    widen,
)

ELEMENTS = {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16, torch.float16: FLOAT16}


def of_each_dtype(make: Callable[[Any], Any]) -> dict[torch.dtype, Any]:
    """Return functions for tensors of each dtype, each of which is compiled by its first call."""
    return {dtype: compiled(make(element)) for dtype, element in ELEMENTS.items()}


# ----------------------------------------------------------------- norms


@fast
def norm_row(row, weight, out, epsilon):
    """Normalise a row of float32s; the result is rounded before it is multiplied by the weight."""
    total = ZERO
    for i in range(len(row)):
        total += row[i] * row[i]
    factor = np.float32(1 / np.sqrt(np.float32(total / len(row) + epsilon)))
    for i in range(len(row)):
        out[i] = narrow(rounded(row[i] * factor, out[i]) * widen(weight[i]), out[i])


@of_each_dtype
def norm_of(element):
    def norm(x, x_row, weight, out, rows, size, epsilon):
        xs, weights = (
            carray(pointer(x), (rows, x_row), element),
            carray(pointer(weight), size, element),
        )
        outs = carray(pointer(out), (rows, size), element)
        row = np.empty(size, np.float32)
        for r in range(rows):
            for i in range(size):
                row[i] = widen(xs[r, i])
            norm_row(row, weights, outs[r], epsilon)

    return norm


@of_each_dtype
def add_norm_of(element):
    def add_norm(x, x_row, residual, residual_row, weight, out, total_out, rows, size, epsilon):
        xs, weights = (
            carray(pointer(x), (rows, x_row), element),
            carray(pointer(weight), size, element),
        )
        before = carray(pointer(residual), (rows, residual_row), element)
        outs = carray(pointer(out), (rows, size), element)
        sums = carray(pointer(total_out), (rows, size), element)
        exact = np.empty(size, np.float32)  # the norm is of the sum before it is rounded
        for r in range(rows):
            total = sums[r]
            for i in range(size):
                exact[i] = widen(xs[r, i]) + widen(before[r, i])
                total[i] = narrow(exact[i], total[i])
            norm_row(exact, weights, outs[r], epsilon)

    return add_norm


def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """Normalise rows ``[T, D]``; each row of `x` and `weight` ``[D]`` are contiguous."""
    out = _empty(x)
    rows, size = x.shape
    norm_of[x.dtype](
        x.data_ptr(), x.stride(0), weight.data_ptr(), out.data_ptr(), rows, size, epsilon
    )
    return out


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, epsilon: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the norm of ``x + residual``, both ``[T, D]``, and this sum."""
    out, total = _empty(x), _empty(x)
    rows, size = x.shape
    add_norm_of[x.dtype](
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


# ----------------------------------------------------------------- rotary embeddings


@fast
def rotated(x, cos, y, sin, like):
    return rounded(x * cos, like) + rounded(y * sin, like)


@of_each_dtype
def rotation_of(element):
    def rotate(first_x, x_row, out, positions, factors, rows, heads, size, rotary, is_neox):
        xs = carray(pointer(first_x), (rows, x_row), element)
        outs = carray(pointer(out), (rows, heads * size), element)
        places, half = carray(pointer(positions), rows, np.int64), rotary // 2
        # Rows of one array, and places counted from `half`, would keep LLVM from vectors
        cos, sin = np.empty(half, np.float32), np.empty(half, np.float32)
        for row in range(rows):
            # Cosines before sines, of the row's position
            at = carray(pointer(factors + xs.itemsize * rotary * places[row]), rotary, element)
            sines = at[half:]
            for i in range(half):
                cos[i], sin[i] = widen(at[i]), widen(sines[i])
            for first in range(0, heads * size, size):
                head, turned = xs[row, first : first + size], outs[row, first : first + size]
                if is_neox:
                    low, high = head[:half], head[half:rotary]
                    to_low, to_high = turned[:half], turned[half:rotary]
                    for i in range(half):
                        x, y, like = widen(low[i]), widen(high[i]), low[i]
                        to_low[i] = narrow(rotated(x, cos[i], -y, sin[i], like), like)
                        to_high[i] = narrow(rotated(y, cos[i], x, sin[i], like), like)
                else:
                    for i in range(half):
                        x, y, like = widen(head[2 * i]), widen(head[2 * i + 1]), head[0]
                        turned[2 * i] = narrow(rotated(x, cos[i], -y, sin[i], like), like)
                        turned[2 * i + 1] = narrow(rotated(y, cos[i], x, sin[i], like), like)
                for i in range(rotary, size):
                    turned[i] = head[i]

    return rotate


def rotate(
    positions: torch.Tensor,  # int64 [T], contiguous
    x: torch.Tensor,  # [T, N * D], each row contiguous
    factors: torch.Tensor,  # [max positions, rotary_dim], cosines before sines, contiguous
    head_size: int,
    is_neox_style: bool,
) -> torch.Tensor:
    out = _empty(x)
    rows, width = x.shape
    rotation_of[x.dtype](
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


# ----------------------------------------------------------------- activations


@fast
def silu(x):
    power = exp2(-LOG2_E * abs(x))
    return x * ((ONE if x >= ZERO else power) / (ONE + power))


@of_each_dtype
def silu_and_mul_of(element):
    def silu_and_mul(x, x_row, out, rows, size):
        xs = carray(pointer(x), (rows, x_row), element)
        outs = carray(pointer(out), (rows, size), element)
        for r in range(rows):
            gate, up, result = xs[r, :size], xs[r, size : 2 * size], outs[r]
            for i in range(size):
                activated = rounded(silu(widen(gate[i])), result[i])
                result[i] = narrow(activated * widen(up[i]), result[i])

    return silu_and_mul


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """Return ``silu(x[:, :D]) * x[:, D:]`` of ``[T, 2 * D]``, each row contiguous."""
    rows, width = x.shape
    out = torch.empty((rows, width // 2), dtype=x.dtype)
    silu_and_mul_of[x.dtype](x.data_ptr(), x.stride(0), out.data_ptr(), rows, width // 2)
    return out


def _empty(x: torch.Tensor) -> torch.Tensor:
    return torch.empty(x.shape, dtype=x.dtype)
