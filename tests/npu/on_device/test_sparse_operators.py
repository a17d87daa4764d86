"""Both operators of sparse attention as torch_npu calls them: launches, lengths, replays, order."""

from types import SimpleNamespace

import pytest
import torch

import ascend_emulator
from ascend_emulator import profiles
from tests.emulator.operators.calls import call, strided
from tests.emulator.operators.layer_calls import int32
from tests.emulator.operators.sparse_calls import ATTENTION, INDEXER, attention, indexer
from tests.helpers.engine import engine, make_model
from tests.helpers.fused import settings, wrong_operator
from tests.npu.models import INDEXED
from vllm_npu_prep.attention.kernels.sparse import make_sparse_kernels
from vllm_npu_prep.errors import PrepError

LENGTHS = ((5, 1), (130, 3), (40, 2))


def choose(**arguments):
    return torch.ops.npu.npu_lightning_indexer(**arguments)


def attend(**arguments):
    return torch.ops.npu.npu_sparse_flash_attention(**arguments)


def on_device(arguments):
    moved = {id(value): value.npu() for value in arguments.values() if torch.is_tensor(value)}
    return {name: moved.get(id(value), value) for name, value in arguments.items()}


@pytest.mark.parametrize(
    ("operator", "name", "make"), [(choose, INDEXER, indexer), (attend, ATTENTION, attention)]
)
def test_an_operator_is_one_launch_without_copies(operator, name, make, seed):
    arguments = make(LENGTHS, seed)
    given = on_device(arguments)
    torch.npu.synchronize()
    with ascend_emulator.count() as counts:
        result, *_ = operator(**given)
    assert counts.nonzero().keys() <= {"launches", "peak_memory_bytes"}
    assert counts.launches == 1
    assert torch.equal(result.cpu(), call(name, arguments)[0])


def test_strided_queries_are_copied_first(seed):
    given = on_device(indexer(LENGTHS, seed))
    given["query"] = strided(given["query"])
    torch.npu.synchronize()
    with ascend_emulator.count() as counts:
        choose(**given)
    assert (counts.launches, counts.hidden_copies) == (1, 1)
    if profiles.current().documentation:
        with pytest.raises(RuntimeError, match="contiguous"):
            torch.npu.synchronize()


@pytest.mark.parametrize("name", ["actual_seq_lengths_query", "block_table"])
def test_lengths_and_blocks_are_on_the_device(name, seed):
    arguments = indexer(LENGTHS, seed)
    given = on_device(arguments) | {name: arguments[name]}
    choose(**given)
    with pytest.raises(RuntimeError, match="a tensor on the device"):
        torch.npu.synchronize()


def test_a_replay_reads_its_own_lengths_without_an_update(seed):
    first, other = (indexer(lengths, seed) for lengths in (LENGTHS, ((60, 3), (9, 2), (20, 1))))
    other = first | {
        "actual_seq_lengths_query": other["actual_seq_lengths_query"],
        "actual_seq_lengths_key": int32(63, 11, 21),
        "block_table": first["block_table"].roll(1, 0),
    }
    given = on_device(first)
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        chosen, _ = choose(**given)
    for name in ("actual_seq_lengths_query", "actual_seq_lengths_key", "block_table"):
        given[name].copy_(other[name])
    torch.npu.synchronize()
    with ascend_emulator.count() as counts:
        graph.replay()
    assert counts.nonzero().keys() <= {"graph_launches", "peak_memory_bytes"}
    assert torch.equal(chosen.cpu(), call(INDEXER, other)[0])


def test_keys_of_padding_are_written_to_the_null_block():
    """Padding of graphs and late draft passes have the slot -1, which no operator takes."""
    plane, keys = torch.zeros(3, 4, 1, 128).npu(), torch.randn(3, 128).npu()
    slots = torch.tensor([6, -1, 9], dtype=torch.int32).npu()
    step = SimpleNamespace(slot_mapping=slots)
    make_sparse_kernels("fia").write_keys(keys, plane, step)
    torch.npu.synchronize()
    written = plane.cpu().flatten(0, 2)
    assert torch.equal(written[[6, 0, 9]], keys.cpu())
    assert torch.equal(written.any(1).nonzero()[:, 0], torch.tensor([0, 6, 9]))


def test_what_nobody_wrote_is_refused_by_attention(seed):
    """A stale length gives the request of a replay one token more than the indexer was told of."""
    given = on_device(indexer(LENGTHS, seed, padding=1))
    chosen, _ = choose(**given)
    more = on_device(attention(((5, 1), (130, 3), (40, 3)), seed))
    attend(**more | {"sparse_indices": chosen})
    with pytest.raises(RuntimeError, match="chosen positions"):
        torch.npu.synchronize()


def test_blocks_of_others_may_be_written_meanwhile(seed):
    """On another stream without an order; blocks of the requests themselves may not."""
    given = on_device(indexer(LENGTHS, seed))
    nobody, own = len(given["key"]) - 1, int(given["block_table"][0, 0])
    torch.npu.synchronize()
    other = torch.npu.Stream()
    for block in (nobody, own):
        choose(**given)
        with torch.npu.stream(other):
            given["key"][block].fill_(0)
        if block == own:
            with pytest.raises(RuntimeError, match="hazard"):
                torch.npu.synchronize()
        else:
            torch.npu.synchronize()


def test_keys_may_be_written_beside_copies_of_other_blocks():
    """As offloading copies blocks to the host; those that are written may not be copied then."""
    plane, keys = torch.zeros(4, 16, 1, 128).npu(), torch.ones(1, 128).npu()
    on_host = torch.empty(16, 128).pin_memory()
    copies = torch.npu.Stream()
    copies.wait_stream(torch.npu.current_stream())
    for slot in (20, 40):  # of blocks 1 and 2
        slots = torch.tensor([slot], dtype=torch.int32).npu()
        torch.npu.synchronize()
        with torch.npu.stream(copies):
            on_host.copy_(plane[2, :, 0], non_blocking=True)
        make_sparse_kernels("fia").write_keys(keys, plane, SimpleNamespace(slot_mapping=slots))
        if slot == 40:
            with pytest.raises(RuntimeError, match="hazard"):
                torch.npu.synchronize()
        else:
            torch.npu.synchronize()


def later_positions(right):
    def choose(*args, **kwargs):
        chosen, values = right(*args, **kwargs)
        return torch.where(chosen > 0, chosen - 1, chosen), values

    return choose


def other_scale(right):
    def attend(*args, **kwargs):
        output, *rest = right(*args, **kwargs)
        return (output * 1.5, *rest)

    return attend


@pytest.mark.parametrize(
    ("operator", "wrong", "said"),
    [
        ("npu_lightning_indexer", later_positions, "positions that are chosen wrongly"),
        ("npu_sparse_flash_attention", other_scale, "attention over chosen positions wrongly"),
    ],
)
def test_a_wrong_operator_ends_the_start(tmp_path, operator, wrong, said):
    folder = make_model(tmp_path / "model", "DeepseekV32", **INDEXED)
    with (
        wrong_operator(operator, wrong),
        pytest.raises(PrepError, match=said),
        engine(folder, **settings("bfloat16")),
    ):
        pass
