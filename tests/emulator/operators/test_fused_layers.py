"""What references of layers read out of documents; plain calls are rows of `verify-device`."""

import math

import pytest
import torch

from ascend_emulator import profiles
from ascend_emulator.operators import KernelRefusalError
from ascend_emulator.operators.delta_rule import RECURRENT
from tests.emulator.operators.calls import call, mrope_arguments
from tests.emulator.operators.formula import DTYPES, assert_close, random
from tests.emulator.operators.layer_calls import (
    ADD,
    CLIPPED,
    NORM,
    QUANTIZE,
    ROTARY,
    SCATTER,
    WEIGHT_QUANT,
    add,
    clipped,
    multiplied,
    norm,
    recurrent,
    rotary,
    scatter,
    weight_quant,
)


@pytest.mark.parametrize("shape", [(2, 1, 5, 8), (2, 3, 5, 8), (2, 3, 1, 8)])
def test_rotary_mul_with_factors_by_request_and_by_head(shape, seed):
    x = random(2, 3, 5, 8, seed=seed)
    r1, r2 = random(*shape, seed=1), random(*shape, seed=2)
    output = call("npu::npu_rotary_mul", {"input": x, "r1": r1, "r2": r2})
    first, second = x.double().chunk(2, -1)
    assert_close(output, x.double() * r1 + torch.cat((-second, first), -1) * r2, torch.float32)


@pytest.mark.parametrize("sections", [(16, 24, 24), (24, 20, 20), (16, 16, 16, 16)])
@pytest.mark.parametrize("cache_mode", ["default", "interleave"])
def test_rotary_embedding_by_sections(sections, cache_mode, seed):
    if cache_mode == "interleave" and len(sections) == 4:
        cache_mode = "default"
    generator = torch.Generator().manual_seed(seed)
    positions = torch.randint(64, (len(sections), 5), generator=generator)
    arguments = mrope_arguments(seed, torch.float32, positions=positions)
    cache = arguments["cos_sin_cache"]
    rows = torch.empty(5, 128)
    for token in range(5):
        for frequency in range(64):
            if cache_mode == "interleave":
                row = frequency % 3
                row = row if row and frequency < 3 * sections[row] else 0
            else:
                ends = torch.tensor(sections).cumsum(0).tolist()
                row = next(index for index, end in enumerate(ends) if frequency < end)
            for column in (frequency, 64 + frequency):
                rows[token, column] = cache[positions[row, token], column]
    chosen = {"mrope_section": list(sections), "cache_mode": cache_mode}
    query, _ = call("npu::npu_mrope", arguments | chosen)
    cos, sin = rows.double()[:, None].chunk(2, -1)
    first, second = arguments["query"].double().view(5, -1, 128).chunk(2, -1)
    expected = torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
    assert_close(query / 4, expected.flatten(1) / 4, torch.float32)


@pytest.mark.parametrize(("profile", "largest"), [("9.1", 1500), ("8.5", 1024), ("docs", 1024)])
def test_k_has_a_limit_in_older_releases_and_documents(profile, largest):
    arguments = {"logits": torch.zeros(1, 1500), "k": torch.tensor([largest], dtype=torch.int32)}
    with profiles.using(profile):
        assert call("npu::npu_top_k_top_p", arguments).isfinite().all()
        with pytest.raises(KernelRefusalError, match="k range"):
            call("npu::npu_top_k_top_p", arguments | {"k": arguments["k"] + 1})


def test_without_decays_nothing_is_forgotten():
    arguments = recurrent()
    zeros = {**arguments, "state": arguments["state"].clone(), "g": arguments["g"] * 0}
    none = {**arguments, "state": arguments["state"].clone(), "g": None}
    assert torch.equal(call(RECURRENT, zeros), call(RECURRENT, none))


@pytest.mark.parametrize("axis", [-1, 0, -2])
@pytest.mark.parametrize("dtype", DTYPES)
def test_quantisation_by_factors(axis, dtype, seed):
    """Axes from -1 up stand for the last one."""
    count = 5 if axis == -2 else 8
    scales = (random(count, seed=seed).abs() * 90).to(dtype)
    offsets = (random(count, seed=seed + 1) * 10).to(dtype)
    arguments = multiplied(dtype, axis=axis, scales=scales, zero_points=offsets)
    output = call(QUANTIZE, arguments)
    for row in range(5):
        for column in range(8):
            index = row if axis == -2 else column
            scaled = float(arguments["input"][row, column]) * float(scales[index])
            level = min(max(round(scaled + float(offsets[index])), -128), 127)
            assert int(output[row, column]) == level


