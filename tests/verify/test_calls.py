"""Lists of calls for `verify-device --calls`: what is kept of a call, and what it has to give."""

import pytest
import torch

from ascend_emulator.operators.lightning_indexer import lightning_indexer
from ascend_emulator.operators.sparse_flash_attention import sparse_flash_attention
from tests.helpers.four_bits import dequantised, numbers_in
from vllm_npu_prep.errors import PrepError
from vllm_npu_prep.verify.calls.call import (
    Call,
    described,
    made_arguments,
    read_list,
    told_arguments,
    write_list,
)
from vllm_npu_prep.verify.calls.expected import expected_of, some_rows
from vllm_npu_prep.verify.outcome import Verdict
from vllm_npu_prep.verify.row import compare

ATTENTION = "npu::npu_fused_infer_attention_score.out"


def note(tensor, found):
    found["values"] = tensor.flatten().tolist()


def call_of(operator, **arguments):
    return Call(operator, {name: described(value, note) for name, value in arguments.items()})


def remade(call):
    return made_arguments(call, seed=1)


def test_a_call_is_made_again_with_its_layout():
    rows = torch.zeros(7, 12, dtype=torch.bfloat16)[1:, 2:6]
    again = remade(call_of("npu::some", x=rows, dim=-1, dtype=torch.float16))
    assert (again["x"].shape, again["x"].stride()) == (rows.shape, rows.stride())
    assert again["x"].storage_offset() == rows.storage_offset()
    assert again["x"].dtype is torch.bfloat16 and again["x"].float().std() > 0.3
    assert (again["dim"], again["dtype"]) == (-1, torch.float16)


def test_whole_numbers_are_those_of_the_call():
    table = torch.tensor([[3, 1, 9], [4, 0, 0]], dtype=torch.int32)[:, :2]
    one = torch.tensor([7]).expand(5)
    again = remade(call_of("npu::some", block_table=table, one=one, actual_seq_lengths=[5, 130]))
    assert again["one"].tolist() == [7] * 5 and again["one"].stride() == (0,)
    assert again["block_table"].tolist() == [[3, 1], [4, 0]]
    assert again["actual_seq_lengths"] == [5, 130]


def test_the_constant_mask_is_what_kernels_take():
    again = remade(call_of("npu::some", atten_mask=torch.zeros(4, 4, dtype=torch.int8)))
    assert again["atten_mask"].tolist() == [[0, 1, 1, 1], [0, 0, 1, 1], [0, 0, 0, 1], [0, 0, 0, 0]]


def test_calls_differ_by_what_chooses_a_kernel():
    def key(shape=(4, 8), mode=3, lengths=(1, 2, 3, 4, 5), values=1):
        ids = torch.full(shape, values, dtype=torch.int32)
        return call_of("npu::some", ids=ids, mode=mode, lengths=[*lengths]).key

    assert key() == key(values=2) == key(lengths=(5, 4, 3, 2, 8))
    assert len({key(), key((4, 9)), key(mode=4), key(lengths=(1, 2, 3, 4, 129))}) == 4


@pytest.mark.parametrize("table", [{"dtype": "int32", "shape": [1, 4]}, None])
def test_a_cache_with_more_blocks_is_no_other_call(table):
    """Keys that attention reads by a table of blocks, beside keys of the step's own tokens."""
    few, many = (
        Call(
            "npu::attend", {"key": {"dtype": "float16", "shape": [n, 8, 64]}, "block_table": table}
        )
        for n in (640, 700)
    )
    assert (few.key == many.key) is (table is not None)


def test_a_longer_table_of_cosines_is_another_call():
    short, long = (
        Call("npu::npu_mrope", {"cos_sin_cache": {"dtype": "float16", "shape": [n, 64]}})
        for n in (512, 1024)
    )
    assert short.key != long.key


def test_slots_that_a_graph_is_told_later_have_padding():
    """A graph was captured with padding alone; what it is told at its replay is drawn."""
    plane = {"dtype": "float16", "shape": [4, 8, 1, 16]}
    slots = {"dtype": "int32", "shape": [16], "values": [-1] * 16}
    given = {"key_cache": plane, "value_cache": plane, "slot_mapping": slots}
    call = Call("npu::npu_scatter_pa_kv_cache", given, captured=True)
    drawn = made_arguments(call, seed=1)["slot_mapping"]
    written = drawn[drawn >= 0]
    assert (drawn == -1).sum() == 2 and len(written.unique()) == 14


