"""Chunked local attention (Llama 4) on npu:0: the operators of each family, copies and launches."""

import numpy as np
import pytest

from tests.helpers.counting import PreparationCounts
from tests.helpers.engine import (
    LLAMA4,
    REPLAYED,
    engine,
    generate,
    graphs,
    greedy,
    make_model,
    runner_of,
)
from tests.helpers.huggingface import is_varied, logits_of
from tests.helpers.prompts import prompts_of
from tests.helpers.watch import record_states

CHUNK_SIZE, TOKENS = 256, 24  # two blocks of 128, which `fia` demands for prompts
LENGTHS = [5, 300, 256, 255, 240, 513, 17, 600]
TOLERANCE = 0.05
"""Largest logit that a token of the float16 engine lacks to float32's best; deviations are 2."""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    config = {**LLAMA4, "attention_chunk_size": CHUNK_SIZE, "spread": 0.15}
    return make_model(tmp_path_factory.mktemp("llama4"), **config)


def check_best(model, prompts, tokens) -> None:
    """Each token is the best one behind those before it, by transformers in float32."""
    logits = logits_of(model)
    for prompt, generated in zip(prompts, tokens):
        rows = logits(prompt + generated)[len(prompt) - 1 : -1]
        lacks = rows.max(axis=1) - rows[np.arange(len(generated)), generated]
        assert (lacks < TOLERANCE).all(), lacks.round(2)


@pytest.mark.parametrize(
    ("attention", "mode", "hybrid", "asynchronous"),
    [
        ("fia", None, True, True),
        ("fia", "FULL", False, True),
        ("atb", "FULL_AND_PIECEWISE", True, False),
    ],
)
def test_tokens_and_what_a_step_asks_of_the_device(
    model, attention, mode, hybrid, asynchronous, seed
):
    prompts = prompts_of(seed, LENGTHS)
    with engine(
        model,
        dtype="float16",
        max_model_len=640,  # five blocks, two and a half chunks
        max_num_batched_tokens=320,
        max_num_seqs=4,
        disable_hybrid_kv_cache_manager=not hybrid,
        async_scheduling=asynchronous,
        additional_config={"npu_prep": {"attention": attention}},
        **(graphs(mode, 1, 2, 4, 320) if mode else {}),
    ) as llm:
        runner = runner_of(llm)
        counts, states = PreparationCounts(runner), record_states(llm)
        got = generate(llm, prompts, greedy(TOKENS))
        kinds = set(runner.padding.counts.by_kind)
        waits = runner.preparer.staging.waits
        assert runner.cache_config.block_size == 128
        assert str(runner.device) == "npu:0"
    check_best(model, prompts, got)
    assert is_varied(got)
    assert kinds >= (REPLAYED[mode] if mode else {"eager: no graphs"})
    assert len(counts.steps) == len(states)
    seen = set()  # launches of steps without masks, or with the constant one
    for index, (state, step) in enumerate(zip(states, counts.steps)):
        assert step.pop("h2d_copies") == 1, (state, step)
        launches = step.pop("launches")
        if index and (attention == "fia" or state == "DecodeOnly"):  # the first makes the constant
            seen.add(launches)
        # Dense masks, one for each kind of layer, are gathered from columns of a larger matrix.
        masks = 2 if attention == "atb" and state != "DecodeOnly" else 0
        assert step.pop("hidden_copies", 0) <= masks, (state, step)
        left = set(step) - {"h2d_bytes", "peak_memory_bytes"}
        assert not left, (state, step)  # no sync, no copy to the host or on the device
    # One gathers block tables, one places new blocks now and then, and one the last step's samples.
    assert seen == ({2, 3} if asynchronous else {1, 2})
    assert waits == 0
