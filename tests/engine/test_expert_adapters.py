"""LoRA on experts through vLLM's engine: tokens are those of merged weights."""

import shutil
from functools import partial

import msgspec
import pytest
from safetensors.torch import load_file, save_file
from vllm.lora.request import LoRARequest
from vllm.model_executor.models.qwen2_moe import Qwen2MoeForCausalLM

from tests.conftest import SEED
from tests.engine.test_lora import (
    DRAFTED,
    FEW_BLOCKS,
    LORA,
    Case,
    requests_of,
    tokens_of,
    with_drafts,
)
from tests.helpers.engine import REPLAYED, generate, graphs, greedy, runner_of
from tests.helpers.expert_adapters import come_and_go
from tests.helpers.huggingface import is_varied, reference
from tests.helpers.lora import (
    ATTENTION,
    MLP,
    fused,
    make_adapter,
    merge,
    sharing,
    with_shared_factors,
)
from tests.helpers.mixtures import MIXTURES
from tests.helpers.mtp import make_mtp_model
from tests.helpers.prompts import prompts_of
from tests.helpers.ranks import Ranks, serve_on_ranks
from tests.helpers.v2 import RUNNERS, asked_for, engine_of
from tests.helpers.watch import count_preemptions, count_verified

GATES = ("mlp.gate", "shared_expert_gate")
ADAPTERS = {
    "all": {"modules": (*ATTENTION, *MLP, *GATES), "rank": 4},
    "experts": {"modules": MLP, "rank": 2, "spread": 0.3},
    "third": {"modules": MLP, "rank": 3, "alpha": 5, "spread": 0.2},
}
MIXED = ["all", "", "experts", "fused", "third", "", "experts", "fused", "all", ""]


class ExpertCase(Case):
    """Also "fused", the updates of "all" in the other format, and "sharing", of shared factors."""

    def __init__(self, root, seed: int) -> None:
        super().__init__(root, seed, "Qwen2Moe", ADAPTERS, **MIXTURES["Qwen2Moe"])
        self.folders["fused"] = fused(self.folders["all"], root / "fused")
        self.merged["fused"] = self.merged["all"]
        apart = with_shared_factors(self.folders["third"], root / "apart")
        self.folders["sharing"] = sharing(apart, root / "sharing")
        self.merged["sharing"] = merge(self.model, apart, root / "merged-sharing")

    def request(self, name: str):
        request = super().request(name)
        is_fused = name == "fused"
        return request and msgspec.structs.replace(request, is_3d_lora_weight=is_fused)


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    return ExpertCase(tmp_path_factory.mktemp("experts"), SEED)


@pytest.fixture(scope="module", params=RUNNERS)
def serving(case, request):
    """An engine that reads both formats, with room for three of four adapters, and few blocks."""
    with engine_of(
        request.param,
        case.model,
        max_loras=3,
        enable_mixed_moe_lora_format=True,
        enable_sleep_mode=True,
        **FEW_BLOCKS,
        **LORA,
        **graphs("FULL_AND_PIECEWISE", 1, 2, 4, 8),
    ) as llm:
        yield llm


def test_both_formats_and_plain_rows_are_merged_weights(serving, case, seed):
    """More adapters than slots, so that each takes the slot of another, and preempted requests."""
    preempted, requests = count_preemptions(serving), requests_of(seed, MIXED)
    expected = [case.tokens(*request, 12) for request in requests]
    assert tokens_of(serving, case, requests, 12) == expected
    assert preempted["preempted"]
    assert REPLAYED["FULL_AND_PIECEWISE"] <= set(runner_of(serving).padding.counts.by_kind)
    assert is_varied(expected)
    plain = [case.tokens("", prompt, 12) for _, prompt in requests]
    assert {name for (name, _), a, b in zip(requests, expected, plain) if a == b} == {""}


def test_adapters_come_and_go_while_others_run(serving, case, seed):
    """An adapter takes the slot of another whose request was aborted; then the engine sleeps."""
    names = {"stays": "experts", "plain": "", "goes": "third", "comes": "fused", "returns": "third"}
    prompts = dict(zip(names, prompts_of(seed + 1, [30, 9, 17, 20, 5])))
    said = come_and_go(serving, prompts, {each: case.request(names[each]) for each in names}, seed)
    del said["goes"], names["goes"]
    assert said == {each: case.tokens(names[each], prompts[each], 16) for each in names}


DOWN = "model.layers.1.mlp.experts.2.down_proj"
OUT = f"base_model.model.{DOWN}.lora_B.weight"
DAMAGED = {
    "lacks a projection": (lambda of: None, f"lacks {DOWN}; an adapter of experts has all"),
    "of another model": (
        lambda b: b[:9].clone(),
        "makes 64 outputs of 32 inputs, and the adapter 9 of 32",
    ),
}


