"""Latent attention on the device: how many launches a layer takes."""

import pytest

from ascend_emulator import profiles
from tests.helpers.counting import ModuleCounts
from tests.helpers.engine import engine, generate, greedy, make_model, runner_of
from tests.helpers.fused import forget_layers, settings
from tests.helpers.latent import (
    GLM_DSA,
    GLM_FLASH_ON_NPUS,
    KIMI_K2,
    LATENT_ON_NPUS,
    V2_LITE,
    V3_EXPERTS_ON_NPUS,
    YARN,
)
from tests.npu.models import INDEXED, LOW_RANK
from tests.npu.only_some import REFUSED_MODELS

LAYER = "model.layers.1"
BUDGET = {
    "DeepSeek V3": ("DeepseekV3", {**LOW_RANK, **V3_EXPERTS_ON_NPUS}, 12, 11),
    "Kimi K2": ("DeepseekV3", {**LOW_RANK, **KIMI_K2}, 12, 11),
    "DeepSeek V2 Lite": ("DeepseekV2", {**LATENT_ON_NPUS, **V2_LITE}, 11, 11),
    "DeepSeek V3.2": ("DeepseekV32", {**INDEXED, "rope_parameters": YARN}, 23, 11),
    "GLM-5, an indexer of another layer": ("GlmMoeDsa", {**GLM_DSA, **INDEXED}, 12, 11),
    "GLM-4.7-Flash": ("Glm4MoeLite", {**LOW_RANK, **GLM_FLASH_ON_NPUS}, 13, 12),
}
"""Launches without padding: a layer beside its experts; these with their router, whose logits are
float32 as GLM's, and the shared expert. GLM-4.7-Flash pads queries to eight heads: their rotated
halves come from the projection so, the others take a launch."""

COPIES = {"GLM-4.7-Flash": {"hidden_copies": 1}}
"""Of strided inputs: of the results without the padding heads."""


@pytest.mark.parametrize("name", BUDGET)
def test_a_layer_stays_within_its_budget(name, tmp_path):
    """Copies that operators make of strided inputs are launches, too."""
    if name in REFUSED_MODELS.get(profiles.current().name, ()):
        return  # `test_tokens.py` has the refusal
    family, config, of_layer, of_experts = BUDGET[name]
    model = make_model(tmp_path / "model", family, spread=0.1, **config)
    forget_layers()
    with engine(model, **settings("bfloat16")) as llm:
        assert str(runner_of(llm).device) == "npu:0"
        counted = ModuleCounts(runner_of(llm).get_model(), [LAYER, f"{LAYER}.mlp"])
        generate(llm, [[5, 6, 7], [8], [9, 10]], greedy(3))
    print(name, counted.counts)
    layer, experts = counted.counts.values()
    assert experts == {"launches": of_experts}, "no copies and no syncs"
    expected = {"launches": of_layer + of_experts, **COPIES.get(name, {})}
    assert layer == expected, "no other copies, of latent weights say, and no syncs"
