"""What the CPU fallback computes with: packed weights and compiled layers."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from vllm import ir
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
)

from vllm_npu_prep.compat.kernels import register_ir_operators
from vllm_npu_prep.compat.torch import PackedLinear, packed_linear
from vllm_npu_prep.ops.cpu import linear, norms
from vllm_npu_prep.ops.cpu.layers import CompiledSiluAndMul, _CompiledRotaryEmbedding
from vllm_npu_prep.ops.cpu.linear import pack_weights, unpacked

COMPILED = (torch.float32, torch.bfloat16, torch.float16)


class Layer(nn.Module):
    """A layer of vLLM's, as far as its method looks at it."""

    def __init__(self, weight: torch.Tensor, method: Any) -> None:
        nn.Module.__init__(self)
        self.weight, self.quant_method = nn.Parameter(weight, requires_grad=False), method

    def forward(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return self.quant_method.apply(self, x, bias)


class Head(ParallelLMHead):
    """The same of a head."""

    __init__, forward = Layer.__init__, Layer.forward


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def linear_layer(outputs: int, inputs: int, dtype: torch.dtype = torch.float32) -> Layer:
    return Layer(draw(outputs, inputs, dtype=dtype), UnquantizedLinearMethod())


def pack(model: nn.Module, dtype: torch.dtype = torch.float32) -> list[str]:
    said: list[str] = []
    config: Any = SimpleNamespace(model_config=SimpleNamespace(dtype=dtype, head_dtype=dtype))
    pack_weights([model], config, said.append)
    return said


def near(dtype: torch.dtype) -> dict[str, float]:
    return {"rtol": 1e-4, "atol": 1e-4} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 5e-2}


@pytest.mark.parametrize("dtype", COMPILED)
@pytest.mark.parametrize(("outputs", "inputs"), [(1, 1), (37, 70), (96, 576)])
def test_a_packed_weight_multiplies_and_is_there_once(dtype, outputs, inputs):
    layer, bias = linear_layer(outputs, inputs, dtype), draw(outputs, dtype=dtype, seed=1)
    weight = layer.weight.data.clone()
    said = pack(layer, dtype)  # a processor may lack what packs 16 bits
    assert said == [] or "multiply in float32" in said[0]
    assert layer.weight.numel() == 0
    for rows in (0, 1, 8, 33):
        x = draw(rows, 2 * inputs, dtype=dtype, seed=2)[:, inputs:]  # a slice of wider rows
        for added in (None, bias):
            # in float32: torch may add float16 products in float16, as on aarch64
            operands = (each if each is None else each.float() for each in (x, weight, added))
            expected = nn.functional.linear(*operands).to(dtype)
            torch.testing.assert_close(layer(x, added), expected, **near(dtype))
    with unpacked(layer):
        assert torch.equal(layer.weight, weight)


def test_new_weights_are_multiplied_after_a_reload():
    layer, x = linear_layer(37, 70), draw(3, 70, seed=1)
    pack(layer)
    new = draw(37, 70, seed=5)
    with unpacked(layer):
        layer.weight.data.copy_(new)
    assert layer.weight.numel() == 0
    torch.testing.assert_close(layer(x), x @ new.T, **near(torch.float32))


def test_a_tied_head_follows_the_embedding_that_keeps_its_rows():
    rows = draw(37, 70)
    model = nn.Module()
    model.embed_tokens = Layer(rows, UnquantizedEmbeddingMethod())
    model.lm_head = Head(rows, UnquantizedEmbeddingMethod())
    model.lm_head.weight = model.embed_tokens.weight
    pack(model)
    assert model.embed_tokens.weight.shape == (37, 70)
    with unpacked(model):
        model.embed_tokens.weight.data.mul_(2)
    x = draw(3, 70, seed=1)
    torch.testing.assert_close(model.lm_head(x), x @ (2 * draw(37, 70)).T, **near(torch.float32))
    assert type(model.embed_tokens.quant_method) is UnquantizedEmbeddingMethod


def test_what_multiplies_by_more_than_a_weight_stays_as_it_is():
    latent, convolution = linear_layer(37, 70), Layer(draw(8, 1, 4), UnquantizedLinearMethod())
    latent._cpu_skip_gemm_dispatch = True
    other = linear_layer(4, 4, torch.float64)
    pack(nn.ModuleList([latent, convolution, other]))
    for layer in (latent, convolution, other):
        assert type(layer.quant_method) is UnquantizedLinearMethod


@pytest.mark.parametrize(
    ("operators", "why"),
    [
        (None, "this torch has no operators for it"),
        (PackedLinear(torch.clone, lambda x, w, b, *rest: x @ w.T), "compute it wrong"),
    ],
)
def test_weights_stay_where_torch_cannot_multiply_packed_ones(monkeypatch, operators, why):
    monkeypatch.setattr(linear, "packed_linear", lambda: operators)
    layer = linear_layer(37, 70)
    (said,) = pack(layer)
    assert why in said
    assert layer.weight.shape == (37, 70)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_of_16_bits_are_packed_in_float32_if_need_be(monkeypatch, dtype):
    def pack_wide(weight: torch.Tensor) -> torch.Tensor:
        if weight.dtype != torch.float32:
            raise RuntimeError("the cpu has no avx512bw")
        return of_torch.pack(weight)

    of_torch = packed_linear()
    wide = PackedLinear(pack_wide, of_torch.multiply)
    monkeypatch.setattr(linear, "packed_linear", lambda: wide)
    layer, x, bias = linear_layer(37, 70, dtype), draw(9, 70, dtype=dtype), draw(37, dtype=dtype)
    weight = layer.weight.data.clone()
    (said,) = pack(layer, dtype)
    assert said.endswith("in float32, by weights of twice their size: the cpu has no avx512bw.")
    exact = nn.functional.linear(x.float(), weight.float(), bias.float())
    product = layer(x, bias)
    assert product.dtype == dtype
    assert (product - exact).abs().max() <= torch.finfo(dtype).eps / 2 * exact.abs().max()
    with unpacked(layer):
        assert torch.equal(layer.weight, weight)


