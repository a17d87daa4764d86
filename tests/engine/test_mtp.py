"""Multi-token prediction: the tokens of transformers, and the drafts of a plain reading.

Not only tokens are compared: in every step, exactly those drafts are made and accepted that
`tests.helpers.mtp.PlainDrafter` makes of the whole sequence. So an input of a draft pass that is
off in any way is seen, though verification hides it from the tokens.
"""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from vllm import SamplingParams
from vllm.lora.request import LoRARequest
from vllm.sampling_params import StructuredOutputsParams

from tests.conftest import SEED
from tests.engine.test_speculation import SAMPLED, SAMPLES, VOCAB, distribution_of, named
from tests.helpers.engine import (
    REPLAYED,
    engine,
    generate,
    graphs,
    greedy,
    runner_of,
    save_tokenizer,
)
from tests.helpers.forced_messages import Forced
from tests.helpers.huggingface import check_varied, reference
from tests.helpers.hybrids import with_a_tower
from tests.helpers.lora import make_adapter, merge
from tests.helpers.mtp import FAMILIES, check_accepted, make_mtp_model, record_verified
from tests.helpers.prompts import prompts_of
from tests.helpers.statistics import check_distribution
from tests.helpers.v2 import RUNNERS, engine_of
from tests.helpers.watch import count_preemptions, count_states, count_verified, record_cached
from vllm_npu_prep.runner import mtp_layers
from vllm_npu_prep.startup.asked import MTP_MODELS

NUM_DRAFTS = 3
MAX_TOKENS = 20


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Callable[..., Any]:
    """Function of a family: its model, the plain reading, prompts and what transformers makes."""
    kept: dict[str, Any] = {}

    def make(family: str) -> Any:
        if family not in kept:
            folder, drafter = make_mtp_model(tmp_path_factory.mktemp(family), family)
            prompts = prompts_of(SEED, [3, 1, 70, 40, 17, 30])
            # Parts within a block. Where prompts part between two, the drafter's row of the block's
            # last token is the first prompt's: block hashes know no later token.
            prompts.append(prompts[2][:62] + prompts[3])
            tokens = reference(folder, prompts, MAX_TOKENS + NUM_DRAFTS)
            check_varied(tokens)
            kept[family] = folder, drafter, prompts, tokens
        return kept[family]

    return make


def drafts(num_drafts: int = NUM_DRAFTS, **config: Any) -> dict[str, Any]:
    """Settings of an engine that drafts with its model's MTP layers."""
    return {"speculative_config": {"method": "mtp", "num_speculative_tokens": num_drafts, **config}}


SMALL = {"block_size": 4, "num_gpu_blocks_override": 56}  # too few blocks for all requests
# A state of each draft; no prefix cache, so the full check follows what each block holds
STATES = {"block_size": 16, "enable_prefix_caching": False}
CACHED_STATES = {"block_size": 16, "enable_prefix_caching": True}
# States of decodes, too, which requests that were preempted come back to
CACHED_AND_FEW = CACHED_STATES | {
    "max_num_seqs": 3,
    "num_gpu_blocks_override": 36,
    "prefix_cache_retention_interval": None,
}
CHECKED = {"npu_prep": {"check": "full"}}
UNPADDED = "disable_padded_drafter_batch"
CASES = [
    # family, asynchronous, graph mode, other settings
    ("MiMo", True, None, SMALL),
    ("MiMo", False, "FULL_AND_PIECEWISE", {"block_size": 16}),
    ("MiMo", True, "FULL", {"block_size": 16}),
    ("MiMo", True, "PIECEWISE", {"block_size": 16}),
    ("MiMo", False, "FULL_DECODE_ONLY", {"block_size": 128}),
    ("MiMo", False, None, {"block_size": 16, UNPADDED: True}),
    ("Glm4Moe", False, None, SMALL),
    ("Glm4Moe", True, "FULL_AND_PIECEWISE", {"block_size": 16}),
    ("DeepseekV3", False, None, SMALL),
    ("DeepseekV3", True, "FULL_AND_PIECEWISE", {"block_size": 16}),
    ("DeepseekV3", True, "FULL_DECODE_ONLY", {"block_size": 16}),
    ("Qwen3Next", True, None, STATES | {"num_gpu_blocks_override": 30}),
    ("Qwen3_5", True, "FULL_AND_PIECEWISE", STATES),
    ("Qwen3_5", False, "FULL_DECODE_ONLY", STATES),
    ("Qwen3_5Moe", False, "PIECEWISE", STATES),
    # A state at the end of each block, where the next round finds it
    ("Qwen3_5", True, "FULL_AND_PIECEWISE", CACHED_STATES),
    ("Qwen3Next", False, None, CACHED_STATES),
    # The same, and requests that lose theirs come back to what the cache has kept of it
    ("Qwen3_5", True, "FULL_AND_PIECEWISE", CACHED_AND_FEW),
]
CASES = [(*case, "V1") for case in CASES] + [
    (*case, "V2") for case in CASES[:5] + CASES[6:] if RUNNERS[1:]
]