@pytest.mark.parametrize("name", ["list.jsonl", "list.jsonl.gz"])
def test_a_list_is_read_as_it_was_written(tmp_path, name):
    calls = [call_of("npu::one", x=torch.ones(2)), Call("npu::two.out", {"k": 1}, captured=True)]
    write_list(tmp_path / name, {"model": "m"}, calls)
    assert read_list(tmp_path / name) == ({"model": "m"}, calls)


@pytest.mark.parametrize("text", ["", "{}\n", '{"format": "another"}\n', "nonsense\n"])
def test_a_file_that_is_no_list_is_refused(tmp_path, text):
    (tmp_path / "list.jsonl").write_text(text)
    with pytest.raises(PrepError, match=r"list.jsonl is no list of calls .*--record FILE"):
        read_list(tmp_path / "list.jsonl")


def test_torchs_own_operators_are_computed_in_float64_by_rows(seed):
    random = torch.Generator().manual_seed(seed)
    x, weight = torch.randn(100, 8, generator=random), torch.randn(3, 8, generator=random)
    (found,) = expected_of(
        "aten::linear", torch.ops.aten.linear.default, {"input": x, "weight": weight}
    )
    assert found.values.dtype is torch.float64
    assert found.rows.tolist() == some_rows(100).tolist() and {0, 99} <= {*found.rows.tolist()}
    torch.testing.assert_close(found.values.float(), (x @ weight.T)[found.rows])


def test_a_long_sum_in_float32_is_as_close_as_is_allowed():
    """A router has 7,168 inputs: a sum near 0 of numbers near 9 is off by more than 1e-5."""
    x, weight = torch.zeros(24, 7168), torch.zeros(256, 7168)
    a = remade(call_of("aten::linear", input=x, weight=weight))
    (expected,) = expected_of("aten::linear", None, a)
    product = torch.nn.functional.linear(a["input"], a["weight"])
    assert compare(product, expected.values, "").verdict is Verdict.SAME
    assert 1 < product.std() < 5


@pytest.mark.parametrize("groups", [1, 4])
def test_packed_weights_are_those_that_an_oracle_reads(seed, groups):
    """Over the border of what is widened at once; scales and offsets of the next group differ."""
    random = torch.Generator().manual_seed(seed)
    shape, outputs = (128, 130), 8 * 130
    words = torch.randint(-(1 << 31), 1 << 31, shape, generator=random).to(torch.int32)
    scale, offset = (torch.randn(groups, outputs, generator=random) for _ in range(2))
    given = {
        "x": torch.randn(30, 128, generator=random),
        "weight": words,
        "antiquant_scale": scale,
        "antiquant_offset": offset,
        "bias": torch.randn(outputs, generator=random),
        "antiquant_group_size": 128 // groups if groups > 1 else 0,
    }
    (found,) = expected_of("npu::npu_weight_quant_batchmatmul", None, given)
    levels = (numbers_in(words) + 8) % 16 - 8
    weight = dequantised(levels.T, scale.T.numpy(), -offset.T.numpy())
    expected = given["x"][found.rows] @ weight.T + given["bias"]
    torch.testing.assert_close(found.values.float(), expected, rtol=1e-4, atol=1e-3)


def test_packed_weights_of_experts_are_those_of_rows(seed):
    """Each row has the weight of its expert: two rows of the first one, and one of the third."""
    random = torch.Generator().manual_seed(seed)
    words = torch.randint(-(1 << 31), 1 << 31, (3, 64, 2), generator=random).to(torch.int32)
    scale, offset = (torch.randn(3, 2, 16, generator=random) for _ in range(2))
    x, sizes = torch.randn(5, 64, generator=random), torch.tensor([2, 0, 1])
    of_weights = {"antiquant_scale": [scale], "antiquant_offset": [offset]}
    given = {"x": [x], "weight": [words], "group_list": sizes, "group_list_type": 1, **of_weights}
    (found,) = expected_of("npu::npu_grouped_matmul", None, given)
    assert found.rows.tolist() == [0, 1, 2]
    for row, expert in enumerate((0, 0, 2)):
        one = {"x": x[[row]], "weight": words[expert], "antiquant_group_size": 32}
        one |= {name: each[0][expert] for name, each in of_weights.items()}
        (alone,) = expected_of("npu::npu_weight_quant_batchmatmul", None, one)
        torch.testing.assert_close(found.values[[row]], alone.values)


