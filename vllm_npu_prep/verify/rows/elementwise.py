"""Rows of norms, activation and rotary embedding: fused operators that replace torch's own."""

from collections.abc import Iterator
from functools import partial

import torch
import torch_npu

from vllm_npu_prep.verify import formulas
from vllm_npu_prep.verify.row import Bench, Outcome, Row, compare, worst_of

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
EPSILON = 1e-6


def rms_norm(dtype: torch.dtype, bench: Bench) -> Outcome:
    """Rows of a hidden size, and q or k by head."""
    parts = []
    for shape in ((7, 256), (7, 4, 128)):
        x = bench.random(*shape, dtype=dtype)
        weight = bench.random(shape[-1], dtype=dtype, seed=1)
        got, _ = torch_npu.npu_rms_norm(bench.put(x), bench.put(weight), EPSILON)
        expected = formulas.rms_norm(x, weight, EPSILON)
        parts.append(compare(got, expected, f"{[*shape]}, {dtype}", where=("row",)))
    return worst_of(parts, f"[7, 256] and [7, 4, 128], {dtype}")


def add_rms_norm(dtype: torch.dtype, bench: Bench) -> Outcome:
    """The sum is a result, too, and may be rounded before the norm or after."""
    x, residual = (bench.random(7, 256, dtype=dtype, seed=seed) for seed in (0, 1))
    weight = bench.random(256, dtype=dtype, seed=2)
    got, _, total = torch_npu.npu_add_rms_norm(
        bench.put(x), bench.put(residual), bench.put(weight), EPSILON
    )
    given = f"[7, 256], {dtype}"
    summed = x.double() + residual.double()
    parts = [
        compare(total, summed, f"{given}, the sum", where=("row",)),
        compare(got, formulas.rms_norm(summed, weight, EPSILON), given, where=("row",)),
    ]
    return worst_of(parts, given)


def swiglu(dtype: torch.dtype, bench: Bench) -> Outcome:
    """Both halves of a row."""
    x = bench.random(7, 256, dtype=dtype)
    got = torch_npu.npu_swiglu(bench.put(x))
    swapped = torch.cat(x.chunk(2, -1)[::-1], -1)
    readings = {"the halves swapped": lambda: formulas.swiglu(swapped)}
    return compare(got, formulas.swiglu(x), f"[7, 256], {dtype}", readings=readings, where=("row",))


def rotary(dtype: torch.dtype, bench: Bench) -> Outcome:
    """Pairs of elements half a head apart; cosines and sines of some positions."""
    x = bench.random(1, 5, 4, 128, dtype=dtype)
    angle = torch.arange(5)[:, None] / 10000 ** (torch.arange(64)[None] / 64)
    angle = torch.cat([angle, angle], 1)[None, :, None]
    cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
    got = torch_npu.npu_rotary_mul(bench.put(x), bench.put(cos), bench.put(sin))
    expected = formulas.rotate_half(x, cos, sin)
    where = ("request", "token", "head", "element")
    return compare(got, expected, f"[1, 5, 4, 128], {dtype}", where=where)


def _rows() -> Iterator[Row]:
    for short, dtype in DTYPES.items():
        yield Row(
            f"norm-rms-{short}",
            "npu_rms_norm",
            partial(rms_norm, dtype),
            (("norms", "gamma shape"),),
        )
        yield Row(
            f"norm-add-rms-{short}",
            "npu_add_rms_norm",
            partial(add_rms_norm, dtype),
            (("norms", "equal shapes"), ("norms", "rounding of the sum")),
        )
        yield Row(f"swiglu-{short}", "npu_swiglu", partial(swiglu, dtype))
        yield Row(
            f"rotary-{short}",
            "npu_rotary_mul",
            partial(rotary, dtype),
            (("npu_rotary_mul", "same dtype"), ("npu_rotary_mul", "range of r1 and r2")),
        )


ROWS: tuple[Row, ...] = tuple(_rows())
"""Rows of this file."""
