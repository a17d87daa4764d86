"""M-RoPE positions of the V2 runner, against a scalar reading of Triton's kernel."""

from dataclasses import replace

import numpy as np
import torch

from tests.v2.test_verification import prepared
from vllm_npu_prep.prep.batch import StepBatch, prepare_step
from vllm_npu_prep.prep.padding import Padding
from vllm_npu_prep.prep.shape import EngineShape
from vllm_npu_prep.runner.v2.rope import NPURopeState

DIMS, SLOTS = 3, 8


def kernel(prefill_positions, delta, query_start_loc, slots, prefill_lens, num_computed, padded):
    """``_prepare_rope_positions_kernel``, request by request."""
    positions = np.zeros((DIMS, padded), np.int64)
    for batch_idx, slot in enumerate(slots):
        is_prefill = num_computed[slot] < prefill_lens[slot]
        start, end = query_start_loc[batch_idx], query_start_loc[batch_idx + 1]
        for block in range(end - start):
            orig_pos = num_computed[slot] + block
            for dim in range(DIMS):
                pos = (
                    prefill_positions[slot][dim][orig_pos] if is_prefill else orig_pos + delta[slot]
                )
                positions[dim, start + block] = pos
    return positions


class Model:
    """Positions that nothing else would give."""

    def __init__(self, rng):
        self.rng = rng

    def get_mrope_input_positions(self, token_ids, mm_features):
        assert mm_features == []
        shape = DIMS, len(token_ids)
        return torch.from_numpy(self.rng.integers(0, 1000, shape)), int(self.rng.integers(-9, 9))


def test_positions_of_prompts_and_of_tokens_after_them(seed):
    rng = np.random.default_rng(seed)
    rope, model = NPURopeState(DIMS, SLOTS, 64, 100, torch.device("cpu")), Model(rng)
    slot_of = {f"request {slot}": slot for slot in range(SLOTS)}
    known = rng.integers(10, 60, SLOTS).astype(np.int32)
    for slot in range(SLOTS):
        rope.init_prefill_positions(slot, model, list(range(known[slot])), [])
    slots = np.arange(SLOTS)
    for step_number in range(60):
        if step_number % 7 == 6:  # another request gets the slot of one that the last step had
            rope.init_prefill_positions(int(slots[0]), model, list(range(10)), [])
            known[slots[0]] = 10
        else:
            slots = rng.permutation(SLOTS)[: int(rng.integers(1, SLOTS + 1))]
        number = len(slots)
        computed = rng.integers(0, 60, SLOTS).astype(np.int32)
        left = np.where(computed < known, known - computed, 5)[slots]
        scheduled = np.array([rng.integers(1, min(6, each) + 1) for each in left], np.int32)
        tokens = rng.integers(0, 7, (SLOTS, 100)).astype(np.int32)
        made, _ = prepared(
            np.zeros(SLOTS, np.int32), np.ones(SLOTS, np.int32), known, computed, tokens
        )
        shape = EngineShape(mrope_dims=rope.num_dims)
        tables = replace(made.batch.tables, shape=shape, mrope=rope.tables)
        tables.request_rows[:number] = slots
        rope.follow(slots)
        padded = int(scheduled.sum()) + 3
        batch = StepBatch(tables, scheduled, np.zeros(number, np.int32), int(scheduled.sum()))
        step = prepare_step(batch, Padding(padded, number))
        rotations = rope.of_requests(slot_of)
        found = [rotations[f"request {slot}"] for slot in range(SLOTS)]
        expected = kernel(
            [each.mrope_positions for each in found],
            [each.mrope_position_delta for each in found],
            step.query_start_loc.tolist(),
            slots.tolist(),
            known,
            computed,
            padded,
        )
        size = int(scheduled.sum())
        np.testing.assert_array_equal(step.mrope_positions[:, :size], expected[:, :size])
