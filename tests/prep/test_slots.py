"""Requests at slots of their own, as vLLM's V2 runner keeps them: the step is that of rows."""

import dataclasses

import numpy as np
import pytest

from tests.helpers.batches import at_slots, step_batch
from vllm_npu_prep.prep.arrays import STEP_ARRAYS
from vllm_npu_prep.prep.batch import StepBatch, prepare_step
from vllm_npu_prep.prep.checks import find_fault
from vllm_npu_prep.prep.oracle import OracleRequest
from vllm_npu_prep.prep.padding import no_padding
from vllm_npu_prep.prep.shape import EngineShape

BLOCK_SIZE, MAX_MODEL_LEN = 4, 32


def requests() -> list[OracleRequest]:
    """A prompt, a chunk of one, and two decodes."""
    lengths = [(0, 5, 5), (4, 6, 12), (7, 1, 3), (19, 1, 19)]
    return [
        OracleRequest(
            num_computed_tokens=computed,
            num_scheduled_tokens=scheduled,
            num_prompt_tokens=prompt,
            token_ids=[100 * index + n for n in range(max(computed + scheduled, prompt))],
            block_ids=[10 * index + 1 + n for n in range(-(-(computed + scheduled) // BLOCK_SIZE))],
        )
        for index, (computed, scheduled, prompt) in enumerate(lengths)
    ]


def prepare(batch: StepBatch, has_request_rows: bool):
    shape = EngineShape(has_request_rows=has_request_rows)
    batch.tables = dataclasses.replace(batch.tables, shape=shape)
    return prepare_step(batch, no_padding(batch.total_num_scheduled_tokens, batch.num_reqs))


@pytest.mark.parametrize("slots", [[0, 1, 2, 3], [5, 0, 3, 1], [2, 4, 1, 5]])
def test_a_step_is_the_same_wherever_its_requests_are(slots):
    rows = step_batch(requests(), BLOCK_SIZE, MAX_MODEL_LEN)
    of_rows, of_slots = prepare(rows, False), prepare(at_slots(rows, slots), True)
    for name in STEP_ARRAYS:
        if name != "idx_mapping":
            own, other = getattr(of_slots, name), getattr(of_rows, name)
            np.testing.assert_array_equal(own, other, err_msg=name)
    assert of_slots.idx_mapping.tolist() == slots and of_rows.idx_mapping.size == 0
    assert of_slots.attn_state == of_rows.attn_state
    np.testing.assert_array_equal(of_slots.block_table(), of_rows.block_table())
    assert find_fault(of_slots, np.array([1000, 1000])) is None


@pytest.mark.parametrize("slots", [[5, 0, 3, 1], [2, 4, 1, 5]])
def test_the_device_gets_block_tables_in_the_order_of_the_batch(slots):
    batch = at_slots(step_batch(requests(), BLOCK_SIZE, MAX_MODEL_LEN), slots)
    step = prepare(batch, True)
    tables = batch.tables
    device = np.zeros_like(tables.block_table_flat)
    _, indices, ids = step.layout.variable_part(0, step.num_block_changes)
    buffer = step.arrays.buffer
    device[buffer.view(np.int64)[indices]] = buffer.view(np.int32)[ids]
    rows = device.reshape(-1, int(tables.max_num_blocks[0]))[: batch.num_reqs]
    for row, request in zip(rows, requests()):
        assert row[: len(request.block_ids)].tolist() == request.block_ids
    copied = tables.device_block_table_flat().reshape(-1, rows.shape[1])
    for row, request in zip(copied, requests()):
        assert row[: len(request.block_ids)].tolist() == request.block_ids
    assert prepare(batch, True).num_block_changes == 0  # the next step sends none again
