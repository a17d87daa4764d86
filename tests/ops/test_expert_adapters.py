"""LoRA on experts, beside merged weights: pair by pair, each with its own adapter or none."""

import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from vllm.model_executor.layers.fused_moe.activation import MoEActivation

from tests.helpers.expert_adapters import by_expert, by_merged_weights, draw_adapters
from tests.helpers.thread_ranks import on_ranks
from vllm_npu_prep.ops import moe_lora
from vllm_npu_prep.ops.moe_method import apply_experts

HIDDEN, INNER, EXPERTS = 12, 10, 5
SLOTS = [2, -1, 0, 0, 1, 2, -1, 1, 0, 2, 2]


def draw(seed, slots, num_slots=3, slices=2):
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=generator)

    x, w13, w2 = (
        normal(len(slots), HIDDEN),
        normal(EXPERTS, 2 * INNER, HIDDEN),
        normal(EXPERTS, HIDDEN, INNER),
    )
    logits = normal(len(slots), EXPERTS)
    weights, ids = logits.softmax(-1).topk(2)
    ids[-1, 1] = -1  # of no expert
    adapters = draw_adapters(generator, slots, num_slots, w13, w2, slices)
    return x, w13, w2, weights, ids, adapters


def apply(x, w13, w2, weights, ids, adapters, share=None):
    experts = list(range(EXPERTS) if share is None else share)
    numbers = torch.full((EXPERTS,), -1)
    numbers[experts] = torch.arange(len(experts))
    return apply_experts(
        x,
        w13[experts],
        w2[experts],
        weights,
        ids,
        MoEActivation.SILU,
        numbers,
        adapters=by_expert(adapters, experts),
    )


def assert_near(got, expected):
    torch.testing.assert_close(got, expected.float(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("slices", [2, 1], ids=["apart", "fused"])
@pytest.mark.parametrize("slots", [SLOTS, [0] * 6, [-1] * 4, [2]], ids=str)
def test_each_pair_gets_its_own_adapter_or_none(seed, slots, slices):
    drawn = draw(seed, slots, slices=slices)
    assert_near(apply(*drawn), by_merged_weights(*drawn))


def test_ranks_with_parts_of_the_experts_make_parts_of_the_sum(seed):
    drawn = draw(seed, SLOTS)
    for share in ([0, 1], [2], [3, 4]):
        assert_near(apply(*drawn, share=share), by_merged_weights(*drawn, share=share))


def half(tensor, rank, dim, parts=1):
    """A rank's half of each part of a dimension."""
    return torch.cat([each.chunk(2, dim)[rank] for each in tensor.chunk(parts, dim)], dim)


@pytest.mark.parametrize("slices", [2, 1], ids=["apart", "fused"])
@pytest.mark.parametrize("sharded", [False, True])
def test_ranks_with_parts_of_each_expert_make_parts_of_the_sum(seed, monkeypatch, slices, sharded):
    x, w13, w2, weights, ids, adapters = drawn = draw(seed, SLOTS, slices=slices)
    here, whole = threading.local(), vars(adapters.layer)
    collectives = {
        "all_gather": lambda tensor: here.group.all_gather(tensor, -1),
        "all_reduce": lambda tensor: sum(here.group.exchange(tensor)),
    }
    for name, collective in collectives.items():
        monkeypatch.setattr(moe_lora, f"tensor_model_parallel_{name}", collective)

    def compute(group):
        here.group, rank = group, group.rank_in_group
        cut = {
            "w13_lora_a_stacked": lambda a: half(a, rank, 2) if sharded else a,
            "w13_lora_b_stacked": lambda b: half(b, rank, 2, 3 - slices),
            "w2_lora_a_stacked": lambda a: half(a, rank, 3),
            "w2_lora_b_stacked": lambda b: half(b, rank, 2) if sharded else b,
        }
        held = {name: [of(each) for each in whole[name]] for name, of in cut.items()}
        layer = SimpleNamespace(**held, fully_sharded=sharded, tp_size=2, tp_rank=rank)
        mine = by_expert(replace(adapters, layer=layer))
        own = half(w13, rank, 1, 2), half(w2, rank, 2)
        return apply_experts(x, *own, weights, ids, MoEActivation.SILU, adapters=mine)

    assert_near(sum(on_ranks(2, compute)), by_merged_weights(*drawn))


def test_factors_that_experts_share_are_those_of_each(seed):
    """Kept once, beside as many copies."""
    drawn = draw(seed, SLOTS)
    once, layer = by_expert(drawn[-1]), drawn[-1].layer
    for held in (layer.w13_lora_a_stacked, layer.w2_lora_b_stacked):
        for each in held:
            each.copy_(each[:, :1].clone().expand_as(each))
    expected = by_merged_weights(*drawn)
    once.layer.w13_lora_a_stacked = [each[:, :1] for each in layer.w13_lora_a_stacked]
    once.layer.w2_lora_b_stacked = [each[:, :1] for each in layer.w2_lora_b_stacked]
    got = apply_experts(*drawn[:-1], MoEActivation.SILU, adapters=once)
    assert_near(got, expected)


def test_infinities_of_another_adapter_are_dropped(seed):
    drawn = draw(seed, SLOTS)
    for held in (drawn[-1].layer.w13_lora_a_stacked, drawn[-1].layer.w2_lora_a_stacked):
        for each in held:
            each[1] = torch.finfo(torch.float32).max
    got = apply(*drawn)
    others = [token for token, slot in enumerate(SLOTS) if slot != 1]
    assert_near(got[others], by_merged_weights(*drawn)[others])
