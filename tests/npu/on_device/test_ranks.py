"""Engines of several ranks, each on a card of its own: tokens, and what each step is on every rank.

The same on the CPU fallback, where more is compared: `tests/engine/test_ranks.py`.
"""

import asyncio
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from tests.helpers.counting import PreparationCounts
from tests.helpers.engine import REPLAYED, graphs
from tests.helpers.huggingface import logits_by, logits_of
from tests.helpers.quantized import QUANTIZE, rounded_model
from tests.helpers.ranks import (
    RankProbe,
    Ranks,
    accepted_drafts,
    loaded_tokens,
    preemptions,
    serve_on_ranks,
)
from tests.helpers.v2 import asked_for
from tests.npu.inputs import adapters_of, drafts_of, prompts
from tests.npu.models import BOUND, PARTED, bound_of, judges_of, lacks, make

CACHE = 32 << 20
PAGE = 2 << 20
"""Of K and V on each rank, and what the card's virtual memory comes in."""

TP, PP, DP = "tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"
SHARED, PCP = "decode_context_parallel_size", "prefill_context_parallel_size"
EXPERTS = {"enable_expert_parallel": True}


class Case(NamedTuple):
    """An engine; V1 schedules pipeline stages synchronously."""

    model: str
    layout: dict[str, int]
    mode: str = "FULL_AND_PIECEWISE"
    dtype: str = "bfloat16"
    runner: str = "V1"
    waits: bool = False
    adapters: bool = False
    drafts: str = ""
    int8: str = ""
    more: dict[str, Any] = {}  # noqa: RUF012


HALF = {"dtype": "float16"}
CASES = {
    "two ranks": Case("Qwen3", {TP: 2}, **HALF, more={"kv_cache_memory_bytes": None}),
    "two ranks, V2": Case("Qwen3", {TP: 2}, runner="V2", drafts="eagle", **HALF),
    "two ranks, adapters": Case("Qwen3", {TP: 2}, "PIECEWISE", waits=True, adapters=True, **HALF),
    "two ranks, decodes": Case("Qwen3", {TP: 2}, "FULL_DECODE_ONLY", waits=True),
    "stages": Case("Qwen3", {PP: 2}, "eager", waits=True),
    "stages, adapters": Case("Qwen3", {PP: 2}, "PIECEWISE", waits=True, adapters=True, **HALF),
    "stages, V2": Case("Qwen3", {PP: 2}, runner="V2", waits=True, **HALF),
    "stages, V2, asynchronous": Case("Qwen3", {PP: 2}, runner="V2", **HALF),
    "stages of latent layers": Case("DeepSeek V3", {PP: 2}, waits=True, more=EXPERTS),
    "stages of ranks": Case("Qwen3", {TP: 2, PP: 2}, "PIECEWISE", waits=True),
    "engines of ranks": Case("Qwen3", {TP: 2, DP: 2}, **HALF),
    "engines of ranks, V2": Case("Qwen3", {TP: 2, DP: 2}, "eager", "float16", "V2", waits=True),
    "engines, experts": Case("Qwen3Moe", {DP: 2}, **HALF, more=EXPERTS),
    "engines, experts, V2": Case("Qwen3Moe", {DP: 2}, runner="V2", **HALF, more=EXPERTS),
    "engines of ranks, experts": Case("Qwen3Moe", {TP: 2, DP: 2}, **HALF, more=EXPERTS),
    "engines of stages, V2": Case("DeepSeek V3", {PP: 2, DP: 2}, runner="V2", more=EXPERTS),
    "engines, MTP": Case("DeepSeek V3", {DP: 2}, drafts="mtp", more=EXPERTS),
    "experts in parts": Case("Qwen3Moe", {TP: 2}, "eager", waits=True, **HALF),
    "experts, adapters, V2": Case(
        "Qwen3Moe", {TP: 2}, runner="V2", adapters=True, **HALF, more=EXPERTS
    ),
    "experts in parts, adapters": Case("Qwen3Moe", {TP: 2}, "eager", adapters=True),
    "scattered experts": Case(
        "Qwen3Moe",
        {TP: 2},
        "PIECEWISE",
        waits=True,
        more=EXPERTS | {"expert_placement_strategy": "round_robin"},
    ),
    "latent, MTP": Case("DeepSeek V3", {TP: 2}, drafts="mtp", more=EXPERTS),
    "sparse, MTP": Case("DeepSeek V3.2", {TP: 2}, drafts="mtp", **HALF, more=EXPERTS),
    "engines, sparse, V2": Case("GLM-5", {DP: 2}, runner="V2", **HALF, more=EXPERTS),
    "int8, sparse": Case("DeepSeek V3.2", {TP: 2}, int8="modelslim", **HALF, more=EXPERTS),
    "states": Case("Qwen3.5 of heads of 128", {TP: 2}),
    "states, MTP": Case("Qwen3.5 of heads of 128", {TP: 2}, drafts="mtp"),
    "int8": Case("Qwen3", {TP: 2}, int8="compressed-tensors"),
    "int8, experts": Case("Qwen3Moe", {TP: 2}, int8="modelslim", more=EXPERTS),
    "int4, experts": Case("Qwen3Moe", {TP: 2}, int8="compressed-tensors", more=EXPERTS),
    "W4A8": Case("wide Qwen3", {TP: 2}, int8="modelslim"),
    "W4A8, experts": Case("wide Qwen3Moe", {TP: 2}, int8="modelslim", more=EXPERTS),
    "W4A8, experts cut": Case("wide Qwen3Moe", {TP: 2}, int8="compressed-tensors"),
    "int8, latent": Case("DeepSeek V3", {TP: 2}, int8="modelslim", more=EXPERTS),
    "shared contexts": Case("Qwen3", {TP: 4, SHARED: 2}, **HALF),
    "shared contexts, latent": Case("DeepSeek V3", {TP: 2, SHARED: 2}, "eager", waits=True),
    "shared prompts": Case("Qwen3", {PCP: 2}, runner="V2", **HALF),
    "shared prompts, latent": Case("DeepSeek V3", {PCP: 2}, runner="V2"),
    "shared prompts, experts": Case("Qwen3Moe", {PCP: 2}, runner="V2", **HALF, more=EXPERTS),
    "shared prompts, sparse": Case("DeepSeek V3.2", {PCP: 2}, runner="V2", **HALF),
    "shared prompts, int8": Case("Qwen3", {PCP: 2}, runner="V2", int8="compressed-tensors"),
}


