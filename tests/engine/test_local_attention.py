"""Chunked local attention (Llama 4) through vLLM's engine: tokens equal transformers'."""

import pytest

from tests.conftest import SEED
from tests.helpers.cache import FreeBlocksPoison
from tests.helpers.engine import LLAMA4, REPLAYED, generate, graphs, greedy, make_model, runner_of
from tests.helpers.forced_messages import Forced
from tests.helpers.huggingface import is_varied, reference
from tests.helpers.prompts import prompts_of
from tests.helpers.v2 import ALSO_V2, engine_of
from tests.helpers.watch import count_preemptions, count_states, on_prepared

LENGTHS = [5, 90, 32, 31, 33, 64, 17, 120]
"""At, before and behind the borders of chunks of 32."""
NUM_TOKENS = 28


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("llama4"), **LLAMA4)


@pytest.fixture(scope="module")
def expected(model):
    tokens = reference(model, prompts_of(SEED, LENGTHS), NUM_TOKENS)
    assert is_varied(tokens)
    return tokens


def settings(**more):
    """Chunks of prompts end inside attention chunks, and go over their borders."""
    return {"block_size": 16, "max_num_batched_tokens": 48, "max_num_seqs": 4, **more}


@pytest.mark.parametrize("runner_name", ALSO_V2)
def test_a_context_that_ends_inside_an_attention_chunk(tmp_path, runner_name):
    """Three blocks, of which two are a chunk: rows of block tables are longer than a request.

    Shorter requests follow longer ones into their rows, whose last blocks mean nothing then. What
    the full check says of virtual requests is forced here.
    """
    model = make_model(tmp_path, **{**LLAMA4, "attention_chunk_size": 256})
    prompts = prompts_of(SEED, [300, 5, 250, 370, 17, 260, 100, 33])
    longest = {"block_size": 128, "max_model_len": 384}
    check = {"npu_prep": {"check": "full"}}
    with engine_of(runner_name, model, **settings(**longest), additional_config=check) as llm:
        assert set(runner_of(llm).preparer.tables.max_num_blocks.tolist()) == {4}
        forced = Forced(llm)
        assert generate(llm, prompts, greedy(8)) == reference(model, prompts, 8)
    assert not forced.wrong("all", "local")


@pytest.mark.parametrize("runner_name", ALSO_V2)
@pytest.mark.parametrize(
    ("mask", "hybrid", "asynchronous"), [("dense", True, True), ("compressed", False, True)]
)
def test_tokens_equal_transformers(model, expected, mask, hybrid, asynchronous, runner_name):
    prompts = prompts_of(SEED, LENGTHS)
    with engine_of(
        runner_name,
        model,
        **settings(
            additional_config={"npu_prep": {"mask": mask}},
            disable_hybrid_kv_cache_manager=not hybrid,
            async_scheduling=asynchronous,
        ),
    ) as llm:
        runner, states = runner_of(llm), count_states(llm)
        groups = runner.kv_cache_config.kv_cache_groups
        got = generate(llm, prompts, greedy(NUM_TOKENS))
        fresh = states["PrefillNoCache"]
        again = generate(llm, prompts[::-1], greedy(NUM_TOKENS))  # prefixes are cached
        hits = states["PrefillNoCache"] - fresh
    assert len(groups) == (3 if hybrid else 1)
    assert got == expected
    assert again == expected[::-1]
    assert {"PrefillNoCache", "ChunkedPrefill", "DecodeOnly"} <= set(states)
    assert hits < fresh


@pytest.mark.parametrize("runner_name", ALSO_V2)
def test_blocks_of_earlier_chunks_are_freed_and_never_read(model, expected, runner_name):
    prompts = prompts_of(SEED, LENGTHS)
    with engine_of(
        runner_name,
        model,
        **settings(
            enable_prefix_caching=False,
            num_gpu_blocks_override=32,
            max_model_len=176,
            max_num_batched_tokens=40,
        ),
    ) as llm:
        poison, count = FreeBlocksPoison(llm), count_preemptions(llm)
        got = generate(llm, prompts, greedy(NUM_TOKENS))
    assert got == expected
    assert poison.poisoned > 20
    assert count["preempted"] > 0


@pytest.mark.parametrize("runner_name", ALSO_V2)
@pytest.mark.parametrize(
    ("mode", "hybrid", "asynchronous"),
    [("PIECEWISE", True, True), ("FULL_DECODE_ONLY", False, False)],
)
def test_graphs_keep_the_tokens(model, expected, mode, hybrid, asynchronous, runner_name):
    """Full ones too: rows of virtual requests are as many as there can be."""
    prompts = prompts_of(SEED, LENGTHS)
    more = {
        "disable_hybrid_kv_cache_manager": not hybrid,
        "async_scheduling": asynchronous,
        "max_num_seqs": 5,
    }
    sizes = graphs(mode, 1, 2, 4, 8, 40)
    with engine_of(runner_name, model, **settings(**more), **sizes) as llm:
        got = generate(llm, prompts, greedy(NUM_TOKENS))
        counts = runner_of(llm).padding.counts.by_kind
    assert got == expected
    assert set(counts) >= REPLAYED[mode]


@pytest.mark.parametrize("runner_name", ALSO_V2)
def test_drafts_over_the_border_of_a_chunk(tmp_path, seed, runner_name):
    """A decode and its drafts are two virtual requests there."""
    model = make_model(tmp_path / "target", **LLAMA4, spread=0.1)
    drafter = make_model(tmp_path / "drafter", num_hidden_layers=1)
    drafts = {"method": "draft_model", "model": str(drafter), "num_speculative_tokens": 3}
    prompts = prompts_of(seed, [20, 9, 61])
    with engine_of(
        runner_name,
        model,
        **settings(max_num_seqs=3),
        speculative_config=drafts,
        **graphs("FULL", 4, 12),
    ) as llm:
        states, border = count_states(llm), []

        def watched(step):
            if step.padding.mode == "FULL" and step.local.num_reqs > step.num_reqs:
                border.append(step.num_drafts)

        on_prepared(llm, watched)
        got = generate(llm, prompts, greedy(40))
    assert got == reference(model, prompts, 40)
    assert any(border), states
