"""What references of layers read out of documents; plain calls are rows of `verify-device`."""

import pytest
import torch

from ascend_emulator import profiles
from ascend_emulator.operators import KernelRefusalError
from ascend_emulator.operators.delta_rule import RECURRENT
from tests.emulator.operators.calls import call, mrope_arguments
from tests.emulator.operators.formula import DTYPES, assert_close, random
from tests.emulator.operators.layer_calls import QUANTIZE, multiplied, recurrent


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
