"""Logits with fused operators are those of the unfused path, over the families that run on NPUs."""

import pytest
import torch

from tests.helpers.engine import make_model
from tests.helpers.fused import MODEL, compare_paths, steps_of
from tests.helpers.step_logits import Steps
from tests.npu.only_some import HEAD_SIZE

FAMILIES = {
    "Llama": {},
    "Qwen2": {},
    "Qwen3": {},
    "Gemma3": {"dtype": "bfloat16", "head_dim": HEAD_SIZE},
    "Phi3": {},
    "Glm4": {"dtype": "bfloat16", "partial_rotary_factor": 0.5, "head_dim": HEAD_SIZE},
    "Olmo2": {},
    "StableLm": {},
    "Mistral": {"head_dim": HEAD_SIZE},
}


OTHER_DTYPES = {"Qwen3": "bfloat16", "Llama": "bfloat16"}
"""Families whose bound is also held in the other dtype. vLLM serves Gemma 3 in bfloat16
alone, random weights of GLM-4 overflow float16, and the others are made of the same layers."""


def same_bits(ours: Steps, theirs: Steps, mode: str) -> None:
    """The same kernels over the same inputs; rows of padding change nothing."""
    assert ours.tokens == theirs.tokens, mode
    assert all(map(torch.equal, ours.logits, theirs.logits)), mode


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_the_unfused_path(tmp_path, seed, family):
    """Eagerly, and in graphs of both kinds, which give the bits of eager steps."""
    config = {**MODEL, **FAMILIES[family]}
    dtype = config.pop("dtype", "float16")
    model = make_model(tmp_path / "model", family, **config)
    eager = compare_paths(model, family, dtype, "eager", seed)
    mode = "FULL_AND_PIECEWISE"
    same_bits(steps_of(model, dtype, mode, seed), eager, mode)


@pytest.mark.parametrize("family", OTHER_DTYPES)
def test_logits_of_the_other_dtype(tmp_path, seed, family):
    model = make_model(tmp_path / "model", family, **MODEL)
    dtype = OTHER_DTYPES[family]
    eager = compare_paths(model, family, dtype, "eager", seed)
    if family != "Qwen3":
        return
    for mode in ("PIECEWISE", "FULL", "FULL_DECODE_ONLY"):
        same_bits(steps_of(model, dtype, mode, seed), eager, mode)
