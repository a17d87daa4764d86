"""Operators of whole layers against scalar formulas in float64."""

import math

import pytest
import torch

from ascend_emulator import profiles
from ascend_emulator.operators import KernelRefusalError
from tests.emulator.operators.calls import call, matmul_arguments, mrope_arguments
from tests.emulator.operators.formula import assert_close
from tests.emulator.operators.test_elementwise import DTYPES, norm_by_hand, random


@pytest.mark.parametrize("dtype", DTYPES)
def test_gemma_rms_norm(dtype, seed):
    x, gamma = random(5, 48, dtype=dtype, seed=seed), random(48, dtype=dtype) / 8
    arguments = {"input": x, "gamma": gamma, "epsilon": 1e-5}
    output, reciprocal = call("npu::npu_gemma_rms_norm", arguments)
    expected, reciprocals = norm_by_hand(x, gamma.double() + 1, 1e-5)
    assert output.dtype == dtype
    assert_close(output, expected, dtype)
    assert reciprocal.flatten().tolist() == pytest.approx(reciprocals, rel=1e-5)


def gelu_by_hand(x, approximate):
    def of(value):
        if approximate == "none":
            return value * 0.5 * (1 + math.erf(value / math.sqrt(2)))
        inner = math.sqrt(2 / math.pi) * (value + 0.044715 * value**3)
        return 0.5 * value * (1 + math.tanh(inner))

    values = [of(value) for value in x.double().flatten().tolist()]
    return torch.tensor(values, dtype=torch.float64).view(x.shape)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_gelu(approximate, dtype, seed):
    x = random(5, 12, dtype=dtype, seed=seed)
    output = call("npu::npu_gelu", {"input": x, "approximate": approximate})
    assert output.dtype == dtype
    assert_close(output, gelu_by_hand(x, approximate), dtype)


@pytest.mark.parametrize("left", [True, False])
@pytest.mark.parametrize(("index", "approximate"), [(0, "none"), (1, "tanh")])
def test_geglu(index, approximate, left, seed):
    x, dtype = random(5, 12, seed=seed), torch.float32
    arguments = {"input": x, "approximate": index, "activate_left": left}
    output, activated = call("npu::npu_geglu", arguments)
    gate, up = (x[:, :6], x[:, 6:]) if left else (x[:, 6:], x[:, :6])
    assert_close(activated, gelu_by_hand(gate, approximate), dtype)
    assert_close(output, gelu_by_hand(gate, approximate) * up.double(), dtype)


def rotated_by_hand(x, rows, head_size, mode):
    """Rotate heads; `rows` are the cosines and sines of each token, ``[T, rotary_dim]``."""
    half = rows.shape[1] // 2
    out = x.double().view(len(x), -1, head_size).clone()
    for token, row in enumerate(rows.double().tolist()):
        for index in range(half):
            one = index if mode == "half" else 2 * index
            other = index + half if mode == "half" else 2 * index + 1
            cos, sin = row[index], row[half + index]
            first, second = out[token, :, one].clone(), out[token, :, other].clone()
            out[token, :, one] = first * cos - second * sin
            out[token, :, other] = second * cos + first * sin
    return out.view(x.shape)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mode", ["half", "interleave"])
@pytest.mark.parametrize("rotary_dim", [128, 64])
def test_rotary_embedding_of_q_and_k(rotary_dim, mode, dtype, seed):
    arguments = mrope_arguments(seed, dtype, rotary_mode=mode)
    cache = arguments["cos_sin_cache"][:, :rotary_dim].contiguous()
    outputs = call("npu::npu_mrope", arguments | {"cos_sin_cache": cache})
    for output, given in zip(outputs, (arguments["query"], arguments["key"])):
        expected = rotated_by_hand(given, cache[arguments["positions"]], 128, mode)
        assert output.dtype == dtype
        assert_close(output / 4, expected / 4, dtype)


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
    expected = rotated_by_hand(arguments["query"], rows, 128, "half")
    assert_close(query / 4, expected / 4, torch.float32)


def test_rotary_of_slices_of_a_projection(seed):
    projected = random(5, 1024, dtype=torch.float16, seed=seed)
    query, key, _ = projected.split((512, 256, 256), -1)
    arguments = mrope_arguments(seed)
    rotated = call("npu::npu_mrope", arguments | {"query": query, "key": key})
    packed = {"query": query.contiguous(), "key": key.contiguous()}
    for got, expected in zip(rotated, call("npu::npu_mrope", arguments | packed)):
        assert got.is_contiguous() and torch.equal(got, expected)


def kept_by_hand(row, p, k):
    """Indices that top-k and then top-p keep, likeliest first."""
    order = sorted(range(len(row)), key=lambda index: -row[index])[:k]
    weights = [math.exp(row[index]) for index in order]
    kept, total = [], 0.0
    for index, weight in zip(order, weights):
        if kept and total / sum(weights) >= p:
            break
        kept.append(index)
        total += weight
    return kept


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("p", "k"), [(0.7, None), (None, 5), (0.7, 5), (0.0, 9), (1.0, 40)])
def test_top_p_keeps_the_smallest_set(p, k, dtype, seed):
    logits = random(4, 40, seed=seed).mul(3).to(dtype)
    limit_p = None if p is None else torch.full((4,), p, dtype=dtype)
    limit_k = None if k is None else torch.full((4,), k, dtype=torch.int32)
    output = call("npu::npu_top_k_top_p", {"logits": logits, "p": limit_p, "k": limit_k})
    assert output.dtype == dtype
    share = 1.0 if p is None else float(limit_p[0])
    for row, got in zip(logits.double().tolist(), output):
        kept = kept_by_hand(row, share, k or 40)
        assert got.isfinite().nonzero().flatten().tolist() == sorted(kept)
    assert torch.equal(output[output.isfinite()], logits[output.isfinite()])


def test_ties_at_k_are_kept():
    logits = torch.tensor([[1.0, 3.0, 2.0, 2.0, 0.0]])
    arguments = {"logits": logits, "k": torch.tensor([2], dtype=torch.int32)}
    output = call("npu::npu_top_k_top_p", arguments)
    assert output.isfinite().tolist() == [[False, True, True, True, False]]


@pytest.mark.parametrize(("profile", "largest"), [("9.1", 1500), ("8.5", 1024), ("docs", 1024)])
def test_k_has_a_limit_in_older_releases_and_documents(profile, largest):
    arguments = {"logits": torch.zeros(1, 1500), "k": torch.tensor([largest], dtype=torch.int32)}
    with profiles.using(profile):
        assert call("npu::npu_top_k_top_p", arguments).isfinite().all()
        with pytest.raises(KernelRefusalError, match="k range"):
            call("npu::npu_top_k_top_p", arguments | {"k": arguments["k"] + 1})


@pytest.mark.parametrize("dtype", DTYPES)
def test_grouped_matmul(dtype, seed):
    arguments = matmul_arguments(seed, dtype)
    outputs = call("npu::npu_grouped_matmul", arguments)
    columns = zip(outputs, arguments["x"], arguments["weight"], arguments["bias"])
    for output, x, weight, bias in columns:
        assert output.dtype == dtype and output.is_contiguous()
        assert_close(output / 8, (x.double() @ weight.double() + bias.double()) / 8, dtype)
