"""Logits with fused operators are those of the unfused path, over the families that run on NPUs."""

import pytest

from tests.helpers.engine import make_model
from tests.helpers.fused import MODEL, compare_paths

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


@pytest.mark.parametrize("mode", ["PIECEWISE", "FULL"])
def test_logits_in_graphs(tmp_path, seed, mode):
    compare_paths(make_model(tmp_path / "model", **MODEL), "Qwen3", "float16", mode, seed)
