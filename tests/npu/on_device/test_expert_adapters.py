"""LoRA on experts on the device: results are those of merged weights, and launches are counted.

Rows of no active expert hold NaN on this runtime, so that a result that reads one is NaN.
"""

from types import SimpleNamespace

import pytest
import torch
from vllm.lora.request import LoRARequest
from vllm.model_executor.layers.fused_moe.activation import MoEActivation

import ascend_emulator
from tests.engine.test_lora import Case
from tests.helpers.counting import ModuleCounts
from tests.helpers.engine import REPLAYED, engine, generate, graphs, greedy, make_model, runner_of
from tests.helpers.expert_adapters import by_expert, by_merged_weights, come_and_go, draw_adapters
from tests.helpers.fused import MODEL, settings
from tests.helpers.huggingface import logits_of
from tests.helpers.lora import MLP, make_adapter
from tests.helpers.mixtures import MIXTURES
from tests.helpers.prompts import prompts_of
from tests.helpers.v2 import engine_of
from tests.npu.models import BOUND, lacks
from tests.npu.on_device.test_experts import asked_of, assert_near, random_layer
from vllm_npu_prep.ops.npu.experts import OwnedExperts, UnquantisedExperts, compute_experts
from vllm_npu_prep.quantization.experts import NPUInt8Experts
from vllm_npu_prep.runner.v2.runner import NPUModelRunnerV2

EXPERTS, TOKENS, NUM_SLOTS = 8, 23, 3
SLOTS = [slot - 1 for slot in range(NUM_SLOTS + 1)] * 6


def plain_weights(w13, w2):
    held = SimpleNamespace(w13_weight=w13.npu(), w2_weight=w2.npu())
    return UnquantisedExperts(held, lambda y: torch.ops.npu.npu_swiglu(y, -1))


def int8_weights(w13, w2):
    """Of levels that are kept in the weights' own dtype, with scales of 1 / 64."""
    held = SimpleNamespace(activation=MoEActivation.SILU)
    for name, weight in (("w13", w13), ("w2", w2)):
        setattr(held, f"{name}_weight", (weight * 64).to(torch.int8).npu())
        setattr(held, f"{name}_weight_scale", torch.full((*weight.shape[:2], 1), 1 / 64).npu())
    return NPUInt8Experts(held, w13.dtype, in_one_launch=True)


def on_device(layer, adapters, share, is_final=True, form=plain_weights):
    """The result for the experts of a share, on the host, and what the device was asked to do."""
    x, w13, w2, weights, ids = layer
    numbers = torch.full((EXPERTS,), -1, dtype=torch.int32)
    numbers[share] = torch.arange(len(share), dtype=torch.int32)
    owned = OwnedExperts.of(numbers.npu(), EXPERTS)
    format_ = form(w13[share], w2[share])
    arguments = [each.npu() for each in (x, weights, ids)]
    there = adapters and by_expert(adapters, share, "npu")
    torch.npu.synchronize()
    with torch.inference_mode(), ascend_emulator.count() as counts:
        result = compute_experts(
            *arguments, owned, format_, has_padding=True, is_final=is_final, adapters=there
        )
    return result.cpu(), asked_of(counts)


LAUNCHES = {2: 5 + 1 + 3 * 3 + 3, 1: 5 + 1 + 3 * 2 + 2}
"""By the parts of gates and ups: those of the layer, one of masks, three of each A and its B; and
those that join two parts' updates and add them."""


