"""The fake graph: a replay that would read something else is refused by name."""

import dataclasses
import itertools
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.helpers.batches import decodes, step_batch
from vllm_npu_prep.attention.metadata import AscendMetadata
from vllm_npu_prep.attention.mla import MLALayerMetadata
from vllm_npu_prep.device.cpu import CPUDevice
from vllm_npu_prep.device.staging import StagingRing
from vllm_npu_prep.graph import GraphCall, tensors_of
from vllm_npu_prep.graph.fake_graph import CheckedGraphPool, GraphSafetyError, check_padding
from vllm_npu_prep.prep.batch import prepare_step
from vllm_npu_prep.prep.layout import StepLayout, largest_step
from vllm_npu_prep.prep.local_attention import NO_LOCAL_GROUPS, LocalGroups
from vllm_npu_prep.prep.padding import GraphMode, Padding, full_padding
from vllm_npu_prep.prep.pcp import NO_PCP, PCPRank
from vllm_npu_prep.prep.shape import EngineShape
from vllm_npu_prep.prep.state import AttentionState


def double(*args, **kwargs):
    return tuple(tensor * 2 for tensor in tensors_of((*args, *kwargs.values())))


CACHE = SimpleNamespace(kv_cache=torch.zeros(2, 3))


def call(*args, metadata=None, run=double, cache=CACHE, **kwargs) -> GraphCall:
    metadata = metadata or {}
    return GraphCall(run, args, kwargs, metadata, dict.fromkeys(metadata, cache))


def test_a_replay_has_the_same_memory_for_inputs_and_results():
    graph, x = CheckedGraphPool().new_graph(), torch.arange(4.0)
    (first,) = graph.capture(call(x))
    x += 10
    (second,) = graph.replay(call(x))
    assert second.tolist() == [20, 22, 24, 26]
    assert second is first, "who keeps results across steps must find them overwritten"


def test_sizes_share_the_memory_of_the_largest():
    pool = CheckedGraphPool()
    large, small = pool.new_graph(), pool.new_graph()
    (of_large,) = large.capture(call(torch.ones(8, 2)))
    (of_small,) = small.capture(call(torch.ones(3, 2)))
    assert of_small.data_ptr() == of_large.data_ptr()


def test_a_capture_runs_the_largest_size_alone():
    pool, ran = CheckedGraphPool(), []

    def run(x: torch.Tensor) -> torch.Tensor:
        ran.append(len(x))
        return 2 * x

    def sized(x: torch.Tensor) -> GraphCall:
        return GraphCall(run, (x,), {}, num_tokens=len(x))

    large, small, x = pool.new_graph(), pool.new_graph(), torch.ones(3, 2)
    of_large, of_small = large.capture(sized(torch.ones(8, 2))), small.capture(sized(x))
    assert (ran, of_small.shape) == ([8], (3, 2))
    assert of_small.data_ptr() == of_large.data_ptr()
    x += 10
    assert small.replay(sized(x)).data_ptr() == of_large.data_ptr()
    assert of_small.tolist() == [[22, 22]] * 3


def test_a_size_whose_results_have_other_rows_runs_at_capture():
    pool = CheckedGraphPool()
    for size in (8, 3):
        result = pool.new_graph().capture(
            GraphCall(lambda x: x.sum(0), (torch.ones(size, 2),), {}, num_tokens=size)
        )
        assert result.tolist() == [size, size]


MOVED = {
    "address": (lambda x: x.clone(), "address"),
    "shape": (lambda x: x[:-1], "shape"),
    "strides": (lambda x: torch.as_strided(x, x.shape, (0, 1)), "strides"),
    "dtype": (lambda x: x.view(torch.int32), "dtype"),
}


@pytest.mark.parametrize("change", MOVED)
@pytest.mark.parametrize("place", ["argument", "keyword"])
def test_an_input_that_moved_is_named(change, place):
    moved, message = MOVED[change]
    x, y = torch.ones(4, 2), torch.ones(4, 2)
    graph = CheckedGraphPool().new_graph()
    graph.capture(call(x, positions=y))
    arguments = (moved(x), y) if place == "argument" else (x, moved(y))
    name = "argument 0" if place == "argument" else "positions"
    with pytest.raises(GraphSafetyError, match=f"{name} is not where .*{message}"):
        graph.replay(call(arguments[0], positions=arguments[1]))


class Adapted(torch.nn.Module):
    """A layer with adapters, as vLLM makes them, that doubles."""

    def __init__(self):
        super().__init__()
        self.slots, self.active = torch.zeros(4), True
        self.lora_a_stacked, self.lora_b_stacked = (torch.zeros(2, 3),), torch.zeros(2, 3)
        self.punica_wrapper = self

    @property
    def is_active(self) -> bool:
        return self.active

    def graph_inputs(self) -> dict[str, torch.Tensor]:
        return {"LoRA slots": self.slots}

    def forward(self, x):
        return x * 2


