"""Engines of several ranks: tokens are those of transformers, and ranks agree on every step."""

import asyncio
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.engine import REPLAYED, graphs, make_model
from tests.helpers.huggingface import is_varied, reference
from tests.helpers.hybrids import GATED_DELTA, QWEN3_NEXT
from tests.helpers.latent import GLM_DSA, LATENT, V3_EXPERTS, V32
from tests.helpers.mtp import PlainDrafter, make_mtp_model, num_accepted
from tests.helpers.prompts import prompts_of
from tests.helpers.ranks import Ranks, accepted_drafts, serve_on_ranks
from tests.helpers.v2 import asked_for, on_both

NUM_TOKENS = 12
MIXTRAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
GRAPHS = graphs("FULL_AND_PIECEWISE", 1, 4, 8, 16)
TP2, PP2 = {"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}
EXPERTS = {"enable_expert_parallel": True}
DEEPSEEK = {"q_lora_rank": 20, **LATENT, **V3_EXPERTS}
NUM_DRAFTS = 3
DRAFTS = {"speculative_config": {"method": "mtp", "num_speculative_tokens": NUM_DRAFTS}}
SYNC = {"async_scheduling": False}
CACHED = {"enable_prefix_caching": True}
LAYOUTS = {  # settings, a model's family, its config; with "MTP" it drafts
    "tensors": (TP2 | GRAPHS, "Qwen3", {}),
    "stages": (PP2 | SYNC | graphs("FULL_DECODE_ONLY", 1, 4, 8), "Qwen3", {"num_hidden_layers": 3}),
    "tensors and stages": (TP2 | PP2 | SYNC, "Qwen3", {}),
    "latent attention and experts": (TP2 | EXPERTS | GRAPHS, "DeepseekV3", DEEPSEEK),
    "latent attention in stages": (PP2 | GRAPHS | SYNC, "DeepseekV3", DEEPSEEK),
    "sparse attention and experts": (TP2 | EXPERTS | GRAPHS, "DeepseekV32", V32),
    "sparse attention in stages": (PP2 | GRAPHS | SYNC, "GlmMoeDsa", GLM_DSA),
    "experts": (TP2 | EXPERTS | SYNC, "Mixtral", MIXTRAL),
    "linear attention": (TP2 | GRAPHS | CACHED, "Qwen3_5", GATED_DELTA),
    "linear attention and experts": (TP2 | EXPERTS | SYNC, "Qwen3Next", QWEN3_NEXT),
    "MTP, latent attention": (TP2 | EXPERTS | GRAPHS, "DeepseekV3", {}),
    "MTP": (TP2 | GRAPHS, "MiMo", {}),
    "MTP, linear attention": (TP2 | GRAPHS | CACHED, "Qwen3_5", {}),
}
ASYNCHRONOUS = {  # stages, which V2 alone schedules so
    "stages, asynchronous": (
        PP2 | graphs("FULL_DECODE_ONLY", 1, 4, 8),
        "Qwen3",
        {"num_hidden_layers": 3},
    ),
    "tensors and stages, asynchronous": (TP2 | PP2 | GRAPHS, "Qwen3", {}),
}


def cases(of_both: dict[str, tuple[Any, ...]], of_v2: dict[str, tuple[Any, ...]]) -> list[Any]:
    """Parameters of layouts: whether a model drafts follows its config, the runner comes last."""
    more = [pytest.param(*each, False, "V2", id=f"{name}-V2") for name, each in of_v2.items()]
    return on_both({name: (*each, "MTP" in name) for name, each in of_both.items()}) + more


def model_of(
    folder: Path, family: str, config: dict[str, Any], drafts: bool
) -> tuple[Path, PlainDrafter | None]:
    """A model, and a plain reading of its MTP layer, if it has one."""
    if drafts:
        return make_mtp_model(folder, family)
    return make_model(folder, family, **config), None


async def all_at_once(ranks: Ranks, prompts: list[list[int]]) -> dict[str, Any]:
    """Tokens of all prompts and what every rank tells; then some steps that sample by chance."""
    await ranks.ask("probe_watch")
    tokens, accepted = await ranks.generate(prompts, NUM_TOKENS), accepted_drafts()
    sampled = await ranks.generate(prompts[:3], 8, temperature=1.0)
    told = {name: await ranks.ask(f"probe_{name}") for name in ("facts", "noted", "counts")}
    return {"tokens": tokens, "accepted": accepted, "sampled": sampled, **told}


def without_pairs(noted: list[list[dict[str, Any]]]) -> list[list[dict[str, Any]]]:
    """What ranks noted of their steps, but for pairs of token and expert: a stage may have none."""
    return [
        [{name: value for name, value in step.items() if name != "num_pairs"} for step in steps]
        for steps in noted
    ]


@pytest.mark.parametrize(
    ("settings", "family", "config", "drafts", "runner"),
    cases(LAYOUTS, ASYNCHRONOUS),
)
def test_ranks_agree_on_every_step(tmp_path, seed, settings, family, config, drafts, runner):
    """Chunks, mixed steps and decodes, whose samples every rank places on its own.

    Tokens are those of transformers, and as many drafts are accepted as by a plain reading.
    """
    prompts = prompts_of(seed, [3, 1, 90, 40, 17])
    folder, drafter = model_of(tmp_path, family, config, drafts)
    settings = settings | (DRAFTS if drafts else {})
    with asked_for(runner):
        got = serve_on_ranks(folder, settings, partial(all_at_once, prompts=prompts))
    expected = reference(folder, prompts, NUM_TOKENS + NUM_DRAFTS)
    assert is_varied(expected)
    assert got["tokens"] == [row[:NUM_TOKENS] for row in expected]
    if drafts:
        assert got["accepted"] == accepted_by_reading(drafter, prompts, expected) > 0
    assert len({token for row in got["sampled"] for token in row}) > 8

    facts, (first, *others) = got["facts"], without_pairs(got["noted"])
    assert {fact["runner"] for fact in facts} == {runner}
    stages, tensors = (settings.get(f"{n}_parallel_size", 1) for n in ("pipeline", "tensor"))
    assert [fact["rank"] for fact in facts] == list(range(stages * tensors))
    for name, count in {"pid": stages * tensors, "num_blocks": 1, "seed": 1}.items():
        assert len({fact[name] for fact in facts}) == count, name
    assert len(first) >= (5 if drafts else NUM_TOKENS + 8)
    for other in others:
        assert other == first
    assert all(step["padding"] == [step["num_tokens"], step["mode"]] for step in first)
    if "compilation_config" in settings:
        kinds = REPLAYED[settings["compilation_config"]["cudagraph_mode"]]
        kinds = {"full graph"} if drafts else kinds
        assert all(kinds <= set(counts) for counts in got["counts"])


def accepted_by_reading(
    drafter: PlainDrafter, prompts: list[list[int]], tokens: list[list[int]]
) -> int:
    """Drafts of all prompts that are accepted until each has its tokens."""
    return sum(
        num_accepted(drafter, prompt, row, NUM_TOKENS, NUM_DRAFTS)
        for prompt, row in zip(prompts, tokens)
    )


async def one_engine_idles(ranks: Ranks, prompts: list[list[int]]) -> dict[str, Any]:
    """Both work; engine 1 caches a prompt, idles while engine 0 works, goes on from its cache."""
    await ranks.ask("probe_watch")
    halves = (ranks.generate(prompts[engine::2], NUM_TOKENS, engine) for engine in (0, 1))
    both = await asyncio.gather(*halves)
    cached = await ranks.generate(prompts[:1], NUM_TOKENS, engine=1)
    before = await ranks.ask("probe_cache")
    alone = await ranks.generate(prompts[1:], NUM_TOKENS, engine=0)
    after = await ranks.ask("probe_cache")
    again = await ranks.generate(prompts[:1], NUM_TOKENS, engine=1)
    asked = ("facts", "noted", "draft_passes")
    told = {name: await ranks.ask(f"probe_{name}") for name in asked}
    return {
        "tokens": {"both": both, "cached": cached, "alone": alone, "again": again},
        "caches": {"before": before, "after": after},
        "accepted": accepted_drafts(),
        **told,
    }


DP2 = {"data_parallel_size": 2}
ENGINES = {  # settings, a model's family, its config; with "MTP" it drafts
    "experts and tensors": (DP2 | TP2 | EXPERTS | GRAPHS, "Mixtral", MIXTRAL),
    "experts": (DP2 | EXPERTS | graphs("FULL", 4, 8), "Mixtral", MIXTRAL),
    "experts, each cut in two": (DP2, "Mixtral", MIXTRAL),
    "latent attention and experts": (DP2 | EXPERTS | GRAPHS, "DeepseekV3", DEEPSEEK),
    "sparse attention and experts": (DP2 | EXPERTS | GRAPHS, "DeepseekV32", V32),
    "MTP, latent attention": (DP2 | EXPERTS | GRAPHS, "DeepseekV3", {}),
    "MTP, synchronous": (DP2 | EXPERTS | SYNC, "Glm4Moe", {}),
    "experts, in stages": (DP2 | PP2 | EXPERTS | GRAPHS | SYNC, "Mixtral", MIXTRAL),
}
STAGES_OF_ENGINES = {
    "experts, in stages, asynchronous": (DP2 | PP2 | EXPERTS | GRAPHS, "Mixtral", MIXTRAL),
}


@pytest.mark.parametrize(
    ("settings", "family", "config", "drafts", "runner"),
    cases(ENGINES, STAGES_OF_ENGINES),
)
def test_engines_that_share_experts_step_together(
    tmp_path, seed, settings, family, config, drafts, runner
):
    """The ranks of all engines share the model's experts, so that none can step alone.

    An idle one makes the other's steps and draft passes, and writes nothing. Engines of two ranks
    show at once what tensor and data parallelism do together.
    """
    folder, drafter = model_of(tmp_path / "model", family, config, drafts)
    # One engine has five requests, more than a graph of the idle one's draft passes holds
    prompts = prompts_of(seed, [140, 3, 60, 17, 25, 9])
    settings = settings | {"additional_config": {"npu_prep": {"check": "full"}}}
    with asked_for(runner):
        traffic = partial(one_engine_idles, prompts=prompts)
        got = serve_on_ranks(folder, settings | (DRAFTS if drafts else {}), traffic)
    tokens = reference(folder, prompts, NUM_TOKENS + NUM_DRAFTS)
    expected = [row[:NUM_TOKENS] for row in tokens]
    assert is_varied(expected)
    assert got["tokens"] == {
        "both": [expected[0::2], expected[1::2]],
        "cached": expected[:1],
        "alone": expected[1:],
        "again": expected[:1],
    }
    if drafts:
        accepted = 2 * accepted_by_reading(drafter, prompts, tokens)
        accepted += accepted_by_reading(drafter, prompts[:1], tokens[:1])
        assert got["accepted"] == accepted > 0

    assert {fact["runner"] for fact in got["facts"]} == {runner}
    num_ranks = settings.get("tensor_parallel_size", 1) * settings.get("pipeline_parallel_size", 1)
    working, idle = got["noted"][:num_ranks], got["noted"][num_ranks:]
    for ranks in (working, idle):
        for other in ranks[1:]:
            assert other == ranks[0]
    decided = [[(s["mode"], s["across"]) for s in steps[0]] for steps in (working, idle)]
    assert all(theirs == mine for mine, theirs in zip(*decided)), "engines agree on every step"
    kinds = Counter((a["is_dummy"], b["is_dummy"]) for a, b in zip(working[0], idle[0]))
    alone = 6 if drafts else NUM_TOKENS
    assert kinds[False, True] >= alone and kinds[True, False] >= alone
    assert kinds[False, False] > 1, "both worked at once"
    for step in (*working[0], *idle[0]):
        assert step["is_dummy"] or step["padding"] == [step["num_tokens"], step["mode"]]
    for a, b in zip(working[0], idle[0]):
        pairs = 2 * (a["num_real_tokens"] + b["num_real_tokens"])  # a token has two experts
        assert a["num_pairs"] == b["num_pairs"] == pairs, "padding goes to no expert"
    replays = "compilation_config" in settings
    if replays:
        modes = set(settings["compilation_config"]["cudagraph_mode"].split("_AND_"))
        assert modes & ({"FULL"} if drafts else modes) <= {mode for mode, _ in decided[0]}
        padded = [step for step in working[0] if step["mode"] != "NONE"]
        assert all(len(set(step["across"])) == 1 for step in padded)

    before, after = (got["caches"][when] for when in ("before", "after"))
    assert after[num_ranks:] == before[num_ranks:], "the idle engine's cache is as it was"
    assert after[:num_ranks] != before[:num_ranks]
    if drafts and runner == "V2":
        passes, others = got["draft_passes"]
        assert passes == others, "engines agree on every pass"
        assert len(passes) >= 2 * len(working[0])
        replayed = [across for padded, across in passes if padded]
        assert bool(replayed) == replays
        assert all(len(set(across)) == 1 for across in replayed)
        assert any(len(set(across)) > 1 for padded, across in passes if not padded)
        assert not replays or {8} < {0, *(padded for padded, _ in passes)}