@pytest.mark.parametrize("is_neox_style", [True, False])
@pytest.mark.parametrize("dtype", DTYPES[:2])
def test_rotary_embedding_in_place(is_neox_style, dtype, seed):
    arguments = rotary(dtype, seed, is_neox_style=is_neox_style)
    before = {name: arguments[name].double() for name in ("query", "key")}
    call(ROTARY, arguments)
    for token, position in enumerate(arguments["positions"].tolist()):
        cos, sin = arguments["cos_sin_cache"][position].double().chunk(2)
        for name, x in before.items():
            for head in range(x.shape[1] // 16):
                columns = torch.arange(16 * head, 16 * head + 16)
                first, second = columns.chunk(2) if is_neox_style else columns.view(8, 2).T
                a, b, after = x[token, first], x[token, second], arguments[name][token]
                assert_close(after[first] / 4, (a * cos - b * sin) / 4, dtype)
                assert_close(after[second] / 4, (b * cos + a * sin) / 4, dtype)


@pytest.mark.parametrize("dim", [-1, 0, 1])
@pytest.mark.parametrize("interleaved", [True, False])
def test_a_clipped_gate(dim, interleaved, seed):
    x = random(4, 6, 3 if dim == 1 else 8, seed=seed) * 9
    arguments = clipped(x=x, dim=dim, interleaved=interleaved, alpha=1.5, limit=6.0, bias=0.5)
    if dim != 0:
        arguments["group_index"] = torch.tensor([1, 2])
    output = call(CLIPPED, arguments).flatten()
    rows = x.double().reshape({-1: 24, 0: 1, 1: 4}[dim], -1)
    expected = []
    for row in rows.tolist():
        half = len(row) // 2
        for index in range(half):
            a, b = row[2 * index : 2 * index + 2] if interleaved else row[index::half]
            a, b = min(a, 6.0), max(min(b, 6.0), -6.0)
            expected.append(a / (1 + math.exp(-1.5 * a)) * (b + 0.5))
    computed = len(expected) if dim == 0 else 3 * len(expected) // len(rows)
    assert_close(output[:computed], torch.tensor(expected[:computed]).double(), torch.float32)
    assert output[computed:].isnan().all()


def test_fast_gelu(seed):
    x = random(5, 8, seed=seed)
    output = call("npu::npu_fast_gelu", {"input": x})
    assert_close(output, x.double() / (1 + (-1.702 * x.double()).exp()), torch.float32)


def test_rows_are_written_where_indices_point(seed):
    arguments = scatter(seed)
    expected = arguments["input"].clone()
    for place, row in zip(arguments["indices"].tolist(), arguments["updates"]):
        expected[place[0], place[1]] = row
    assert call(SCATTER, arguments) is arguments["input"]
    assert torch.equal(arguments["input"], expected)


@pytest.mark.parametrize("dtype", DTYPES[:2])
@pytest.mark.parametrize("shape", [(6,), (1, 6), (1,), (1, 1)])
def test_products_with_int8_weights(dtype, shape, seed):
    arguments = weight_quant(dtype, seed)
    for name in ("antiquant_scale", "antiquant_offset"):
        arguments[name] = arguments[name][: shape[-1]].view(shape)
    output = call(WEIGHT_QUANT, arguments)
    x, weight, scale, offset, bias = (value.double() for value in arguments.values())
    for column in range(6):
        index = column if shape[-1] == 6 else 0
        real = (weight[:, column] + offset.flatten()[index]) * scale.flatten()[index]
        assert_close(output[:, column] / 8, (x @ real + bias[column]) / 8, dtype)


def test_products_are_added_in_float32(seed):
    arguments = add(seed=seed)
    before = arguments["C"].double()
    call(ADD, arguments)
    x, weight = arguments["x"].double(), arguments["weight"].double()
    expected = before + torch.einsum("km,kn->mn", x, weight)
    assert_close(arguments["C"] / 4, expected / 4, torch.float32)


def test_a_mask_of_the_first_result_changes_nothing():
    """vllm-ascend passes it where a norm and its quantisation are one operator."""
    plain, masked = (call(NORM, norm() | given) for given in ({}, {"output_mask": [True, False]}))
    for ours, theirs in zip(plain, masked):
        assert torch.equal(ours, theirs)