@pytest.mark.parametrize("name", ["lora_a_stacked", "lora_b_stacked", "slots"])
def test_adapters_that_moved_are_named(name):
    layer, x = Adapted(), torch.ones(2)
    graph = CheckedGraphPool().new_graph()
    graph.capture(call(x, run=layer))
    moved = torch.zeros_like(*tensors_of([getattr(layer, name)]))
    setattr(layer, name, (moved,) if name == "lora_a_stacked" else moved)
    with pytest.raises(GraphSafetyError, match=r"LoRA .* is not where .*address"):
        graph.replay(call(x, run=layer))


def test_a_graph_without_adapters_serves_no_step_with_some():
    layer, x = Adapted(), torch.ones(2)
    graph = CheckedGraphPool().new_graph()
    layer.active = False
    graph.capture(call(x, run=layer))
    graph.replay(call(x, run=layer))
    layer.active = True
    with pytest.raises(GraphSafetyError, match=r"LoRA .* was not among the inputs"):
        graph.replay(call(x, run=layer))


def test_an_input_that_comes_or_goes_is_named():
    graph, x = CheckedGraphPool().new_graph(), torch.ones(2)
    graph.capture(call(x))
    with pytest.raises(GraphSafetyError, match="inputs_embeds was not among"):
        graph.replay(call(x, inputs_embeds=x))


def test_weights_that_were_replaced_are_named():
    layer, graph = torch.nn.Linear(2, 2), CheckedGraphPool().new_graph()
    x = torch.ones(1, 2)
    graph.capture(call(x, run=layer))
    layer.weight = torch.nn.Parameter(layer.weight.clone())
    with pytest.raises(GraphSafetyError, match="weight is not where"):
        graph.replay(call(x, run=layer))


def metadata(block_tables, slots) -> AscendMetadata:
    lengths = torch.zeros(2, dtype=torch.int32)
    return AscendMetadata(
        attn_state=AttentionState.DecodeOnly,
        attn_mask=None,
        block_tables=block_tables,
        slot_mapping=slots,
        query_start_loc=lengths,
        query_start_loc_np=lengths.numpy(),
        seq_lens=lengths,
        seq_lens_np=lengths.numpy(),
        num_computed_tokens=lengths,
        num_reqs=1,
        max_query_len=1,
        max_seq_len=1,
        num_actual_tokens=1,
        num_input_tokens=2,
    )


@pytest.mark.parametrize("seen", [lambda step: step, MLALayerMetadata], ids=["plain", "MLA"])
@pytest.mark.parametrize("name", ["block_tables", "slot_mapping"])
def test_metadata_that_moved_is_named(name, seen):
    x, graph = torch.ones(2), CheckedGraphPool().new_graph()
    before = metadata(torch.zeros(2, 3), torch.zeros(2))
    graph.capture(call(x, metadata=dict.fromkeys(["layer 0", "layer 1"], seen(before))))
    after = dataclasses.replace(before, **{name: getattr(before, name).clone()})
    with pytest.raises(GraphSafetyError, match=f"{name} of layer 0 is not where"):
        graph.replay(call(x, metadata=dict.fromkeys(["layer 0", "layer 1"], seen(after))))


def test_a_kv_cache_that_moved_is_named():
    x, graph = torch.ones(2), CheckedGraphPool().new_graph()
    step = {"layer 0": metadata(torch.zeros(2, 3), torch.zeros(2))}
    graph.capture(call(x, metadata=step))
    other = SimpleNamespace(kv_cache=CACHE.kv_cache.clone())
    with pytest.raises(GraphSafetyError, match="KV cache of layer 0 is not where"):
        graph.replay(call(x, metadata=step, cache=other))


# ------------------------------------------------------------------- padded values


LOCAL = LocalGroups(4, 1, (0,))


def staged_step(
    padding: Padding,
    count: int = 2,
    local: LocalGroups = NO_LOCAL_GROUPS,
    pcp: PCPRank = NO_PCP,
):
    """A step of decodes as the runner leaves it, on the CPU fallback."""
    batch = step_batch(decodes(count), block_size=4, max_model_len=16)
    shape = EngineShape(local=local, pcp=pcp)
    batch.tables = dataclasses.replace(batch.tables, shape=shape)
    ring = StagingRing(CPUDevice(), largest_step(shape, 16, 8, 64), pin_memory=False)
    layout = StepLayout(padding.num_input_tokens, padding.num_reqs_padded, shape)
    staged = ring.acquire(layout)
    step = prepare_step(batch, padding, layout, staged.np)
    ring.submit(step.nbytes)
    tables = torch.zeros(padding.num_reqs_padded, 4, dtype=torch.int32)
    tables[:count, :2] = torch.tensor([[1, 2], [3, 4]])[:count]
    return step, staged, [tables]


FULL = full_padding(8, 8, 1)
MIXED = full_padding(8, 3, 0)
PIECEWISE = Padding(8, 2, mode=GraphMode.PIECEWISE)


