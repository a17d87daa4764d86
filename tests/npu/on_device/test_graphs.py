"""Graphs that are captured and replayed: long traffic, the cache, and what a replay costs."""

import ctypes
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from tests.helpers.cache import CacheWatch
from tests.helpers.engine import engine, generate, graphs, greedy, make_model, runner_of
from tests.helpers.logs import record_logs
from tests.helpers.v2 import RUNNERS, engine_of
from tests.helpers.watch import around_forward
from tests.npu.models import INDEXED
from vllm_npu_prep.attention.kernels.sparse import make_sparse_kernels
from vllm_npu_prep.graph import GraphCall, OutOfStreamsError


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("qwen3"), num_hidden_layers=1)


@pytest.fixture
def fia():
    """The kernels' class, which needs torch_npu."""
    from vllm_npu_prep.attention.kernels.fia import FiaKernels

    return FiaKernels


@contextmanager
def streams_left(number: int) -> Iterator[None]:
    """Spend all streams of the device but this many."""
    torch.npu.Stream()  # torch_npu makes all of its own at once
    acl, left, spent = ctypes.CDLL("libascendcl.so"), ctypes.c_uint32(), []
    while acl.aclrtGetStreamAvailableNum(ctypes.byref(left)) == 0 and left.value > number:
        spent.append(ctypes.c_void_p())
        assert acl.aclrtCreateStream(ctypes.byref(spent[-1])) == 0
    assert left.value == number
    try:
        yield
    finally:
        for stream in spent:
            assert acl.aclrtDestroyStream(stream) == 0


def test_graphs_that_streams_do_not_suffice_for_are_given_up(model, monkeypatch):
    """14 for two pieces in each size, then one of the 4 for the whole model: 4 tokens give theirs
    to the full graphs of 2 and 1."""
    prompts, lines = [[5, 6, 7, 8], [9, 5]], record_logs(monkeypatch)
    with engine(model, dtype="float16") as llm:
        expected = generate(llm, prompts, greedy(5))
    sizes = (1, 2, 4, 8, 16, 32, 64)
    with (
        streams_left(15),
        engine(model, dtype="float16", **graphs("FULL_AND_PIECEWISE", *sizes)) as llm,
    ):
        assert generate(llm, prompts, greedy(5)) == expected
        kept = runner_of(llm).compilation_config.cudagraph_capture_sizes
        counts = runner_of(llm).padding.counts.by_kind
    failures = [line for line in lines if "Out of streams while capturing" in line]
    assert len(failures) == 1
    assert kept == [1, 2, 8, 16, 32, 64]
    assert counts["full graph"] > 0 and counts["piecewise graphs"] > 0


def test_a_capture_that_forks_begins_with_streams_for_it():
    """Communication forks a capture. torch_npu would not survive a fork that gets no stream."""
    from vllm_npu_prep.graph.npu import NPUGraphPool

    x, side = torch.ones(2, device="npu"), torch.npu.Stream()
    torch.npu.synchronize()  # `x` is there for every stream

    def forked():
        here = torch.npu.current_stream()
        side.wait_stream(here)
        with torch.npu.stream(side):
            y = x * 2
        here.wait_stream(side)
        return y + 1

    pool, capture_stream = (
        NPUGraphPool(torch.npu.graph_pool_handle(), 2),
        torch.npu.Stream(),
    )
    for left in (1, 2):
        graph = pool.new_graph()
        with streams_left(left), torch.npu.stream(capture_stream):
            if left == 1:
                with pytest.raises(OutOfStreamsError, match=r"1 left on the device, .* take 2"):
                    graph.capture(GraphCall(forked, (), {}))
            else:
                outputs = graph.capture(GraphCall(forked, (), {}))
                graph.replay(GraphCall(forked, (), {}))
    torch.npu.synchronize()
    assert outputs.tolist() == [3, 3]


@pytest.mark.parametrize("runner", RUNNERS)
def test_graphs_that_streams_do_not_suffice_to_measure(model, monkeypatch, runner):
    """V1 sets nothing aside for graphs then. V2 measures as it captures, and gives up sizes."""
    lines = record_logs(monkeypatch)
    sized = {"kv_cache_memory_bytes": None, "num_gpu_blocks_override": 16}
    sized |= graphs("FULL_AND_PIECEWISE", 1, 2, 4, 8)
    with streams_left(3), engine_of(runner, model, dtype="float16", **sized) as llm:
        kept = runner_of(llm).compilation_config.cudagraph_capture_sizes
        generate(llm, [[5, 6, 7, 8]], greedy(3))
        counts = runner_of(llm).padding.counts.by_kind
    lacking = [line.partition(" the ")[0] for line in lines if line.startswith("Out of streams")]
    measured = ["Out of streams while measuring"] if runner == "V1" else []
    assert lacking == [*measured, "Out of streams while capturing"]
    assert kept == [8], "the largest decode alone"
    assert counts["full graph"] > 0


