"""Graph modes on the CPU fallback through vLLM's engine; the fake graph checks each replay."""

import os

import pytest

from tests.conftest import SEED
from tests.helpers.cache import CacheWatch
from tests.helpers.engine import REPLAYED, engine, generate, graphs, greedy, runner_of
from tests.helpers.huggingface import reference
from tests.helpers.logs import record_logs
from tests.helpers.prompts import prompts_of
from tests.helpers.traffic import traffic
from tests.helpers.v2 import RUNNERS, engine_of
from vllm_npu_prep.errors import PrepError
from vllm_npu_prep.graph.fake_graph import CheckedGraph, GraphSafetyError
from vllm_npu_prep.runner.v1 import runner as v1_runner
from vllm_npu_prep.runner.v2 import runner as v2_runner

STEPS = int(os.environ.get("NPU_PREP_TEST_STEPS", "150"))
LONG_RUNS = ["FULL_AND_PIECEWISE", "FULL"] if STEPS > 1000 else ["FULL_AND_PIECEWISE"]


@pytest.fixture(scope="module")
def mixed(qwen3):
    """Batches of prompts, how many tokens each wants, and what transformers makes of them."""
    prompts = prompts_of(SEED, [3, 1, 90, 40, 17, 2, 64, 65, 33, 5, 9])
    batches = [(prompts[:count], 5 + count) for count in (11, 5, 3)]
    return batches, [reference(qwen3, *batch) for batch in batches]


@pytest.mark.parametrize("runner_name", RUNNERS)
@pytest.mark.parametrize(
    ("mode", "asynchronous"),
    [
        ("PIECEWISE", False),
        ("FULL_DECODE_ONLY", True),
        ("FULL_AND_PIECEWISE", True),
        ("FULL", False),
    ],
)
def test_tokens_are_right_and_only_own_slots_are_written(
    qwen3, mixed, mode, asynchronous, runner_name
):
    """Prompts above the largest size, chunks, a `max_num_seqs` off the grid, requests that end."""
    batches, expected = mixed
    with engine_of(
        runner_name,
        qwen3,
        max_num_seqs=7,
        max_num_batched_tokens=48,
        block_size=16,
        async_scheduling=asynchronous,
        **graphs(mode, 1, 2, 4, 8, 16),
    ) as llm:
        runner = runner_of(llm)
        watch = CacheWatch(runner)
        got = [generate(llm, prompts, greedy(count)) for prompts, count in batches]
        counts = runner.padding.counts.by_kind
    assert got == expected
    assert set(counts) >= REPLAYED[mode]
    assert sum(kind.startswith("eager") for kind in counts) >= 1, "the largest chunks fit no size"
    if mode != "PIECEWISE":
        assert watch.padding_seen >= {0, 1, 2}


@pytest.mark.parametrize("runner_name", RUNNERS)
@pytest.mark.parametrize("mode", LONG_RUNS)
def test_long_mixed_traffic_equals_eager(qwen3, seed, mode, runner_name):
    """Arrivals depend on how many are running, so both engines see the same ones."""
    settings = {
        "max_num_seqs": 7,
        "max_num_batched_tokens": 48,
        "block_size": 4,
        "num_gpu_blocks_override": 70,
        "max_model_len": 96,
        "async_scheduling": False,
    }
    with engine(qwen3, **settings) as llm:
        expected, happened = traffic(llm, seed, STEPS)
    with engine_of(runner_name, qwen3, **settings, **graphs(mode)) as llm:
        got, same = traffic(llm, seed, STEPS)
        counts = runner_of(llm).padding.counts.by_kind
    assert happened == same
    assert happened["preempted"] > 0
    assert got == expected
    assert set(counts) >= REPLAYED[mode]


@pytest.mark.parametrize("runner_name", RUNNERS)
def test_graphs_of_decodes_serve_no_other_batch(qwen3, runner_name):
    """Five tokens of two prompts would fit a graph that was captured for eight decodes."""
    with engine_of(runner_name, qwen3, max_num_seqs=8, **graphs("FULL_DECODE_ONLY", 8)) as llm:
        generate(llm, [[5, 6, 7], [8, 9]], greedy(4))
        counts = dict(runner_of(llm).padding.counts.by_kind)
    assert counts.pop("full graph") >= 3
    assert set(counts) == {
        "eager: not a uniform decode, the only kind that FULL_DECODE_ONLY captures"
    }


