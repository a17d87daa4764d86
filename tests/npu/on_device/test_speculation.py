"""What a speculative step asks of the device, drafting included: copies, read-backs, launches."""

from dataclasses import asdict
from functools import cache

import numpy as np
import pytest
from vllm import SamplingParams

import ascend_emulator
from tests.helpers.counting import ModuleCounts, PreparationCounts
from tests.helpers.drafters import disturb_model, make_eagle_head
from tests.helpers.engine import generate, greedy, make_model, runner_of
from tests.helpers.hybrids import EXPERTS as EXPERTS_BESIDE
from tests.helpers.hybrids import ON_NPUS
from tests.helpers.latent import LATENT_ON_NPUS, V3_EXPERTS_ON_NPUS
from tests.helpers.mtp import make_mtp_model
from tests.helpers.prompts import prompts_of
from tests.helpers.v2 import RUNNERS, engine_of
from tests.helpers.watch import count_verified, on_prepared
from tests.npu.only_some import HEAD_SIZE


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("qwen3")
    return make_model(folder, num_hidden_layers=1, spread=0.1, embedding_scale=20)


@pytest.fixture(scope="module")
def drafter(model, tmp_path_factory):
    """What a method drafts with, as vLLM's options say it."""

    def make(method):
        if method == "ngram":
            return {"prompt_lookup_max": 2, "prompt_lookup_min": 1}
        folder = tmp_path_factory.mktemp(method)
        if method == "draft_model":
            return {"model": str(disturb_model(folder / "model", model, 0.3))}
        return {"model": str(make_eagle_head(folder, model, method, head_dim=HEAD_SIZE))}

    return cache(make)


def counts_of_steps(runner):
    """What each later step asks of the device, sampling and drafting included."""
    whole, execute_model, sample_tokens = [], runner.execute_model, runner.sample_tokens

    def counted_execute_model(*args):
        whole.append(asdict(ascend_emulator.counters()))
        return execute_model(*args)

    def counted_sample_tokens(*args):
        result, before = sample_tokens(*args), whole[-1]
        after = asdict(ascend_emulator.counters())
        whole[-1] = {name: after[name] - count for name, count in before.items()}
        return result

    runner.execute_model, runner.sample_tokens = counted_execute_model, counted_sample_tokens
    return whole


TO_THE_HOST = {  # samples, and: drafts for the scheduler; counts for later passes or the next step
    ("V1", "eagle", 1, False): 2,
    ("V1", "eagle", 3, False): 3,
    ("V1", "eagle", 1, True): 2,
    ("V1", "eagle", 3, True): 2,
    ("V1", "eagle3", 3, True): 2,
    ("V1", "draft_model", 2, True): 2,
    ("V1", "ngram", 3, False): 1,
    # Drafts stay on the device, in synchronous steps, too
    ("V2", "eagle", 1, False): 1,
    ("V2", "eagle", 3, False): 2,
    ("V2", "eagle", 1, True): 2,
    ("V2", "eagle3", 3, True): 2,
}


@pytest.mark.parametrize(
    ("runner_name", "method", "num_drafts", "asynchronous"),
    TO_THE_HOST,
)
def test_a_step_copies_once_and_reads_back_what_it_must(
    model, drafter, seed, runner_name, method, num_drafts, asynchronous
):
    drafts = {"method": method, "num_speculative_tokens": num_drafts, **drafter(method)}
    with engine_of(
        runner_name,
        model,
        dtype="float16",
        max_num_seqs=4,
        async_scheduling=asynchronous,
        speculative_config=drafts,
    ) as llm:
        runner = runner_of(llm)
        steps, verified = [], count_verified(llm)
        on_prepared(llm, lambda step: steps.append((step.attn_state.name, step.num_block_changes)))
        preparation, whole = PreparationCounts(runner), counts_of_steps(runner)
        prompts = prompts_of(seed, [5, 30, 9])
        if method == "ngram":
            prompts = [prompt * 3 for prompt in prompts]  # something to look up
        generate(llm, prompts, greedy(20))
        started = 0
        if method != "ngram":
            started = getattr(runner, "speculation", runner).num_valid_tokens.started
    whole = [counts for counts in whole if "h2d_copies" in counts][: len(steps)]
    assert verified["accepted"] + verified["partly"] > 0
    assert verified["rejected"] > 0 or method == "ngram"  # what this model repeats is always right
    seen = 0
    for (state, num_block_changes), prepared, counts in zip(steps, preparation.steps, whole):
        if state != "SpecDecoding":
            continue
        seen += 1
        assert prepared["h2d_copies"] == 1 == counts["h2d_copies"], counts
        # Samples are placed by one launch; by V2 by another, if one is wanted that had to wait
        placing = 2 if runner_name == "V2" else asynchronous
        assert prepared.get("launches", 0) <= placing + (num_block_changes > 0), prepared
        assert counts["d2h_copies"] == TO_THE_HOST[runner_name, method, num_drafts, asynchronous]
        left = set(prepared) - {"h2d_copies", "h2d_bytes", "launches", "peak_memory_bytes"}
        assert not left, "preparation waits for nothing and reads nothing back"
    assert seen > 4
    counts_are_read = method != "ngram" and (num_drafts, asynchronous) != (1, False)
    assert started == (len(steps) if counts_are_read else 0)


