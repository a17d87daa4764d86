"""The rejection sampler's kernels against the source of Triton's, launched as vLLM does."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.kernels import Drafts
from vllm_npu_prep.ops import register_overrides
from vllm_npu_prep.ops.triton.rejection import sample_recovered_tokens

drafts = st.builds(
    Drafts, st.lists(st.integers(0, 4), min_size=1, max_size=6), st.integers(0, 10**6)
)

register_overrides("replace")


@settings(max_examples=100)
@given(drafts, st.booleans())
def test_greedy_acceptance_equals_the_source(d, mixed):
    d.greedy(mixed).check()


@settings(max_examples=100)
@given(drafts, st.booleans())
def test_random_acceptance_equals_the_source(d, with_draft_probs):
    d.random(with_draft_probs).check()


@settings(max_examples=40)
@given(drafts.filter(lambda d: any(d.lengths)), st.booleans())
def test_recovered_tokens_equal_the_source(d, with_draft_probs):
    d.recover(with_draft_probs).check()


@settings(max_examples=20)
@given(drafts.filter(lambda d: any(d.lengths)), st.booleans())
def test_drafts_given_as_a_column_recover_the_same_tokens(d, with_draft_probs):
    """The kernel reads them where they are, whatever their shape: vLLM's tests give a column."""
    row, column = torch.zeros(sum(d.lengths)).int(), torch.zeros(sum(d.lengths), 1).int()
    probs = d.draft_probs if with_draft_probs else None
    rest = probs, d.target_probs, d.inv_q, d.target_probs.shape[1], 0, probs is None, False
    sample_recovered_tokens(row, d.cu, d.draft, *rest)
    sample_recovered_tokens(column, d.cu, d.draft[:, None], *rest)
    assert column[:, 0].tolist() == row.tolist()


@settings(max_examples=40)
@given(drafts)
def test_expand_repeats_and_replaces(d):
    d.expand(replace_to=100).check()
