"""The rejection sampler's kernels against a scalar reading of Triton's, launched as vLLM does."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.kernels import VOCAB, Drafts
from vllm_npu_prep.ops import register_overrides

drafts = st.builds(
    Drafts, st.lists(st.integers(0, 4), min_size=1, max_size=6), st.integers(0, 10**6)
)

register_overrides("replace")


def scalar_greedy(d: Drafts, is_greedy) -> torch.Tensor:
    out = d.output.clone()
    for row, start, length in d.spans():
        if is_greedy is not None and not is_greedy[row]:
            continue
        rejected = False
        for pos in range(length):
            if not rejected:
                out[row, pos] = d.argmax[start + pos]
                rejected = bool(d.draft[start + pos] != d.argmax[start + pos])
        if not rejected:
            out[row, length] = d.bonus[row]
    return out


def scalar_random(d: Drafts, draft_probs) -> torch.Tensor:
    out = d.output.clone()
    for row, start, length in d.spans():
        if d.is_greedy[row]:
            continue
        rejected = False
        for pos in range(length):
            if rejected:
                continue
            token = int(d.draft[start + pos])
            accepted = False
            if token >= 0:
                p = 1.0 if draft_probs is None else draft_probs[start + pos, token]
                q = d.target_probs[start + pos, token]
                accepted = p > 0 and bool(q / p >= d.uniform[start + pos])
            out[row, pos] = token if accepted else int(d.recovered[start + pos])
            rejected = not accepted
        if not rejected:
            out[row, length] = d.bonus[row]
    return out


@settings(max_examples=300)
@given(drafts, st.booleans())
def test_greedy_acceptance_equals_the_scalar_reading(d, mixed):
    expected = scalar_greedy(d, d.is_greedy if mixed else None)
    assert torch.equal(d.greedy(mixed).run()["output_token_ids"], expected)


@settings(max_examples=300)
@given(drafts, st.booleans())
def test_random_acceptance_equals_the_scalar_reading(d, with_draft_probs):
    expected = scalar_random(d, d.draft_probs if with_draft_probs else None)
    assert torch.equal(d.random(with_draft_probs).run()["output_token_ids"], expected)


@settings(max_examples=300)
@given(drafts.filter(lambda d: any(d.lengths)), st.booleans())
def test_recovered_tokens_equal_the_scalar_reading(d, with_draft_probs):
    expected = []
    for row, start, length in d.spans():
        for index in range(start, start + length):
            best, best_score = 0, float("-inf")
            for token in range(VOCAB):
                p = d.target_probs[index, token]
                if with_draft_probs:
                    p = max(p - d.draft_probs[index, token], torch.tensor(0.0))
                elif token == d.draft[index]:
                    p = torch.tensor(0.0)
                if p * d.inv_q[row, token] > best_score:
                    best, best_score = token, p * d.inv_q[row, token]
            expected.append(best)
    assert d.recover(with_draft_probs).run()["output_token_ids"].tolist() == expected


@settings(max_examples=100)
@given(drafts)
def test_expand_repeats_and_replaces(d):
    expected = []
    for row, _, length in d.spans():
        value = int(d.bonus[row])
        expected += [100 if value == int(d.bonus[0]) else value] * length
    assert d.expand(replace_to=100).run()["output"].tolist() == expected
