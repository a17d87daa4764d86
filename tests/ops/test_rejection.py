"""The rejection sampler's kernels against the source of Triton's, launched as vLLM does."""

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.kernels import Drafts
from vllm_npu_prep.ops import register_overrides

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


@settings(max_examples=40)
@given(drafts)
def test_expand_repeats_and_replaces(d):
    d.expand(replace_to=100).check()
