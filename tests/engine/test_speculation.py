"""Speculative decoding through vLLM's engine: the same tokens, whoever drafts them.

Drafters are made of the models that verify them (`tests.helpers.drafters`), so that drafts are
accepted, rejected and accepted in part.
"""

from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.conftest import SEED
from tests.helpers.drafters import disturb_model, make_eagle_head
from tests.helpers.engine import REPLAYED, generate, graphs, greedy, make_model, runner_of
from tests.helpers.huggingface import is_varied, logits_of, reference
from tests.helpers.life_cycle import generate_with_calls
from tests.helpers.mtp import record_verified
from tests.helpers.prompts import prompts_of
from tests.helpers.v2 import RUNNERS, engine_of, on_both
from tests.helpers.watch import count_preemptions, count_states, count_verified, on_prepared
from vllm_npu_prep.observe.violation import StepCheckError

LENGTHS = [3, 1, 90, 40, 17, 30, 70]
NUM_DRAFTS = 3


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("qwen3"), spread=0.1, embedding_scale=20)


@pytest.fixture(scope="module")
def drafters(model, tmp_path_factory):
    """Folder of a drafter by method."""
    folder = tmp_path_factory.mktemp("drafters")
    return {
        "draft_model": disturb_model(folder / "draft_model", model, share=0.05),
        "eagle": make_eagle_head(folder / "eagle", model, "eagle"),
        "eagle3": make_eagle_head(folder / "eagle3", model, "eagle3"),
    }


@pytest.fixture(scope="module")
def expected(model):
    """Prompts, the first one twice, and what transformers makes of them."""
    prompts = prompts_of(SEED, LENGTHS)
    prompts.append(prompts[2][:64] + prompts[3])
    tokens = reference(model, prompts, 24)
    assert is_varied(tokens)
    return prompts, tokens


def drafted_by(drafters, method, **config):
    spec = {"method": method, "num_speculative_tokens": NUM_DRAFTS, **config}
    return {"speculative_config": {**spec, "model": str(drafters[method])}}


UNPADDED = "disable_padded_drafter_batch"
CASES = {  # method, asynchronous, graph mode, other settings
    "draft_model-sync-None": (
        "draft_model",
        False,
        None,
        {"block_size": 7, "num_gpu_blocks_override": 40},
    ),
    "draft_model-async-graphs": ("draft_model", True, "FULL_AND_PIECEWISE", {"block_size": 16}),
    "eagle-async-None": ("eagle", True, None, {"block_size": 4, "num_gpu_blocks_override": 64}),
    "eagle-sync-FULL": ("eagle", False, "FULL", {"block_size": 16}),
    "eagle3-async-PIECEWISE": ("eagle3", True, "PIECEWISE", {"block_size": 16}),
    "eagle3-sync-FULL_DECODE_ONLY": ("eagle3", False, "FULL_DECODE_ONLY", {"block_size": 128}),
}


@pytest.mark.parametrize(
    ("method", "asynchronous", "mode", "settings", "runner"),
    [
        *on_both(CASES),
        pytest.param("eagle", False, None, {UNPADDED: True}, "V1", id="eagle-sync-unpadded"),
    ],
)
def test_tokens_are_those_without_speculation(
    model, drafters, expected, method, asynchronous, mode, settings, runner
):
    """In chunks, from the prefix cache, preempted, in graphs, paused; some without drafts."""
    settings, (prompts, tokens) = dict(settings), expected
    config = {UNPADDED: settings.pop(UNPADDED)} if UNPADDED in settings else {}
    if runner == "V2":
        settings |= {"additional_config": {"npu_prep": {"check": "full"}}}
    with engine_of(
        runner,
        model,
        max_model_len=128,
        max_num_seqs=5,
        max_num_batched_tokens=48,
        async_scheduling=asynchronous,
        enable_prefix_caching=True,
        **settings,
        **drafted_by(drafters, method, **config),
        **(graphs(mode, 1, 4, 8, 20) if mode else {}),
    ) as llm:
        runner = runner_of(llm)
        states, preempted = count_states(llm), count_preemptions(llm)
        verified, different = count_verified(llm), []  # numbers of drafts in a step
        on_prepared(
            llm,
            lambda step: different.append(len({*step.batch.num_draft_tokens[: step.num_reqs]})),
        )
        got = generate(llm, prompts, greedy(24))
        again = generate(llm, prompts, greedy(24))
        preempted = Counter(preempted)  # without those that calls ask for
        disturbed, calls = generate_with_calls(llm, prompts, greedy(24), SEED)
        counts = runner.padding.counts.by_kind
        sizes = runner.compilation_config.cudagraph_capture_sizes
        assert runner.scheduler_config.async_scheduling == asynchronous
    assert got == tokens
    assert again == tokens
    assert disturbed == tokens, dict(calls)
    assert calls["queues drained"] > 2
    assert verified.keys() >= {"rejected", "partly"}
    assert method == "eagle3" or verified["accepted"] > 0  # that head knows one token ahead
    assert max(different) > 1, "requests with drafts beside others without"
    assert (preempted["preempted"] > 0) == ("num_gpu_blocks_override" in settings)
    if mode is None:
        assert states["SpecDecoding"] > 10 and states["ChunkedPrefill"] > 0
    else:
        assert set(counts) >= REPLAYED[mode]
        assert mode == "PIECEWISE" or all(size % (NUM_DRAFTS + 1) == 0 for size in sizes)


