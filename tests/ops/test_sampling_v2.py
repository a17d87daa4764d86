"""Kernels of the V2 runner's sampler: each against a scalar reading of its Triton source."""

import math

import numpy as np
import pytest
import torch

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


def equal(given, expected):
    torch.testing.assert_close(given, expected, rtol=1e-5, atol=1e-5)


def test_temperature(rng):
    logits, slots = rows_of(rng, SLOTS)
    temperature = tensor([0, 1, 0.5, 2, 0.01, 7], torch.float32)
    expected = logits.clone()
    for row, slot in enumerate(slots):
        if temperature[slot] not in (0, 1):
            expected[row] /= temperature[slot]
    sampling_v2.scale_by_temperature(logits, VOCAB, slots, temperature, VOCAB, BLOCK_SIZE=8)
    equal(logits, expected)


def test_min_p(rng):
    logits, slots = rows_of(rng, SLOTS)
    min_p = tensor([0, 0.1, 0.9, 1, 0.001, 0], torch.float32)
    expected = logits.clone()
    for row, slot in enumerate(slots):
        if min_p[slot] == 0:
            continue
        least = float(logits[row].max()) + math.log(float(min_p[slot]))
        for token in range(VOCAB):
            if float(logits[row, token]) < least:
                expected[row, token] = -INF
    sampling_v2.limit_by_min_p(logits, VOCAB, slots, min_p, VOCAB)
    equal(logits, expected)


def known_tokens(rng):
    """Tokens of each slot, with rubbish after them, and lengths of prompt and all."""
    tokens = tensor(rng.integers(0, VOCAB, (SLOTS, LENGTH)))
    prompt = rng.integers(1, 12, SLOTS)
    known = prompt + rng.integers(0, 10, SLOTS)
    for slot in range(SLOTS):
        tokens[slot, known[slot] :] = -99
    return tokens, tensor(prompt), tensor(known)


