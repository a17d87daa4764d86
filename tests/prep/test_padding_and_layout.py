"""Graph padding rules and the buffer layout."""

import dataclasses
from itertools import pairwise

import numpy as np
import pytest

from tests.helpers.batches import decodes, step_batch
from vllm_npu_prep.prep.batch import StepBatch, device_has_all, prepare_step
from vllm_npu_prep.prep.layout import ALIGNMENT, StepLayout, largest_step, targets_per_row
from vllm_npu_prep.prep.padding import Padding, full_graph_padding, no_padding, uniform_query_len
from vllm_npu_prep.prep.shape import EngineShape


def with_tables(batch: StepBatch, **tables) -> StepBatch:
    return dataclasses.replace(batch, tables=dataclasses.replace(batch.tables, **tables))


@pytest.mark.parametrize(
    ("tokens", "reqs", "decode_len", "sizes", "expected"),
    [
        (3, 3, 1, [1, 2, 4, 8], Padding(4, 4, 1)),
        (4, 4, 1, [1, 2, 4, 8], Padding(4, 4, 1)),
        (5, 5, 1, [8, 4, 2, 1], Padding(8, 8, 1)),
        (9, 9, 1, [1, 2, 4, 8], Padding(9, 9)),  # above the largest: eager
        (6, 2, 3, [4, 8, 12], Padding(12, 4, 3)),  # sizes are multiples of the decode length
        (6, 2, 3, [8], Padding(8, 3)),  # none is: one dummy request takes the rest
        (10, 3, 0, [16], Padding(16, 4)),
        (16, 3, 0, [16], Padding(16, 3)),
        (3, 3, 0, [24], Padding(24, 6)),  # a padding request holds 8 tokens
    ],
)
def test_padded_sizes(tokens, reqs, decode_len, sizes, expected):
    assert full_graph_padding(tokens, reqs, decode_len, sizes, max_model_len=8) == expected


def test_uniform_query_len_tells_decodes_from_equal_prompts():
    three, none = np.array([3, 3], np.int32), np.array([0, 0], np.int32)
    assert uniform_query_len(three, none) == 0
    assert uniform_query_len(three, none + 2) == 3
    assert uniform_query_len(none + 1, none) == 1


@pytest.mark.parametrize("num_groups", [1, 3])
def test_layout_arrays_are_aligned_and_do_not_overlap(num_groups):
    layout = StepLayout(37, 5, EngineShape(num_groups))
    arrays = list(layout.arrays.values())
    for left, right in pairwise(arrays):
        assert left.end <= right.offset
        assert right.offset % ALIGNMENT == 0
    assert arrays[-1].end <= layout.variable_offset


def test_parts_of_the_tail_do_not_overlap():
    layout = StepLayout(37, 5, EngineShape(2))
    assert layout.nbytes() == layout.variable_offset
    targets, indices, ids = layout.variable_part(3, 7)
    assert targets.start * 8 == layout.variable_offset
    assert (targets.stop - targets.start, indices.stop - indices.start) == (3, 7)
    assert targets.stop == indices.start
    assert ids.start * 4 == indices.stop * 8
    assert (ids.stop - ids.start, ids.stop * 4) == (7, layout.nbytes(3, 7))


def test_logits_are_bounded_by_tokens_and_by_requests():
    assert StepLayout(4096, 2).max_logits == 2
    three_drafts = EngineShape(max_logits_per_req=4)
    assert StepLayout(4096, 2, three_drafts).max_logits == 8
    assert StepLayout(5, 2, three_drafts).max_logits == 5
    assert StepLayout(4096, 2, three_drafts).max_drafts == 6


def test_a_buffer_too_small_is_refused():
    with pytest.raises(ValueError, match="needs"):
        StepLayout(10, 2).views(np.zeros(8, np.uint8))


def test_largest_step_holds_every_step():
    shape = EngineShape(2, max_logits_per_req=3)
    largest = largest_step(shape, 64, 8, 100)
    for tokens in (1, 17, 64):
        for reqs in range(1, 11):
            assert StepLayout(tokens, reqs, shape).nbytes(8 * targets_per_row(2), 100) <= largest


def test_groups_get_slots_of_their_own_tables():
    batch = step_batch(decodes(2), block_size=4, max_model_len=16)
    table = batch.tables.block_table(0)
    both = prepare_step(
        with_tables(
            batch,
            block_sizes=np.array([4, 2], np.int32),
            shape=EngineShape(2),
            **device_has_all([table, np.pad(table + 10, ((0, 0), (0, 3)))]),
        ),
        no_padding(2, 2),
    )
    # Position 5: the second block of four tokens, the third of two.
    assert both.slot_mapping[0].tolist() == [2 * 4 + 1, 4 * 4 + 1]
    assert both.slot_mapping[1].tolist() == [10 * 2 + 1, 10 * 2 + 1]
    assert both.block_numbers(1).tolist() == [10, 10]


