"""The cheap check: silent on whatever is prepared, and loud on each kind of fault, by name."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.batches import RandomBatch, local_step, random_batches
from vllm_npu_prep.observe.check import StepCheck, explain_fault
from vllm_npu_prep.observe.violation import StepCheckError
from vllm_npu_prep.prep.batch import PreparedStep, prepare_step
from vllm_npu_prep.prep.checks import Rule, find_fault
from vllm_npu_prep.prep.oracle import OracleRequest
from vllm_npu_prep.prep.padding import GraphMode

VOCAB = 150_000
REQ_IDS = ["one", "two", "three"]


def owned(step: PreparedStep) -> PreparedStep:
    """The step with as many blocks for each request as it needs, as an engine has it."""
    tables = step.batch.tables
    for group, block_size in enumerate(tables.block_sizes.tolist()):
        tables.num_blocks[group, : step.num_reqs] = -(-step.seq_lens // block_size)
    return step


def limits(step: PreparedStep) -> np.ndarray:
    """Of a cache that just holds the blocks of the tables."""
    tables = step.batch.tables
    slots = [
        (1 + tables.block_table(group).max()) * block_size
        for group, block_size in enumerate(tables.block_sizes)
    ]
    return np.array([VOCAB, *slots], np.int64)


@given(random_batches(), st.booleans())
def test_prepared_steps_break_no_rule(batch, in_full_graph):
    step = owned(batch.step())
    if in_full_graph and batch.capture_sizes is not None:
        step.padding = replace(step.padding, mode=GraphMode.FULL)
    assert find_fault(step, limits(step)) is None


@given(random_batches(), st.integers(1, 5))
def test_virtual_requests_break_no_rule(batch, blocks_per_chunk):
    step = owned(local_step(batch, blocks_per_chunk))
    assert find_fault(step, limits(step)) is None


def mixed_step(capture_size: int = 16) -> PreparedStep:
    """A decode, two prompts of five tokens each, and padding, in a full graph with chunks of 8."""
    requests = [
        OracleRequest(9, 1, 4, list(range(10)), [3, 1, 2]),
        OracleRequest(0, 5, 5, list(range(20, 25)), [5, 4]),
        OracleRequest(6, 5, 20, list(range(40, 60)), [6, 9, 8]),
    ]
    step = owned(local_step(RandomBatch(requests, 4, 40, [capture_size], None, True), 2))
    step.padding = replace(step.padding, mode=GraphMode.FULL)
    assert find_fault(step, limits(step)) is None
    return step


def message(step: PreparedStep) -> str:
    fault = find_fault(step, limits(step))
    assert fault is not None, "nothing was noticed"
    error = explain_fault(step, limits(step), fault, REQ_IDS)
    assert error.rule == fault.rule.title
    return str(error)


def test_the_pass_that_writes_a_step_checks_it():
    """What it says is put into words later; without limits it says nothing."""
    requests = [OracleRequest(9, 1, 4, list(range(10)), [3, 1, 2])]
    step = owned(RandomBatch(requests, 4, 40, None, None, True).step())
    told = limits(step)
    assert step.rule == Rule.NOT_CHECKED
    check = StepCheck(VOCAB, told[1:].tolist())

    def written() -> PreparedStep:
        return prepare_step(replace(step.batch, check_limits=told), step.padding)

    def verify(written: PreparedStep) -> None:
        batch = SimpleNamespace(req_ids=REQ_IDS)
        flight = SimpleNamespace(step=written)
        check.verify(SimpleNamespace(in_flight=flight, input_batch=batch), None)

    right = written()
    assert right.rule == Rule.HOLDS
    verify(right)
    step.batch.tables.token_ids[0, 9] = VOCAB
    wrong = written()
    assert wrong.rule == Rule.VOCABULARY
    with pytest.raises(StepCheckError, match=f"request one, token 0: given {VOCAB}"):
        verify(wrong)
    step.batch.tables.token_ids[0, 9] = VOCAB - 1
    step.batch.tables.num_blocks[0, 0] = 1
    assert written().rule == Rule.BLOCKS


def beyond_max_model_len(step):
    for lengths in (step.batch.tables.num_computed_tokens, step.arrays.num_computed_tokens):
        lengths[0] = 40
    step.arrays.seq_lens[0] = 41


def without_its_last_block(step):
    step.batch.tables.num_blocks[0, 2] -= 1


def of_another_block(step):
    step.arrays.slot_mapping[0, 0] += 4


def requests_without_padding(step):
    step.arrays.query_start_loc[step.num_reqs :] = 11
    step.arrays.seq_lens[step.num_reqs :] = 0


def virtual_requests_without_padding(step):
    step.arrays.chunk_local_query_start_loc[step.local.num_reqs :] = 11
    step.arrays.chunk_local_seq_lens[step.local.num_reqs :] = 0


def changed(name, index, value):
    """A fault that writes one entry of an array."""

    def fault(step):
        getattr(step.arrays, name)[index] = value

    return fault


FAULTS = [  # the rule, what breaks it, and what is said of it, some left out at " ... "
    ("starts", changed("query_start_loc", 0, 1), "given 1, allowed 0"),
    (
        "query lengths",
        changed("query_start_loc", 2, 7),
        "request two: given 1 to 7, allowed 5 scheduled",
    ),
    (
        "end",
        lambda step: setattr(step.batch, "total_num_scheduled_tokens", 12),
        "given 11, allowed 12",
    ),
    (
        "lengths",
        changed("seq_lens", 2, 12),
        "request three: given 12 of 6 computed, allowed 11 of 6",
    ),
    (
        "lengths",
        changed("num_computed_tokens", 0, 8),
        "request one: given 10 of 8 computed, allowed 10 of 9",
    ),
    (
        "model length",
        beyond_max_model_len,
        "request one ... given 41, allowed up to max_model_len 40",
    ),
    (
        "blocks",
        without_its_last_block,
        "request three ... group 0: given 11, allowed up to 8 in its 2 blocks",
    ),
    ("positions", changed("positions", 3, 3), "request two, token 3: given 3, allowed 2"),
    ("positions", changed("positions", 0, 8), "request one, token 0: given 8, allowed 9"),
    (
        "vocabulary",
        changed("input_ids", 7, VOCAB),
        f"request three, token 7: given {VOCAB}, allowed 0 to {VOCAB - 1}",
    ),
    ("vocabulary", changed("input_ids", 0, -1), "request one, token 0: given -1"),
    (
        "slots",
        changed("slot_mapping", (0, 2), 3),
        "request two, token 2, KV-cache group 0: given 3, allowed 4 to 39",
    ),
    (
        "slots",
        changed("slot_mapping", (1, 2), 40),
        "request two, token 2, KV-cache group 1: given 40",
    ),
    (
        "table",
        of_another_block,
        "request one, token 0, KV-cache group 0: given 13, allowed 9, in its block 2",
    ),
    ("longest query", lambda step: setattr(step, "max_query_len", 4), "given 4, allowed 5"),
    ("longest sequence", lambda step: setattr(step, "max_seq_len", 10), "given 10, allowed 11"),
    ("logits", changed("logits_indices", 2, 11), "given token 11 in [0, 5, 11], allowed rising"),
    ("logits", changed("logits_indices", 1, 0), "token 0 in [0, 0, 10], allowed rising, below 11"),
    ("logits", changed("logits_indices", 0, -1), "given token -1 in [-1, 5, 10]"),
    (
        "padding",
        changed("slot_mapping", (2, 13), 4),
        "slot: token 13, KV-cache group 2: given 4, allowed -1",
    ),
    ("padding requests", changed("seq_lens", 3, 2), "padding request 3 ... length 2"),
    (
        "padding requests",
        changed("seq_lens", 3, 0),
        "padding request 3 ... tokens 11 to 16, length 0",
    ),
    ("TND end", requests_without_padding, "given 11, allowed 16"),
    (
        "local queries",
        changed("chunk_local_query_start_loc", 2, 0),
        "virtual request 1 ... given 1 to 0",
    ),
    (
        "local lengths",
        changed("chunk_local_seq_lens", 0, 9),
        "virtual request 0 ... given 9 of 1 computed, allowed 2 of 1 computed",
    ),
    ("local TND end", virtual_requests_without_padding, "given 11, allowed 16"),
]


@pytest.mark.parametrize(("rule", "plant", "told"), FAULTS, ids=[fault[2] for fault in FAULTS])
def test_a_planted_fault_is_named(rule, plant, told):
    step = mixed_step()
    plant(step)
    said = message(step)
    assert said.startswith(f'step check "{rule}": ') and "\n" not in said
    for part in told.split(" ... "):
        assert part in said


def test_virtual_requests_end_at_the_tokens_of_the_step():
    step = mixed_step()
    starts, last = step.arrays.chunk_local_query_start_loc, step.local.num_reqs
    starts[last] -= 1
    step.arrays.chunk_local_seq_lens[last - 1] -= 1
    assert 'step check "local end"' in message(step)


def test_only_samples_on_the_device_may_be_placeholders():
    step = mixed_step()
    step.batch.num_sampled_rows, step.batch.previous_rows = 3, np.array([1, -1, -1], np.int64)
    step.arrays.input_ids[0] = -1
    assert find_fault(step, limits(step)) is None
    step.batch.previous_rows = np.array([-1, 0, -1], np.int64)
    assert find_fault(step, limits(step)).rule == Rule.VOCABULARY


def test_every_rule_of_attention_has_a_fault():
    planted = {rule for rule, *_ in FAULTS} | {"local end"}
    planted |= {rule.title for rule in Rule if rule >= Rule.NO_SLOT}  # prep/test_states.py
    assert planted == {rule.title for rule in Rule if rule > Rule.HOLDS}
