"""Launches of a layer of experts in each family that is served on NPUs."""

import dataclasses

import pytest
import torch
from vllm.config import VllmConfig
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner

import ascend_emulator
from tests.helpers.counting import ModuleCounts
from tests.helpers.engine import engine, generate, greedy, make_model, runner_of
from tests.helpers.fused import MODEL, settings
from tests.helpers.latent import LATENT_ON_NPUS, V3_EXPERTS_ON_NPUS
from tests.helpers.mixtures import MIXTURES
from vllm_npu_prep.ops.npu.experts import OwnedExperts
from vllm_npu_prep.ops.npu.router_norms import CastRows
from vllm_npu_prep.ops.npu.routing import _weigh_no_padding
from vllm_npu_prep.ops.triton.eplb import map_to_physical_and_record

BUDGET = {
    "Qwen3Moe": (7, 7, 7, 7),
    "Mixtral": (7, 7, 7, 7),
    "MiniMaxM2": (7, 8, 7, 8),
    "Glm4Moe": (11, 12, 11, 12),
    "Qwen2Moe": (12, 12, 12, 12),
    "DeepseekV3": (11, 12, 11, 12),
}
"""Launches of a layer of experts, its router and shared experts included: without padding, with
some; the same where other ranks have some of the experts, collectives apart.

MiniMax, GLM and DeepSeek compute logits in float32: the norm before casts for them, in its own
launch. Qwen2's shared expert has a gate of its own: a sigmoid; its product is that of the router.
Padding takes a launch: a router by sigmoid leaves padding out and gives it no weight; a router by
softmax leaves it out itself, and the indices of its rows are turned into some that nothing reads.
Experts of other ranks need the latter, too, so with a sigmoid it is two.
"""

OF_A_MAP = (15, 12)
"""Launches that `--enable-eplb` adds to the first layer of experts in a forward pass, which makes
three for all of them, and to each other one."""

CAST = ("MiniMaxM2", "Glm4Moe", "DeepseekV3")
CONFIGS = MIXTURES | {
    "DeepseekV3": {"q_lora_rank": 96, **LATENT_ON_NPUS, **V3_EXPERTS_ON_NPUS},
}


def own_half(layer):
    """Let a layer of experts be a rank's that has half of them: what it was loaded with, cut."""
    runner: MoERunner = layer.experts
    routed, router = runner.routed_experts, runner.router
    half = routed.global_num_experts // 2
    for weight in (routed.w13_weight, routed.w2_weight):
        weight.data = weight.data[:half].contiguous()
    method = routed.quant_method
    owned = OwnedExperts(routed.global_num_experts, 0, half)
    method.grouped = dataclasses.replace(method.grouped, owned=owned)
    router.padding_has_weight = routed.padding_has_weight = True  # until it is decided anew
    _weigh_no_padding(runner)


@pytest.mark.parametrize("family", BUDGET)
def test_a_layer_stays_within_its_budget(tmp_path, seed, family):
    model = make_model(tmp_path, family, **{**MODEL, **CONFIGS[family]})
    budget = iter(BUDGET[family])
    with engine(model, **settings("bfloat16")) as llm:
        runner = runner_of(llm)
        modules = dict(runner.get_model().named_modules())
        (name,) = [n for n in modules if n.endswith(("layers.1.mlp", "1.block_sparse_moe"))]
        counted = ModuleCounts(runner.get_model(), [name])
        generate(llm, [[5, 6, 7], [8], [9, 10]], greedy(3))
        assert counted.counts[name] == {"launches": next(budget)}, "no copies and no syncs"

        x = torch.randn(6, MODEL["hidden_size"], generator=torch.Generator().manual_seed(seed))
        x = x.bfloat16().npu()
        is_padding = torch.tensor([False] * 4 + [True] * 2, device="npu")
        given = CastRows(x, x.float()) if family in CAST else x

        def twice(is_padding):
            with (
                torch.inference_mode(),
                set_forward_context(None, runner.vllm_config, is_padding=is_padding),
            ):
                first = modules[name](given)  # may make what the other layers of a step read, too
                again = modules[name](given)
            assert counted.counts[name] == {"launches": next(budget)}
            assert first.isfinite().all() and torch.equal(first, again)
            return first

        whole = twice(is_padding)
        own_half(modules[name])
        twice(None)
        part = twice(is_padding)
        assert not torch.equal(part[:4], whole[:4]), "the others' experts are not in the sum"
        torch.testing.assert_close(part[4:], whole[4:])  # shared experts, or nothing


def test_the_map_of_experts_that_move_stays_within_its_budget():
    """Each layer maps what its router chose, and counts it, without a copy or a sync."""
    experts = torch.arange(8, device="npu")
    ids = torch.tensor([[0, 7], [3, -1], [8, 5]], dtype=torch.int32, device="npu")
    load = torch.zeros(8, dtype=torch.int32, device="npu")
    given = ids, load, experts.flip(0)[:, None], experts.new_ones(8), load.new_ones(()).bool()
    counted = []
    with set_forward_context(None, VllmConfig()):
        for _ in OF_A_MAP:
            torch.npu.synchronize()
            with ascend_emulator.count() as counts:
                mapped = map_to_physical_and_record(*given)
            counted.append((counts.launches, counts.hidden_copies, counts.syncs))
    assert counted == [(launches, 0, 0) for launches in OF_A_MAP]
    assert mapped.tolist() == [[7, 0], [4, -1], [-1, 2]]
    assert load.tolist() == [2, 0, 2, 0, 2, 0, 0, 2]
