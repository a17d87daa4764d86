"""Launches of a layer of experts in each family that is served on NPUs."""

import pytest
import torch
from vllm.forward_context import set_forward_context

from tests.helpers.counting import ModuleCounts
from tests.helpers.engine import engine, generate, greedy, make_model, runner_of
from tests.helpers.fused import MODEL, settings
from tests.helpers.mixtures import MIXTURES
from vllm_npu_prep.ops.router_norms import CastRows

BUDGET = {
    "Qwen3Moe": (7, 1),
    "Mixtral": (7, 1),
    "MiniMaxM2": (7, 1),
    "Glm4Moe": (11, 1),
    "Qwen2Moe": (12, 1),
}
"""Launches of a layer of experts, its router and shared experts included, and those that padding
adds.

MiniMax and GLM compute logits in float32: the norm before casts for them, in its own launch.
Qwen2's shared expert has a gate of its own: a sigmoid; its product is that of the router. Padding
takes a launch: a router by sigmoid leaves padding out and gives it no weight; a router by softmax
leaves it out itself, and the indices of its rows are turned into some that nothing reads.
"""

CAST = ("MiniMaxM2", "Glm4Moe")


@pytest.mark.parametrize("family", BUDGET)
def test_a_layer_stays_within_its_budget(tmp_path, family):
    model = make_model(tmp_path, family, **{**MODEL, **MIXTURES[family]})
    launches, for_padding = BUDGET[family]
    with engine(model, **settings("bfloat16")) as llm:
        runner = runner_of(llm)
        modules = dict(runner.get_model().named_modules())
        (name,) = [n for n in modules if n.endswith(("layers.1.mlp", "1.block_sparse_moe"))]
        counted = ModuleCounts(runner.get_model(), [name])
        generate(llm, [[5, 6, 7], [8], [9, 10]], greedy(3))
        assert counted.counts[name] == {"launches": launches}, "no copies and no syncs"

        x = torch.ones(6, MODEL["hidden_size"], dtype=torch.bfloat16, device="npu")
        is_padding = torch.tensor([False] * 4 + [True] * 2, device="npu")
        given = CastRows(x, x.float()) if family in CAST else x
        with (
            torch.inference_mode(),
            set_forward_context(None, runner.vllm_config, is_padding=is_padding),
        ):
            first = modules[name](given)  # may make what the other layers of a step read, too
            again = modules[name](given)
        assert counted.counts[name] == {"launches": launches + for_padding}
        assert first.isfinite().all() and torch.equal(first, again)
