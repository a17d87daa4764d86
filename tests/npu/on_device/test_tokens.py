"""Greedy tokens of engines on the card: each is the best one by transformers in float32, and each
step has one copy.

Streams are slow in different ways. What only hardware can show (numerics, speed, layout limits of
real kernels) is not shown here.
"""

import os
from typing import Any, NamedTuple

import numpy as np
import pytest
from transformers import DeepseekV3Config

from ascend_emulator import profiles
from tests.helpers.counting import PreparationCounts
from tests.helpers.engine import REPLAYED, generate, graphs, greedy, runner_of
from tests.helpers.fused import forget_layers
from tests.helpers.latent import as_kimi_k2
from tests.helpers.mixtures import MIXTURES
from tests.helpers.v2 import engine_of
from tests.helpers.watch import count_preemptions, count_states, count_verified
from tests.npu.inputs import LENGTHS, WINDOWED, adapters_of, drafts_of, prompts
from tests.npu.models import PARTED, bound_of, judges_of, lacks, make
from tests.npu.only_some import REFUSED_MODELS
from vllm_npu_prep.errors import PrepError


class Case(NamedTuple):
    model: str
    mode: str = "FULL_AND_PIECEWISE"
    runner: str = "V1"
    drafts: str = ""
    dtype: str = "bfloat16"
    attention: str = "fia"
    adapters: bool = False
    waits: bool = False
    """Whether it schedules synchronously."""
    tokens: int = 12
    """Of each request."""
    blocks: int = 0
    """Of the cache, where requests have to be preempted; the full check then looks at each step."""