@pytest.mark.parametrize("slices", LAUNCHES)
@pytest.mark.parametrize("share", [[*range(EXPERTS)], [2, 3, 4], [3]], ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_results_are_those_of_merged_weights(seed, dtype, share, slices):
    layer = random_layer(seed, dtype=dtype)
    generator = torch.Generator().manual_seed(seed)
    adapters = draw_adapters(generator, SLOTS[:TOKENS], NUM_SLOTS, *layer[1:3], slices)
    is_final = dtype == torch.bfloat16
    got, asked = on_device(layer, adapters, share, is_final)
    assert_near(got, by_merged_weights(*layer, adapters, share))
    assert asked == {"launches": LAUNCHES[slices] + (not is_final)}
    plain, asked = on_device(layer, None, share, is_final)
    assert asked == {"launches": 5 + (not is_final)}
    without = [token for token in range(TOKENS) if SLOTS[token] < 0]
    assert torch.equal(got[without], plain[without])


def test_adapters_multiply_what_int8_weights_get_rounded(seed):
    """Rows come a second time, as they are, and what is activated is rounded on its own."""
    x, w13, w2, weights, ids = random_layer(seed, dtype=torch.bfloat16)
    layer = x, (w13 * 64).round() / 64, (w2 * 64).round() / 64, weights, ids
    generator = torch.Generator().manual_seed(seed)
    adapters = draw_adapters(generator, SLOTS[:TOKENS], NUM_SLOTS, *layer[1:3])
    share = [2, 3, 4]
    got, asked = on_device(layer, adapters, share, form=int8_weights)
    assert_near(got, by_merged_weights(*layer, adapters, share), tolerance=0.05)
    assert asked == {"launches": LAUNCHES[2] + 3, "hidden_copies": 2}
    _, asked = on_device(layer, None, share, form=int8_weights)
    assert asked == {"launches": 5}


LAYER = "model.layers.1.mlp.experts"
FAMILY = "Qwen3Moe"
CONFIG = {**MODEL, **MIXTURES[FAMILY]}


def test_steps_without_adapters_launch_nothing_for_them(tmp_path, seed):
    model = make_model(tmp_path / "model", FAMILY, **CONFIG)
    folder = make_adapter(tmp_path / "adapter", model, seed=seed, modules=MLP)
    adapter, prompts = LoRARequest("adapter", 1, str(folder)), [[5, 6, 7], [8], [9, 10]]
    lora = {"enable_lora": True, "lora_target_modules": ["experts"]}
    launches, tokens = {}, {}
    for asked in ({}, lora):
        with engine(model, **settings("bfloat16"), **asked) as llm:
            counted = ModuleCounts(runner_of(llm).get_model(), [LAYER])
            for loras in ([None] * 3, [None, adapter, None])[: 1 + len(asked) // 2]:
                key = bool(asked), any(loras)
                tokens[key] = generate(llm, prompts, greedy(3), loras)
                ((what, launches[key]),) = counted.counts[LAYER].items()
                assert what == "launches"
    assert tokens[True, False] == tokens[False, False]
    assert tokens[True, True] != tokens[False, False]
    assert launches[True, False] == launches[False, False]
    assert launches[True, True] == launches[False, False] + LAUNCHES[2] - 5


def test_graphs_without_adapters_launch_nothing_for_them(tmp_path, seed, monkeypatch):
    """Graphs of steps without adapters launch what those of an engine without LoRA do."""
    model, capture = make_model(tmp_path, FAMILY, **CONFIG), NPUModelRunnerV2._capture
    captured = {}

    def counted_capture(runner, desc, **settings):
        counted = ModuleCounts(runner.get_model(), [LAYER])
        capture(runner, desc, **settings)
        ((what, captured[asks, bool(desc.num_active_loras)]),) = counted.counts[LAYER].items()
        assert what == "launches"

    monkeypatch.setattr(NPUModelRunnerV2, "_capture", counted_capture)
    for asks in (False, True):
        lora = {"enable_lora": asks, "max_loras": 2, "lora_target_modules": ["experts"]}
        in_graphs = graphs("FULL_DECODE_ONLY", 4)
        with engine_of("V2", model, **settings("bfloat16"), **lora, **in_graphs):
            pass
    plain = captured[False, False]
    assert captured == {
        (False, False): plain,
        (True, False): plain,
        (True, True): plain + LAUNCHES[2] - 5,
    }


def test_adapters_come_and_go_and_sleep(tmp_path, seed):
    """An adapter takes the slot of another whose request was aborted; then the engine sleeps."""
    adapters = {
        name: {"modules": MLP, "rank": rank} for name, rank in (("a", 4), ("b", 2), ("c", 3))
    }
    case = Case(tmp_path, seed, FAMILY, adapters, **CONFIG)
    names = {"stays": "a", "plain": "", "goes": "b", "comes": "c", "returns": "b"}
    prompts = dict(zip(names, prompts_of(seed, [30, 9, 17, 20, 5])))
    lora = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8, "enable_sleep_mode": True}
    lora |= graphs("FULL_AND_PIECEWISE", 1, 4, 16)
    with engine_of("V2", case.model, **settings("float16"), **lora) as llm:
        requests = {each: case.request(names[each]) for each in names}
        said = come_and_go(llm, prompts, requests, seed)
        assert REPLAYED["FULL_AND_PIECEWISE"] <= set(runner_of(llm).padding.counts.by_kind)
    for each, tokens in said.items():
        judge = logits_of(case.merged[names[each]])
        assert lacks(judge, prompts[each], tokens).max() < BOUND["float16"], each
    plain = {each: lacks(logits_of(case.model), prompts[each], said[each]).max() for each in said}
    assert min(plain[each] for each in said if names[each]) > BOUND["float16"]
