"""Kernels of the V2 runner's sampler: each against its Triton source."""

import math

import numpy as np
import pytest
import torch
from vllm.v1.worker.gpu import structured_outputs
from vllm.v1.worker.gpu.sample import (
    bad_words,
    gumbel,
    logit_bias,
    logprob,
    min_p,
    output,
    penalties,
)

from tests.helpers.triton_source import Source, assert_same, kernels_of
from vllm_npu_prep.ops.triton import sampling_v2
from vllm_npu_prep.ops.triton.gumbel import gumbel_noise

SLOTS, VOCAB, WORDS, LENGTH = 6, 70, 3, 24
INF = math.inf


@pytest.fixture
def rng(seed):
    return np.random.default_rng(seed)


def tensor(values, dtype=torch.int32):
    return torch.tensor(np.asarray(values), dtype=dtype)


def rows_of(rng, count=5):
    """Logits, and the slot of each row; with ties, and some that are left out already."""
    logits = torch.tensor(rng.normal(0, 3, (count, VOCAB)).round(1), dtype=torch.float32)
    logits[rng.random((count, VOCAB)) < 0.05] = -INF
    return logits, torch.tensor(rng.permutation(SLOTS)[:count])


def test_temperature(rng):
    logits, slots = rows_of(rng, SLOTS)
    temperature = tensor([0, 1, 0.5, 2, 0.01, 7], torch.float32)
    source = Source(gumbel, "_temperature_kernel")
    given = logits, VOCAB, slots, temperature, VOCAB
    assert_same(sampling_v2.scale_by_temperature, source, (SLOTS, 9), *given, BLOCK_SIZE=8)


def test_min_p(rng):
    logits, slots = rows_of(rng, SLOTS)
    shares = tensor([0, 0.1, 0.9, 1, 0.001, 0], torch.float32)
    given = logits, VOCAB, slots, shares, VOCAB
    source = Source(min_p, "_min_p_kernel")
    assert_same(sampling_v2.limit_by_min_p, source, (SLOTS,), *given, BLOCK_SIZE=8)


def known_tokens(rng):
    """Tokens of each slot, with rubbish after them, and lengths of prompt and all."""
    tokens = tensor(rng.integers(0, VOCAB, (SLOTS, LENGTH)))
    prompt = rng.integers(1, 12, SLOTS)
    known = prompt + rng.integers(0, 10, SLOTS)
    for slot in range(SLOTS):
        tokens[slot, known[slot] :] = -99
    return tokens, tensor(prompt), tensor(known)


def test_counts_of_new_requests(rng):
    tokens, prompt, known = known_tokens(rng)
    slots = torch.tensor(rng.permutation(SLOTS)[:4])
    mask = torch.zeros(SLOTS, WORDS, dtype=torch.int32)
    counts = torch.zeros(SLOTS, VOCAB, dtype=torch.int32)
    given = slots, tokens, LENGTH, prompt, known, mask, WORDS, counts, VOCAB
    source = Source(penalties, "_bincount_kernel")
    assert_same(sampling_v2.count_tokens, source, (4, 3), *given, BLOCK_SIZE=8)


def drafted_rows(rng, counts):
    """Rows of logits of requests that verify so many drafts: slot, place, and input of each."""
    slots = rng.permutation(SLOTS)[: len(counts)]
    of_rows = [slot for slot, count in zip(slots, counts) for _ in range(count + 1)]
    places = [place for count in counts for place in range(count + 1)]
    logits = torch.tensor(rng.normal(0, 3, (len(places), VOCAB)), dtype=torch.float32)
    return logits, torch.tensor(of_rows), tensor(places), tensor(rng.integers(0, 3, len(places)))


WITH_DRAFTS = pytest.mark.parametrize("counts", [[0] * SLOTS, [2, 0, 3, 1]], ids=["none", "some"])


@WITH_DRAFTS
def test_penalties(rng, counts):
    """A row's drafts count, as far as they come before it."""
    mask = tensor(rng.integers(-(2**31), 2**31, (SLOTS, WORDS)))
    counted = tensor(rng.integers(0, 3, (SLOTS, VOCAB)))
    logits, slots, places, inputs = drafted_rows(rng, counts)
    repetition = tensor([1, 1.5, 0.7, 1, 2, 1.1], torch.float32)
    frequency = tensor([0, 0.5, 0, -0.3, 0, 2], torch.float32)
    presence = tensor([0, 0, 0.5, 0.2, 0, -1], torch.float32)
    assert_same(
        *(sampling_v2.apply_penalties, Source(penalties, "_penalties_kernel"), (len(slots), 2)),
        *(logits, VOCAB, slots, inputs, places, repetition, frequency, presence),
        *(mask, WORDS, counted, VOCAB, VOCAB),
        BLOCK_SIZE=64,
    )


