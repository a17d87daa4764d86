"""Engines of several ranks: tokens are those of transformers, and ranks agree on every step."""

import asyncio
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.engine import REPLAYED, graphs, make_model
from tests.helpers.huggingface import check_varied, reference
from tests.helpers.hybrids import FULL, GATED_DELTA, QWEN3_NEXT
from tests.helpers.latent import LATENT, V3_EXPERTS
from tests.helpers.mtp import make_mtp_model, num_accepted
from tests.helpers.prompts import prompts_of
from tests.helpers.ranks import Ranks, accepted_drafts, serve_on_ranks
from tests.helpers.v2 import asked_for

NUM_TOKENS = 12
MIXTRAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
GRAPHS = graphs("FULL_AND_PIECEWISE", 1, 4, 8, 16)
TP2, PP2 = {"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}
EXPERTS = {"enable_expert_parallel": True}
DEEPSEEK = {"family": "DeepseekV3", "q_lora_rank": 20, **LATENT, **V3_EXPERTS}
LAYOUTS = {
    "tensors": (TP2 | GRAPHS, {}),
    "stages": (PP2 | graphs("FULL_DECODE_ONLY", 1, 4, 8), {"num_hidden_layers": 3}),
    "tensors and stages": (TP2 | PP2, {}),
    "latent attention": (TP2 | {"async_scheduling": False}, DEEPSEEK),
    "latent attention and experts": (TP2 | EXPERTS | GRAPHS, DEEPSEEK),
    "latent attention in stages": (PP2 | GRAPHS | {"async_scheduling": False}, DEEPSEEK),
    "experts": (TP2 | EXPERTS | {"async_scheduling": False}, {"family": "Mixtral", **MIXTRAL}),
    "linear attention": (
        TP2 | GRAPHS | {"enable_prefix_caching": True},
        {"family": "Qwen3_5", **GATED_DELTA},
    ),
    "linear attention and experts": (
        TP2 | EXPERTS | {"async_scheduling": False},
        {"family": "Qwen3Next", **QWEN3_NEXT},
    ),
}
ON_V2 = "-V2"
"""With which names of cases on Model Runner V2 end."""
SHARED_OUT = ("tensors", "experts", "linear attention", "linear attention and experts")
LAYOUTS |= {f"{name}{ON_V2}": LAYOUTS[name] for name in SHARED_OUT}
IN_STAGES = ("stages", "tensors and stages", "latent attention in stages")
LAYOUTS |= {
    f"{name}{ON_V2}": (LAYOUTS[name][0] | {"async_scheduling": False}, LAYOUTS[name][1])
    for name in IN_STAGES
}


def check_runner(facts: list[dict[str, Any]], which: str) -> None:
    """Every rank has the runner that a case's name asks for."""
    assert {fact["runner"] for fact in facts} == {"V2" if which.endswith(ON_V2) else "V1"}


async def all_at_once(ranks: Ranks, prompts: list[list[int]]) -> dict[str, Any]:
    """Tokens of all prompts and what every rank tells; then some steps that sample by chance."""
    await ranks.ask("probe_watch")
    tokens = await ranks.generate(prompts, NUM_TOKENS)
    sampled = await ranks.generate(prompts[:3], 8, temperature=1.0)
    asked = ("facts", "noted", "counts")
    told = {name: await ranks.ask(f"probe_{name}") for name in asked}
    return {"tokens": tokens, "sampled": sampled, **told}


def check_that_ranks_agree(noted: list[list[dict[str, Any]]], num_steps: int) -> None:
    """Every rank prepared the same steps, array by array, and padded them as was decided.

    Pairs of token and expert are left out: a stage may have no layer with experts.
    """
    first, *others = [
        [{name: value for name, value in step.items() if name != "num_pairs"} for step in steps]
        for steps in noted
    ]
    assert len(first) >= num_steps
    for other in others:
        for mine, theirs in zip(first, other, strict=True):
            assert theirs == mine
    for step in first:
        assert step["padding"] == [step["num_tokens"], step["mode"]]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_tokens_are_those_of_transformers_and_ranks_agree_on_every_step(tmp_path, seed, layout):
    """Chunks, mixed steps and decodes, whose samples every rank places on its own."""
    settings, model = LAYOUTS[layout]
    folder = make_model(tmp_path, **model)
    prompts = prompts_of(seed, [3, 1, 90, 40, 17])
    with asked_for("V2" if layout.endswith(ON_V2) else "V1"):
        got = serve_on_ranks(folder, settings, partial(all_at_once, prompts=prompts))
    expected = reference(folder, prompts, NUM_TOKENS)
    check_varied(expected)
    assert got["tokens"] == expected
    assert len({token for row in got["sampled"] for token in row}) > 8
    check_that_ranks_agree(got["noted"], NUM_TOKENS + 8)

    facts, stages = got["facts"], settings.get("pipeline_parallel_size", 1)
    check_runner(facts, layout)
    num_ranks = stages * settings.get("tensor_parallel_size", 1)
    assert [fact["rank"] for fact in facts] == list(range(num_ranks))
    assert len({fact["pid"] for fact in facts}) == num_ranks
    assert len({fact["num_blocks"] for fact in facts}) == 1
    assert len({fact["seed"] for fact in facts}) == 1
    layers = sum(fact["num_layers"] for fact in facts[:: num_ranks // stages])
    attending = model.get("layer_types", [FULL] * model.get("num_hidden_layers", 2)).count(FULL)
    assert layers == attending
    if "compilation_config" in settings:
        kinds = REPLAYED[settings["compilation_config"]["cudagraph_mode"]]
        assert all(kinds <= set(counts) for counts in got["counts"])


async def all_drafting(ranks: Ranks, prompts: list[list[int]]) -> dict[str, Any]:
    """Tokens of all prompts, and how many drafts were accepted."""
    await ranks.ask("probe_watch")
    tokens = await ranks.generate(prompts, NUM_TOKENS)
    asked = ("facts", "noted", "counts")
    told = {name: await ranks.ask(f"probe_{name}") for name in asked}
    return {"tokens": tokens, "accepted": accepted_drafts(), **told}


DRAFTING = {
    "DeepseekV3-async": TP2 | EXPERTS | GRAPHS,
    "DeepseekV3-sync": TP2 | EXPERTS | {"async_scheduling": False},
    "Glm4Moe-sync": TP2 | GRAPHS | {"async_scheduling": False},
    "MiMo-async": TP2 | GRAPHS,
    "Qwen3_5-async": TP2 | GRAPHS | {"enable_prefix_caching": True},
    "Qwen3Next-sync": TP2 | EXPERTS | {"async_scheduling": False},
}
DRAFTING |= {f"{which}{ON_V2}": DRAFTING[which] for which in ("MiMo-async", "Qwen3_5-async")}


@pytest.mark.parametrize("which", DRAFTING)
def test_mtp_layers_draft_on_two_ranks(tmp_path, seed, which):
    """As many drafts are accepted as by a plain reading of whole sequences, in chunks, too."""
    settings, num_drafts = DRAFTING[which], 3
    folder, drafter = make_mtp_model(tmp_path, which.split("-")[0])
    prompts = prompts_of(seed, [3, 1, 90, 40, 17])
    drafts = {"method": "mtp", "num_speculative_tokens": num_drafts}
    with asked_for("V2" if which.endswith(ON_V2) else "V1"):
        got = serve_on_ranks(
            folder,
            {**settings, "speculative_config": drafts},
            partial(all_drafting, prompts=prompts),
        )
    tokens = reference(folder, prompts, NUM_TOKENS + num_drafts)
    check_varied(tokens)
    assert got["tokens"] == [row[:NUM_TOKENS] for row in tokens]
    expected = [
        num_accepted(drafter, prompt, row, NUM_TOKENS, num_drafts)
        for prompt, row in zip(prompts, tokens)
    ]
    print(expected, got["accepted"])
    assert got["accepted"] == sum(expected) > 0
    check_runner(got["facts"], which)
    check_that_ranks_agree(got["noted"], 5)
    if "compilation_config" in settings:
        assert all("full graph" in counts for counts in got["counts"])


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
    asked = ("facts", "noted", "expert_tokens")
    told = {name: await ranks.ask(f"probe_{name}") for name in asked}
    return {
        "tokens": {"both": both, "cached": cached, "alone": alone, "again": again},
        "caches": {"before": before, "after": after},
        **told,
    }


ENGINES = {
    "experts and tensors": {"data_parallel_size": 2, **TP2, **EXPERTS, **GRAPHS},
    "experts": {"data_parallel_size": 2, **EXPERTS, **graphs("FULL", 4, 8)},
    "experts, each cut in two": {"data_parallel_size": 2},
    "latent attention and experts": {"data_parallel_size": 2, **EXPERTS, **GRAPHS},
}
ENGINES |= {f"{name}{ON_V2}": settings for name, settings in ENGINES.items()}


def recording(folder: Path) -> dict[str, Any]:
    """Settings with which each rank records its steps, and the tokens of each expert."""
    record = {"dir": str(folder), "steps": "last 400", "expert_tokens": True}
    return {"additional_config": {"npu_prep": {"check": "full", "record": record}}}


@pytest.mark.parametrize("layout", ENGINES)
def test_engines_that_share_experts_step_together_and_an_idle_one_writes_nothing(
    tmp_path, seed, layout
):
    """The ranks of all engines share the model's experts, so that none can step alone.

    Engines of two ranks show at once what tensor and data parallelism do together.
    """
    settings = ENGINES[layout] | recording(tmp_path / "records")
    model = DEEPSEEK if "latent" in layout else {"family": "Mixtral", **MIXTRAL}
    folder = make_model(tmp_path / "model", **model)
    prompts = prompts_of(seed, [140, 3, 60, 17])
    with asked_for("V2" if layout.endswith(ON_V2) else "V1"):
        got = serve_on_ranks(folder, settings, partial(one_engine_idles, prompts=prompts))
    expected = reference(folder, prompts, NUM_TOKENS)
    check_varied(expected)
    assert got["tokens"] == {
        "both": [expected[0::2], expected[1::2]],
        "cached": expected[:1],
        "alone": expected[1:],
        "again": expected[:1],
    }

    check_runner(got["facts"], layout)
    num_ranks = settings.get("tensor_parallel_size", 1)
    working, idle = got["noted"][:num_ranks], got["noted"][num_ranks:]
    for ranks in (working, idle):
        for other in ranks[1:]:
            assert other == ranks[0]
    decided = [[(s["mode"], s["across"]) for s in steps[0]] for steps in (working, idle)]
    assert all(theirs == mine for mine, theirs in zip(*decided)), "engines agree on every step"
    kinds = Counter((a["is_dummy"], b["is_dummy"]) for a, b in zip(working[0], idle[0]))
    assert kinds[False, True] >= NUM_TOKENS and kinds[True, False] >= NUM_TOKENS
    assert kinds[False, False] > 1, "both worked at once"
    for step in (*working[0], *idle[0]):
        assert step["is_dummy"] or step["padding"] == [step["num_tokens"], step["mode"]]
    k = model["num_experts_per_tok"]
    for a, b in zip(working[0], idle[0]):
        pairs = k * (a["num_real_tokens"] + b["num_real_tokens"])
        assert a["num_pairs"] == b["num_pairs"] == pairs, "padding goes to no expert"
    for steps, counted in zip(got["noted"], got["expert_tokens"], strict=True):
        real = [step for step in steps if not step["is_dummy"]]
        assert all(counted), "no step is without counts, the last one before an idle time either"
        for step, layers in zip(real, counted, strict=True):
            assert {sum(tokens) for tokens in layers.values()} == {step["num_pairs"]}
    if "compilation_config" in settings:
        kinds_of_graphs = set(settings["compilation_config"]["cudagraph_mode"].split("_AND_"))
        assert kinds_of_graphs <= {mode for mode, _ in decided[0]}
        padded = [step for step in working[0] if step["mode"] != "NONE"]
        assert all(len(set(step["across"])) == 1 for step in padded)

    before, after = (got["caches"][when] for when in ("before", "after"))
    assert after[num_ranks:] == before[num_ranks:], "the idle engine's cache is as it was"
    assert after[:num_ranks] != before[:num_ranks]


async def engines_that_draft(ranks: Ranks, prompts: list[list[int]], on_v2: bool) -> dict[str, Any]:
    """As above, with the drafts that were accepted."""
    told = await one_engine_idles(ranks, prompts)
    passes = await ranks.ask("probe_draft_passes") if on_v2 else []
    return told | {"accepted": accepted_drafts(), "passes": passes}


SHARING = {"data_parallel_size": 2, **EXPERTS}
DRAFTING_ENGINES = {
    "DeepseekV3-graphs": SHARING | GRAPHS,
    "Glm4Moe-sync": SHARING | {"async_scheduling": False},
}
DRAFTING_ENGINES |= {f"{name}{ON_V2}": settings for name, settings in DRAFTING_ENGINES.items()}


@pytest.mark.parametrize("which", DRAFTING_ENGINES)
def test_engines_that_share_experts_draft_together(tmp_path, seed, which):
    """MTP layers with experts: an idle engine makes the other's draft passes, and writes nothing.

    As many drafts are accepted as by a plain reading of whole sequences.
    """
    settings, num_drafts, on_v2 = DRAFTING_ENGINES[which], 3, which.endswith(ON_V2)
    folder, drafter = make_mtp_model(tmp_path, which.split("-")[0])
    # One engine has five requests, more than a graph of the idle one's passes holds
    prompts = prompts_of(seed, [140, 3, 60, 17, 25, 9])
    drafts = {"method": "mtp", "num_speculative_tokens": num_drafts}
    with asked_for("V2" if on_v2 else "V1"):
        got = serve_on_ranks(
            folder,
            {**settings, "speculative_config": drafts},
            partial(engines_that_draft, prompts=prompts, on_v2=on_v2),
        )
    tokens = reference(folder, prompts, NUM_TOKENS + num_drafts)
    expected = [row[:NUM_TOKENS] for row in tokens]
    check_varied(expected)
    assert got["tokens"] == {
        "both": [expected[0::2], expected[1::2]],
        "cached": expected[:1],
        "alone": expected[1:],
        "again": expected[:1],
    }
    accepted = [
        num_accepted(drafter, prompt, row, NUM_TOKENS, num_drafts)
        for prompt, row in zip(prompts, tokens)
    ]
    print(accepted, got["accepted"])
    assert got["accepted"] == 2 * sum(accepted) + accepted[0] > 0
    check_runner(got["facts"], which)
    working, idle = got["noted"]
    kinds = Counter((a["is_dummy"], b["is_dummy"]) for a, b in zip(working, idle))
    assert kinds[False, True] > 5 and kinds[True, False] > 5 and kinds[False, False] > 1
    before, after = (got["caches"][when] for when in ("before", "after"))
    assert after[1] == before[1], "the idle engine's cache is as it was"
    assert after[0] != before[0]
    if on_v2:
        passes, others = got["passes"]
        assert passes == others, "engines agree on every pass"
        assert len(passes) >= 2 * len(working)
        replayed = [across for padded, across in passes if padded]
        assert bool(replayed) == ("graphs" in which)
        assert all(len(set(across)) == 1 for across in replayed)
        assert any(len(set(across)) > 1 for padded, across in passes if not padded)
        assert {8} < {0, *(padded for padded, _ in passes)} or "graphs" not in which


async def each_engine_alone(ranks: Ranks, prompts: list[list[int]]) -> dict[str, Any]:
    """The same prompts to each engine."""
    await ranks.ask("probe_watch")
    tokens = [await ranks.generate(prompts, NUM_TOKENS, engine=engine) for engine in (0, 1)]
    return {"tokens": tokens, "noted": await ranks.ask("probe_noted")}


def test_engines_without_experts_know_nothing_of_one_another(tmp_path, seed):
    folder = make_model(tmp_path)
    prompts = prompts_of(seed, [3, 90, 17])
    traffic = partial(each_engine_alone, prompts=prompts)
    got = serve_on_ranks(folder, {"data_parallel_size": 2}, traffic)
    expected = reference(folder, prompts, NUM_TOKENS)
    assert got["tokens"] == [expected, expected]
    for steps in got["noted"]:
        assert len(steps) >= NUM_TOKENS
        assert not any(step["is_dummy"] or step["across"] for step in steps)
