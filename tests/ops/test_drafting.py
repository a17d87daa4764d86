"""The drafters' kernels against the source of Triton's, launched as vLLM does."""

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.kernels import (
    expanded_inputs,
    next_draft_step,
    padded_inputs,
    padded_next_tokens,
)
from vllm_npu_prep.ops import register_overrides

seeds = st.integers(0, 10**6)

register_overrides("replace")


@settings(max_examples=100)
@given(
    st.integers(1, 6),
    st.integers(0, 3),
    st.sampled_from([1, 4, 16]),
    st.integers(1, 50),
    st.booleans(),
    seeds,
)
def test_a_draft_step_equals_the_source(batch, padding, block_size, max_len, in_place, seed):
    next_draft_step(batch, padding, block_size, max_len, in_place, seed).check()


@settings(max_examples=100)
@given(st.lists(st.integers(0, 4), min_size=1, max_size=7), seeds)
def test_padded_inputs_equal_the_source(num_drafts, seed):
    padded_inputs(num_drafts, seed).check()


@settings(max_examples=100)
@given(st.integers(1, 7), st.integers(1, 5), seeds)
def test_padded_next_tokens_equal_the_source(num_reqs, num_sampled, seed):
    padded_next_tokens(num_reqs, num_sampled, seed).check()


@settings(max_examples=100)
@given(st.lists(st.integers(1, 6), min_size=1, max_size=6), st.integers(1, 4), st.booleans(), seeds)
def test_expanded_inputs_equal_the_source(query_lens, num_slots, shift, seed):
    expanded_inputs(query_lens, num_slots, shift, seed).check()