@pytest.mark.parametrize("restores", [False, True])
def test_logit_bias(rng, restores):
    logits, slots = rows_of(rng, SLOTS)
    allowed, stops = (tensor(rng.integers(0, VOCAB, (SLOTS, 4))) for _ in range(2))
    biased = tensor([rng.permutation(VOCAB)[:4] for _ in range(SLOTS)])
    stops[:, 0], stops[3] = allowed[:, 0], allowed[3]
    bias = tensor(rng.normal(0, 5, (SLOTS, 4)), torch.float32)
    num_allowed = tensor([0, 1, 4, 4, 2, 0])
    num_bias, num_stops = (tensor(rng.integers(0, 5, SLOTS)) for _ in range(2))
    num_stops[0], num_stops[1], num_stops[3] = 2, 1, 4  # all that is allowed stops
    restore = tensor([0, 1, 0, 1, 1, 0])
    min_lens = tensor([5, 11, 3, 99, 99, 4])
    pos = (min_lens[slots] - tensor([1, 2, 1, 2, 2, 1])[slots]).long()  # one is long enough
    assert_same(
        *(sampling_v2.apply_logit_bias, Source(logit_bias, "_bias_kernel"), (SLOTS,)),
        *(logits, VOCAB, VOCAB, slots, num_allowed, allowed, 4, num_bias, biased, 4, bias, 4),
        *(pos, min_lens, num_stops, restore, stops, 4),
        BLOCK_SIZE=4,
        LOGITS_BLOCK_SIZE=8,
        CHECK_ALL_MASKED_ROWS=restores,
    )


@WITH_DRAFTS
def test_bad_words(rng, counts):
    """What comes before a word may be drafted."""
    forbidden = 0
    for _ in range(40):
        tokens, prompt, known = known_tokens(rng)
        tokens %= 3  # prefixes match often
        logits, slots, places, inputs = drafted_rows(rng, counts)
        words, offsets = torch.zeros(SLOTS, 16).int(), torch.zeros(SLOTS, 6).int()
        num_words = tensor(rng.integers(0, 6, SLOTS))
        for slot in range(SLOTS):
            end = 0
            for index in range(int(num_words[slot])):
                word = [*rng.integers(0, 3, rng.integers(0, 3)).tolist(), int(rng.integers(VOCAB))]
                words[slot, end : end + len(word)] = tensor(word)
                end += len(word)
                offsets[slot, index + 1] = end
        assert_same(
            *(sampling_v2.forbid_bad_words, Source(bad_words, "_bad_words_kernel")),
            *((len(slots), 5), logits, VOCAB, slots, words, 16, offsets, 6, num_words),
            *(tokens, LENGTH, prompt, known, inputs, places),
        )
        forbidden += int((logits == -INF).sum())
    assert forbidden > 100


def test_a_bad_word_outside_of_the_logits_forbids_nothing():
    tokens, one = tensor([[7, 3, 5, 0]]), tensor([1])
    words, offsets = tensor([[5, VOCAB + 1, 3, 5, 9]]), tensor([[0, 2, 5]])
    logits, none = torch.zeros(1, VOCAB), torch.zeros(1, dtype=torch.int32)
    sampling_v2.forbid_bad_words(
        *(logits, VOCAB, torch.tensor([0]), words, 5, offsets, 3, tensor([2])),
        *(tokens, 4, one, tensor([3]), none, none),
    )
    assert torch.nonzero(logits).tolist() == [[0, 9]]


def test_log_probabilities_and_ranks(rng):
    logits, _ = rows_of(rng)
    chosen = torch.tensor(rng.integers(0, VOCAB, (5, 3)))
    given = torch.empty(5, 3), logits, VOCAB, chosen, 3, 3, VOCAB
    source = Source(logprob, "_topk_log_softmax_kernel")
    sizes = {"BLOCK_SIZE": 8, "TOPK_BLOCK_SIZE": 2}
    assert_same(sampling_v2.log_softmax_of, source, (5,), *given, **sizes)
    given = torch.empty(5, dtype=torch.int64), logits, VOCAB, chosen[:, 0].contiguous(), VOCAB
    source = Source(logprob, "_ranks_kernel")
    assert_same(sampling_v2.ranks_of, source, (5,), *given, BLOCK_SIZE=8)


