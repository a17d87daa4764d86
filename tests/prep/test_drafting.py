"""Lengths of draft passes against a scalar reading of the kernels that the device counts with."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from vllm_npu_prep.prep.draft_lengths import (
    next_draft_seq_lens,
    num_rejected_tokens,
    token_positions,
)


def scalar_rejected(num_drafts: int, num_valid: int) -> int:
    """`eagle_prepare_inputs_padded_kernel`, one request."""
    return num_drafts + 1 - num_valid if num_drafts > 0 else 0


def scalar_step(position: int, seq_len: int, max_model_len: int) -> tuple[int, int]:
    """`eagle_step_slot_mapping_metadata_kernel`, one request: its next position and length."""
    if position + 1 >= max_model_len:
        return 0, 1
    return position + 1, min(seq_len + 1, max_model_len)


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 7)), min_size=1, max_size=9))
def test_rejected_tokens_are_those_of_the_kernel(requests):
    requests = [(drafts, min(valid, drafts + 1)) for drafts, valid in requests]
    drafts, valid = zip(*requests)
    rejected = num_rejected_tokens(list(drafts), np.array(valid, np.int32))
    assert rejected.tolist() == [scalar_rejected(*request) for request in requests]
    assert rejected.dtype == np.int32


@given(st.lists(st.integers(1, 24), min_size=1, max_size=9), st.integers(1, 5), st.integers(24, 26))
def test_lengths_follow_the_positions_over_several_passes(lengths, passes, max_model_len):
    seq_lens = np.array(lengths, np.int32)
    expected = [(length - 1, length) for length in lengths]
    for _ in range(passes):
        before = seq_lens.copy()
        following = next_draft_seq_lens(seq_lens, max_model_len)
        assert np.array_equal(seq_lens, before), "what attention still reads is left alone"
        seq_lens = following
        expected = [scalar_step(*request, max_model_len) for request in expected]
        assert seq_lens.tolist() == [seq_len for _, seq_len in expected]


@given(st.lists(st.tuples(st.integers(1, 6), st.integers(0, 20)), min_size=1, max_size=9))
def test_positions_of_a_pass_end_with_each_sequence(requests):
    query_lens, computed = zip(*requests)
    starts = np.cumsum([0, *query_lens]).astype(np.int32)
    seq_lens = np.add(query_lens, computed).astype(np.int32)
    expected = [first + offset for length, first in requests for offset in range(length)]
    positions = token_positions(starts, seq_lens)
    assert positions.tolist() == expected and positions.dtype == np.int64
