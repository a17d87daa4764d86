"""What preparing a step asks of the device: one copy, at most two launches, no sync, no read-back.

Counted from entering `_prepare_inputs` to entering the model's forward, in served traffic.
"""

import importlib

import numpy as np
import pytest

from tests.helpers.counting import PreparationCounts
from tests.helpers.emulator import ROOT
from tests.helpers.engine import LLAMA4, generate, graphs, greedy, make_model, runner_of
from tests.helpers.v2 import engine_of
from tests.helpers.watch import record_states

CASES = [
    pytest.param("V1", False, {}, {}, id="sync"),
    pytest.param("V1", True, {}, {}, id="async"),
    pytest.param("V1", True, {}, {**LLAMA4, "attention_chunk_size": 256}, id="local attention"),
    pytest.param("V2", False, {}, {}, id="v2-sync"),
    pytest.param("V2", True, {}, {}, id="v2"),
    pytest.param("V2", True, graphs("FULL_DECODE_ONLY", 1, 2, 4), {}, id="v2-graphs"),
]


@pytest.mark.parametrize(("runner_name", "async_scheduling", "mode", "config"), CASES)
def test_a_step_is_one_copy_and_at_most_two_launches(
    tmp_path, runner_name, async_scheduling, mode, config, seed
):
    """And one launch for the block tables of attention chunks."""
    model = make_model(tmp_path / "model", **config or {"num_hidden_layers": 1})
    chunked = bool(config)
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(2, 512, n).tolist() for n in (5, 120, 127, 128, 60, 1, 126)]
    with engine_of(
        runner_name,
        model,
        dtype="float16",
        max_num_seqs=4,  # the others come in when one of these has finished
        max_num_batched_tokens=64,
        async_scheduling=async_scheduling,
        **mode,
    ) as llm:
        runner = runner_of(llm)
        counts = PreparationCounts(runner)
        states = record_states(llm)
        generate(llm, prompts, greedy(6))
        waits = runner.preparer.staging.waits
    assert len(counts.steps) == len(states)
    assert set(states) >= {"DecodeOnly", "ChunkedPrefill", "PrefillNoCache"}
    decode_launches = set()
    for index, (state, step) in enumerate(zip(states, counts.steps)):
        assert step.pop("h2d_copies") == 1, (state, step)
        launches = step.pop("launches", 0)
        assert launches <= (2 if index else 4) + chunked, launches  # the first makes the mask
        if state == "DecodeOnly":
            decode_launches.add(launches)
        left = set(step) - {"h2d_bytes", "peak_memory_bytes"}
        assert not left, (state, step)  # no sync, no copy to the host or on the device
    # Asynchronous: samples are placed by one launch; new blocks, now and then, by another.
    assert decode_launches == {async_scheduling + chunked, async_scheduling + chunked + 1}
    assert waits == 0, "the ring waited, which is to be the exception"


@pytest.mark.parametrize("runner_name", ["V1", "V2"])
def test_the_peer_benchmark_counts_and_times_each_part(tmp_path, monkeypatch, runner_name):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    peer_engine = importlib.import_module("peer_engine")
    model = make_model(tmp_path / "model", num_hidden_layers=1)
    prompts = [[5] * length for length in (3, 9, 5)]
    case = {"decodes": prompts, "prompts": [], "longest": 100, "warm": 3, "steps": 3}
    with engine_of(runner_name, model, dtype="float16", async_scheduling=True) as llm:
        engine = peer_engine.Engine(llm)
        decodes = engine.run({**case, "timed": False})
        times = engine.run({**case, "timed": True})
        mixed = engine.run({**case, "prompts": [[[7] * 20]], "timed": False})
    assert decodes["scheduled"] == {"requests": 3, "tokens": 3, "drafts": 0}
    assert mixed["scheduled"] == {"requests": 4, "tokens": 23, "drafts": 0}
    for counts in (decodes, mixed):
        assert counts["prepare"]["h2d_copies"] == counts["step"]["h2d_copies"] == 1
        assert counts["prepare"]["d2h_copies"] == 0 < counts["step"]["d2h_copies"]
        assert counts["prepare"]["launches"] <= 2 < counts["runner"]["launches"]
    assert 0 < times["prepare"]["ns"] < times["runner"]["ns"] < times["step"]["ns"]