def counted(tokens, prompt, known, slots):
    mask = torch.zeros(SLOTS, WORDS, dtype=torch.int32)
    counts = torch.zeros(SLOTS, VOCAB, dtype=torch.int32)
    for slot in slots.tolist():
        words = [0] * WORDS
        for place in range(int(known[slot])):
            token = int(tokens[slot, place])
            if place < prompt[slot]:
                words[token // 32] |= 1 << token % 32
            else:
                counts[slot, token] += 1
        mask[slot] = torch.tensor(np.array(words, np.uint32).view(np.int32))
    return mask, counts


def test_counts_of_new_requests(rng):
    tokens, prompt, known = known_tokens(rng)
    slots = torch.tensor(rng.permutation(SLOTS)[:4])
    expected_mask, expected_counts = counted(tokens, prompt, known, slots)
    mask, counts = torch.zeros_like(expected_mask), torch.zeros_like(expected_counts)
    sampling_v2.count_tokens(
        slots, tokens, LENGTH, prompt, known, mask, WORDS, counts, VOCAB, BLOCK_SIZE=8
    )
    assert torch.equal(mask, expected_mask)
    assert torch.equal(counts, expected_counts)


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
    tokens, prompt, known = known_tokens(rng)
    tokens %= 7  # several times
    mask, known_counts = counted(tokens, prompt, known, torch.arange(SLOTS))
    logits, slots, places, inputs = drafted_rows(rng, counts)
    repetition = tensor([1, 1.5, 0.7, 1, 2, 1.1], torch.float32)
    frequency = tensor([0, 0.5, 0, -0.3, 0, 2], torch.float32)
    presence = tensor([0, 0, 0.5, 0.2, 0, -1], torch.float32)
    expected = logits.clone()
    for row, (slot, place) in enumerate(zip(slots.tolist(), places.tolist())):
        before = inputs[row - place + 1 : row + 1].tolist()
        for token in range(VOCAB):
            value = float(expected[row, token])
            count = int(known_counts[slot, token]) + before.count(token)
            in_prompt = int(mask[slot, token // 32]) >> token % 32 & 1
            if in_prompt or count:
                factor = float(repetition[slot])
                value = value / factor if value > 0 else value * factor
            value -= float(frequency[slot]) * count
            expected[row, token] = value - float(presence[slot]) * (count > 0)
    sampling_v2.apply_penalties(
        *(logits, VOCAB, slots, inputs, places, repetition, frequency, presence),
        *(mask, WORDS, known_counts, VOCAB, VOCAB),
    )
    equal(logits, expected)


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
    expected = logits.clone()
    for row, slot in enumerate(slots.tolist()):
        line = expected[row]
        if num_allowed[slot]:
            kept = {int(t): float(line[t]) for t in allowed[slot, : num_allowed[slot]]}
            line[:] = -INF
            for token, value in kept.items():
                line[token] = value
        for index in range(int(num_bias[slot])):
            line[biased[slot, index]] += bias[slot, index]
        if num_stops[slot] and pos[row] + 1 < min_lens[slot]:
            of_stops = {int(t): float(line[t]) for t in stops[slot, : num_stops[slot]]}
            for token in of_stops:
                line[token] = -INF
            if restores and restore[slot] and float(line.max()) == -INF:
                for token, value in of_stops.items():
                    if -INF < value < INF:
                        line[token] = value
    sampling_v2.apply_logit_bias(
        *(logits, VOCAB, VOCAB, slots, num_allowed, allowed, 4, num_bias, biased, 4, bias, 4),
        *(pos, min_lens, num_stops, restore, stops, 4),
        BLOCK_SIZE=4,
        LOGITS_BLOCK_SIZE=8,
        CHECK_ALL_MASKED_ROWS=restores,
    )
    equal(logits, expected)


@WITH_DRAFTS
def test_bad_words(rng, counts):
    """What comes before a word may be drafted."""
    hits = 0
    for _ in range(40):
        tokens, prompt, known = known_tokens(rng)
        tokens %= 3  # prefixes match often
        logits, slots, places, inputs = drafted_rows(rng, counts)
        words, offsets = torch.zeros(SLOTS, 16).int(), torch.zeros(SLOTS, 6).int()
        num_words = tensor(rng.integers(0, 6, SLOTS))
        expected = logits.clone()
        for slot in range(SLOTS):
            end = 0
            for index in range(int(num_words[slot])):
                word = [*rng.integers(0, 3, rng.integers(0, 3)).tolist(), int(rng.integers(VOCAB))]
                words[slot, end : end + len(word)] = tensor(word)
                end += len(word)
                offsets[slot, index + 1] = end
                prefix = word[:-1]
                for row in torch.nonzero(slots == slot)[:, 0].tolist():
                    place = int(places[row])
                    output = tokens[slot, prompt[slot] : known[slot]].tolist()
                    output += inputs[row - place + 1 : row + 1].tolist()
                    if len(prefix) <= len(output) and output[len(output) - len(prefix) :] == prefix:
                        expected[row, word[-1]] = -INF
                        hits += bool(prefix) and place == max(counts)
        sampling_v2.forbid_bad_words(
            *(logits, VOCAB, slots, words, 16, offsets, 6, num_words),
            *(tokens, LENGTH, prompt, known, inputs, places),
        )
        equal(logits, expected)
    assert hits > 10


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
    output, ranks = torch.empty(5, 3), torch.empty(5, dtype=torch.int64)
    sampling_v2.log_softmax_of(output, logits, VOCAB, chosen, 3, 3, VOCAB, BLOCK_SIZE=8)
    sampling_v2.ranks_of(ranks, logits, VOCAB, chosen[:, 0], VOCAB, BLOCK_SIZE=8)
    for row in range(5):
        total = sum(math.exp(value) for value in logits[row].tolist())
        for column, token in enumerate(chosen[row].tolist()):
            expected = float(logits[row, token]) - math.log(total)
            assert float(output[row, column]) == pytest.approx(expected, abs=1e-5)
        own = float(logits[row, chosen[row, 0]])
        assert int(ranks[row]) == sum(value >= own for value in logits[row].tolist())


@pytest.mark.parametrize("num_topk", [0, 2, 5])
def test_token_ids_of_log_probabilities(rng, num_topk):
    slots = torch.tensor(rng.permutation(SLOTS)[:5])
    sampled = torch.tensor(rng.integers(0, VOCAB, 5))
    best = tensor(rng.integers(0, VOCAB, (5, max(num_topk, 1))))
    counts, chosen = tensor([0, 3, 1, 0, 2, 3]), tensor(rng.integers(0, VOCAB, (SLOTS, 8)))
    columns = max(num_topk, 3)
    given = torch.zeros(5, 1 + columns, dtype=torch.int64)
    valid = torch.zeros(5, 1 + columns, dtype=torch.bool)
    expected, expected_valid = given.clone(), valid.clone()
    for row, slot in enumerate(slots.tolist()):
        count = int(counts[slot])
        own = chosen[slot, :count] if count else best[row, :num_topk]
        expected[row, 0], expected_valid[row, : 1 + len(own)] = sampled[row], True
        expected[row, 1 : 1 + len(own)] = own
    sampling_v2.fill_logprob_token_ids(
        *(given, 1 + columns, valid, 1 + columns, sampled, best, best.shape[1], slots),
        *(counts, chosen, 8),
        NUM_TOPK=num_topk,
        PADDED_COLS=8,
    )
    assert torch.equal(given, expected)
    assert torch.equal(valid, expected_valid)


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
    expected = logits.clone()
    for index, place in enumerate(asked):
        req, at = divmod(place, stride)
        if at >= int(borders[req + 1] - borders[req]):
            continue
        for token in range(VOCAB):
            if not int(masks[index, token // 32]) >> token % 32 & 1:
                expected[int(borders[req]) + at, token] = -INF
    sampling_v2.apply_grammar_bitmask(
        *(logits, VOCAB, tensor(asked), borders, masks, WORDS, VOCAB),
        MASK_STRIDE=stride,
        BLOCK_SIZE=32,
    )
    equal(logits, expected)


def hashed(*words: int, domain: int = 0) -> int:
    """MurmurHash3 of 32-bit words, as ``murmur3_hash32`` of ``gumbel.py`` has it."""
    value, whole = domain, (1 << 32) - 1
    for key in words:
        key = key * 0xCC9E2D51 & whole
        key = (key << 15 | key >> 17) & whole
        value ^= key * 0x1B873593 & whole
        value = (value << 13 | value >> 19) & whole
        value = (value * 5 + 0xE6546B64) & whole
    value ^= 16
    value = (value ^ value >> 16) * 0x85EBCA6B & whole
    value = (value ^ value >> 13) * 0xC2B2AE35 & whole
    return value ^ value >> 16


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_noise_of_seeds(dtype):
    """In float64, 53 bits of two hashes, as ``murmur3_uniform64`` has them."""
    seeds = torch.tensor([0, 1, -1, 2**62 + 12345, -(2**63)])
    pos = torch.tensor([0, 7, 4095, 3, 131071])
    noise = gumbel_noise(seeds, pos, VOCAB, dtype)
    assert noise.dtype == dtype
    for row in range(5):
        seed, position, whole = int(seeds[row]), int(pos[row]), (1 << 32) - 1
        for token in range(VOCAB):
            words = seed & whole, seed >> 32 & whole, position & whole, token
            low, high = hashed(*words), hashed(*words, domain=0x9E3779B9)
            if dtype == torch.float32:
                uniform = (low + 0.5) / 2**32
                expected = pytest.approx(-math.log(-math.log1p(-uniform)), rel=1e-3, abs=1e-4)
            else:
                uniform = ((high << 32 | low) >> 11) * 2**-53 + 2**-54
                expected = pytest.approx(-math.log(-math.log(uniform)), rel=1e-12, abs=1e-12)
            assert float(noise[row, token]) == expected


@pytest.mark.parametrize("per_request", [1, 3])
def test_tokens_that_were_kept(rng, per_request):
    """Of rows of requests with a sample less than they may have, and of one without any."""
    logits, _ = rows_of(rng, 4 * per_request)
    logits[rng.random(logits.shape) < 0.7] = -INF
    logits[0, 3], logits[1, 4] = INF, math.nan
    borders = tensor(range(0, 4 * per_request + 1, per_request))
    sampled = tensor([per_request, 0, per_request, max(1, per_request - 1)])
    num_rows, most = 4 * per_request, 9
    ids = torch.full((num_rows, most), -1, dtype=torch.int32)
    packed, counts = (
        torch.zeros(num_rows, -(-VOCAB // 8), dtype=torch.uint8),
        tensor([7] * num_rows),
    )
    sampling_v2.list_kept_tokens(
        *(logits, VOCAB, 1, borders, sampled, ids, most, packed, 9, counts, VOCAB, most),
        ROWS_PER_REQUEST=per_request,
        BLOCK_SIZE=64,
    )
    for row in range(num_rows):
        req, place = divmod(row, per_request)
        kept = [token for token in range(VOCAB) if abs(float(logits[row, token])) < INF]
        kept = kept if place < sampled[req] else []
        assert counts[row] == len(kept)
        assert ids[row, : len(kept)].tolist() == kept[:most]
        bits = np.unpackbits(packed[row].numpy(), bitorder="little")
        assert np.flatnonzero(bits).tolist() == kept
