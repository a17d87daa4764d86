"""Logits with fused operators are those of the unfused path, over the families that run on NPUs."""

import pytest
import torch

from tests.helpers.engine import make_model
from tests.helpers.fused import MODEL, compare_paths, steps_of

FAMILIES = {
    "Llama": {},
    "Qwen2": {},
    "Qwen3": {},
    "Gemma3": {"dtype": "bfloat16"},
    "Phi3": {},
    "Glm4": {"dtype": "bfloat16", "partial_rotary_factor": 0.5, "head_dim": 64},
    "Olmo2": {},
    "StableLm": {},
    "Mistral": {},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_the_unfused_path(tmp_path, seed, family):
    config = {**MODEL, **FAMILIES[family]}
    dtype = config.pop("dtype", "float16")
    model = make_model(tmp_path / "model", family, **config)
    compare_paths(model, family, dtype, "eager", seed)


def test_graphs_give_the_bits_of_eager_steps(tmp_path, seed):
    """The same kernels over the same inputs; rows of padding change nothing."""
    model = make_model(tmp_path / "model", **MODEL)
    eager = compare_paths(model, "Qwen3", "bfloat16", "eager", seed)
    for mode in ("PIECEWISE", "FULL"):
        replayed = steps_of(model, "bfloat16", mode, seed)
        assert replayed.tokens == eager.tokens
        assert all(map(torch.equal, replayed.logits, eager.logits)), mode