def test_padding_of_a_decode_graph_writes_no_live_block(model, seed):
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(2, 512, 4 + index).tolist() for index in range(8)]
    with engine(model, dtype="float16", max_num_seqs=8, **graphs("FULL_DECODE_ONLY", 8)) as llm:
        watch = CacheWatch(runner_of(llm))
        for count in range(1, 9):
            generate(llm, prompts[:count], greedy(3))
        assert runner_of(llm).padding.counts.by_kind["full graph"] >= 16
    assert watch.padding_seen == set(range(8))


def test_graphs_are_captured_with_a_task_queue_of_level_1(model):
    """No graph can be captured with level 2, which a user may have asked for."""
    torch.npu.set_task_queue_enable(2)
    try:
        with engine(model, dtype="float16", **graphs("FULL_DECODE_ONLY", 1)) as llm:
            generate(llm, [[5, 6, 7]], greedy(3))
            assert runner_of(llm).padding.counts.by_kind["full graph"] > 0
        assert torch.npu.get_task_queue_enable() == 1
    finally:
        torch.npu.set_task_queue_enable(1)


def calls_of_a_replay(monkeypatch, model, *kernels, **settings):
    """What the host calls for the replay of a decode, by name."""
    counts, seen, npu = Counter(), [], torch.npu

    def count(owner, name):
        function = getattr(owner, name)

        def counted(*args, **kwargs):
            counts[name] += 1
            return function(*args, **kwargs)

        monkeypatch.setattr(owner, name, counted)

    count(npu.NPUGraph, "replay")
    count(npu, "graph_task_update_begin")
    count(npu, "graph_task_update_end")
    count(npu.ExternalEvent, "record")
    count(npu, "synchronize")
    count(npu.Stream, "synchronize")
    for owner, name in kernels:
        count(owner, name)
    with engine(model, **settings, **graphs("FULL_DECODE_ONLY", 1)) as llm:
        around_forward(runner_of(llm), counts.clear, lambda _: seen.append(counts.copy()))
        generate(llm, [[5, 6, 7]], greedy(3))
    return seen[-1]


def test_a_replay_of_sparse_attention_is_one_call(tmp_path, monkeypatch):
    """Both operators read lengths on the device, so nothing is told to any layer."""
    model = make_model(tmp_path / "model", "DeepseekV32", **INDEXED)
    kernels = make_sparse_kernels("fia")
    counted = [(type(kernels), name) for name in ("choose", "attend_chosen")]
    assert calls_of_a_replay(monkeypatch, model, *counted, dtype="bfloat16") == {"replay": 1}


def test_a_replay_costs_three_calls_a_layer(tmp_path, monkeypatch, fia):
    layers = 6
    model = make_model(tmp_path / "model", num_hidden_layers=layers)
    counted = calls_of_a_replay(monkeypatch, model, (fia, "attend"), dtype="float16")
    assert counted == {
        "replay": 1,
        "graph_task_update_begin": layers,
        "attend": layers,
        "graph_task_update_end": layers,
        "record": 3,  # for the first layer, for the next two, for the last three
    }


def test_a_step_that_fails_while_its_replay_waits(tmp_path, seed, monkeypatch, fia):
    """The device does not hang: a graph was launched when its second layer failed to be told."""
    model = make_model(tmp_path / "model", num_hidden_layers=2)
    attend, told = fia.attend, []

    def planted(self, *args):
        metadata = args[3]
        told.extend([self] * metadata.in_full_graph)
        if len(told) == 2:
            raise ValueError("planted")
        return attend(self, *args)

    with engine(model, dtype="float16", **graphs("FULL_DECODE_ONLY", 1)) as llm:
        monkeypatch.setattr(fia, "attend", planted)
        with pytest.raises(ValueError, match="planted"):
            generate(llm, [[5, 6, 7]], greedy(3))
        torch.npu.synchronize()  # fails if an external event was never recorded