def test_attention_over_blocks_is_that_over_keys(seed):
    """The same request, once with fresh keys and once with a cache in blocks."""
    random = torch.Generator().manual_seed(seed)
    query, keys, values = (torch.randn(6, 2, 8, generator=random) for _ in range(3))
    given = {"input_layout": "TND", "num_heads": 2, "scale": 0.5, "sparse_mode": 3, "query": query}
    fresh = {"key": keys, "value": values, "actual_seq_lengths_kv": [2, 6]}
    table = torch.tensor([[2, 0], [1, 3]], dtype=torch.int32)
    planes = torch.full((2, 4, 3, 2, 8), float("nan"))
    for plane, rows in zip(planes, (keys, values)):
        plane[2, :2], plane[1], plane[3, :1] = rows[:2], rows[2:5], rows[5:]
    paged = {
        **dict(zip(("key", "value"), planes.flatten(3))),
        "block_table": table,
        "block_size": 3,
        "num_key_value_heads": 2,
        "actual_seq_lengths_kv": [2, 4],
    }
    one, other = (
        expected_of(ATTENTION, None, {**given, "actual_seq_lengths": [2, 6], **form})[0]
        for form in (fresh, paged)
    )
    torch.testing.assert_close(one.values, other.values)
    assert one.rows.tolist() == [*range(6)]


def test_a_windows_first_key_counts():
    """``pre_tokens`` is how many keys before its own a token sees."""
    values = torch.tensor([1.0, 10.0, 100.0, 1000.0]).view(4, 1, 1)
    given = {"input_layout": "TND", "num_heads": 1, "sparse_mode": 4, "pre_tokens": 1}
    lengths = {"actual_seq_lengths": [4], "actual_seq_lengths_kv": [4]}
    tensors = {"query": torch.zeros(4, 1, 1), "key": torch.zeros(4, 1, 1), "value": values}
    (found,) = expected_of(ATTENTION, None, {**given, **lengths, **tensors})
    assert found.values.flatten().tolist() == [1, 5.5, 55, 550]


def test_attention_over_a_long_context_is_no_mean():
    """Otherwise a kernel that reads other keys would pass."""
    shape = torch.zeros(1, 2, 64), torch.zeros(4096, 2, 64), torch.zeros(4096, 2, 64)
    tensors = remade(call_of(ATTENTION, **dict(zip(("query", "key", "value"), shape))))
    given = {"input_layout": "TND", "num_heads": 2, "scale": 0.125, "sparse_mode": 3}
    lengths = {"actual_seq_lengths": [1], "actual_seq_lengths_kv": [4096]}
    (found,) = expected_of(ATTENTION, None, {**given, **lengths, **tensors})
    assert (found.values[0] - tensors["value"].double().mean(0)).abs().mean() > 0.2


def test_a_cache_write_leaves_other_blocks():
    plane = torch.arange(4 * 2.0).view(4, 2, 1, 1)
    rows = torch.tensor([50.0, 60.0, 70.0]).view(3, 1, 1)
    given = {
        "key": rows,
        "value": rows,
        "key_cache": plane,
        "value_cache": plane,
        "slot_mapping": torch.tensor([3, -1, 4]),
    }
    for found in expected_of("npu::npu_scatter_pa_kv_cache", None, given):
        assert found.rows.tolist() == [0, 1, 2, 3]
        assert found.values.flatten().tolist() == [0, 1, 2, 50, 70, 5, 6, 7]


def test_a_write_of_keys_leaves_other_rows():
    """A recording has slot 0 for all padding; rows that are compared are written once."""
    operator, plane = "npu::npu_scatter_nd_update_", torch.zeros(40, 4)
    given = {"input": plane, "indices": torch.zeros(9, 1, dtype=torch.int32)}
    a = remade(call_of(operator, **given, updates=torch.zeros(9, 4)))
    assert len(a["indices"].unique()) == 9
    (found,) = expected_of(operator, None, a)
    written = torch.isin(found.rows, a["indices"].flatten())
    assert written.sum() == 9 and (~written).sum() > 9
    assert torch.equal(found.values[~written], a["input"][found.rows[~written]])
    order = a["indices"].flatten().argsort()
    assert torch.equal(found.values[written], a["updates"][order])


def test_of_equal_largest_numbers_any_place_is_right():
    logits = torch.tensor([[1.0, 3.0, 3.0], [4.0, 4.0, 0.0]])
    (found,) = expected_of("aten::argmax", None, {"self": logits, "dim": -1})
    for places, right in (([2, 0], True), ([1, 1], True), ([0, 1], False)):
        assert torch.equal(found.of(torch.tensor(places)), found.values) is right
    assert found.tolerance == 0