@pytest.mark.parametrize("num_topk", [0, 2, 5])
def test_token_ids_of_log_probabilities(rng, num_topk):
    slots = torch.tensor(rng.permutation(SLOTS)[:5])
    sampled = torch.tensor(rng.integers(0, VOCAB, 5))
    best = tensor(rng.integers(0, VOCAB, (5, max(num_topk, 1))))
    counts, chosen = tensor([0, 3, 1, 0, 2, 3]), tensor(rng.integers(0, VOCAB, (SLOTS, 8)))
    columns = max(num_topk, 3)
    given = torch.zeros(5, 1 + columns, dtype=torch.int64)
    valid = torch.zeros(5, 1 + columns, dtype=torch.bool)
    assert_same(
        *(sampling_v2.fill_logprob_token_ids, Source(logprob, "_fill_logprob_token_ids_kernel")),
        *((5,), given, 1 + columns, valid, 1 + columns, sampled, best, best.shape[1], slots),
        *(counts, chosen, 8),
        NUM_TOPK=num_topk,
        PADDED_COLS=8,
    )


def test_tokens_after_those_of_prompts(rng):
    tokens = tensor(rng.integers(0, VOCAB, (SLOTS, LENGTH)))
    slots = torch.tensor(rng.permutation(SLOTS)[:3])
    starts, computed = tensor([0, 5, 6, 14]), tensor([0, 4, 2, 9, 16, 1])
    computed[slots[2]] = LENGTH - 8  # up to the last token, which has none after it
    given = torch.zeros(14, dtype=torch.int64)
    sampling_v2.list_prompt_tokens(given, starts, slots, computed, tokens, LENGTH, BLOCK_SIZE=4)
    for row, slot in enumerate(slots.tolist()):
        first = int(starts[row])
        for token in range(first, int(starts[row + 1])):
            place = int(computed[slot]) + 1 + token - first
            if place < LENGTH:
                assert given[token] == tokens[slot, place]


@pytest.mark.parametrize("stride", [1, 3])
def test_grammar(rng, stride):
    borders = tensor([0, 1, 2, 3, 4, 5] if stride == 1 else [0, 2, 3, 3, 4, 5])
    logits, _ = rows_of(rng)
    asked = [0, 2, 4] if stride == 1 else [0, 1, 2, 5, 6, 9]  # 2, 5 and 6 have no row of logits
    masks = tensor(rng.integers(-(2**31), 2**31, (len(asked), WORDS)))
    assert_same(
        *(sampling_v2.apply_grammar_bitmask,),
        *(Source(structured_outputs, "_apply_grammar_bitmask_kernel"), (len(asked), 3)),
        *(logits, VOCAB, tensor(asked), borders, masks, WORDS, VOCAB),
        MASK_STRIDE=stride,
        BLOCK_SIZE=32,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@np.errstate(over="ignore")
def test_noise_of_seeds(dtype):
    seeds = torch.tensor([0, 1, -1, 2**62 + 12345, -(2**63)])
    pos = torch.tensor([0, 7, 4095, 3, 131071])
    noise, source = gumbel_noise(seeds, pos, VOCAB, dtype), kernels_of(gumbel)
    assert noise.dtype == dtype
    for row, draw in enumerate(zip(seeds.numpy(), pos.numpy())):
        if dtype == torch.float32:
            uniform = source["murmur3_uniform32"](*draw, np.arange(VOCAB))
            expected = -np.log(-source["_log1p_neg_stable"](uniform))
            tolerance = 1e-3
        else:
            uniform = source["murmur3_uniform64"](*draw, np.arange(VOCAB))
            expected, tolerance = -np.log(-np.log(uniform)), 1e-12
        np.testing.assert_allclose(noise[row], expected, rtol=tolerance, atol=tolerance / 10)


@pytest.mark.parametrize("per_request", [1, 3])
def test_tokens_that_were_kept(rng, per_request):
    """Of rows of requests with a sample less than they may have, and of one without any."""
    logits, _ = rows_of(rng, 4 * per_request)
    logits[rng.random(logits.shape) < 0.7] = -INF
    logits[0, 3], logits[1, 4] = INF, math.nan
    borders = tensor(range(0, 4 * per_request + 1, per_request))
    sampled = tensor([per_request, 0, per_request, max(1, per_request - 1)])
    num_rows, most = 4 * per_request, 9
    ids = torch.zeros(num_rows, most, dtype=torch.int32)
    packed, counts = (
        torch.zeros(num_rows, -(-VOCAB // 8), dtype=torch.uint8),
        tensor([7] * num_rows),
    )
    assert_same(
        *(sampling_v2.list_kept_tokens, Source(output, "_compact_sampling_mask_kernel")),
        *((num_rows,), logits, VOCAB, 1, borders, sampled, ids, most, packed, 9, counts),
        *(VOCAB, most),
        ROWS_PER_REQUEST=per_request,
        BLOCK_SIZE=64,
    )