def planted_slot_0(step):
    step.arrays.slot_mapping[:, step.total_num_scheduled_tokens :] = 0


def planted_length(step):
    step.arrays.seq_lens[step.num_reqs :] = 5


FAULTS = {
    "slot 0 in padding": (planted_slot_0, r"slot_mapping .* is 0 in padding"),
    "padding longer than its tokens": (planted_length, r"seq_lens\[\d\] is 5 .* must be 1"),
}


@pytest.mark.parametrize("runner_name", RUNNERS)
@pytest.mark.parametrize("fault", FAULTS)
def test_planted_unsafe_padding_is_caught(qwen3, seed, fault, runner_name, monkeypatch):
    plant, message = FAULTS[fault]
    prepare_step = v1_runner.prepare_step

    def planted(batch, padding, *args):
        step = prepare_step(batch, padding, *args)
        if padding.mode == "FULL" and batch.num_reqs:
            plant(step)
        return step

    prompts = prompts_of(seed, [5, 9, 4])
    options = {"additional_config": {"npu_prep": {"check": "off"}}}  # which would see it first
    with engine_of(runner_name, qwen3, **graphs("FULL_DECODE_ONLY", 4, 8), **options) as llm:
        for each in (v1_runner, v2_runner):
            monkeypatch.setattr(each, "prepare_step", planted)
        with pytest.raises(GraphSafetyError, match=message):
            generate(llm, prompts, greedy(4))


def test_the_smallest_cache_holds_the_lengths_of_captures(qwen3, monkeypatch):
    """As many keys as queries: kernels that sum up the blocks of a batch refuse longer ones."""
    captured, capture = [], CheckedGraph.capture

    def recorded(self, call):
        name, metadata = next(iter(call.attn_metadata.items()))
        captured.append((metadata.seq_lens_np.tolist(), metadata.query_lens.tolist()))
        blocks = -(-metadata.seq_lens_np // 16)
        assert blocks.sum() <= call.layers[name].kv_cache.shape[1]
        return capture(self, call)

    monkeypatch.setattr(CheckedGraph, "capture", recorded)
    smallest = {"block_size": 16, "max_model_len": 64, "num_gpu_blocks_override": 5}
    smallest["max_num_seqs"] = 4
    with engine(qwen3, **graphs("FULL_DECODE_ONLY", 1, 4), **smallest):
        pass
    assert ([1] * 4, [1] * 4) in captured
    assert ([1], [1]) in captured


def test_the_log_says_sizes_and_once_why_a_step_is_eager(qwen3, seed, monkeypatch):
    lines = record_logs(monkeypatch)
    with engine(qwen3, max_num_batched_tokens=48, **graphs("FULL_AND_PIECEWISE", 2, 8)) as llm:
        generate(llm, prompts_of(seed, [40, 30, 44]), greedy(3))
        counts = runner_of(llm).padding.counts.by_kind
    (table,) = [line for line in lines if "graphs:\n" in line]
    rows = [line.split() for line in table.splitlines()[1:]]
    assert rows[0] == ["tokens", "PIECEWISE", "FULL"]
    assert [row[0] for row in rows[1:]] == ["8", "2", "all"]
    reason = "more than 8 tokens, the largest capture size"
    assert sum(f"A step runs without a graph ({reason})" in line for line in lines) == 1
    assert counts[f"eager: {reason}"] >= 3
    assert f"{counts[f'eager: {reason}']} eager: {reason}" in lines[-1], "the sum, at shutdown"


@pytest.mark.parametrize("runner_name", RUNNERS)
def test_capture_with_requests_in_flight_is_refused(qwen3, seed, runner_name):
    with engine_of(runner_name, qwen3, **graphs("FULL_DECODE_ONLY", 8)) as llm:
        core = llm.llm_engine
        core.add_request("a", {"prompt_token_ids": [5, 6, 7]}, greedy(8))
        core.step()
        with pytest.raises(PrepError, match="with 1 request in flight"):
            runner_of(llm).capture_model()