HALF = {"dtype": "float16"}
ATB = {"dtype": "float16", "attention": "atb"}
CASES = {
    "fia": Case("Qwen3", "eager", waits=True, **HALF),
    "fia, graphs": Case("Qwen3", **HALF),
    "fia, graphs, V2": Case("Qwen3", runner="V2", **HALF),
    "fia, pieces": Case("Qwen3", "PIECEWISE", waits=True, **HALF),
    "fia, decodes": Case("Qwen3", "FULL_DECODE_ONLY"),
    "fia, full graphs, ngram": Case("Qwen3", "FULL", drafts="ngram", waits=True, **HALF),
    "fia, EAGLE": Case("Qwen3", "eager", drafts="eagle", **HALF),
    "fia, full graphs, EAGLE, V2": Case("Qwen3", "FULL", "V2", "eagle", waits=True, **HALF),
    "fia, pieces, draft model": Case("Qwen3", "PIECEWISE", drafts="draft_model", **HALF),
    "fia, graphs, draft model, V2": Case("Qwen3", runner="V2", drafts="draft_model", **HALF),
    "fia, graphs, EAGLE-3": Case("Qwen3", drafts="eagle3", **HALF),
    "fia, graphs, EAGLE-3, V2": Case("Qwen3", runner="V2", drafts="eagle3", **HALF),
    "fia, graphs, adapters": Case("Qwen3", adapters=True, **HALF),
    "fia, graphs, adapters, V2": Case("Qwen3", runner="V2", adapters=True, **HALF),
    "atb": Case("Qwen3", "FULL_DECODE_ONLY", waits=True, **ATB),
    "atb, bfloat16": Case("Qwen3", "FULL_DECODE_ONLY", attention="atb"),
    "atb, V2": Case("Qwen3", "FULL_DECODE_ONLY", "V2", **ATB),
    "atb, graphs, ngram": Case("Qwen3", drafts="ngram", waits=True, **ATB),
    "atb, draft model": Case("Qwen3", "eager", drafts="draft_model", **ATB),
    "atb, EAGLE, V2": Case("Qwen3", "eager", "V2", "eagle", **ATB),
    "atb, pieces, EAGLE-3": Case("Qwen3", "PIECEWISE", drafts="eagle3", waits=True, **ATB),
    "atb, pieces, adapters": Case("Qwen3", "PIECEWISE", adapters=True, **ATB),
    "windows": Case("Gemma 3"),  # vLLM refuses float16 for Gemma 3
    "windows, atb": Case("Gemma 3", attention="atb"),
    "windows, layers that share K and V": Case("Gemma 3n", "FULL"),
    "local attention": Case("Llama 4", "FULL", **HALF),
    "local attention, atb": Case("Llama 4", waits=True, **ATB),
    "MiMo, MTP": Case("MiMo", drafts="mtp", **HALF),
    "MiMo, MTP, V2": Case("MiMo", runner="V2", drafts="mtp", **HALF),
    "MiMo, MTP, atb": Case("MiMo", "FULL_DECODE_ONLY", drafts="mtp", **ATB),
    "GLM-4.5, MTP": Case("GLM-4.5", drafts="mtp", **HALF),
    "DeepSeek V3, MTP": Case("DeepSeek V3", drafts="mtp"),  # whose draft passes are compiled
    **{f"experts of {family}": Case(family, **HALF) for family in MIXTURES},
    "experts of Qwen3Moe, atb": Case("Qwen3Moe", **ATB),
    "experts, full graphs": Case("Qwen3Moe", "FULL", **HALF),
    "experts, adapters, V2": Case("Qwen3Moe", runner="V2", adapters=True, **HALF),
    "experts, adapters": Case("Qwen3Moe", "eager", adapters=True),
    "DeepSeek V2 Lite": Case("DeepSeek V2 Lite", waits=True),
    "DeepSeek V2": Case("DeepSeek V2", "PIECEWISE"),
    "DeepSeek V3": Case("DeepSeek V3"),
    "dense DeepSeek V3": Case("dense DeepSeek V3", drafts="ngram", waits=True, blocks=4),
    "DeepSeek V3.2": Case("DeepSeek V3.2"),
    "DeepSeek V3.2, MTP, V2": Case("DeepSeek V3.2", runner="V2", drafts="mtp", **HALF),
    "GLM-5, V2": Case("GLM-5", runner="V2", **HALF),
    "GLM-5, MTP": Case("GLM-5", drafts="mtp", **HALF),
    "GLM-5, ngram": Case("GLM-5", "FULL_DECODE_ONLY", drafts="ngram", waits=True, **HALF),
    "Kimi K2": Case("Kimi K2"),
    "GLM-4.7-Flash": Case("GLM-4.7-Flash"),
    "Qwen3-Next": Case("Qwen3-Next"),
    "Qwen3-Next, MTP": Case("Qwen3-Next", drafts="mtp"),
    "Qwen3.5": Case("Qwen3.5", waits=True),
    "Qwen3.5, V2": Case("Qwen3.5", runner="V2"),
    "Qwen3.5, MTP": Case("Qwen3.5", drafts="mtp"),
    "Qwen3.5, MTP, V2": Case("Qwen3.5", runner="V2", drafts="mtp"),
    "Qwen3.5 MoE": Case("Qwen3.5 MoE", "PIECEWISE"),
    "Qwen3.5, preempted": Case("Qwen3.5 of blocks of 128", blocks=15),
    "Qwen3.5, MTP, preempted": Case(
        "Qwen3.5 of blocks of 128", drafts="mtp", waits=True, blocks=19
    ),
    "Qwen3.5, MTP, preempted, V2": Case(
        "Qwen3.5 of blocks of 128", "FULL_DECODE_ONLY", "V2", "mtp", blocks=19, tokens=6
    ),
}

LONGER = ("Gemma 3", "Gemma 3n", "Llama 4")
"""Models whose windows or chunks are smaller than some of their prompts."""

WITHOUT_FULL = {"FULL_AND_PIECEWISE": "PIECEWISE", "FULL_DECODE_ONLY": "eager"}
"""Graph modes that start-up chooses where captured attention can't be updated."""


@pytest.fixture(autouse=True)
def deepseek_keeps_its_name():
    """vLLM renames transformers' class for Kimi K2, for the whole process."""
    yield
    DeepseekV3Config.model_type = "deepseek_v3"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("models")


