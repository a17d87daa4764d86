"""Verification and drafting of the V2 runner: each against a scalar reading of Triton's kernels."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.helpers.traffic import Traffic
from vllm_npu_prep.prep.batch import StepBatch, prepare_step
from vllm_npu_prep.prep.padding import Padding
from vllm_npu_prep.prep.shape import EngineShape
from vllm_npu_prep.prep.tables import BatchTables, device_has_all
from vllm_npu_prep.runner.v2.speculator import shifted
from vllm_npu_prep.runner.v2.verification import (
    NPURejectionSampler,
    VerifiedBatch,
    count_accepted,
    counted_on_device,
)

VOCAB, MAX_DRAFTS = 7, 3


def prepared(num_drafts, num_scheduled, known, computed, token_ids):
    """A step of requests at these slots, and its arrays as torch sees them."""
    number = len(num_drafts)
    table = np.arange(number * 8, dtype=np.int32).reshape(number, 8)
    tables = BatchTables(
        num_computed_tokens=computed,
        num_prompt_tokens=known,
        num_tokens=known,
        token_ids=token_ids,
        block_sizes=np.full(1, 16, np.int32),
        shape=EngineShape(max_logits_per_req=1 + int(num_drafts.max())),
        **device_has_all([table]),
    )
    batch = StepBatch(tables, num_scheduled, num_drafts, int(num_scheduled.sum()))
    step = prepare_step(batch, Padding(int(num_scheduled.sum()), number))
    names = ("logits_indices", "target_logits_indices", "draft_token_ids", "bonus_logits_indices")
    names += ("cu_num_draft_tokens", "cu_num_sampled_tokens", "backup_next_token_ids", "input_ids")
    names += ("query_start_loc", "seq_lens", "discard_request_mask", "positions")
    arrays = {name: torch.from_numpy(getattr(step.arrays, name).copy()) for name in names}
    return step, SimpleNamespace(**arrays)


def random_step(traffic, number=6, even=False):
    """Requests that verify drafts, beside chunks of prompts and prompts that end."""
    drafts = [MAX_DRAFTS if even else traffic.number(0, MAX_DRAFTS) for _ in range(number)]
    if not any(drafts):
        drafts[0] = 2
    computed, scheduled, known, is_chunk = [], [], [], []
    for count in drafts:
        computed.append(traffic.number(0, 59))
        is_chunk.append(not count and traffic.chance(0.5))
        scheduled.append(1 + count if count else traffic.number(1, 8))
        # With drafts one token is known that isn't computed; a chunk of a prompt leaves some
        known.append(computed[-1] + (1 if count else scheduled[-1] + 3 * is_chunk[-1]))
    drafts, computed, scheduled, known = (
        np.array(each, np.int32) for each in (drafts, computed, scheduled, known)
    )
    tokens = np.array([traffic.tokens(100) for _ in range(number)], np.int32)
    return (*prepared(drafts, scheduled, known, computed, tokens), is_chunk)


def verified_batch(step, arrays):
    number = step.num_reqs
    batch = VerifiedBatch.__new__(VerifiedBatch)
    batch.num_reqs, batch.idx_mapping = number, torch.arange(number) * 3 % 11
    return batch.of(step, arrays)


def verify(step, arrays, drawn, invalid=None):
    """Our sampler's rows, for these tokens drawn from each row of logits."""
    sampler = NPURejectionSampler.__new__(NPURejectionSampler)
    sampler.sampler = lambda logits, batch, drafts: SimpleNamespace(
        sampled_token_ids=drawn[:, None]
    )
    batch = verified_batch(step, arrays)
    return sampler(None, batch, None, invalid).sampled_token_ids


def kernel_greedy(arrays, argmax, drafts, cu, number, invalid):
    """``_rejection_kernel`` and ``_insert_resampled_kernel`` for greedy requests."""
    rows, counts = [], []
    for req in range(number):
        start, end = cu[req], cu[req + 1]
        num_drafts, accepted, verifying, row = end - start - 1, 0, True, []
        for i in range(num_drafts):
            draft = -1 if invalid[start + i + 1] else drafts[start + i + 1]
            if verifying:
                verifying = argmax[start + i] == draft and draft >= 0
                accepted += verifying
                row.append(draft if verifying else argmax[start + i])
        if accepted == num_drafts:
            row.append(argmax[end - 1])
        rows.append(row)
        counts.append(accepted + 1)
    return rows, counts


