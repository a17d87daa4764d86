"""What a graph sees of any batch, in every mode: equal to the oracle, and safe to run."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.batches import RandomBatch, decodes, random_batches, step_batch
from vllm_npu_prep.prep.arrays import NULL_BLOCK_ID
from vllm_npu_prep.prep.batch import prepare_step
from vllm_npu_prep.prep.capture_sizes import fitting_sizes, largest_decode, thin_sizes
from vllm_npu_prep.prep.mask import MaskForm, build_mask, plan_mask
from vllm_npu_prep.prep.oracle import OracleGraphs, oracle_step
from vllm_npu_prep.prep.padding import CapturedGraphs, GraphMode, dispatch, full_padding, why_eager


@st.composite
def captured(draw, num_reqs: int, max_model_len: int) -> CapturedGraphs:
    """Graphs of an engine that such a batch can run in."""
    query_len = draw(st.integers(1, 4))
    sizes = {size * query_len for size in draw(st.sets(st.integers(1, 60), max_size=6))}
    mode = draw(st.sampled_from(GraphMode))
    max_num_seqs = draw(st.integers(num_reqs, num_reqs + 20))
    if mode == GraphMode.FULL:
        sizes = fitting_sizes(sizes, max_num_seqs, max_model_len)
    return CapturedGraphs(mode, tuple(sizes), max_num_seqs, query_len)


@st.composite
def batches_with_graphs(draw) -> tuple[RandomBatch, CapturedGraphs]:
    batch = draw(random_batches())
    graphs = draw(captured(len(batch.requests), batch.max_model_len))
    if draw(st.booleans()):  # all as long as a decode is, which random requests seldom are
        lengths = {r.num_scheduled_tokens for r in batch.requests}
        if len(lengths) == 1:
            (length,) = lengths
            sizes = tuple(length * -(-size // length) for size in graphs.capture_sizes)
            graphs = CapturedGraphs(graphs.mode, sizes, graphs.max_num_seqs, length)
    return batch, graphs


def prepared(batch: RandomBatch, graphs: CapturedGraphs):
    step = batch.batch()
    uniform = bool((step.num_scheduled_tokens == graphs.decode_query_len).all())
    padding = dispatch(graphs, step.total_num_scheduled_tokens, step.num_reqs, uniform)
    return prepare_step(step, padding)


@given(batches_with_graphs())
def test_every_padded_array_equals_the_oracle(case):
    batch, graphs = case
    step = prepared(batch, graphs)
    expected = oracle_step(
        batch.requests,
        block_size=batch.block_size,
        max_model_len=batch.max_model_len,
        chunked_prefill=batch.chunked_prefill,
        graphs=OracleGraphs(
            graphs.mode, graphs.capture_sizes, graphs.max_num_seqs, graphs.decode_query_len
        ),
    )
    assert step.padding.mode == expected["runtime_mode"]
    assert step.num_input_tokens == expected["num_input_tokens"]
    assert step.padding.num_reqs_padded == expected["num_reqs_padded"]
    assert step.attn_state.name == expected["attn_state"]
    for name in ("input_ids", "positions", "query_start_loc", "seq_lens"):
        assert getattr(step.arrays, name).tolist() == expected[f"{name}_padded"], name
    assert step.arrays.slot_mapping[0].tolist() == expected["slot_mapping_padded"]


@given(batches_with_graphs())
def test_what_a_graph_sees_is_safe_to_run(case):
    batch, graphs = case
    step = prepared(batch, graphs)
    tokens, arrays = step.total_num_scheduled_tokens, step.arrays
    assert (arrays.slot_mapping[:, tokens:] < 0).all(), "padding writes into the cache"
    assert arrays.is_padding.sum() == step.num_input_tokens - tokens
    starts = arrays.query_start_loc
    assert (np.diff(starts) >= 0).all()
    assert starts[step.num_reqs] == tokens
    if step.padding.mode == GraphMode.FULL:
        assert starts[-1] == step.num_input_tokens, "the TND rule"
        padding = slice(step.num_reqs, None)
        query_lens, longest = np.diff(starts)[padding], batch.max_model_len
        assert arrays.seq_lens[padding].tolist() == query_lens.tolist(), "rows without keys"
        assert (query_lens <= longest).all(), "more than a row of the block table holds"
    else:
        assert len(arrays.seq_lens) == step.num_reqs, "attention is eager: real requests alone"


@given(batches_with_graphs(), st.sampled_from(MaskForm))
def test_mask_rows_of_padding_hide_nothing(case, form):
    """A softmax over masked cells alone is not finite."""
    batch, graphs = case
    step = prepared(batch, graphs)
    plan = plan_mask(step.attn_state, form, step.num_input_tokens, step.max_seq_len)
    mask = build_mask(plan, step.positions)
    if mask is not None and mask.shape[0] == step.num_input_tokens and form == MaskForm.DENSE:
        assert not mask[step.total_num_scheduled_tokens :].any()
    if mask is not None:
        assert not mask.all(axis=1).any(), "a row that sees nothing"


@given(batches_with_graphs())
def test_a_step_without_requests_is_all_padding(case):
    """What a dummy run captures and what an idle data-parallel rank replays."""
    batch, graphs = case
    step = prepared(batch, graphs)
    nobody = step_batch(batch.requests, batch.block_size, batch.max_model_len)
    nobody.tables.num_blocks[0, : len(batch.requests)] = 1
    nobody.tables.num_synced_blocks[0, : len(batch.requests)] = 1
    nobody.tables.num_device_blocks[0, : len(batch.requests)] = 1
    nobody.num_scheduled_tokens = np.empty(0, np.int32)
    nobody.total_num_scheduled_tokens = 0
    padding = step.padding
    if padding.mode == GraphMode.PIECEWISE:  # attention is outside: no rows (`of_dummy_run`)
        padding = dataclasses.replace(padding, num_reqs_padded=0)
    dummy = prepare_step(nobody, padding)
    arrays = dummy.arrays
    assert arrays.is_padding.all()
    assert (arrays.slot_mapping == -1).all()
    assert not arrays.input_ids.any()
    assert not arrays.positions.any()
    assert arrays.seq_lens.tolist() == np.diff(arrays.query_start_loc).tolist()
    assert arrays.query_start_loc[0] == 0
    if step.padding.mode == GraphMode.FULL:
        assert arrays.query_start_loc[-1] == step.num_input_tokens
    # Rows that requests had on the device are the null block's, and are sent again later.
    count = min(len(batch.requests), padding.num_reqs_padded)
    _, indices, ids = dummy.layout.variable_part(0, dummy.num_block_changes)
    assert dummy.num_block_changes == count
    assert (arrays.variable_int32[_relative(ids, dummy, 4)] == NULL_BLOCK_ID).all()
    assert not nobody.tables.num_synced_blocks[0, :count].any()
    assert len(arrays.variable_int64[_relative(indices, dummy, 8)]) == count


def _relative(part: slice, step, itemsize: int) -> slice:
    start = step.layout.variable_offset // itemsize
    return slice(part.start - start, part.stop - start)


def test_padding_requests_share_what_one_row_cannot_hold():
    graphs = CapturedGraphs(GraphMode.FULL, (24,), max_num_seqs=4)
    batch = step_batch(decodes(3), block_size=4, max_model_len=16)
    step = prepare_step(batch, dispatch(graphs, 3, 3, uniform_decode=True))
    assert step.arrays.query_start_loc.tolist() == [0, 1, 2, 3, 19, 24]
    assert step.arrays.seq_lens.tolist() == [6, 6, 6, 16, 5]


def test_padding_that_no_row_can_hold_is_refused():
    batch = step_batch(decodes(3), block_size=4, max_model_len=16)
    with pytest.raises(ValueError, match="can't hold the padding tokens"):
        prepare_step(batch, full_padding(24, 3, 0))


@given(st.sets(st.integers(1, 60), min_size=1), st.integers(1, 8), st.integers(1, 20), st.data())
def test_the_padding_of_sizes_that_fit_always_fits(sizes, max_num_seqs, max_model_len, data):
    """The bound is sharp, too: of a size that was left out, some batch does not fit."""
    kept = fitting_sizes(sizes, max_num_seqs, max_model_len)

    def fits(size: int, num_tokens: int, num_reqs: int) -> bool:
        rows = min(size, max_num_seqs) + 1 - num_reqs
        return size - num_tokens <= rows * max_model_len

    def batches(size: int, smaller: list[int]) -> list[tuple[int, int]]:
        return [
            (num_tokens, num_reqs)
            for num_tokens in range(max(smaller, default=0) + 1, size + 1)
            for num_reqs in range(1, min(num_tokens, max_num_seqs) + 1)
        ]

    for index, size in enumerate(kept):
        assert all(fits(size, *batch) for batch in batches(size, kept[:index]))
    for size in sizes - {*kept}:
        smaller = [each for each in kept if each < size]
        assert not all(fits(size, *batch) for batch in batches(size, smaller))


def test_arrays_of_piecewise_graphs_stay_where_they_lay():
    graphs = CapturedGraphs(GraphMode.PIECEWISE, (8,), max_num_seqs=8)
    places = set()
    for count in (1, 5, 8):
        batch = step_batch(decodes(count), block_size=4, max_model_len=16)
        layout = prepare_step(batch, dispatch(graphs, count, count, False)).layout
        names = "input_ids", "positions", "slot_mapping", "is_padding"
        places.add(tuple(layout.arrays[name].offset for name in names))
    assert len(places) == 1


@pytest.mark.parametrize(
    ("mode", "tokens", "uniform", "part"),
    [
        ("FULL_DECODE_ONLY", 4, False, "the only kind that FULL_DECODE_ONLY captures"),
        ("FULL_DECODE_ONLY", 40, True, "more than 32 tokens"),
        ("FULL_AND_PIECEWISE", 40, False, "more than 32 tokens"),
        ("PIECEWISE", 8, False, "no graph was captured"),
    ],
)
def test_why_a_step_runs_eagerly(mode, tokens, uniform, part):
    assert part in why_eager(GraphMode(mode), tokens, 32, uniform)


@pytest.mark.parametrize(
    ("max_num_seqs", "query_len", "budget", "expected"),
    [(12, 1, 64, 12), (12, 4, 64, 48), (20, 4, 64, 64), (30, 3, 64, 63), (1, 4, 4, 4)],
)
def test_largest_decode_step(max_num_seqs, query_len, budget, expected):
    assert largest_decode(max_num_seqs, query_len, budget) == expected


@given(st.sets(st.integers(1, 600), min_size=1), st.integers(1, 80), st.data())
def test_thinning_keeps_the_largest_and_what_is_asked_for(sizes, limit, data):
    keep = data.draw(st.lists(st.sampled_from(sorted(sizes)), max_size=3))
    thinned = thin_sizes(sizes, limit, keep)
    assert thinned == sorted(set(thinned))
    assert set(thinned) <= sizes
    assert len(thinned) == min(limit, len(sizes))
    assert max(sizes) in thinned
    if limit > len(set(keep)):
        assert set(keep) <= set(thinned)


def test_thinning_spreads_over_the_order_of_sizes():
    sizes = [1, 2, 4, *range(8, 513, 8)]
    assert thin_sizes(sizes, 5, [256, 1]) == [1, 120, 256, 384, 512]