class NPURankProbe(RankProbe):
    """Adds what each step asks of the rank's device, and its memory."""

    probe_held: tuple[Any, ...] = ()

    def probe_count(self) -> None:
        """From now on, count each step's preparation."""
        self.probe_preparations = PreparationCounts(self.model_runner)

    def probe_asked(self) -> list[dict[str, int]]:
        """What each step that was counted asked of the device to be prepared."""
        return self.probe_preparations.steps

    def probe_free(self) -> tuple[int, int]:
        """Free memory of the device, and what sleep gives back of it, in pages."""
        import torch

        torch.npu.synchronize()
        torch.npu.empty_cache()
        regions = [each for of_tag in self.sleep_mode_backend._regions.values() for each in of_tag]
        pages = sum(-(-region.data.numel() // PAGE) for region in regions)
        return torch.npu.mem_get_info()[0], pages * PAGE

    def probe_hold(self, rank: int) -> None:
        """Take the memory of one rank's device, but for less than half of the cache."""
        import torch

        while self.rank == rank and (left := self.probe_free()[0]) > CACHE // 2:
            more = torch.empty(left - PAGE, dtype=torch.uint8, device="npu")
            self.probe_held = (*self.probe_held, more)

    def probe_let_go(self) -> None:
        """Give it back."""
        self.probe_held = ()


def settings_of(case: Case, model: Path) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "dtype": case.dtype,
        "block_size": 128,
        "max_num_batched_tokens": 64,
        "max_num_seqs": 4,
        "kv_cache_memory_bytes": CACHE,
        "worker_extension_cls": f"{__name__}.NPURankProbe",
        "additional_config": {"npu_prep": {"check": "cheap"}},
        "async_scheduling": not case.waits,
        **case.layout,
        **case.more,
    }
    if case.more.get("kv_cache_memory_bytes", 0) is None:  # measured as in production
        settings["num_gpu_blocks_override"] = 64
    if case.adapters:
        # With batches in flight, vLLM 0.32's scheduler asserts that running requests have no more
        # adapters than a step may have, and lets more come in (Scheduler.schedule).
        several = {"max_loras": 3 if PP in case.layout else 2, "max_cpu_loras": 3}
        settings |= {"enable_lora": True, "max_lora_rank": 8, **several}
    if case.mode != "eager":
        settings |= graphs(case.mode, 4, 16)
    return settings | (drafts_of(model, case.drafts) if case.drafts else {})


async def traffic(ranks: Ranks, loras: list[Any] | None) -> dict[str, Any]:
    """Tokens, undisturbed; then what some steps ask of the device, then the arrays of others."""
    inputs = prompts()
    told: dict[str, Any] = {"tokens": await ranks.generate(inputs, 12, loras=loras)}
    told |= {"accepted": accepted_drafts(), "facts": await ranks.ask("probe_facts")}
    told["counts"] = await ranks.ask("probe_counts")
    await ranks.ask("probe_count")
    await ranks.generate(inputs[:3], 8, loras=loras and loras[:3])
    told["asked"] = await ranks.ask("probe_asked")
    await ranks.ask("probe_watch")
    await ranks.generate(inputs[:3], 8, loras=loras and loras[:3])
    return told | {"noted": await ranks.ask("probe_noted")}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("ranks")


@pytest.mark.parametrize("name", CASES)
def test_tokens_are_the_best_by_transformers(folder, tmp_path, name):
    """And each step has the same arrays on every rank of an engine, with one copy each."""
    case = CASES[name]
    model = made = make(folder, case.model, case.drafts == "mtp")
    if case.int8:
        left_out = ("kv_b_proj",) if "latent" in name else ()
        how = {"scheme": "W4A16", "group": 32} if name.startswith("int4") else {}
        if name.startswith("W4A8"):
            how = {"scheme": "W4A8", "group": 0 if "experts" in name else 256}
        QUANTIZE(model, tmp_path / "int8", case.int8, False, left_out, **how)
        made = tmp_path / "int8"
    loras = adapters_of(model) if case.adapters else None
    with asked_for(case.runner):
        talk = partial(traffic, loras=loras)
        got = serve_on_ranks(made, settings_of(case, model), talk)
    per_engine = case.layout.get(TP, 1) * case.layout.get(PP, 1) * case.layout.get(PCP, 1)
    num_engines = case.layout.get(DP, 1)
    devices = [fact["device"] for fact in got["facts"]]
    assert devices == [f"npu:{rank}" for rank in range(per_engine * num_engines)]
    assert {fact["runner"] for fact in got["facts"]} == {case.runner}
    assert (got["accepted"] > 0) == bool(case.drafts)

    replayed = REPLAYED.get(case.mode, set())
    if SHARED in case.layout:  # ranks exchange results between the pieces of a graph
        replayed = replayed & {"piecewise graphs"}
    if num_engines > 1:  # which engine gets a request is a matter of time
        replayed = replayed & {"full graph"}
    assert all(counts.keys() >= replayed for counts in got["counts"])

    least = max if num_engines > 1 else min
    assert least(map(len, got["noted"])) >= 8
    for first in range(0, per_engine * num_engines, per_engine):
        steps, *others = got["noted"][first : first + per_engine]
        if PP in case.layout:  # stages have experts of their own, or none
            steps, *others = [
                [{**each, "num_pairs": 0} for each in stage] for stage in (steps, *others)
            ]
        if not {SHARED, PCP} & {*case.layout}:  # which have slots or rows of their own
            assert all(other == steps for other in others)
    assert least(map(len, got["asked"])) >= 8
    copies = {step.get("h2d_copies", 0) for asked in got["asked"] for step in asked}
    # Which rows have which adapter is a copy of its own, if it changed.
    assert copies <= ({1, 2} if case.adapters else {1})

    if PCP in case.layout:  # block tables of rows are gathered, besides samples and new blocks
        launches = {step.get("launches", 0) for asked in got["asked"] for step in asked}
        assert max(launches) <= 3, launches

    if case.int8:
        ranks = case.layout.get(TP, 1)
        judges = [logits_by(rounded_model(model, made, ranks))] * len(prompts())
    else:
        judges = judges_of(model, case.adapters)
    judged = zip(judges, prompts(), got["tokens"], strict=True)
    lacking = np.stack([lacks(judge, prompt, row) for judge, prompt, row in judged])
    print(f"{name}: {lacking.max():.3f}, {(lacking > 0).mean():.3f} of tokens")
    # Inputs of int8 layers may come to lie a level higher or lower
    assert lacking.max() < bound_of(case.model, case.dtype, bool(case.int8)), lacking.round(3)
    assert (lacking > 0).mean() < 1 / PARTED


async def slept(ranks: Ranks, model: Path) -> dict[str, Any]:
    """Tokens after sleeps of both levels, and free memory of all ranks awake, asleep and awake.

    In between, one rank has no memory to wake up, and after the second sleep the other one.
    """
    inputs, failures = prompts()[:2], []
    tokens, free = [await ranks.generate(inputs, 6)], [await ranks.ask("probe_free")]
    for rank, level in enumerate((1, 2)):
        await ranks.llm.sleep(level=level)
        free.append(await ranks.ask("probe_free"))
        await ranks.ask("probe_hold", rank)
        try:
            await ranks.llm.wake_up()
        except Exception as error:
            failures.append([str(error), await ranks.llm.is_sleeping()])
        await ranks.ask("probe_let_go")
        free.append(await ranks.ask("probe_free"))
        await ranks.llm.wake_up(["weights"])
        if level == 2:
            await ranks.llm.collective_rpc("reload_weights", kwargs={"weights_path": str(model)})
        await ranks.llm.wake_up(["kv_cache"])
        tokens.append(await ranks.generate(inputs, 6))
        free.append(await ranks.ask("probe_free"))
    return {
        "free": [[pages for pages, _ in each] for each in free],
        "given_back": [pages for _, pages in free[0]],
        "tokens": tokens,
        "failures": failures,
        "counts": await ranks.ask("probe_counts"),
    }


def test_ranks_sleep_together_and_wake_up_together(folder):
    """Both levels give back what weights and cache take, to a page, and find it again.

    A rank without memory is one line, whichever it is, and the other one sleeps on, too.
    """
    model = make(folder, "Qwen3")
    settings = settings_of(CASES["two ranks, decodes"], model)
    talk = partial(slept, model=model)
    got = serve_on_ranks(model, settings | {"enable_sleep_mode": True}, talk)
    first, *others = got["tokens"]
    assert others == [first, first]
    judge = logits_of(model)
    worst = max(lacks(judge, *each).max() for each in zip(prompts(), first, strict=False))
    assert worst < BOUND["bfloat16"]
    assert all(counts["full graph"] > 0 for counts in got["counts"])
    awake = got["free"][0]
    asleep = [pages + more for pages, more in zip(awake, got["given_back"], strict=True)]
    assert got["free"] == [awake, asleep, asleep, awake, asleep, asleep, awake]
    assert len(got["failures"]) == 2
    for said, is_asleep in got["failures"]:
        assert "wake-up: no memory" in said and "\n" not in said
        assert is_asleep


async def disturbed(ranks: Ranks, model: Path) -> dict[str, Any]:
    """Tokens when some requests are preempted, when others are given up, and after sleep."""
    inputs, rounds = prompts(), []
    for level in (0, 1, 2):
        if level:
            await ranks.llm.sleep(level=level)
            await ranks.llm.wake_up(["weights"])
            if level == 2:
                reload = {"weights_path": str(model)}
                await ranks.llm.collective_rpc("reload_weights", kwargs=reload)
            await ranks.llm.wake_up(["kv_cache"])
        given_up = ranks.stream(inputs[1][::-1], 12)
        await anext(given_up)
        running = asyncio.create_task(ranks.generate(inputs, 40))
        await anext(given_up)
        await given_up.aclose()
        rounds.append(await running)
    counts = await ranks.ask("probe_counts")
    return {"rounds": rounds, "preempted": preemptions(), "counts": counts}


def test_ranks_that_share_prompts_are_disturbed(folder):
    """Preemption, requests that are given up beside others, and both levels of sleep."""
    case = CASES["shared prompts"]
    model = make(folder, case.model)
    few = {"block_size": 16, "num_gpu_blocks_override": 17, "enable_sleep_mode": True}
    with asked_for(case.runner):
        talk = partial(disturbed, model=model)
        got = serve_on_ranks(model, settings_of(case, model) | few, talk)
    judge = logits_of(model)
    for tokens in got["rounds"]:
        worst = max(lacks(judge, *each).max() for each in zip(prompts(), tokens, strict=True))
        assert worst < BOUND[case.dtype]
    assert got["preempted"] > 0
    assert all(counts.keys() >= REPLAYED[case.mode] for counts in got["counts"])


async def evicted(ranks: Ranks) -> dict[str, Any]:
    more = prompts() + [each[::-1] for each in prompts()]  # twice what the cache holds
    rounds = [[await ranks.generate([each], 6) for each in more] for _ in range(2)]
    return {"rounds": rounds, "loaded": loaded_tokens()}


def test_blocks_of_all_ranks_come_back_from_the_host(folder):
    """The cache holds four prompts at once, but not all of them."""
    model = make(folder, "Qwen3")
    settings = settings_of(CASES["two ranks"], model) | {"kv_cache_memory_bytes": CACHE}
    settings |= {"block_size": 16, "kv_offloading_size": 0.01, "num_gpu_blocks_override": 40}
    got = serve_on_ranks(model, settings, evicted)
    assert got["rounds"][0] == got["rounds"][1]
    assert got["loaded"] >= 4 * 128, "tokens that came from the host"
