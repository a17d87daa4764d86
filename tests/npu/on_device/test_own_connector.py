"""A KV connector of one's own on the device: what it is told, and what it pulls beside steps."""

import pytest

import ascend_emulator
from tests.conftest import SEED
from tests.engine.test_own_connector import LENGTHS, check_calls, pulling
from tests.helpers.engine import graphs, make_model, runner_of
from tests.helpers.latent import LATENT_ON_NPUS, V3_EXPERTS_ON_NPUS
from tests.helpers.prompts import prompts_of
from tests.helpers.v2 import engine_of

BLOCK_SIZE = 16
CASES = {
    "fia": ("V1", {"spread": 0.1}, "float16"),
    "latent-V2": (
        "V2",
        {
            "family": "DeepseekV3",
            **LATENT_ON_NPUS,
            **V3_EXPERTS_ON_NPUS,
            "spread": 0.1,
            "embedding_scale": 20,
        },
        "bfloat16",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_connector_is_told_of_planes_layers_blocks_and_ends(tmp_path, name):
    """Between the pieces of graphs, with asynchronous scheduling; tokens are the engine's own."""
    runner, config, dtype = CASES[name]
    model, prompts = make_model(tmp_path / "model", **config), prompts_of(SEED, LENGTHS)
    settings = {"dtype": dtype, **graphs("PIECEWISE", 1, 4, 8, async_scheduling=True)}
    with engine_of(runner, model, **pulling(BLOCK_SIZE), **settings) as llm:
        assert str(runner_of(llm).device) == "npu:0"
        check_calls(llm, prompts, None, BLOCK_SIZE)
        assert runner_of(llm).padding.counts.by_kind["piecewise graphs"] > 0
    assert ascend_emulator.counters().hazards == 0