def test_tables_of_another_type_are_refused():
    """The fused pass reads them by address."""
    batch = step_batch(decodes(1), block_size=4, max_model_len=16)
    with pytest.raises(TypeError, match="num_tokens is int64"):
        with_tables(batch, num_tokens=batch.tables.num_tokens.astype(np.int64))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"num_scheduled_tokens": [1, 1, 1, 1]}, "more requests than rows"),
        ({"num_scheduled_tokens": [1, 1, 2]}, "past the layout"),
        ({"num_scheduled_tokens": [1, 0, 1]}, "past the layout"),
        ({"num_computed_tokens": [5, 16, 5]}, "past max_model_len"),
        ({"num_computed_tokens": [5, -1, 5]}, "past max_model_len"),
        ({"num_draft_tokens": [0, 1, 0]}, "more drafts than scheduled tokens"),
        ({"max_num_blocks": [1]}, "longer than its row of the block table"),
        ({"previous_rows": [0, 7, 1]}, "past the last step's samples"),
        ({"num_sampled_rows": 1 << 20}, "no room for the last step's samples"),
        ({"num_blocks": [[5, 5, 5, 0, 0]]}, "no room for the new block-table entries"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_a_step_that_does_not_fit_writes_past_no_end(wrong, message):
    """The fused pass works on addresses: nothing else would stop it."""
    batch = step_batch(decodes(3), block_size=4, max_model_len=16)
    layout = StepLayout(3, 3)
    arrays = layout.views(np.zeros(layout.nbytes(3), np.uint8))
    batch.previous_rows, batch.num_sampled_rows = np.zeros(3, np.int64), 3
    prepare_step(batch, no_padding(3, 3), layout, arrays)
    for name, value in wrong.items():
        if name == "num_sampled_rows":
            batch.num_sampled_rows = value
        elif name == "previous_rows":
            batch.previous_rows = np.array(value, np.int64)
        elif hasattr(batch, name):
            setattr(batch, name, np.array(value, np.int32))
        else:
            before = getattr(batch.tables, name)
            before.flat[: np.size(value)] = np.ravel(value)
    with pytest.raises(ValueError, match=message):
        prepare_step(batch, no_padding(3, 3), layout, arrays)


def test_a_buffer_of_its_own_has_room_for_every_block_change():
    batch = step_batch(decodes(3), block_size=4, max_model_len=16)
    batch.tables.num_blocks[0, :3] = 2
    assert prepare_step(batch, no_padding(3, 3)).num_block_changes == 6
    assert prepare_step(batch, no_padding(3, 3)).num_block_changes == 0


def test_last_step_samples_are_placed_before_the_drafts():
    batch = step_batch(decodes(3, drafts=2), block_size=4, max_model_len=16)
    batch = dataclasses.replace(
        batch, previous_rows=np.array([4, -1, 0], np.int64), num_sampled_rows=6
    )
    step = prepare_step(batch, no_padding(9, 3))
    # Rows 1, 2, 3 and 5 belong to nobody any more: the place behind the tokens.
    first = step.layout.offset_int32("input_ids")
    assert (step.arrays.variable_int64[:6] - first).tolist() == [6, 9, 9, 9, 0, 9]
    assert step.nbytes == step.layout.variable_offset + 6 * 8


def test_drafts_of_the_last_step_are_placed_twice():
    """Rows of the last step: next token and three drafts each; a request may verify fewer."""
    batch = step_batch(decodes(3, drafts=2), block_size=4, max_model_len=16)
    rows = np.array([2, -1, 0], np.int64)
    batch = dataclasses.replace(batch, previous_rows=rows, num_sampled_rows=3, num_sampled_drafts=3)
    step = prepare_step(batch, no_padding(9, 3))
    tokens, drafts = (step.layout.offset_int32(n) for n in ("input_ids", "draft_token_ids"))
    spare = tokens + 9
    rows = step.arrays.variable_int64[: batch.num_targets].reshape(3, 7).tolist()
    assert rows[0] == [tokens + 6, tokens + 7, tokens + 8, spare, drafts + 4, drafts + 5, spare]
    assert rows[1] == [spare] * 7
    assert rows[2] == [tokens, tokens + 1, tokens + 2, spare, drafts, drafts + 1, spare]
    assert step.nbytes == step.layout.variable_offset + 21 * 8


def test_a_place_kept_for_a_draft_is_no_token_and_never_accepted():
    batch = step_batch(decodes(2, drafts=2), block_size=4, max_model_len=16)
    computed = batch.tables.num_computed_tokens
    batch.tables.token_ids[0, computed[0] + 1] = -1
    step = prepare_step(batch, no_padding(6, 2))
    assert step.input_ids[1] == 0
    assert step.draft_token_ids[0] == -1
    assert step.draft_token_ids[1:].tolist() == step.input_ids[[2, 4, 5]].tolist()


def test_without_speculation_nothing_of_it_is_laid_out():
    assert StepLayout(8, 4).max_drafts == 0
    arrays = StepLayout(8, 4).arrays
    drafts = ("target_logits_indices", "draft_token_ids", "bonus_logits_indices")
    assert [arrays[name].nbytes for name in drafts] == [0, 0, 0]
