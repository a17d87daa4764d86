"""Launches of a layer of experts in each family that is served on NPUs."""

import pytest

from tests.helpers.counting import ModuleCounts
from tests.helpers.engine import engine, generate, greedy, make_model, runner_of
from tests.helpers.fused import MODEL, settings
from tests.helpers.mixtures import MIXTURES

BUDGET = {"Qwen3Moe": 7, "Mixtral": 7, "MiniMaxM2": 8, "Glm4Moe": 12, "Qwen2Moe": 14}
"""Launches of a layer of experts without padding, its router and shared experts included.

MiniMax and GLM compute logits in float32, which takes a cast. Qwen2's shared expert has a gate of
its own: three launches.
"""


@pytest.mark.parametrize("family", BUDGET)
def test_a_layer_stays_within_its_budget(tmp_path, family):
    model = make_model(tmp_path, family, **{**MODEL, **MIXTURES[family]})
    with engine(model, **settings("bfloat16")) as llm:
        modules = dict(runner_of(llm).get_model().named_modules())
        (name,) = [n for n in modules if n.endswith(("layers.1.mlp", "1.block_sparse_moe"))]
        counted = ModuleCounts(runner_of(llm).get_model(), [name])
        generate(llm, [[5, 6, 7], [8], [9, 10]], greedy(3))
    assert counted.counts[name] == {"launches": BUDGET[family]}, "no copies and no syncs"