def test_what_is_written_into_a_list_is_expected():
    x = torch.arange(6.0).view(2, 3)
    given = {
        "self": x,
        "split_sizes": [1, 2],
        "dim": -1,
        "out": [torch.zeros(2, n) for n in (1, 2)],
    }
    split = torch.ops.aten.split_with_sizes_copy.out
    first, second = expected_of("aten::split_with_sizes_copy.out", split, given)
    assert (first.result, first.values.flatten().tolist()) == (0, [0, 3])
    assert (second.result, second.values.flatten().tolist()) == (1, [1, 2, 4, 5])


def test_a_sum_with_a_dtype_is_expected():
    """Not every operator that takes a dtype takes a device."""
    given = {"self": torch.arange(6).view(2, 3), "dim": [1], "dtype": torch.int32}
    (found,) = expected_of("aten::sum.dim_IntList", torch.ops.aten.sum.dim_IntList, given)
    assert found.values.tolist() == [3, 12]


def test_positions_that_a_graph_was_not_told_yet_are_drawn():
    table, heads = torch.zeros(5, 4), torch.zeros(3, 8)
    given = {"positions": torch.tensor([2, -1, 1 << 40]), "query": heads, "cos_sin_cache": table}
    positions = remade(call_of("npu::npu_mrope", **given))["positions"]
    assert ((positions >= 0) & (positions < 5)).all()
    known = remade(call_of("npu::npu_mrope", **{**given, "positions": torch.tensor([4, 0, 3])}))
    assert known["positions"].tolist() == [4, 0, 3]


def sparse_call(operator, names, told, **tensors):
    """A call over blocks of 32, of requests that are told, or will be at a replay."""
    ends, lengths, table = told
    bf16 = {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in tensors.items()}
    given = {
        **bf16,
        "actual_seq_lengths_query": torch.tensor(ends, dtype=torch.int32),
        names[0]: torch.tensor(lengths, dtype=torch.int32),
        "block_table": torch.tensor(table, dtype=torch.int32),
        "layout_query": "TND",
        names[1]: "PA_BSND",
    }
    return operator, given


TOLD = {
    "lengths": ([1, 5, 6], [70, 40, 1], [[3, 1, 5], [4, 2, 0], [6, 0, 0]]),
    "a replay's": ([0, 0, 0], [0, 0, 0], [[9, 9, 9]] * 3),
}


@pytest.mark.parametrize("told", [*TOLD, "another replay's"])
def test_a_choice_is_right_by_its_scores(told):
    shapes = {"query": (6, 4, 128), "weights": (6, 4), "key": (8, 32, 1, 128)}
    names = "actual_seq_lengths_key", "layout_key"
    own = TOLD.get(told, TOLD["lengths"])
    operator, given = sparse_call("npu::npu_lightning_indexer", names, own, **shapes)
    call = call_of(operator, **given, sparse_count=16)
    a = remade(call)
    if told not in TOLD:
        a |= told_arguments(call, a, seed=1)
        assert a["actual_seq_lengths_key"].tolist() == [96, 32, 33]  # first all blocks, of 32 keys
    chosen, _ = lightning_indexer(**a)
    (expected,) = expected_of(operator, None, a)
    torch.testing.assert_close(expected.of(chosen), expected.values, rtol=1e-4, atol=1e-4)
    assert (expected.values > -100).sum() == (chosen[expected.rows] >= 0).sum() > 0
    row = int((chosen[:, 0] >= 0).sum(1).argmax())
    for wrong in (0 if chosen[row, 0, 0] else 1, -1):  # another key in the place of the best one
        other = chosen.clone()
        other[row, 0, 0] = wrong
        assert not torch.allclose(expected.of(other), expected.values, atol=1e-2)