EXPERTS_OF_DRAFTERS = {
    "MiMo": [],
    "Glm4Moe": [11],
    "DeepseekV3": [11],
    "Qwen3_5": [],
    "Qwen3Next": [13],  # two for its gates, as in the model
}
"""Launches of an MTP layer's experts, with their router and shared expert: as the model's."""

HYBRID_HEAD = 256
"""With which a state fills the K of 128 tokens."""

DRAFT_PASSES = {
    "MiMo": ({"num_hidden_layers": 1}, "float16", (4, 58, 56, 45), (47, 54, 55)),
    "Glm4Moe": (
        {"head_dim": HEAD_SIZE, "n_group": 1, "topk_group": 1},
        "float16",
        (4, 53, 51, 40),
        (42, 49, 50),
    ),
    "DeepseekV3": (
        {"q_lora_rank": 96, **LATENT_ON_NPUS, **V3_EXPERTS_ON_NPUS},
        "bfloat16",
        (4, 60, 56, 45),
        (48, 54, 55),
    ),
    # Their layers attend, whatever the model's own do
    "Qwen3_5": ({**ON_NPUS, "head_dim": HYBRID_HEAD}, "bfloat16", (4, 46, 44, 33), (35, 42, 43)),
    "Qwen3Next": (
        {**ON_NPUS, **EXPERTS_BESIDE, "head_dim": HYBRID_HEAD},
        "bfloat16",
        (4, 56, 54, 43),
        (45, 52, 53),
    ),
}
"""Settings of a model, and most launches: on V1 of setting the first pass's inputs, and of three
passes, each with what prepares the next; on V2 of three passes, the first with its inputs. Experts
are part of the layers of all but MiMo and Qwen3.5."""
PASSES = {
    "V1": ("drafter", "propose", "build_per_group_and_layer_attn_metadata"),
    "V2": ("speculator", "draft", "_next_metadata"),
}
"""A runner's drafter, what drafts all tokens, and what builds a pass's metadata."""


@pytest.mark.parametrize("runner_name", RUNNERS)
@pytest.mark.parametrize("family", DRAFT_PASSES)
def test_launches_of_a_draft_pass(tmp_path, seed, family, runner_name):
    """Of one MTP layer; a pass beyond the first one adds its positions, slots and metadata."""
    config, dtype, *budgets = DRAFT_PASSES[family]
    most_launches = budgets[runner_name == "V2"]
    folder, _ = make_mtp_model(tmp_path, family, **config)
    drafts = {"method": "mtp", "num_speculative_tokens": 3}
    settings = {"dtype": dtype, "max_num_seqs": 4, "speculative_config": drafts}
    with engine_of(runner_name, folder, **settings) as llm:
        name, drafting, building = PASSES[runner_name]
        drafter, seen = getattr(runner_of(llm), name), []
        propose, build = getattr(drafter, drafting), getattr(drafter, building)
        names = [name for name, _ in drafter.model.named_modules() if name.endswith(".experts")]
        counted = ModuleCounts(drafter.model, [name.removesuffix(".experts") for name in names])

        def launches():
            return asdict(ascend_emulator.counters())["launches"]

        def counted_propose(*args, **given):
            seen.append([launches()])
            result = propose(*args, **given)
            seen[-1].append(launches())
            return result

        def counted_build(*args, **given):
            seen[-1].append(launches())
            return build(*args, **given)

        setattr(drafter, drafting, counted_propose)
        setattr(drafter, building, counted_build)
        generate(llm, prompts_of(seed, [5, 30, 9]), greedy(20))
    # Where drafting begins and ends, and where passes have their metadata built
    passes = list(zip(*(np.diff(row).tolist() for row in seen)))
    assert len(passes) == len(most_launches)
    print(family, runner_name, "inputs and three passes:", *map(set, passes), counted.counts)
    experts = [count.get("launches") for count in counted.counts.values()]
    assert experts == EXPERTS_OF_DRAFTERS[family], "a router that vLLM computes takes dozens"
    assert len(seen) > 5
    for launched, most in zip(passes, most_launches):
        assert len(set(launched[1:])) == 1, "whatever the batch, after the prompts"
        assert 0 < launched[1] <= max(launched) <= most


def test_drafts_by_chance_are_verified_without_a_sync(model, drafter, seed):
    """By V2: a step of random requests reads back its samples and the counts of its draft passes,
    and copies nothing to the device but its inputs."""
    drafts = {"method": "eagle", "num_speculative_tokens": 3, **drafter("eagle")}
    drafts["draft_sample_method"] = "probabilistic"
    settings = {"dtype": "float16", "max_num_seqs": 4, "async_scheduling": True}
    with engine_of("V2", model, speculative_config=drafts, **settings) as llm:
        whole, verified = counts_of_steps(runner_of(llm)), count_verified(llm)
        chances = SamplingParams(temperature=0.9, max_tokens=20, ignore_eos=True, detokenize=False)
        tokens = generate(llm, prompts_of(seed, [5, 30, 9]), [greedy(20), chances, chances])
    assert [len(row) for row in tokens] == [20] * 3
    assert verified["accepted"] + verified["partly"] > 0 and verified["rejected"] > 0
    decodes = whole[2:-2]
    assert len(decodes) > 4
    assert {(each["h2d_copies"], each["d2h_copies"]) for each in decodes} == {(1, 2)}