IN_ALL = {
    "slot 0": (lambda s, a, t: a.slot_mapping[0].__setitem__(5, 0), r"slot_mapping .*\[5\] is 0"),
    "slot of a live block": (
        lambda s, a, t: a.slot_mapping[0].__setitem__(7, 9),
        r"slot_mapping of group 0\[7\] is 9 in padding, and must be -1",
    ),
    "stale token": (lambda s, a, t: a.input_ids.__setitem__(2, 7), r"input_ids\[2\] is 7"),
    "stale position": (lambda s, a, t: a.positions.__setitem__(3, 5), r"positions\[3\] is 5"),
}
IN_FULL = {
    "stale length": (lambda s, a, t: a.seq_lens.__setitem__(2, 4), r"seq_lens\[2\] is 4"),
    "no keys": (lambda s, a, t: a.seq_lens.__setitem__(2, 0), r"seq_lens\[2\] is 0 .* must be"),
    "stale block": (lambda s, a, t: t.__setitem__((2, 1), 3), r"block table .*\[2, 1\] is 3"),
    "short query_start_loc": (
        lambda s, a, t: a.query_start_loc.__setitem__(-1, 7),
        "query_start_loc",
    ),
    "short query_start_loc on the host": (
        lambda s, a, t: s.np.query_start_loc.__setitem__(slice(3, None), 2),
        "ends at 2, the graph has 8 tokens",
    ),
    "falling query_start_loc": (
        lambda s, a, t: a.query_start_loc.__setitem__(2, 1),
        "must rise from 0 and reach 2 after 2 requests",
    ),
}
OF_CHUNKS = {
    "stale length": (
        lambda s, a, t: a.chunk_local_seq_lens.__setitem__(2, 3),
        r"chunk_local_seq_lens\[2\]",
    ),
    "stale block": (lambda s, a, t: t.__setitem__((2, 0), 3), r"local block table .*\[2, 0\] is 3"),
    "short query_start_loc": (
        lambda s, a, t: a.chunk_local_query_start_loc.__setitem__(-1, 7),
        "chunk_local_query_start_loc",
    ),
    "falling query_start_loc on the host": (
        lambda s, a, t: s.np.chunk_local_query_start_loc.__setitem__(2, 0),
        "chunk_local_query_start_loc .* must rise from 0",
    ),
}
FAULTS = [
    *itertools.product([FULL, MIXED, PIECEWISE], [NO_LOCAL_GROUPS], IN_ALL.values()),
    *itertools.product([FULL, MIXED], [NO_LOCAL_GROUPS], IN_FULL.values()),
    *itertools.product([FULL, MIXED], [LOCAL], OF_CHUNKS.values()),
]


@pytest.mark.parametrize(("padding", "local", "fault"), FAULTS)
def test_unsafe_padding_is_named(padding, local, fault):
    plant, message = fault
    step, staged, tables = staged_step(padding, local=local)
    of_chunks = torch.zeros(8, 1, dtype=torch.int32)
    if local:
        of_chunks = torch.zeros(len(staged.np.chunk_local_seq_lens), 1, dtype=torch.int32)
    of_chunks[:2, 0] = torch.tensor([2, 4])
    given = {0: of_chunks} if local else {}
    check_padding(step, staged, tables, given)
    plant(staged, staged.device, of_chunks if local else tables[0])
    with pytest.raises(GraphSafetyError, match=message):
        check_padding(step, staged, tables, given)


OF_RANKS = {
    "token": (lambda a: a.pcp_input_ids.__setitem__(2, 5), r"pcp_input_ids\[2\] is 5"),
    "position": (lambda a: a.pcp_positions.__setitem__(3, 1), r"pcp_positions\[3\] is 1"),
    "slot": (lambda a: a.slot_mappings[0].__setitem__(2, 9), r"group 0\[2\] is 9 in padding"),
    "slot of the other rank": (
        lambda a: a.slot_mappings[0].__setitem__(6, 9),
        r"group 0\[6\] is 9 in padding",
    ),
    "row": (lambda a: a.pcp_table_rows.__setitem__(2, 0), r"pcp_table_rows\[2\] is 0"),
    "start": (lambda a: a.pcp_query_start_loc.__setitem__(-1, 2), "and end at 4"),
    "length": (lambda a: a.pcp_seq_lens.__setitem__(3, 0), r"pcp_seq_lens\[3\] is 0"),
}


@pytest.mark.parametrize("fault", OF_RANKS)
def test_unsafe_padding_of_a_rank_is_named(fault):
    """Two decodes on two ranks, each padded to four tokens."""
    plant, message = OF_RANKS[fault]
    step, staged, tables = staged_step(Padding(8, 2, 1, GraphMode.FULL), pcp=PCPRank(2, 0, 16))
    check_padding(step, staged, tables)
    plant(staged.device)
    with pytest.raises(GraphSafetyError, match=message):
        check_padding(step, staged, tables)


def test_nothing_is_said_of_real_tokens_and_requests():
    step, staged, tables = staged_step(FULL)
    staged.device.slot_mappings[0][0] = 0
    staged.device.input_ids[1] = 3
    tables[0][1, 0] = 7
    check_padding(step, staged, tables)
    assert np.array_equal(staged.device.seq_lens[:2], [6, 6])