@pytest.mark.parametrize("told", [*TOLD, "another replay's"])
def test_attention_over_a_choice_is_that_over_its_rows(told):
    shapes = {"query": (6, 4, 512), "query_rope": (6, 4, 64), "key_rope": (8, 32, 1, 64)}
    shapes |= dict.fromkeys(("key", "value"), (8, 32, 1, 512))
    names = "actual_seq_lengths_kv", "layout_kv"
    own = TOLD.get(told, TOLD["lengths"])
    operator, given = sparse_call("npu::npu_sparse_flash_attention", names, own, **shapes)
    given["sparse_indices"] = torch.zeros(6, 1, 16, dtype=torch.int32)
    call = call_of(operator, **given, scale_value=0.05, attention_mode=2)
    a = remade(call)
    if told not in TOLD:
        a |= told_arguments(call, a, seed=1)
        assert a["actual_seq_lengths_kv"].tolist() == [96, 32, 33]
    output, *_ = sparse_flash_attention(**a)
    (expected,) = expected_of(operator, None, a)
    torch.testing.assert_close(expected.of(output).double(), expected.values, rtol=0.02, atol=0.02)
    assert len(expected.rows) == 6 and expected.values.abs().max() > 0.3
    assert not torch.allclose(expected.of(output.roll(1, 0)).double(), expected.values, atol=0.1)


def told(operator, **arguments):
    """What a call has, and what its graph is told in place of it."""
    call = call_of(operator, **arguments)
    own = remade(call)
    return own, told_arguments(call, own, seed=1)


def test_a_graph_is_told_other_lengths_and_blocks():
    """The first context fills its blocks; the others end beside the edge of one."""
    planes = dict.fromkeys(("key", "value"), torch.zeros(20, 16, 8))
    table = torch.tensor([[3, 4, 5], [6, 0, 0], [0, 0, 0]], dtype=torch.int32)
    given = {"block_table": table, "block_size": 16, "query": torch.zeros(4, 1, 8), **planes}
    lengths = {"actual_seq_lengths": [1, 4, 4], "actual_seq_lengths_kv": [40, 9, 0]}
    own, other = told(ATTENTION, **given, **lengths)
    assert other["actual_seq_lengths_kv"] == [48, 16, 0]
    assert other["block_table"].shape == (3, 3) and (other["block_table"] >= 0).all()
    assert not torch.equal(other["block_table"], own["block_table"])
    assert own["actual_seq_lengths_kv"] == [40, 9, 0]


def test_a_graph_is_told_how_many_drafts_were_accepted():
    """Each request has its drafts in a graph, whatever was accepted."""
    vectors = {name: torch.zeros(24, 2, 8) for name in ("query", "key", "value")}
    numbers = {
        "actual_seq_lengths": torch.full((6,), 4, dtype=torch.int32),
        "num_accepted_tokens": torch.ones(6, dtype=torch.int32),
        "ssm_state_indices": torch.zeros(24, dtype=torch.int32),
    }
    given = {"state": torch.zeros(40, 2, 8, 8), "beta": torch.zeros(24, 2)}
    own, other = told("npu::npu_recurrent_gated_delta_rule", **vectors, **numbers, **given)
    assert own["num_accepted_tokens"].tolist() == [1] * 6
    accepted, blocks = other["num_accepted_tokens"], other["ssm_state_indices"]
    assert 1 <= accepted.min() < accepted.max() <= 4
    assert len(blocks.unique()) == 24 and blocks.min() > 0


def test_a_graph_is_told_other_experts_and_rows():
    x, weight = [torch.zeros(64, 8)], [torch.zeros(4, 8, 8)]
    groups = torch.zeros(4, dtype=torch.int64)
    own, other = told(
        "npu::npu_grouped_matmul", x=x, weight=weight, group_list=groups, group_list_type=1
    )
    assert own["group_list"].sum() == other["group_list"].sum() == 56  # some rows have no expert
    assert not torch.equal(own["group_list"], other["group_list"])
    rows = torch.tensor([0, 1, 2, 0, 1, 2])
    given = {"self": torch.zeros(9, 4), "dim": 0, "index": rows, "source": torch.zeros(6, 4)}
    own, other = told("aten::index_copy_", **given)
    assert len(own["index"].unique()) == len(other["index"].unique()) == 6
    assert not torch.equal(own["index"], other["index"])


@pytest.mark.parametrize("form", ["layer", "experts"])
def test_weights_of_four_bits_beside_int8_rows_are_drawn(form):
    """A recording has zeros for them, beside which any kernel would be right."""
    words, rows = torch.zeros(3, 64, 4, dtype=torch.int32), torch.zeros(5, 64, dtype=torch.int8)
    if form == "layer":
        made = remade(call_of("npu::npu_quant_matmul", x1=rows, x2=words[0]))["x2"]
    else:
        (made,) = remade(call_of("npu::npu_grouped_matmul", x=[rows], weight=[words]))["weight"]
    assert {*numbers_in(made).flatten().tolist()} == {*range(16)}