def steps_that_bring_weights(llm, counts: PreparationCounts) -> set[int]:
    """Which steps give an adapter its place on the device, from now on: it may have left it."""
    manager, steps = runner_of(llm).lora_manager._adapter_manager, set()
    activate = manager.activate_adapter

    def watched(lora_id: int) -> bool:
        is_new = activate(lora_id)
        steps.update({len(counts.steps)} if is_new else ())
        return is_new

    manager.activate_adapter = watched
    return steps


@pytest.mark.parametrize("name", CASES)
def test_tokens_are_the_best_by_transformers(folder, name):
    case = CASES[name]
    refusal = REFUSED_MODELS.get(profiles.current().name, {}).get(case.model.partition(" of ")[0])
    model = make(folder, case.model, case.drafts == "mtp")
    is_longer = case.model in LONGER
    given = prompts(WINDOWED if is_longer else LENGTHS)
    mode = case.mode
    if os.environ.get("NPU_EMULATOR_DRIVER") == "24.1.RC3":  # it keeps old arguments in replays
        mode = WITHOUT_FULL[mode]
    settings: dict[str, Any] = {
        "dtype": case.dtype,
        "block_size": 128,
        "max_model_len": 384 if is_longer else 256,
        "max_num_batched_tokens": 64,
        "max_num_seqs": 4,
        "kv_cache_memory_bytes": 32 << 20,
        "async_scheduling": not case.waits,
        "additional_config": {"npu_prep": {"attention": case.attention}},
    }
    if case.drafts:
        settings |= drafts_of(model, case.drafts)
    if case.adapters:
        settings |= {"enable_lora": True, "max_loras": 2, "max_cpu_loras": 3, "max_lora_rank": 8}
    if case.mode != "eager":
        settings |= graphs(case.mode, 4, 16)
    if case.blocks:
        settings["num_gpu_blocks_override"] = case.blocks
        settings["additional_config"]["npu_prep"]["check"] = "full"
    forget_layers()
    path = as_kimi_k2(model) if case.model == "Kimi K2" else model
    if refusal:
        with pytest.raises(PrepError, match=refusal), engine_of(case.runner, path, **settings):
            pass
        return
    with engine_of(case.runner, path, **settings) as llm:
        assert str(runner_of(llm).device) == "npu:0"
        states, verified = count_states(llm), count_verified(llm)
        preempted = count_preemptions(llm)
        generate(llm, given[:1], greedy(4))
        counts = PreparationCounts(runner_of(llm))
        bring = steps_that_bring_weights(llm, counts) if case.adapters else set()
        tokens = generate(
            llm, given, greedy(case.tokens), adapters_of(model) if case.adapters else None
        )
        steps = runner_of(llm).padding.counts.by_kind

    replayed = {kind for kind in steps if not kind.startswith("eager")}
    if case.attention == "atb" and (case.drafts or "windows" in name):
        mode = "eager" if mode == "FULL_DECODE_ONLY" else "PIECEWISE"  # not with dense masks
    assert replayed == REPLAYED.get(mode if case.mode != "eager" else "", set()), steps
    assert states.keys() >= {"PrefillNoCache", "ChunkedPrefill"}
    assert mode == "FULL" or ("SpecDecoding" if case.drafts else "DecodeOnly") in states
    if case.drafts and case.drafts != "ngram":
        assert min(verified[what] for what in ("partly", "rejected")) > 0, verified
    assert (preempted["preempted"] > 0) == (case.blocks > 0)
    # Which rows have which adapter is a copy of its own, if it changed.
    copies = {step["h2d_copies"] for at, step in enumerate(counts.steps) if at not in bring}
    assert copies == {1} or (case.adapters and copies == {1, 2})

    judged = zip(judges_of(model, case.adapters), given, tokens, strict=False)
    lacking = np.stack([lacks(judge, prompt, row) for judge, prompt, row in judged])
    print(f"{name}: {lacking.max():.3f}, {(lacking > 0).mean():.3f} of tokens")
    assert lacking.max() < bound_of(case.model, case.dtype), lacking.round(3)
    assert (lacking > 0).mean() < 1 / PARTED
