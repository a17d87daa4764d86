"""Latent attention of the reference family against formulas in float64, and its planted bugs."""

import pytest
import torch

from vllm_npu_prep.attention.kernels.latent import make_latent_kernels
from vllm_npu_prep.prep.mask import compressed_mask
from vllm_npu_prep.verify.latent import LatentForm, LatentStep, forms_of, shape_of

SHAPE = shape_of(3, 24, 8, 12)
MASK = torch.from_numpy(compressed_mask())
STEPS = {
    "decodes": ((5, 1), (16, 1), (3, 1)),
    "drafts": ((5, 3), (16, 2), (3, 1)),
    "prompts": ((0, 5), (0, 17)),
    "both": ((7, 1), (3, 3), (40, 9), (17, 5), (0, 6)),
    "chunks after chunks": ((33, 4), (70, 6), (5, 7), (0, 4), (50, 5)),
}


def run(form: LatentForm, seed: int):
    step = LatentStep(form, torch.device("cpu"), make_latent_kernels("reference"), MASK, seed)
    return step.run()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("blocks", [1, 3])
@pytest.mark.parametrize("name", STEPS)
def test_a_step_equals_the_formula(name, blocks, dtype, seed):
    form = LatentForm(STEPS[name], SHAPE, dtype, 8, 3, blocks)
    outcome = run(form, seed)
    assert not outcome.verdict.is_bad, outcome


def test_the_forms_of_an_engine_equal_their_formulas(seed):
    forms = forms_of(shape_of(4), torch.float32, 16, 3)
    assert len(forms) == 3
    for what, form in forms.items():
        assert not run(form, seed).verdict.is_bad, what