@pytest.mark.parametrize("what", DAMAGED)
def test_adapters_that_do_not_fit_are_refused(serving, case, seed, tmp_path, what):
    change, said = DAMAGED[what]
    folder = shutil.copytree(case.folders["experts"], tmp_path / "damaged")
    tensors = load_file(folder / "adapter_model.safetensors")
    tensors[OUT] = change(tensors[OUT])
    if tensors[OUT] is None:
        del tensors[OUT], tensors[OUT.replace("lora_B", "lora_A")]
    save_file(tensors, folder / "adapter_model.safetensors")
    with pytest.raises(ValueError, match=said):
        serving.llm_engine.add_lora(LoRARequest("damaged", 9, str(folder)))
    requests = requests_of(seed, ["experts", ""])
    assert tokens_of(serving, case, requests, 6) == [case.tokens(*each, 6) for each in requests]


FORMATS = {  # settings of an engine, and a format of adapters that it reads beside others
    "fused": ({}, "fused"),
    "of shared factors": ({"enable_moe_shared_loras": True}, "sharing"),
}


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("name", FORMATS)
def test_engines_of_one_format_are_merged_weights(case, seed, monkeypatch, name, runner):
    """The fused one is that of models whose experts are one matrix in their files."""
    settings, adapter = FORMATS[name]
    if name == "fused":
        monkeypatch.setattr(Qwen2MoeForCausalLM, "is_3d_moe_weight", True)
    requests = requests_of(seed, [adapter, "", adapter, "", adapter])
    with engine_of(runner, case.model, **LORA, **settings, **graphs("FULL", 1, 4, 8)) as llm:
        assert tokens_of(llm, case, requests, 12) == [case.tokens(*each, 12) for each in requests]


async def all_at_once(ranks: Ranks, prompts, adapters):
    return await ranks.generate(prompts, 12, loras=adapters)


TP2 = {"tensor_parallel_size": 2, "max_loras": 3, "async_scheduling": False}
LAYOUTS = {
    "expert parallel": {"enable_expert_parallel": True, "enable_mixed_moe_lora_format": True},
    "parts": {"enable_mixed_moe_lora_format": True, **graphs("FULL_AND_PIECEWISE", 1, 4, 8)},
    "parts, fully sharded": {"fully_sharded_loras": True},
}


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_add_updates_of_merged_weights(case, seed, layout, runner):
    """Each has some of the experts, or a part of each."""
    settings = LAYOUTS[layout]
    second = "fused" if "enable_mixed_moe_lora_format" in settings else "experts"
    requests = requests_of(seed, ["all", "", "experts", second, "all"])
    adapters = [case.request(name) for name, _ in requests]
    talk = partial(all_at_once, prompts=[prompt for _, prompt in requests], adapters=adapters)
    with asked_for(runner):
        got = serve_on_ranks(case.model, {**TP2, **LORA, **settings}, talk)
    assert got == [case.tokens(*each, 12) for each in requests]


@pytest.mark.parametrize(("method", "runner"), DRAFTED)
def test_each_adapter_verifies_its_drafts(case, tmp_path, seed, method, runner):
    loops = [prompt * 8 for prompt in prompts_of(seed, [4, 3, 5])]
    requests = list(zip(["all", "", "experts"], loops))
    got, verified = with_drafts(case, runner, method, requests, tmp_path)
    assert got == [case.tokens(*request, 24) for request in requests]
    assert verified["rejected"] > 0


@pytest.mark.parametrize("runner", RUNNERS)
def test_adapters_of_experts_verify_drafts_of_an_mtp_layer(tmp_path, seed, runner):
    """The layer itself has no adapters."""
    model, _ = make_mtp_model(tmp_path / "model", "Glm4Moe")
    experts = [f"layers.1.mlp.experts.{number}" for number in range(8)]
    modules = tuple(f"{expert}.{part}" for expert in experts for part in MLP)
    folder = make_adapter(tmp_path / "adapter", model, seed=seed, modules=modules, spread=0.3)
    merged = merge(model, folder, tmp_path / "merged")
    prompts, adapter = prompts_of(seed, [20, 9, 30]), LoRARequest("a", 1, str(folder))
    adapted, plain = (reference(each, prompts, 20) for each in (merged, model))
    expected = [adapted[0], plain[1], adapted[2]]
    assert expected[0] != plain[0]
    drafts = {"method": "mtp", "num_speculative_tokens": 2}
    with engine_of(runner, model, speculative_config=drafts, max_loras=2, **LORA) as llm:
        verified = count_verified(llm)
        got = generate(llm, prompts, greedy(20), [adapter, None, adapter])
    assert got == expected
    assert verified["rejected"] > 0
    assert verified["accepted"] + verified["partly"] > 0
