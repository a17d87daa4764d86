"""Latent attention on the device: how many launches a layer takes."""

from tests.helpers.counting import ModuleCounts
from tests.helpers.engine import engine, generate, greedy, make_model, runner_of
from tests.helpers.fused import forget_layers, settings
from tests.helpers.latent import LATENT_ON_NPUS, V3_EXPERTS_ON_NPUS

LAYER = "model.layers.1"
BUDGET = {"layer": 13, "experts": 12}
"""Launches without padding: a layer beside its experts; these with their router, whose logits are
float32 as GLM's, and the shared expert."""


def test_a_layer_stays_within_its_budget(tmp_path):
    """Of DeepSeek V3; copies that operators make of strided inputs are launches, too."""
    config = {**LATENT_ON_NPUS, **V3_EXPERTS_ON_NPUS, "q_lora_rank": 96}
    model = make_model(tmp_path / "model", "DeepseekV3", spread=0.1, **config)
    forget_layers()
    with engine(model, **settings("bfloat16")) as llm:
        assert str(runner_of(llm).device) == "npu:0"
        counted = ModuleCounts(runner_of(llm).get_model(), [LAYER, f"{LAYER}.mlp"])
        generate(llm, [[5, 6, 7], [8], [9, 10]], greedy(3))
    print(counted.counts)
    layer, experts = counted.counts.values()
    assert experts == {"launches": BUDGET["experts"]}, "no copies and no syncs"
    assert layer == {"launches": BUDGET["layer"] + BUDGET["experts"]}, "no copies and no syncs"