def test_sums_that_are_rounded_on_the_way_are_noticed(monkeypatch):
    """oneDNN adds products of float16 in float16 on aarch64."""

    def multiply(x, weight, bias, *_):
        total = torch.zeros(len(x), len(weight), dtype=x.dtype)
        for inputs, columns in zip(x.split(8, 1), weight.split(8, 1)):
            total += nn.functional.linear(inputs.float(), columns.float()).to(x.dtype)
        return total + bias

    operators = PackedLinear(torch.clone, multiply)
    monkeypatch.setattr(linear, "packed_linear", lambda: operators)
    (said,) = pack(linear_layer(37, 70, torch.float16), torch.float16)
    assert "in float32, by weights of twice their size: torch's operators compute it wrong" in said


def test_the_first_line_of_torchs_refusal_is_given():
    def refuse(weight: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("the cpu has no avx512_fp16\nException raised from")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(linear, "packed_linear", lambda: PackedLinear(refuse, print))
        assert pack(linear_layer(37, 70))[0].endswith("takes longer: the cpu has no avx512_fp16.")


@pytest.mark.parametrize("dtype", COMPILED)
@pytest.mark.parametrize("rows", [0, 1, 9])
def test_norms_are_those_of_vllm(dtype, rows):
    register_ir_operators(norms.PROVIDER, norms.IMPLEMENTATIONS)
    wide, weight = draw(rows, 5, 192, dtype=dtype), draw(96, dtype=dtype, seed=1)
    heads, x, residual = wide[:, :3, :96], wide[:, 0, :96], wide[:, 1, 96:]
    if rows > 1:
        x[1, 7] = torch.nan
    norm, add_norm = ir.ops.rms_norm, ir.ops.fused_add_rms_norm
    given = [(norm, (heads, weight, 1e-5)), (norm, (x, weight, 1e-5))]
    given.append((add_norm, (x, residual, weight, 1e-5)))
    for operator, arguments in given:
        ours, native = (operator.impls[name] for name in (norms.PROVIDER, "native"))
        assert ours.supports_args(*arguments)
        got, expected = ours.impl_fn(*arguments), native.impl_fn(*arguments)
        torch.testing.assert_close(got, expected, rtol=1e-2, atol=2e-6, equal_nan=True)


def test_norms_leave_other_arguments_to_vllm():
    x, weight = draw(2, 8), draw(8)
    for given in (
        (x.double(), weight.double(), 1e-5),
        (x, None, 1e-5),
        (x.bfloat16(), weight, 1e-5),
        (x, weight, 1e-5, 4),
        (draw(8, 2).T, weight, 1e-5),
    ):
        assert not norms._supports_rms_norm(*given)
    assert not norms._supports_fused_add_rms_norm(x, x[:1], weight, 1e-5)


class Compiled(_CompiledRotaryEmbedding, RotaryEmbedding):
    """The embedding that a worker registers."""


@pytest.mark.parametrize("is_neox", [True, False])
@pytest.mark.parametrize("dtype", COMPILED)
def test_rotary_embeddings_are_those_of_vllm(dtype, is_neox):
    with set_current_vllm_config(VllmConfig()):
        layer = Compiled(24, 16, 64, 10000.0, is_neox, dtype)
    qkv, positions = draw(5, 6 * 24, dtype=dtype), torch.tensor([0, 63, 7, 7, 31])
    query, key = qkv[:, :72], qkv[:, 72:120]
    got, expected = (f(positions, query, key) for f in (layer.forward_oot, layer.forward_native))
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)
    heads = layer.forward_oot(positions, query.view(5, 3, 24), None)
    torch.testing.assert_close(heads[0].flatten(1), expected[0], rtol=1e-5, atol=1e-6)
    assert heads[1] is None


@pytest.mark.parametrize("dtype", COMPILED)
def test_swiglu_is_that_of_vllm(dtype):
    with set_current_vllm_config(VllmConfig()):
        layer = CompiledSiluAndMul()
    x = 5 * draw(6, 2, 70, dtype=dtype)
    x[0, 0, :3] = torch.tensor([torch.nan, torch.inf, -300])
    for given in (x, x[:, 0, :], x[:0], x.transpose(0, 2)):
        got, expected = layer.forward_oot(given), layer.forward_native(given)
        torch.testing.assert_close(got, expected, rtol=1e-2, atol=2e-6, equal_nan=True)
        if dtype != torch.float32 and len(given):  # rounded as often
            assert (got == expected).float().mean() > 0.95