@pytest.mark.parametrize(
    ("family", "asynchronous", "mode", "settings", "runner"),
    CASES,
    ids=[
        f"{family}-{'async' if a else 'sync'}-{'unpadded' if UNPADDED in more else mode}"
        f"{'-cached' if family.startswith('Qwen') and more['enable_prefix_caching'] else ''}"
        f"{'-preempted' if more.keys() >= CACHED_AND_FEW.keys() else ''}"
        f"{named(r)}"
        for family, a, mode, more, r in CASES
    ],
)
def test_tokens_and_accepted_drafts(made, family, asynchronous, mode, settings, runner):
    """In chunks of prompts, from the prefix cache, preempted, in graphs.

    The full check names what is broken in steps of states and drafts.
    """
    folder, drafter, prompts, tokens = made(family)
    settings = {"enable_prefix_caching": True, "max_num_seqs": 5, **settings}
    caches = settings["enable_prefix_caching"]
    if family.startswith("Qwen"):
        settings["additional_config"] = CHECKED
    config = {UNPADDED: settings.pop(UNPADDED)} if UNPADDED in settings else {}
    with engine_of(
        runner,
        folder,
        max_model_len=128,
        max_num_batched_tokens=48,
        async_scheduling=asynchronous,
        **settings,
        **drafts(**config),
        **(graphs(mode, 1, 4, 8, 20, 48) if mode else {}),
    ) as llm:
        states, preempted = count_states(llm), count_preemptions(llm)
        verified, records = count_verified(llm), record_verified(llm)
        cached, resumed = record_cached(llm), record_cached(llm, of_resumed=True)
        forced = Forced(llm) if family.startswith("Qwen") and asynchronous else None
        got = [generate(llm, prompts, greedy(MAX_TOKENS)) for _ in range(2)]
        runner = runner_of(llm)
        counts = dict(runner.padding.counts.by_kind)
        assert runner.scheduler_config.async_scheduling == asynchronous
        before = [cache.clone() for cache in runner.kv_caches]
        runner._dummy_run(20)  # as an engine that idles beside others
        unwritten = [torch.equal(a, b) for a, b in zip(before, runner.kv_caches)]
    assert unwritten and all(unwritten)
    print(dict(states), dict(verified), dict(counts), dict(preempted))
    assert got == [[row[:MAX_TOKENS] for row in tokens]] * 2
    check_accepted(drafter, records, [a + b for a, b in zip(prompts, tokens)])
    assert min(verified[what] for what in ("accepted", "partly", "rejected")) > 0
    assert (preempted["preempted"] > 0) == ("num_gpu_blocks_override" in settings)
    assert states["ChunkedPrefill"] > 0
    assert not caches or max(cached) > 0 or settings["block_size"] == 128
    assert mode is None or set(counts) >= REPLAYED[mode]
    kinds = ("all", "states", "drafts", "states drafts", "async", "async drafts")
    assert forced is None or forced.of(*kinds, *(["full graphs"] if mode else []))
    if settings.keys() >= CACHED_AND_FEW.keys():
        print(resumed)
        assert max(resumed) >= 16, "states that a preempted request found again"


