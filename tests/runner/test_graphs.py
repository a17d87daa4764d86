"""Graphs at start-up and before a replay, without an engine."""

import contextlib
from types import SimpleNamespace

import pytest
import torch
from vllm.config import CUDAGraphMode
from vllm.forward_context import BatchDescriptor

from tests.helpers.logs import record_logs
from vllm_npu_prep.device.cpu import CPUDevice
from vllm_npu_prep.graph import OutOfStreamsError
from vllm_npu_prep.graph.wrapper import GraphWrapper
from vllm_npu_prep.prep.padding import GraphMode
from vllm_npu_prep.runner.graphs import Graphs

MODES = (CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL)


class Dispatcher:
    """Upstream's, as far as captures ask it."""

    cudagraph_mode = CUDAGraphMode.FULL_AND_PIECEWISE

    def __init__(self, sizes: list[int]) -> None:
        self.sizes, self.cudagraph_keys = sizes, {mode: {1} for mode in MODES}
        self.initialized = None

    def get_capture_descs(self):
        # A full graph of decodes has a request for each token.
        return [
            (
                mode,
                [BatchDescriptor(size, size if mode == MODES[1] else None) for size in self.sizes],
            )
            for mode in MODES
        ]

    def initialize_cudagraph_keys(self, mode, decode_query_len):
        self.initialized = mode, decode_query_len
        self.cudagraph_mode = mode


def graphs_of(sizes: list[int], **settings) -> Graphs:
    compilation = SimpleNamespace(
        cudagraph_capture_sizes=sizes[::-1], max_cudagraph_capture_size=sizes[0]
    )
    return Graphs(CPUDevice(), Dispatcher(sizes), compilation, **settings)


NO_MEMORY = torch.OutOfMemoryError("out of memory")
NO_STREAMS = OutOfStreamsError("0 left on the device")


def capture(
    graphs: Graphs, failing: set[int] = frozenset(), error: Exception = NO_MEMORY
) -> list[tuple[str, int]]:
    """Capture all; what was captured."""
    captured = []

    def capture_one(desc, cudagraph_runtime_mode):
        if desc.num_tokens in failing:
            raise error
        captured.append((cudagraph_runtime_mode.name, desc.num_tokens))

    assert graphs.capture(capture_one, contextlib.nullcontext) == 0  # bytes of a device
    return captured


def test_every_size_is_captured_for_each_kind_of_graph():
    graphs = graphs_of([8, 4, 1])
    assert capture(graphs) == [(mode.name, size) for mode in MODES for size in (8, 4, 1)]
    assert graphs.captured() == (GraphMode.FULL_AND_PIECEWISE, 8)
    assert graphs.dispatcher.initialized is None, "nothing was given up"


def test_a_size_without_memory_is_given_up_for_all_kinds(monkeypatch):
    lines = record_logs(monkeypatch)
    graphs = graphs_of([16, 8, 6, 4, 2, 1], decode_query_len=2, largest_decode=4)
    captured = capture(graphs, {8})
    # 8 has too little; 6 and 1 are every other one of 6, 2 and 1; 4 is spared
    kept = [16, 4, 2]
    assert captured == [(mode.name, size) for mode in MODES for size in kept]
    assert graphs.compilation.cudagraph_capture_sizes == kept[::-1]
    assert graphs.captured() == (GraphMode.FULL_AND_PIECEWISE, 16)
    assert graphs.dispatcher.initialized == (CUDAGraphMode.FULL_AND_PIECEWISE, 2)
    assert not any(graphs.dispatcher.cudagraph_keys.values())
    assert any("Out of memory" in line and "Left out for it: 6, 1" in line for line in lines)


class Wrapper(SimpleNamespace):
    """Holds graphs of one kind, each of which takes streams until it is deleted."""

    def take(self, descriptor, most: int) -> None:
        if sum(each.streams for each in WRAPPERS) + self.of_each > most:
            raise NO_STREAMS
        self.concrete_cudagraph_entries[descriptor] = object()

    @property
    def streams(self) -> int:
        return self.of_each * len(self.concrete_cudagraph_entries)


WRAPPERS: list[Wrapper] = []


def capture_with_streams(monkeypatch, graphs: Graphs, most: int) -> list[int]:
    """Capture all, where a size takes 3 streams for its pieces and one for the whole model."""
    wrappers = [Wrapper(of_each=of_each, concrete_cudagraph_entries={}) for of_each in (3, 1)]
    monkeypatch.setattr(f"{__name__}.WRAPPERS", wrappers)
    monkeypatch.setattr(GraphWrapper, "_all_instances", wrappers)
    by_mode = dict(zip(MODES, wrappers))

    def capture_one(desc, cudagraph_runtime_mode):
        by_mode[cudagraph_runtime_mode].take(desc, most)

    graphs.capture(capture_one, contextlib.nullcontext)
    kept = graphs.compilation.cudagraph_capture_sizes
    for wrapper in wrappers:
        sizes = [descriptor.num_tokens for descriptor in wrapper.concrete_cudagraph_entries]
        assert sorted(sizes) == kept, "each kind of graph has the same sizes"
    return kept


@pytest.mark.parametrize(
    ("most", "kept"),
    [
        (24, [1, 2, 4, 8, 16, 32]),
        (23, [1, 2, 8, 16, 32]),  # without the streams of 4, the other full graphs have theirs
        (16, [1, 8, 16, 32]),  # after five sizes no pieces are left for 1
        (9, [8, 32]),
        (5, [32]),
        (2, []),
    ],
)
def test_sizes_give_their_streams_to_those_that_matter_most(monkeypatch, most, kept):
    """Every size takes as many: the largest, the largest decode and one decode stay."""
    graphs = graphs_of([32, 16, 8, 4, 2, 1], decode_query_len=1, largest_decode=8)
    lines = record_logs(monkeypatch)
    assert capture_with_streams(monkeypatch, graphs, most) == kept
    assert any("Out of streams" in line for line in lines) == (len(kept) < 6)


def test_sizes_that_another_rank_has_given_up_are_given_up_here():
    graphs = graphs_of([8, 4, 2], agree=lambda given_up: given_up | {4})
    capture(graphs)
    assert graphs.compilation.cudagraph_capture_sizes == [2, 8]


def test_sizes_with_too_many_requests_are_not_tried(monkeypatch):
    lines = record_logs(monkeypatch)
    graphs = graphs_of([8, 4, 2])
    graphs.most_rows = 4
    assert {size for _, size in capture(graphs)} == {4, 2}
    assert graphs.captured() == (GraphMode.FULL_AND_PIECEWISE, 4)
    assert any("Graphs of 8 tokens are left out" in line for line in lines)


def test_another_error_ends_a_capture():
    with pytest.raises(RuntimeError, match="107002"):
        capture(graphs_of([2, 1]), {2}, RuntimeError("error code is 107002"))


def test_sizes_whose_padding_no_longer_fits_are_given_up_too():
    """Without 12 tokens, batches of 9 would have 15 tokens of padding, and a request holds 8."""
    settings = {"largest_decode": 4, "max_num_reqs": 4, "max_model_len": 8}
    graphs = graphs_of([24, 16, 8, 4], **settings)
    graphs.dispatcher.cudagraph_mode = CUDAGraphMode.FULL
    capture(graphs, {16})
    assert graphs.compilation.cudagraph_capture_sizes == [4]


def test_without_memory_for_any_graph_there_are_none():
    graphs = graphs_of([2, 1])
    assert capture(graphs, {1, 2}) == []
    assert graphs.captured() == (GraphMode.NONE, 0)
