"""Verification of drawn drafts against a scalar reading of the V2 runner's Triton kernels."""

import math

import numpy as np
import pytest
import torch

from vllm_npu_prep.ops.triton.gumbel import gumbel_noise, seeded_uniform
from vllm_npu_prep.ops.triton.rejection_v2 import verify_drawn_drafts

VOCAB, INF = 9, math.inf


def log_sum_exp(logits):
    """``_compute_max_and_sumexp`` and ``_compute_global_logsumexp``, over one block."""
    most = max(logits)
    return most + math.log(sum(math.exp(each - most) for each in logits))


def kernels(target, draft, temperature, token, uniform):
    """``_rejection_kernel``, ``_resample_kernel``: acceptance, and logits to draw another from."""
    if temperature == 0 or token < 0:
        return False, target  # greedy tokens are compared; no draft: the target's logits
    of_target = [each - log_sum_exp(target) for each in target]
    draft = [each / temperature for each in draft]
    of_draft = [each - log_sum_exp(draft) for each in draft]
    is_accepted = of_target[token] > math.log(uniform) + of_draft[token]
    residual = []
    for p, q in zip(of_target, of_draft):
        if p == -INF:
            residual.append(-INF)  # the ratio is infinite, or not a number
            continue
        ratio = math.exp(q - p)
        residual.append(p + math.log1p(-ratio) if ratio < 1 else -INF)
    return is_accepted, residual


def test_drafts_that_were_drawn(seed):
    rng, seen = np.random.default_rng(seed), set()
    for _ in range(60):
        number = 12
        target = rng.normal(0, 2, (number, VOCAB))
        target[rng.random((number, VOCAB)) < 0.2] = -INF  # by top-k, or by a grammar
        target[:, 3] = 0.5
        draft = target * 0.5 + rng.normal(0, 2, (number, VOCAB))
        draft[~np.isfinite(draft)] = 1.0
        draft[rng.random((number, VOCAB)) < 0.1] = -INF
        draft[:, 4] = 1.5
        temperature = rng.choice([0, 0.5, 1, 1.7], number)
        tokens = rng.integers(-1, VOCAB, number)
        for row in range(number):
            if tokens[row] >= 0 and draft[row, tokens[row]] == -INF:
                tokens[row] = 4  # a draft has a chance
        uniform = rng.random(number)
        given = verify_drawn_drafts(
            *(torch.tensor(each, dtype=torch.float32) for each in (target, draft, temperature)),
            torch.tensor(tokens, dtype=torch.int32),
            torch.tensor(uniform, dtype=torch.float32),
        )
        for row in range(number):
            accepted, logits = kernels(
                target[row].tolist(),
                draft[row].tolist(),
                float(temperature[row]),
                int(tokens[row]),
                float(uniform[row]),
            )
            assert bool(given.are_accepted[row]) == accepted
            assert given.logits[row].tolist() == pytest.approx(logits, rel=2e-3, abs=2e-3)
            seen.add((accepted, temperature[row] == 0, tokens[row] < 0))
    assert seen == {(a, g, n) for a in (0, 1) for g in (0, 1) for n in (0, 1) if not a or not g | n}


def test_equal_probabilities_reject_nothing():
    logits = torch.randn(500, VOCAB, generator=torch.Generator().manual_seed(1))
    tokens = torch.arange(500, dtype=torch.int32) % VOCAB
    uniform = torch.linspace(0, 1 - 2**-24, 500)
    ones = torch.ones(500)
    assert verify_drawn_drafts(logits, logits, ones, tokens, uniform).are_accepted.all()


def test_numbers_of_a_seed_are_even_and_those_of_no_noise(seed):
    seeds = torch.full((20000,), seed)
    positions = torch.arange(20000)
    numbers = seeded_uniform(seeds, positions)
    assert ((numbers > 0) & (numbers < 1)).all()
    assert torch.equal(numbers[:7], seeded_uniform(seeds[:7], positions[:7]))
    counts = np.histogram(numbers.numpy(), 20, (0, 1))[0]
    assert abs(counts - 1000).max() < 5 * math.sqrt(1000)
    noise = gumbel_noise(seeds[:1], positions[:1], 1)
    assert float(noise) == pytest.approx(-math.log(-math.log1p(-float(numbers[0]))), rel=1e-4)