@pytest.mark.parametrize(
    ("family", "asynchronous", "runner"),
    [
        pytest.param("MiMo", False, "V1", id="sync"),
        pytest.param("MiMo", True, "V1", id="async"),
        pytest.param("Glm4Moe", True, "V1", id="Glm4Moe-async"),
        pytest.param("DeepseekV3", False, "V1", id="DeepseekV3-sync"),
        pytest.param("Qwen3_5", True, "V1", id="Qwen3_5-async"),
        *(pytest.param("MiMo", True, runner, id=f"async-{runner}") for runner in RUNNERS[1:]),
    ],
)
def test_drafts_stop_at_the_end_of_the_context(made, family, asynchronous, runner):
    """Every length up to `max_model_len`; a budget that cuts drafts and prompts."""
    folder, drafter, *_ = made(family)
    prompts = prompts_of(SEED, [5, 50, 61, 62, 63])
    expected = [reference(folder, [each], 64 + NUM_DRAFTS - len(each))[0] for each in prompts]
    with engine_of(
        runner,
        folder,
        max_model_len=64,
        max_num_seqs=5,
        max_num_batched_tokens=13,
        block_size=8,
        async_scheduling=asynchronous,
        enable_prefix_caching=family != "Qwen3_5",
        **drafts(),
    ) as llm:
        records = record_verified(llm)
        got = generate(llm, prompts, greedy(100))
    assert got == [row[:-NUM_DRAFTS] for row in expected]
    check_accepted(drafter, records, [a + b for a, b in zip(prompts, expected)])
    assert max(len(step.token_ids) + len(step.drafts) for step in records) == 63
    assert {len(step.drafts) for step in records} == {1, 2, 3}, "fewer near the end"


def test_a_published_checkpoint_drafts(tmp_path, seed):
    """Whose language model is inside of one that sees, and whose positions are M-RoPE's."""
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
    rope |= {"mrope_section": [2, 1, 1], "mrope_interleaved": True}
    folder, drafter = make_mtp_model(tmp_path / "text", "Qwen3_5", rope_parameters=rope)
    prompts = prompts_of(seed, [3, 1, 70, 17])
    tokens = reference(folder, prompts, MAX_TOKENS + NUM_DRAFTS)
    check_varied(tokens)
    sees = with_a_tower(folder, tmp_path / "sees")
    settings = {**STATES, "language_model_only": True, "additional_config": CHECKED}
    with engine(sees, max_model_len=128, max_num_batched_tokens=48, **settings, **drafts()) as llm:
        assert runner_of(llm).uses_mrope
        records = record_verified(llm)
        got = generate(llm, prompts, greedy(MAX_TOKENS))
    assert got == [row[:MAX_TOKENS] for row in tokens]
    check_accepted(drafter, records, [a + b for a, b in zip(prompts, tokens)])
    assert max(step.num_accepted for step in records) > 1


@pytest.mark.parametrize("runner", RUNNERS)
def test_of_several_layers_the_first_one_drafts(tmp_path, seed, monkeypatch, runner):
    """As vLLM's V1 runner has it, also if the second layer has other weights."""
    folder, drafter = make_mtp_model(tmp_path, "Glm4Moe", num_layers=2)
    prompts = prompts_of(seed, [3, 40, 17])
    tokens = reference(folder, prompts, MAX_TOKENS + 4)
    warned: list[str] = []
    monkeypatch.setattr(
        mtp_layers.logger, "warning", lambda text, *args: warned.append(text % args)
    )
    with engine_of(runner, folder, max_num_batched_tokens=32, **drafts(4)) as llm:
        drafter_layers = {
            "V1": lambda: runner_of(llm).drafter._draft_attn_layer_names,
            "V2": lambda: runner_of(llm).speculator.draft_attn_layer_names,
        }
        assert len(drafter_layers[runner]()) == 2
        assert "the model has 2 MTP layers; the first one drafts" in warned[0]
        records = record_verified(llm)
        got = generate(llm, prompts, greedy(MAX_TOKENS))
    assert got == [row[:MAX_TOKENS] for row in tokens]
    check_accepted(drafter, records, [a + b for a, b in zip(prompts, tokens)])
    assert max(step.num_accepted for step in records) > 1


def test_a_layer_of_a_tied_model_drafts(tmp_path, seed):
    """Its ``lm_head`` is the model's embeddings."""
    config = {"tie_word_embeddings": True, "spread": 0.25, "embedding_scale": 5.0}
    folder, drafter = make_mtp_model(tmp_path, "MiMo", **config)
    prompts = prompts_of(seed, [3, 40, 17])
    tokens = reference(folder, prompts, MAX_TOKENS + NUM_DRAFTS)
    check_varied(tokens)
    with engine(folder, max_num_batched_tokens=32, async_scheduling=False, **drafts()) as llm:
        model, of_drafter = runner_of(llm).get_model(), runner_of(llm).drafter.model
        assert of_drafter.lm_head is model.lm_head is not None
        records = record_verified(llm)
        got = generate(llm, prompts, greedy(MAX_TOKENS))
    assert got == [row[:MAX_TOKENS] for row in tokens]
    check_accepted(drafter, records, [a + b for a, b in zip(prompts, tokens)])
    accepted = {step.num_accepted for step in records}
    assert min(accepted) == 0 < max(accepted)