@pytest.mark.parametrize("even", [False, True], ids=["ragged", "even"])
def test_greedy_drafts(seed, even):
    traffic, kinds = Traffic(seed, (0, VOCAB)), set()
    for _ in range(200):
        step, arrays, is_chunk = random_step(traffic, even=even)
        number, num_logits = step.num_reqs, step.num_logits
        cu = np.concatenate(([0], np.cumsum(step.num_sampled_tokens))).tolist()
        inputs = arrays.input_ids[arrays.logits_indices[:num_logits].long()].tolist()
        drawn = torch.tensor(traffic.rng.integers(0, 3, num_logits))
        for row in range(num_logits - 1):  # drafts that are often right
            if traffic.chance(0.7):
                drawn[row] = inputs[row + 1]
        invalid = torch.tensor(traffic.rng.random(num_logits) < 0.1)
        given = verify(step, arrays, drawn, invalid)
        rows, counts = kernel_greedy(arrays, drawn.tolist(), inputs, cu, number, invalid.tolist())
        width = max(step.num_sampled_tokens.tolist())
        assert given.tolist() == [row + [-1] * (width - len(row)) for row in rows]

        # `_get_num_sampled_and_rejected_kernel`
        num_sampled = [0 if c else n for c, n in zip(is_chunk, counts)]
        num_logits_of = step.num_sampled_tokens.tolist()
        num_rejected = [0 if c else n - s for c, n, s in zip(is_chunk, num_logits_of, num_sampled)]

        # `_prepare_prefill_inputs_kernel` of the drafters
        expected, counted = [None] * len(arrays.input_ids), []
        for req in range(number):
            start, end = arrays.query_start_loc[req : req + 2].tolist()
            length = end - start - num_rejected[req]
            slot = step.request_rows[req]
            if num_sampled[req]:
                following = rows[req][-1]
            else:
                following = int(step.batch.tables.token_ids[slot, int(step.seq_lens[req])])
            for place in range(1, length):
                expected[start + place - 1] = int(arrays.input_ids[start + place])
            expected[start + length - 1] = following
            counted.append(start + length - 1)
        for count in (count_accepted, counted_on_device):
            accepted = count(given, step, arrays, VOCAB)
            assert accepted.num_valid_tokens.tolist() == num_sampled
            assert accepted.num_rejected_tokens.tolist() == num_rejected
            assert accepted.last_token_indices.tolist() == counted
            ids = shifted(arrays.input_ids, torch.tensor(counted), accepted.next_token_ids)
            assert [a for a, b in zip(ids.tolist(), expected) if b is not None] == [
                each for each in expected if each is not None
            ]
        kinds |= {("discarded", any(is_chunk)), ("all", width in counts), ("none", 1 in counts)}
    assert {("all", True), ("none", True)} <= kinds
    assert even or ("discarded", True) in kinds


@pytest.mark.parametrize("count", [count_accepted, counted_on_device])
def test_drafts_follow_the_end_of_a_prompt(count):
    """In a step without drafts, every sample counts, and prompts have more tokens than samples."""
    scheduled, tokens = np.array([3, 1], np.int32), np.arange(20, dtype=np.int32).reshape(2, 10)
    known = np.array([3, 5], np.int32)
    given = np.zeros(2, np.int32), scheduled, known, known - scheduled, tokens
    accepted = count(torch.tensor([[4], [5]]), *prepared(*given), VOCAB)
    assert accepted.next_token_ids.tolist() == [4, 5]
    assert accepted.last_token_indices.tolist() == [2, 3]
    assert accepted.num_rejected_tokens.tolist() == [0, 0]


@pytest.mark.parametrize("even", [False, True], ids=["ragged", "even"])
def test_rows_of_logits_know_their_requests(seed, even):
    """``_expand_idx_mapping_kernel``."""
    traffic = Traffic(seed, (0, VOCAB))
    for _ in range(20):
        step, arrays, _ = random_step(traffic, even=even)
        batch = verified_batch(step, arrays)
        slots, places, borders = [], [], [0]
        for req, count in enumerate(step.num_sampled_tokens.tolist()):
            slots += [int(batch.idx_mapping[req])] * count
            places += range(count)
            borders.append(borders[-1] + count)
        assert batch.expanded_idx_mapping.tolist() == slots
        assert batch.expanded_local_pos.tolist() == places
        assert batch.cu_num_logits.tolist() == borders
