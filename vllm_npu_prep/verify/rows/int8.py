"""Rows of what quantised layers and experts call: rounding to int8, and products of int8."""

from collections.abc import Iterator, Mapping
from functools import partial

import torch

from vllm_npu_prep.verify.int8 import Int8Probe, experts_product, probes, wide_swiglu
from vllm_npu_prep.verify.outcome import Outcome, worst_of
from vllm_npu_prep.verify.row import DTYPES, Record, Row, RowContext, compare

COVERS: Mapping[str, tuple[Record, ...]] = {
    "dynamic-quant": (("npu_dynamic_quant", "form"),),
    "quantize": (
        ("npu_quantize", "form"),
        ("npu_quantize", "offset dtype"),
        ("npu_quantize", "sizes"),
    ),
    "matmul-dynamic": (
        ("npu_quant_matmul", "form"),
        ("npu_quant_matmul", "bias"),
        ("npu_quant_matmul", "order of sums"),
    ),
    "matmul-static": (("npu_quant_matmul", "order of sums"),),
    "experts": tuple(
        ("npu_grouped_matmul, int8 rows", what)
        for what in ("form", "group sizes", "rows of no group")
    ),
}
"""The records that each row tries."""


def calls(dtype: torch.dtype) -> Mapping[str, Int8Probe]:
    """Return start-up's calls, the product of experts, and what the plugin doesn't call yet."""
    others = {"experts": experts_product(dtype), "swiglu-wide": wide_swiglu(dtype)}
    return {**probes(dtype), **others}


def int8(name: str, dtype: torch.dtype, context: RowContext) -> Outcome:
    probe = calls(dtype)[name]
    given = f"{probe.operator}, {dtype}"
    results = zip(probe.call(context.put), probe.expected(), strict=True)
    return worst_of(
        [compare(got, formula, given, where=("row",)) for got, formula in results], given
    )


def zeros(dtype: torch.dtype, context: RowContext) -> Outcome:
    """Check that products of rows of zeros, which padding may be, are zeros and not NaN."""
    values, scale = torch.ops.npu.npu_dynamic_quant(context.put(torch.zeros(3, 64, dtype=dtype)))
    weight = context.put(torch.ones(32, 64, dtype=torch.int8)).t()
    product = torch.ops.npu.npu_quant_matmul(
        values,
        weight,
        context.put(torch.full((32,), 0.5)),
        pertoken_scale=scale,
        output_dtype=dtype,
    )
    return compare(product, torch.zeros(3, 32, dtype=dtype), f"rows of zeros, {dtype}")


def _rows() -> Iterator[Row]:
    for short, dtype in DTYPES.items():
        for name, probe in calls(dtype).items():
            yield Row(
                f"int8-{name}-{short}",
                probe.operator,
                partial(int8, name, dtype),
                COVERS.get(name, ()),
            )
        yield Row(
            f"int8-zeros-{short}",
            "npu_dynamic_quant, npu_quant_matmul",
            partial(zeros, dtype),
            (("npu_dynamic_quant", "rows of zeros"),),
        )


ROWS: tuple[Row, ...] = tuple(_rows())
