"""Torch replacements of Triton kernels against a scalar reading of the Triton source."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_npu_prep.ops import rejection
from vllm_npu_prep.ops.slot_mapping import compute_slot_mapping

VOCAB = 7
PLACEHOLDER = -1


class Drafts:
    """Random drafts of several requests; few distinct tokens, so that some are accepted."""

    def __init__(self, lengths: list[int], seed: int):
        generator = torch.Generator().manual_seed(seed)
        self.lengths = lengths
        total = sum(lengths)
        self.cu = torch.tensor(lengths).cumsum(0).int()
        self.max_len = max(*lengths, 1)

        def probs(rows):
            return torch.rand(rows, VOCAB, generator=generator).softmax(-1)

        def tokens(rows, high=VOCAB):
            return torch.randint(0, high, (rows,), generator=generator)

        self.draft = tokens(total, 3).int()
        self.argmax = tokens(total, 3)
        self.draft_probs, self.target_probs = probs(total), probs(total)
        self.bonus, self.recovered = tokens(len(lengths)), tokens(total)
        self.uniform = torch.rand(total, generator=generator, dtype=torch.float64)
        self.is_greedy = torch.rand(len(lengths), generator=generator) < 0.5
        self.inv_q = torch.rand(len(lengths), VOCAB, generator=generator).reciprocal()
        self.output = torch.full((len(lengths), self.max_len + 1), PLACEHOLDER, dtype=torch.int32)
        if total:
            self.draft[int(torch.randint(0, total, (1,), generator=generator))] = -1  # padded draft

    def spans(self):
        start = 0
        for row, length in enumerate(self.lengths):
            yield row, start, length
            start += length


drafts = st.builds(
    Drafts,
    st.lists(st.integers(0, 4), min_size=1, max_size=6),
    st.integers(0, 10**6),
)


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
                accepted = bool(d.target_probs[start + pos, token] / p >= d.uniform[start + pos])
            out[row, pos] = token if accepted else int(d.recovered[start + pos])
            rejected = not accepted
        if not rejected:
            out[row, length] = d.bonus[row]
    return out


@settings(max_examples=300)
@given(drafts, st.booleans())
def test_greedy_acceptance_equals_the_scalar_reading(d, mixed):
    is_greedy = d.is_greedy if mixed else None
    expected = scalar_greedy(d, is_greedy)
    rejection.rejection_greedy_sample(
        d.output, d.cu, d.draft, d.argmax, d.bonus, is_greedy, d.max_len, None, None, False
    )
    assert torch.equal(d.output, expected)


@settings(max_examples=300)
@given(drafts.filter(lambda d: any(d.lengths)), st.booleans())
def test_random_acceptance_equals_the_scalar_reading(d, with_draft_probs):
    draft_probs = d.draft_probs if with_draft_probs else None
    expected = scalar_random(d, draft_probs)
    rejection.rejection_random_sample(
        d.output,
        d.cu,
        d.draft,
        draft_probs,
        d.target_probs,
        d.bonus,
        d.recovered,
        d.uniform,
        d.is_greedy,
        d.max_len,
        VOCAB,
        None,
        draft_probs is None,
        False,
    )
    assert torch.equal(d.output, expected)


@settings(max_examples=300)
@given(drafts.filter(lambda d: any(d.lengths)), st.booleans())
def test_recovered_tokens_equal_the_scalar_reading(d, with_draft_probs):
    out = torch.zeros(sum(d.lengths), dtype=torch.int64)
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
    rejection.sample_recovered_tokens(
        out,
        d.cu,
        d.draft,
        d.draft_probs if with_draft_probs else None,
        d.target_probs,
        d.inv_q,
        VOCAB,
        8,
        not with_draft_probs,
        False,
    )
    assert out.tolist() == expected


@settings(max_examples=100)
@given(drafts)
def test_expand_repeats_and_replaces(d):
    values = d.bonus.clone()
    out = torch.full((sum(d.lengths) + 2,), -9)
    rejection.expand(out, values, d.cu, int(values[0]), 100, 32)
    expected = []
    for row, _, length in d.spans():
        value = int(values[row])
        expected += [100 if value == values[0] else value] * length
    assert out.tolist() == [*expected, -9, -9]


@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_slot_mapping_of_upstreams_tables(block_size):
    table = torch.arange(40, dtype=torch.int32).view(2, 20) + 1
    positions = torch.tensor([3, 0, 1, 2])
    out = torch.zeros(6, dtype=torch.int64)
    starts = torch.tensor([0, 1, 4], dtype=torch.int32)
    compute_slot_mapping(4, 6, starts, positions, table, 20, out, block_size, 1, 0, 1, -1, 1024)
    expected = []
    for row, position in [(0, 3), (1, 0), (1, 1), (1, 2)]:
        block = int(table[row, position // block_size])
        expected.append(block * block_size + position % block_size)
    assert out.tolist() == [*expected, -1, -1]
