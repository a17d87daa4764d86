"""Norms and activations that round: whose layers they are put into, and Gemma's factors."""

from importlib import import_module

import pytest
import torch

from vllm_npu_prep.quantization import rounding
from vllm_npu_prep.quantization.int8 import swiglu_may_round
from vllm_npu_prep.quantization.rounding import two_factors

KNOWN = rounding.DECODERS | rounding.ATTENTIONS | rounding.LATENT_ATTENTIONS | rounding.MLPS


@pytest.mark.parametrize("name", sorted(KNOWN))
def test_the_classes_that_are_known_are_those_of_vllm(name):
    """A class that vLLM renames would lose its fused norms without a word."""
    module, cls, _ = name.rsplit(".", 2)
    forward = getattr(import_module(module), cls).forward
    assert forward.__qualname__ == f"{cls}.forward"


@pytest.mark.parametrize(("dtype", "bound"), [(torch.bfloat16, 2**-11), (torch.float16, 2**-15)])
def test_the_product_of_two_factors_is_the_number(dtype, bound, seed):
    """A single one of bfloat16 would be off by up to 2**-8."""
    generator = torch.Generator().manual_seed(seed)
    product = 1 + torch.empty(4096).uniform_(-2, 2, generator=generator)
    product[:3] = torch.tensor([0.0, 1.0, -1.0])
    first, second = two_factors(product, dtype)
    assert first.dtype == second.dtype == dtype
    got = first.double() * second.double()
    assert ((got - product).abs() <= bound * product.abs()).all()
    alone = product.to(dtype).double()
    assert ((alone - product).abs() > bound * product.abs()).any()


def test_swiglu_rounds_wide_rows_by_static_scales_alone():
    asked = (7840, False), (7841, False), (28672, True)
    assert [swiglu_may_round(*each) for each in asked] == [True, False, True]
