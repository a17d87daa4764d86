"""Norms, activation and rotary embedding against scalar formulas in float64."""

import math

import pytest
import torch

from tests.emulator.operators.calls import call
from tests.emulator.operators.formula import assert_close

DTYPES = [torch.float16, torch.bfloat16, torch.float32]


def random(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def norm_by_hand(x, gamma, epsilon):
    rows = x.double().flatten(0, -1 - gamma.dim()).flatten(1)
    scales = gamma.double().flatten()
    outputs, reciprocals = [], []
    for row in rows.tolist():
        mean = sum(value * value for value in row) / len(row)
        reciprocal = 1 / math.sqrt(mean + epsilon)
        reciprocals.append(reciprocal)
        outputs.append([v * reciprocal * g for v, g in zip(row, scales.tolist())])
    return torch.tensor(outputs, dtype=torch.float64).view(x.shape), reciprocals


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(5, 48), (3, 2, 16), (2, 3, 4, 8)])
@pytest.mark.parametrize("epsilon", [1e-6, 1e-2])
def test_rms_norm(shape, dtype, epsilon, seed):
    x, gamma = random(*shape, dtype=dtype, seed=seed), random(shape[-1], dtype=dtype)
    arguments = {"input": x, "gamma": gamma, "epsilon": epsilon}
    output, reciprocal = call("npu::npu_rms_norm", arguments)
    expected, reciprocals = norm_by_hand(x, gamma, epsilon)
    assert output.dtype == dtype and reciprocal.dtype == torch.float32
    assert reciprocal.shape == (*shape[:-1], 1)
    assert_close(output, expected, dtype)
    assert reciprocal.flatten().tolist() == pytest.approx(reciprocals, rel=1e-5)


def test_rms_norm_over_several_dimensions(seed):
    x, gamma = random(5, 3, 8, seed=seed), random(3, 8)
    output, reciprocal = call("npu::npu_rms_norm", {"input": x, "gamma": gamma})
    assert reciprocal.shape == (5, 1, 1)
    assert_close(output, norm_by_hand(x, gamma, 1e-6)[0], torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
def test_add_rms_norm(dtype, seed):
    x1, x2 = random(5, 48, dtype=dtype, seed=seed), random(5, 48, dtype=dtype, seed=seed + 1)
    gamma = random(48, dtype=dtype)
    arguments = {"x1": x1, "x2": x2, "gamma": gamma, "epsilon": 1e-5}
    output, reciprocal, total = call("npu::npu_add_rms_norm", arguments)
    assert torch.equal(total, x1 + x2)
    expected, reciprocals = norm_by_hand(x1 + x2, gamma, 1e-5)
    assert_close(output, expected, dtype)
    assert reciprocal.flatten().tolist() == pytest.approx(reciprocals, rel=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_add_rms_norm_cast(dtype, seed):
    """float32 of what is rounded, not what was before rounding; the rest as without the cast."""
    rows = {f"x{i}": random(5, 48, dtype=dtype, seed=seed + i) for i in (1, 2)}
    arguments = {**rows, "gamma": random(48, dtype=dtype), "epsilon": 1e-5}
    wide, *others = call("npu::npu_add_rms_norm_cast", arguments)
    assert wide.dtype == torch.float32
    assert torch.equal(wide, others[0].float())
    plain = call("npu::npu_add_rms_norm", arguments)
    assert all(map(torch.equal, others, plain))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("shape", "dim"), [((5, 12), -1), ((6, 4), 0), ((8,), -1), ((2, 4, 3), 1)])
def test_swiglu(shape, dim, dtype, seed):
    x = random(*shape, dtype=dtype, seed=seed)
    output = call("npu::npu_swiglu", {"input": x, "dim": dim})
    moved = x.double().movedim(dim, -1)
    half = moved.shape[-1] // 2
    expected = torch.zeros_like(moved[..., :half])
    for index in range(half):
        gate, up = moved[..., index], moved[..., half + index]
        expected[..., index] = gate / (1 + (-gate).exp()) * up
    assert output.dtype == dtype
    assert_close(output, expected.movedim(-1, dim), dtype)


def rotate_by_hand(x, r1, r2, mode):
    x, r1, r2 = x.double(), r1.double().expand(x.shape), r2.double().expand(x.shape)
    size = x.shape[-1]
    output = torch.zeros_like(x)
    for index in range(size):
        if mode == "half":
            partner = index + size // 2 if index < size // 2 else index - size // 2
            sign = -1 if index < size // 2 else 1
        else:
            partner = index + 1 if index % 2 == 0 else index - 1
            sign = -1 if index % 2 == 0 else 1
        output[..., index] = (
            x[..., index] * r1[..., index] + sign * x[..., partner] * r2[..., index]
        )
    return output


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mode", ["half", "interleave"])
@pytest.mark.parametrize("shape", [(1, 1, 5, 8), (1, 5, 1, 8), (5, 1, 1, 8)])
def test_rotary_mul(shape, mode, dtype, seed):
    sizes = [5 if size == 5 else other for size, other in zip(shape, (2, 3, 4))]
    x = random(*sizes, 8, dtype=dtype, seed=seed)
    r1, r2 = random(*shape, dtype=dtype, seed=1), random(*shape, dtype=dtype, seed=2)
    arguments = {"input": x, "r1": r1, "r2": r2, "rotary_mode": mode}
    output = call("npu::npu_rotary_mul", arguments)
    assert output.dtype == dtype
    assert_close(output / 4, rotate_by_hand(x, r1, r2, mode) / 4, dtype)


@pytest.mark.parametrize("shape", [(2, 1, 5, 8), (2, 3, 5, 8), (2, 3, 1, 8)])
def test_rotary_mul_with_factors_by_request_and_by_head(shape, seed):
    x = random(2, 3, 5, 8, seed=seed)
    r1, r2 = random(*shape, seed=1), random(*shape, seed=2)
    output = call("npu::npu_rotary_mul", {"input": x, "r1": r1, "r2": r2})
    assert_close(output, rotate_by_hand(x, r1, r2, "half"), torch.float32)


def test_rotary_mul_with_a_matrix(seed):
    x, r1, r2 = random(1, 5, 2, 8, seed=seed), random(1, 5, 1, 8), random(1, 5, 1, 8, seed=3)
    rotate = torch.zeros(8, 8)
    for pair in range(0, 8, 2):
        rotate[pair + 1, pair], rotate[pair, pair + 1] = -1.0, 1.0
    arguments = {"input": x, "r1": r1, "r2": r2, "rotate": rotate}
    output = call("npu::npu_rotary_mul", arguments)
    assert_close(output, rotate_by_hand(x, r1, r2, "interleave"), torch.float32)