@pytest.mark.parametrize("runner", RUNNERS)
def test_adapters_and_forced_requests_verify_drafts(made, tmp_path, seed, runner):
    """The MTP layer knows neither adapters nor grammars: what it drafts is only ever a guess."""
    folder, *_ = made("MiMo")
    changed = (f"model.layers.{layer}.mlp.{name}" for layer in (0, 1) for name in ("up", "down"))
    adapter = make_adapter(
        tmp_path / "a", folder, seed=seed, modules=tuple(f"{name}_proj" for name in changed)
    )
    merged = merge(folder, adapter, tmp_path / "merged")
    lora = LoRARequest("a", 1, str(adapter))
    prompts, asked = prompts_of(seed, [20, 9, 40, 33]), ["a", None, "regex", "regex"]
    expected = []
    for prompt, kind in zip(prompts, asked):
        if kind == "regex":
            expected.append(forced_tokens(folder, prompt))
        else:
            expected += reference(merged if kind else folder, [prompt], MAX_TOKENS)
    params = [
        SamplingParams(
            temperature=0,
            max_tokens=MAX_TOKENS,
            ignore_eos=kind != "regex",
            structured_outputs=StructuredOutputsParams(regex=FORM) if kind == "regex" else None,
        )
        for kind in asked
    ]
    served = tmp_path / "served"
    shutil.copytree(folder, served)
    save_tokenizer(served)
    tokenizer = AutoTokenizer.from_pretrained(served)
    tokenizer.eos_token = "[SEP]"  # with which forms end
    tokenizer.save_pretrained(served)
    with engine_of(
        runner,
        served,
        max_num_batched_tokens=48,
        enable_lora=True,
        max_lora_rank=8,
        skip_tokenizer_init=False,
        structured_outputs_config={"backend": "xgrammar"},
        **drafts(),
        **graphs("FULL_AND_PIECEWISE", 4, 16, 48),
    ) as llm:
        verified = count_verified(llm)
        got = generate(llm, prompts, params, [lora if kind == "a" else None for kind in asked])
    assert got == expected
    assert verified["accepted"] + verified["partly"] > 0 and verified["rejected"] > 0


FORM, FORCED = "(t1[0-9]){8}", 8
"""Eight of ten tokens, and then the end."""


def forced_tokens(model: Path, prompt: list[int]) -> list[int]:
    """Greedy tokens of transformers among those that `FORM` allows."""
    hf = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    ids = list(prompt)
    for _ in range(FORCED):
        with torch.no_grad():
            logits = hf(torch.tensor([ids])).logits[0, -1, 10:20]
        ids.append(10 + int(logits.argmax()))
    return [*ids[len(prompt) :], 1]


@pytest.mark.parametrize(
    ("draft_sample_method", "runner"),
    [
        pytest.param(method, runner, id=f"{method}{named(runner)}")
        for runner in RUNNERS
        for method in ("greedy", "probabilistic")
    ],
)
def test_random_samples_follow_the_target(tmp_path, seed, draft_sample_method, runner):
    """Whole continuations, by what transformers makes of each."""
    folder, _ = make_mtp_model(
        tmp_path, "MiMo", noise=0.1, vocab_size=VOCAB, num_hidden_layers=1, embedding_scale=4.0
    )
    (prompt,) = [[token % VOCAB for token in row] for row in prompts_of(seed, [9])]
    params = SamplingParams(temperature=0.8, max_tokens=SAMPLED, ignore_eos=True, detokenize=False)
    with engine_of(
        runner,
        folder,
        max_num_seqs=256,
        max_num_batched_tokens=2560,
        **drafts(2, draft_sample_method=draft_sample_method),
    ) as llm:
        verified = count_verified(llm)
        torch.manual_seed(seed)
        tokens = generate(llm, [prompt] * SAMPLES, params)
    print(dict(verified))
    assert min(verified[what] for what in ("accepted", "rejected", "partly")) > SAMPLES / 100
    counts = np.zeros([VOCAB] * SAMPLED)
    np.add.at(counts, tuple(np.array(tokens).T), 1)
    check_distribution(counts, distribution_of(folder, prompt, 0.8))


# ------------------------------------------------------------------- faults that are seen


def ids_not_shifted(drafter: Any, patch: Callable[..., None]) -> None:
    """Each token's hidden state beside its own embedding."""
    prepare = drafter.set_inputs_first_pass

    def faulty(**given: Any) -> Any:
        result, ids = prepare(**given), given["target_token_ids"]
        drafter.input_ids[: len(ids)] = ids
        return result

    patch("set_inputs_first_pass", faulty)


