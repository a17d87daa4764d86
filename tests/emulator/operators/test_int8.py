"""Operators with int8 against loops over Python's numbers."""

import math

import pytest
import torch

from tests.emulator.operators import int8_calls as calls
from tests.emulator.operators.calls import call
from tests.emulator.operators.formula import assert_close
from tests.emulator.operators.test_elementwise import norm_by_hand

HALF = [torch.float16, torch.bfloat16]


def by_token(rows):
    """int8 rows and their scales, of rows of floats."""
    scales = [max(map(abs, row)) / 127 for row in rows]
    return [[round(x / s) for x in row] for row, s in zip(rows, scales)], scales


def by_all(rows, scale, offset):
    return [[min(127, max(-128, round(x / scale) + offset)) for x in row] for row in rows]


def check_rows(values, rows, at_most=1):
    """int8 values; float32 may round a number just between two levels the other way."""
    assert values.dtype == torch.int8
    difference = (values.int() - torch.tensor(rows)).abs()
    assert difference.max() <= at_most
    assert (difference > 0).float().mean() < 0.03


def silu(x):
    return x / (1 + math.exp(-x))


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_rows_with_a_scale_each(dtype, seed):
    arguments = calls.dynamic_arguments(seed, dtype)
    values, scale = call(calls.DYNAMIC, arguments)
    rows, scales = by_token(arguments["input"].tolist())
    check_rows(values, rows)
    assert scale.dtype == torch.float32
    assert scale.tolist() == pytest.approx(scales, rel=1e-6)
    assert values.abs().amax(1).tolist() == [127] * 5


def test_a_row_of_zeros_stays_zero():
    values, scale = call(calls.DYNAMIC, {"input": torch.zeros(2, 8).half()})
    assert not values.any() and not scale.any()


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("channels", [1, 8])
def test_given_scales_and_offsets(dtype, channels, seed):
    arguments = calls.quantize_arguments(seed, dtype, channels)
    values = call(calls.QUANTIZE, arguments)
    scales = arguments["scales"].expand(8).tolist()
    columns = arguments["input"].t().tolist()
    expected = [by_all([column], scale, -7)[0] for column, scale in zip(columns, scales)]
    check_rows(values, torch.tensor(expected).t().tolist())


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("static", [False, True], ids=["dynamic", "static"])
def test_products(dtype, static, seed):
    """Float biases come after the scales, int32 ones before."""
    arguments = calls.matmul_arguments(seed, dtype, static)
    output = call(calls.MATMUL, arguments)
    x1, x2 = arguments["x1"].tolist(), arguments["x2"].t().tolist()
    scale, bias = arguments["scale"], arguments["bias"].tolist()
    if scale.dtype == torch.int64:
        scale = scale.int().view(torch.float32)
    scale = scale.tolist()
    tokens = [1.0] * 5 if static else arguments["pertoken_scale"].tolist()
    expected = torch.zeros(5, 6, dtype=torch.float64)
    for m, row in enumerate(x1):
        for n, column in enumerate(x2):
            total = sum(a * b for a, b in zip(row, column))
            if static:
                expected[m, n] = (total + bias[n]) * scale[n]
            else:
                expected[m, n] = total * scale[n] * tokens[m] + bias[n]
    assert output.dtype == dtype and output.is_contiguous()
    assert_close(output / 64, expected / 64, dtype)


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_norms(dtype, seed):
    """The sum is rounded, the norm is not before it becomes int8."""
    arguments = calls.norm_arguments(seed, dtype)
    values, empty, total, scale, nothing = call(calls.NORM, arguments)
    x1, x2 = arguments["x1"], arguments["x2"]
    assert torch.equal(total, (x1.float() + x2.float()).to(dtype))
    normed, _ = norm_by_hand(total, arguments["gamma"].double(), 1e-5)
    rows, scales = by_token(normed.tolist())
    check_rows(values, rows)
    assert scale.tolist() == pytest.approx(scales, rel=1e-4)
    assert empty.numel() == nothing.numel() == 0
    factors = calls.numbers(8, dtype=dtype, seed=seed + 3)
    values, *_, scale, _ = call(calls.NORM, arguments | {"smooth_scale1": factors})
    rows, scales = by_token((normed * factors.double()).tolist())
    check_rows(values, rows)
    assert scale.tolist() == pytest.approx(scales, rel=1e-4)

    arguments = calls.static_norm_arguments(seed, dtype)
    values, _, total = call(calls.STATIC_NORM, arguments)
    assert torch.equal(total, (x1.float() + x2.float()).to(dtype))
    check_rows(values, by_all(normed.tolist(), 0.0234375, 5))


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_activations(dtype, seed):
    """The left half is activated; a static scale divides."""
    arguments = calls.swiglu_arguments(seed, dtype)
    products = [[silu(a) * b for a, b in zip(row[:6], row[6:])] for row in arguments["x"].tolist()]
    values, scale = call(calls.SWIGLU, arguments)
    rows, scales = by_token(products)
    check_rows(values, rows)
    assert scale.tolist() == pytest.approx(scales, rel=1e-4)
    values, scale = call(calls.SWIGLU, calls.swiglu_arguments(seed, dtype, static=True))
    check_rows(values, by_all(products, torch.tensor(0.02).item(), 3))
    assert scale.isnan().all()


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_products_of_grouped_rows(dtype, seed):
    """Each group has its weight and scales; rows of none are undefined."""
    arguments = calls.grouped_arguments(seed, dtype)
    (output,) = call("npu::npu_grouped_matmul", arguments)
    x, weight = arguments["x"][0].double(), arguments["weight"][0].double()
    scale, tokens = arguments["scale"][0].double(), arguments["per_token_scale"][0].double()
    expected = torch.stack(
        [
            x[row] @ weight[group] * scale[group] * tokens[row]
            for row, group in enumerate([0, 0, 2, 2, 2])
        ]
    )
    assert output.dtype == dtype
    assert_close(output[:5] / 64, expected / 64, dtype)
    assert output[5:].isnan().all()
