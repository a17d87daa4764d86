"""The cheap check: silent on whatever is prepared.

What it says of faults: `tests.inspect.test_check_messages`.
"""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.batches import RandomBatch, local_step, random_batches
from tests.inspect.test_check_messages import ROWS, VOCAB, attending, limits_of, verify
from vllm_npu_prep.observe.violation import StepCheckError
from vllm_npu_prep.prep.batch import PreparedStep, prepare_step
from vllm_npu_prep.prep.checks import Rule, find_fault
from vllm_npu_prep.prep.oracle import OracleRequest
from vllm_npu_prep.prep.padding import GraphMode


@given(random_batches(), st.booleans())
def test_prepared_steps_break_no_rule(batch, in_full_graph):
    step = batch.step()
    if in_full_graph and batch.capture_sizes is not None:
        step.padding = replace(step.padding, mode=GraphMode.FULL)
    assert find_fault(step, limits_of(step)) is None


@given(random_batches(), st.integers(1, 5))
def test_virtual_requests_break_no_rule(batch, blocks_per_chunk):
    step = local_step(batch, blocks_per_chunk)
    assert find_fault(step, limits_of(step)) is None


def test_the_pass_that_writes_a_step_checks_it():
    """What it says is put into words later; without limits it says nothing."""
    requests = [OracleRequest(9, 1, 4, list(range(10)), [3, 1, 2])]
    step = RandomBatch(requests, 4, 40, None, None, True).step()
    told = limits_of(step)
    assert step.rule == Rule.NOT_CHECKED

    def written() -> PreparedStep:
        return prepare_step(replace(step.batch, check_limits=told), step.padding)

    right = written()
    assert right.rule == Rule.HOLDS
    verify(right, told, req_ids=["one"])
    step.batch.tables.token_ids[0, 9] = VOCAB
    wrong = written()
    assert wrong.rule == Rule.VOCABULARY
    with pytest.raises(StepCheckError, match=f"request one, token 0: given {VOCAB}"):
        verify(wrong, told, req_ids=["one"])
    step.batch.tables.token_ids[0, 9] = VOCAB - 1
    step.batch.tables.num_blocks[0, 0] = 1
    assert written().rule == Rule.BLOCKS


def test_only_samples_on_the_device_may_be_placeholders():
    made = attending(False, ROWS["rows in place"])
    batch = made.step.batch
    batch.num_sampled_rows, batch.previous_rows = 4, np.array([1, -1, -1, -1], np.int64)
    made.input_ids[0] = -1
    assert find_fault(made.step, made.limits) is None
    batch.previous_rows = np.array([-1, 0, -1, -1], np.int64)
    assert find_fault(made.step, made.limits).rule == Rule.VOCABULARY