def states_of_rejected_tokens(drafter: Any, patch: Callable[..., None]) -> None:
    """The last accepted token with the hidden state of the last scheduled one."""
    prepare = drafter.set_inputs_first_pass

    def faulty(**given: Any) -> Any:
        result, ends = prepare(**given), given["cad"].query_start_loc[1:] - 1
        drafter.hidden_states[result[1]] = given["target_hidden_states"][ends]
        return result

    patch("set_inputs_first_pass", faulty)


def slots_of_the_step(drafter: Any, patch: Callable[..., None]) -> None:
    """Later passes write where the step's tokens are cached."""
    prepare, update = drafter.set_inputs_first_pass, drafter._update_positions_dependent_metadata
    slots: list[torch.Tensor] = []

    def remember(**given: Any) -> Any:
        result = prepare(**given)
        slots[:] = [given["cad"].slot_mapping[result[1]].clone()]
        return result

    def faulty(positions: Any, common: Any, batch_size: int, *args: Any) -> Any:
        result = update(positions, common, batch_size, *args)
        common.slot_mapping.copy_(slots[0])
        return result

    patch("set_inputs_first_pass", remember)
    patch("_update_positions_dependent_metadata", faulty)


def positions_off_by_one(drafter: Any, patch: Callable[..., None]) -> None:
    """Each token at the position before its own."""
    set_positions = drafter._set_positions
    patch("_set_positions", lambda num, positions: set_positions(num, (positions - 1).clamp(min=0)))


def positions_that_stay(drafter: Any, patch: Callable[..., None]) -> None:
    """Later passes rotate by the position of the first one."""
    update = drafter._update_positions_dependent_metadata

    def faulty(positions: Any, common: Any, batch_size: int, *args: Any) -> Any:
        result = update(positions, common, batch_size, *args)
        result -= 1
        return result + 1

    patch("_update_positions_dependent_metadata", faulty)


def states_of_the_first_pass(drafter: Any, patch: Callable[..., None]) -> None:
    """Every pass is fed what the first one is fed."""
    prepare, model = drafter.set_inputs_first_pass, drafter.model
    fed: list[torch.Tensor] = []

    def remember(**given: Any) -> Any:
        fed.clear()
        result = prepare(**given)
        fed.append(drafter.hidden_states[result[1]].clone())
        fed.append(torch.empty(0))  # the first pass is still to come
        return result

    def faulty(**given: Any) -> Any:
        if len(fed) == 1:
            given["hidden_states"][: len(fed[0])] = fed[0]
        elif fed:
            fed.pop()
        return model(**given)

    faulty.compute_logits = model.compute_logits  # type: ignore[attr-defined]
    patch("set_inputs_first_pass", remember)
    patch("model", faulty)


FAULTS = (
    ids_not_shifted,
    states_of_rejected_tokens,
    slots_of_the_step,
    positions_off_by_one,
    positions_that_stay,
    states_of_the_first_pass,
)


def test_accepted_counts_show_a_fault_that_tokens_hide(tmp_path, seed, monkeypatch):
    """Faults in one engine, one after the other; its layer's attention counts for much."""
    folder, drafter = make_mtp_model(tmp_path, "MiMo", noise=0.04)
    prompts = prompts_of(seed, [3, 40, 17, 25])
    tokens = reference(folder, prompts, MAX_TOKENS + NUM_DRAFTS)
    sequences = [a + b for a, b in zip(prompts, tokens)]
    with engine(folder, enable_prefix_caching=False, async_scheduling=False, **drafts()) as llm:
        of_engine, records = runner_of(llm).drafter, record_verified(llm)
        for fault in (None, *FAULTS, None):
            records.clear()
            with monkeypatch.context() as patches:
                if fault is not None:
                    fault(
                        of_engine,
                        lambda name, new: patches.setitem(of_engine.__dict__, name, new),
                    )
                got = generate(llm, prompts, greedy(MAX_TOKENS))
            assert got == [row[:MAX_TOKENS] for row in tokens], "verification hides it"
            if fault is None:
                check_accepted(drafter, records, sequences)
                continue
            with pytest.raises(AssertionError, match=r"drafts after|tokens, "):
                check_accepted(drafter, records, sequences)


def test_every_family_has_a_plain_reading():
    assert {name.removesuffix("ForCausalLM") for name in MTP_MODELS.values()} == {*FAMILIES}