@pytest.mark.parametrize("runner", RUNNERS)
def test_the_full_check_counts_accepted_drafts_itself(model, drafters, expected, runner):
    """Of a request whose drafts were rejected in part, one more is taken back."""
    with engine_of(
        runner,
        model,
        async_scheduling=True,
        additional_config={"npu_prep": {"check": "full"}},
        **drafted_by(drafters, "draft_model"),
    ) as llm:
        parts = runner_of(llm)
        if runner == "V1":
            correct = parts.updates.correct_counts
            parts.updates.correct_counts = lambda *args: correct(*args[:-1], args[-1] - 1)
        else:
            exact = parts.req_states.exact_counts
            parts.req_states.exact_counts = lambda *args: exact(
                *args[:-1], SimpleNamespace(read=lambda: args[-1].read() - 1)
            )
        with pytest.raises(StepCheckError, match="without the drafts that the last step rejected"):
            generate(llm, expected[0], greedy(24))


def test_a_draft_model_drafts_the_same_for_either_runner(model, drafters, expected):
    """As many count in every step: in chunks of prompts, of a model with a cache of its own."""
    prompts, tokens = expected
    verified = []
    for runner in RUNNERS:
        with engine_of(
            runner,
            model,
            max_model_len=128,
            max_num_seqs=5,
            max_num_batched_tokens=48,
            block_size=16,
            async_scheduling=False,
            **drafted_by(drafters, "draft_model"),
        ) as llm:
            records = record_verified(llm)
            assert generate(llm, prompts, greedy(24)) == tokens
        verified.append(sorted((step.token_ids, step.num_accepted) for step in records))
    assert len(verified[0]) > 50 and verified[0] == verified[-1]
    assert {accepted for _, accepted in verified[0]} == set(range(NUM_DRAFTS + 1))


CHOSEN = [  # what requests of one batch ask for
    {"logprob_token_ids": [5, 9]},
    {"logprobs": 3},
    {"logprob_token_ids": [300]},
    {},
    {"logprobs": 0},
    {"logprob_token_ids": [*range(40, 60)]},
]


@pytest.mark.parametrize(
    ("drafts", "asynchronous", "runner"),
    on_both({"no drafts": (False, True), "sync": (True, False), "async": (True, True)}),
)
def test_chosen_tokens_are_scored_beside_others(
    model, drafters, expected, drafts, asynchronous, runner
):
    """By what transformers makes of them: alone, and where others want their likeliest tokens."""
    prompts, tokens = [each[: len(CHOSEN)] for each in expected]
    logits = logits_of(model)
    params = [greedy(12, **asked) for asked in CHOSEN]
    with engine_of(
        runner,
        model,
        async_scheduling=asynchronous,
        **(drafted_by(drafters, "eagle") if drafts else {}),
    ) as llm:
        verified = count_verified(llm)
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = llm.generate(inputs[:1], params[:1], use_tqdm=False)
        outputs += llm.generate(inputs, params, use_tqdm=False)
    assert bool(verified["accepted"] and verified["rejected"]) == drafts
    for index, output in zip([0, *range(len(CHOSEN))], outputs, strict=True):
        asked, got = CHOSEN[index], output.outputs[0]
        assert list(got.token_ids) == tokens[index][:12]
        found = logits(prompts[index] + got.token_ids[:-1])[len(prompts[index]) - 1 :]
        known = torch.as_tensor(found).log_softmax(-1).numpy()
        assert (got.logprobs is None) == (not asked)
        for token, row, entries in zip(
            got.token_ids, known, got.logprobs or (), strict=bool(asked)
        ):
            likeliest = np.argsort(-row)[: asked.get("logprobs")].tolist()
            chosen = asked.get("logprob_token_ids", likeliest)
            assert set(entries) == {token, *chosen}
            if token not in chosen:  # else vLLM tells the place among them
                assert entries[token].rank == 1 + int((row > row[token]).sum())
            for each, entry in entries.items():
                assert entry.logprob == pytest.approx(row[each], abs=1e-4)


GEMMA = {"sliding_window": 13, "embedding_scale": 0.02, "tie_word_embeddings": True}


@pytest.mark.parametrize(
    ("asynchronous", "num_layers", "mode"),
    [(True, 1, "PIECEWISE"), (False, 3, None)],
    ids=["one", "several"],
)
def test_a_drafter_beside_windows_has_groups_of_its_own(
    tmp_path, seed, asynchronous, num_layers, mode
):
    """Windows, full attention, and each of the drafter's layers; blocks freed in one group."""
    target = make_model(tmp_path / "gemma2", "Gemma2", **GEMMA)
    drafter = make_model(tmp_path / "drafter", num_hidden_layers=num_layers, seed=1)
    prompts = prompts_of(seed, [5, 40, 30, 12, 14])
    with engine_of(
        "V2" if asynchronous else "V1",
        target,
        block_size=16,
        max_num_batched_tokens=32,
        async_scheduling=asynchronous,
        **drafted_by({"draft_model": drafter}, "draft_model"),
        **(graphs(mode, 8, 24) if mode else {}),
    ) as llm:
        assert len(runner_of(llm).kv_cache_config.kv_cache_groups) == 2 + num_layers
        verified, records = count_verified(llm), record_verified(llm)
        got = generate(llm, prompts, greedy(24))
    assert got == reference(target, prompts, 24)
    assert verified["rejected"] > 0
    if not asynchronous:  # the host of V1 knows the drafts
        drafts = reference(drafter, [step.token_ids for step in records], NUM_DRAFTS)
        assert [step.drafts for step in records] == [
            each[: len(step.drafts)] for each, step in zip(drafts, records)
        ]
