"""The cheap check: silent on whatever is prepared, and what it says of each kind of fault.

Each rule is broken in steps with drafts and without, where rows of the tables are those of the
batch (vLLM's V1 runner) and where they are not (V2). The numbers of its message are those of the
step before it was broken.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.batches import (
    RandomBatch,
    at_slots,
    drafts_step,
    local_step,
    random_batches,
    state_step,
)
from tests.helpers.forced_messages import ending
from tests.inspect.test_shared_prompts import SAID
from tests.prep.test_dcp import shared_step
from vllm_npu_prep.observe.check import READS, StepCheck, explain_fault
from vllm_npu_prep.observe.violation import StepCheckError
from vllm_npu_prep.prep.batch import PreparedStep, StepBatch, prepare_step
from vllm_npu_prep.prep.checks import NO_SLOTS, Rule, find_fault
from vllm_npu_prep.prep.dcp import DCPRank
from vllm_npu_prep.prep.oracle import OracleRequest
from vllm_npu_prep.prep.padding import GraphMode, Padding

VOCAB, BLOCK_SIZE, MAX_MODEL_LEN, NUM_INPUT_TOKENS, NUM_DRAFTS = 150_000, 4, 40, 20, 2
NAMES = ["one", "two", "three", "four"]
PADDING = len(NAMES)  # row of the padding request
ROWS = {"rows in place": [0, 1, 2, 3, 4, 5], "rows elsewhere": [3, 0, 5, 1, 4, 2]}


@dataclass
class Steps:
    """A step that breaks no rule, until a test breaks one."""

    step: PreparedStep
    limits: np.ndarray
    has_drafts: bool
    starts: list[int]  # of each request's tokens, and where the last ones end

    def __getattr__(self, name: str) -> Any:
        return getattr(self.step.arrays, name)

    @property
    def tables(self) -> Any:
        return self.step.batch.tables

    @property
    def request_rows(self) -> list[int]:
        """Row of each request in the tables."""
        return self.step.request_rows.tolist()


def batch_of(has_drafts: bool, sizes: list[int] | None) -> RandomBatch:
    """Two decodes, a chunk of a prompt and a prompt."""
    requests = [
        OracleRequest(
            num_computed_tokens=computed,
            num_scheduled_tokens=scheduled + drafts * has_drafts,
            num_prompt_tokens=prompt,
            token_ids=list(range(20 * row, 20 * row + max(prompt, computed + scheduled))),
            block_ids=[10 * row + block for block in (3, 1, 4, 9, 5, 7)],
            num_draft_tokens=drafts * has_drafts,
            draft_token_ids=[99] * drafts * has_drafts,
            num_accepted_tokens=accepted if has_drafts else 1,
        )
        for row, (computed, scheduled, prompt, drafts, accepted) in enumerate(
            [(9, 1, 4, 2, 3), (5, 1, 4, 1, 1), (6, 5, 20, 0, 1), (0, 5, 5, 0, 1)]
        )
    ]
    return RandomBatch(requests, BLOCK_SIZE, MAX_MODEL_LEN, sizes, None, True)


def limits_of(step: PreparedStep) -> np.ndarray:
    """Limits of a cache that just has the tables' blocks; each request gets those that it needs."""
    tables, limits = step.batch.tables, [VOCAB]
    holds_states = tables.shape.states.groups
    for each in range(tables.shape.num_groups):
        needed = -(-step.seq_lens // tables.tokens_per_block(each))
        tables.num_blocks[each, step.request_rows] = needed + NUM_DRAFTS * (each in holds_states)
        num_slots = (1 + int(tables.block_table(each).max())) * int(tables.block_sizes[each])
        limits.append(NO_SLOTS if each in holds_states else num_slots)
    return np.array(limits, np.int64)


def finished(step: PreparedStep, slots: list[int], mode: GraphMode = GraphMode.FULL) -> Steps:
    """The step in its rows."""
    moved = at_slots(step.batch, slots[: step.num_reqs])
    step = prepare_step(moved, step.padding, step.layout)
    step.padding = replace(step.padding, mode=GraphMode.FULL)
    has_drafts = bool(step.batch.num_draft_tokens.any())
    made = Steps(step, limits_of(step), has_drafts, step.query_start_loc.tolist())
    assert find_fault(step, made.limits) is None
    step.padding = replace(step.padding, mode=mode)
    return made


def attending(has_drafts: bool, slots: list[int]) -> Steps:
    """A step of attention, the first and the last group in chunks of two blocks; padded."""
    return finished(local_step(batch_of(has_drafts, [NUM_INPUT_TOKENS]), 2), slots)


def holding_states(has_drafts: bool, slots: list[int]) -> Steps:
    """A step with states of whole blocks, as with the prefix cache; padded."""
    batch = batch_of(has_drafts, [NUM_INPUT_TOKENS])
    if has_drafts:
        step = drafts_step(batch.requests, MAX_MODEL_LEN, NUM_DRAFTS, BLOCK_SIZE)
    else:
        step = state_step(batch, 1, keeps_states=True)
    return finished(step, slots, GraphMode.PIECEWISE)


def on_a_rank(has_drafts: bool, slots: list[int]) -> Steps:
    """A step of the second of two ranks, which keep runs of two tokens in turn; padded."""
    batch = batch_of(has_drafts, None)
    scheduled = sum(request.num_scheduled_tokens for request in batch.requests)
    return finished(shared_step(batch, DCPRank(2, 1, 2), 1, NUM_INPUT_TOKENS - scheduled), slots)


class Message(NamedTuple):
    """What a message has to say."""

    given: object
    allowed: object
    req: int | None = None  # row of the batch
    token: int | None = None
    group: int | None = None
    more: str = ""  # after the text of the rule

    def line(self, rule: Rule) -> str:
        name, text = rule.title, rule.text
        request = None if self.req is None else NAMES[self.req]
        end = ending(self.given, self.allowed, request, self.token, self.group)
        return f'step check "{name}": {text}{self.more}{end}'


Plant = Callable[[Steps], Message | list[Message]]


class Entry(NamedTuple):
    """One wrong entry of an array; of several groups, the last one's."""

    array: str
    req: int
    token: int | None = None  # among those of the request
    to: int | None = None
    said: tuple[str, str] = ("{it}", "{it}")  # of the values after the fault, of those before
    by: int = 0  # if it has no value of its own

    def __call__(self, step: Steps) -> Message:
        array, is_padding = getattr(step, self.array), self.req == PADDING
        index = self.req if self.token is None else step.starts[self.req] + self.token
        of_group = array[-1] if array.ndim == 2 else array
        has_group = array.ndim == 2 or self.array.startswith("dcp_")
        given, allowed = self.said
        allowed = allowed.format(**self.values(step, of_group[index]))
        of_group[index] = of_group[index] + self.by if self.to is None else self.to
        return Message(
            given.format(**self.values(step, of_group[index])),
            allowed,
            None if is_padding else self.req,
            None if self.token is None else index,
            step.tables.shape.num_groups - 1 if has_group else None,
            " (padding request 4)" if is_padding and self.token is None else "",
        )

    def values(self, step: Steps, it: int) -> dict[str, int]:
        """What messages tell of a request."""
        found = {"it": it, "block": it // BLOCK_SIZE, "first": step.starts[self.req]}
        found |= {"length": step.seq_lens[self.req], "computed": step.num_computed_tokens[self.req]}
        if step.step.shape.states:
            found["reads"] = step.initial_state_indices[-1, self.req]
            found["writes"] = step.state_indices[-1, self.req]
        if self.array.startswith("dcp_"):
            found["kept"] = step.dcp_local_seq_lens[self.req]
            found["before"] = step.dcp_local_context_lens[self.req]
        return found


LENGTH = ("{length} of {computed} computed",) * 2
IN_BLOCK = "{it}", "{it}, in its block {block}"
ID = "{it}", f"0 to {VOCAB - 1}"
PADDED = (
    "tokens {first} to 20, length {length}, {computed} of them computed",
    f"tokens that rise to {NUM_INPUT_TOKENS} at most, and a length that is their number, up to "
    f"max_model_len {MAX_MODEL_LEN}, 0 of them computed",
)
BOTH = "reads block {reads}, writes block {writes}"
BLOCKS = BOTH, f"{BOTH}, and neither is the null block"
WRITES = "writes block {it}", "writes block {it}, which is not the null block"
UNUSED, UNUSED_BLOCK = (BOTH, "the null block"), ("block {it}", "the null block")
KEPT = "{kept}, {before} of them computed", "{kept}, {before} of them computed, which rank 1 keeps"
ELSEWHERE = "{it} on rank 1", "-1: rank 0 keeps position 8"  # the first one of a run there
ON_RANK = "{it} on rank 1", IN_BLOCK[1]

ENTRIES = [
    (Rule.SEQ_LENS, attending, Entry("seq_lens", 2, said=LENGTH, by=1)),
    (Rule.SEQ_LENS, attending, Entry("num_computed_tokens", 1, said=LENGTH, by=-1)),
    (Rule.POSITIONS, attending, Entry("positions", 0, 0, by=-1)),
    (Rule.POSITIONS, attending, Entry("positions", 2, 3, by=1)),
    (Rule.VOCABULARY, attending, Entry("input_ids", 1, 0, VOCAB, ID)),
    (Rule.VOCABULARY, attending, Entry("input_ids", 3, 1, -1, ID)),
    (Rule.LAST_SLOT, attending, Entry("slot_mapping", 3, 4, said=IN_BLOCK, by=BLOCK_SIZE)),
    (Rule.PADDING_TOKENS, attending, Entry("slot_mapping", PADDING, 4, 5)),
    (Rule.PADDING_TOKENS, on_a_rank, Entry("slot_mapping", PADDING, 4, 5)),
    (Rule.PADDING_REQS, attending, Entry("seq_lens", PADDING, to=1, said=PADDED)),
    (Rule.PADDING_REQS, attending, Entry("seq_lens", PADDING, to=0, said=PADDED)),
    (Rule.PADDING_REQS, attending, Entry("num_computed_tokens", PADDING, to=3, said=PADDED)),
    (Rule.NO_SLOT, holding_states, Entry("slot_mapping", 2, 1, 9)),
    (
        *(Rule.STATE_BEGINS, holding_states),
        Entry("has_initial_state", 3, to=1, said=("True", "False, with 0 computed tokens")),
    ),
    (
        *(Rule.STATE_BEGINS, holding_states),
        Entry("has_initial_state", 2, to=0, said=("False", "True, with 6 computed tokens")),
    ),
    # With drafts, the state of its first token is at the end of the block that it fills.
    (Rule.STATE_BLOCKS, holding_states, Entry("state_indices", 0, to=77, said=BLOCKS)),
    (Rule.STATE_BLOCKS, holding_states, Entry("initial_state_indices", 0, to=77, said=BLOCKS)),
    (Rule.STATE_BLOCKS, holding_states, Entry("initial_state_indices", 1, to=77, said=BLOCKS)),
    (Rule.STATE_BLOCKS, holding_states, Entry("state_indices", 2, to=77, said=BLOCKS)),
    (Rule.STATE_BLOCKS, holding_states, Entry("state_indices", 3, to=77, said=WRITES)),
    (Rule.STATE_BLOCKS, holding_states, Entry("token_state_indices", 0, 2, 77, WRITES)),
    (
        *(Rule.STATE_PADDING, holding_states),
        Entry("has_initial_state", PADDING, to=1, said=("an initial state", "none")),
    ),
    (Rule.STATE_PADDING, holding_states, Entry("state_indices", PADDING, to=9, said=UNUSED)),
    (Rule.STATE_PADDING, holding_states, Entry("initial_state_indices", PADDING, None, 9, UNUSED)),
    (
        *(Rule.STATE_PADDING, holding_states),
        Entry("num_accepted_tokens", PADDING, to=2, said=("2 accepted tokens", "1")),
    ),
    (Rule.STATE_PADDING, holding_states, Entry("token_state_indices", 3, 1, 9, UNUSED_BLOCK)),
    (Rule.STATE_PADDING, holding_states, Entry("token_state_indices", PADDING, 1, 9, UNUSED_BLOCK)),
    (Rule.STATE_ACCEPTED, holding_states, Entry("num_accepted_tokens", 0, to=2)),
    (Rule.STATE_ACCEPTED, holding_states, Entry("num_accepted_tokens", 3, to=2)),
    (Rule.SHARDED_SLOTS, on_a_rank, Entry("slot_mapping", 2, 2, 55, ELSEWHERE)),
    (Rule.SHARDED_SLOTS, on_a_rank, Entry("slot_mapping", 2, 4, said=ON_RANK, by=BLOCK_SIZE)),
    (Rule.SHARDED_LENS, on_a_rank, Entry("dcp_local_seq_lens", 2, said=KEPT, by=1)),
    (Rule.SHARDED_LENS, on_a_rank, Entry("dcp_local_context_lens", 0, said=KEPT, by=-1)),
    (Rule.SHARDED_LENS, on_a_rank, Entry("dcp_local_seq_lens", PADDING, to=3, said=KEPT)),
]
OF_DRAFTS = "token_state_indices", "num_accepted_tokens"  # arrays that only steps with drafts have
CASES: dict[str, tuple[Rule, Callable[[bool, list[int]], Steps], Plant]] = {
    f"{rule.name} {entry.array} {entry.req} {entry.to} {make.__name__}": (rule, make, entry)
    for rule, make, entry in ENTRIES
}
WITH_DRAFTS = {name for name, case in CASES.items() if case[2].array in OF_DRAFTS}


def breaks(rule: Rule, make: Callable = attending, with_drafts: bool = False) -> Callable:
    """Name a function that breaks a rule in a step, and returns what is to be said of it."""

    def add(plant: Plant) -> Plant:
        name = f"{plant.__name__} {make.__name__}"
        CASES[name] = rule, make, plant
        WITH_DRAFTS.update({name} if with_drafts else ())
        return plant

    return add


@breaks(Rule.STARTS_AT_ZERO)
def starts_late(step):
    step.query_start_loc[0] = 1
    return Message(1, 0)


@breaks(Rule.QUERY_LENS)
def query_one_longer(step):
    first, end = step.starts[1:3]
    step.query_start_loc[2] += 1
    allowed = f"{end - first} scheduled tokens of {NUM_INPUT_TOKENS}"
    return Message(f"{first} to {end + 1}", allowed, 1)


@breaks(Rule.ENDS_AT_TOKENS)
def fewer_tokens_than_scheduled(step):
    step.step.batch.total_num_scheduled_tokens += 1
    return Message(step.starts[4], step.starts[4] + 1)


@breaks(Rule.MODEL_LEN)
def past_the_model(step):
    step.tables.num_computed_tokens[step.request_rows[1]] = MAX_MODEL_LEN
    step.num_computed_tokens[1] = MAX_MODEL_LEN
    step.seq_lens[1] = end = MAX_MODEL_LEN + step.starts[2] - step.starts[1]
    return Message(end, f"up to max_model_len {MAX_MODEL_LEN}", 1)


@breaks(Rule.BLOCKS)
@breaks(Rule.BLOCKS, holding_states)
@breaks(Rule.BLOCKS, on_a_rank)
def without_its_last_block(step):
    group = step.tables.shape.num_groups - 1
    needed = -(-11 // step.tables.tokens_per_block(group))
    step.tables.num_blocks[group, step.request_rows[2]] = needed - 1
    blocks = f"{needed - 1} block{'s' * (needed > 2)}"
    return Message(11, f"up to 8 in its {blocks}", 2, group=group)


@breaks(Rule.SLOTS)
def slot_past_the_cache(step):
    token, end = step.starts[3] + 1, int(step.limits[3])
    step.slot_mapping[2, token] = end
    return Message(end, f"{BLOCK_SIZE} to {end - 1}", 3, token, 2)


@breaks(Rule.SLOTS)
def slot_of_the_null_block(step):
    token = step.starts[2]
    step.slot_mapping[0, token] = BLOCK_SIZE - 1
    return Message(BLOCK_SIZE - 1, f"{BLOCK_SIZE} to {step.limits[1] - 1}", 2, token, 0)


@breaks(Rule.SLOTS, on_a_rank)
def table_with_the_null_block(step):
    """Its first token here is that at position 2, the last one of the first run on rank 1."""
    step.tables.block_table(0)[step.request_rows[3], 0] = 0
    token = step.starts[3] + 2
    step.slot_mapping[0, token] = 0
    return Message(0, f"{BLOCK_SIZE} to {step.limits[1] - 1}", 3, token, 0)


@breaks(Rule.MAX_QUERY_LEN)
def longest_query_too_short(step):
    step.step.max_query_len -= 1
    return Message(4, 5)


@breaks(Rule.MAX_SEQ_LEN)
def longest_sequence_too_short(step):
    right = step.step.max_seq_len
    step.step.max_seq_len -= 1
    return Message(right - 1, right)


@breaks(Rule.LOGITS)
def logits_of_padding(step):
    return wrong_logits(step, -1, step.starts[4])


@breaks(Rule.LOGITS)
def logits_twice(step):
    return wrong_logits(step, -1, step.starts[3] - 1)._replace(req=2)


@breaks(Rule.LOGITS)
def logits_before_the_step(step):
    return wrong_logits(step, 0, -1)


def wrong_logits(step: Steps, place: int, token: int) -> Message:
    indices = step.logits_indices[: step.step.num_logits]
    indices[place] = token
    return Message(f"token {token} in {indices.tolist()}", f"rising, below {step.starts[4]}")


@breaks(Rule.ENDS_AT_INPUT_TOKENS)
def graph_that_ends_early(step):
    step.query_start_loc[4:], step.seq_lens[4:] = step.starts[4], 0
    return Message(step.starts[4], NUM_INPUT_TOKENS)


@breaks(Rule.LOCAL_QUERY_LENS)
def virtual_requests_that_fall(step):
    start = step.starts[1]
    step.chunk_local_query_start_loc[2] = start - 1
    allowed = f"rising from 0 to {NUM_INPUT_TOKENS} at most"
    return Message(f"{start} to {start - 1}", allowed, more=" (virtual request 1)")


@breaks(Rule.LOCAL_SEQ_LENS)
def virtual_length_one_more(step):
    step.chunk_local_seq_lens[2] += 1
    allowed = "8 of 6 computed, up to a chunk of 8"
    return Message("9 of 6 computed", allowed, more=" (virtual request 2)")


@breaks(Rule.LOCAL_ENDS_AT_TOKENS)
def virtual_requests_that_end_early(step):
    end = step.starts[4]
    step.chunk_local_query_start_loc[5] -= 1
    step.chunk_local_seq_lens[4] -= 1
    return Message(end - 1, end, more=" (virtual request 4)")


@breaks(Rule.LOCAL_ENDS_AT_INPUT_TOKENS)
def graph_of_virtual_requests_that_ends_early(step):
    step.chunk_local_query_start_loc[5:] = step.starts[4]
    step.chunk_local_seq_lens[5:] = 0
    return Message(step.starts[4], NUM_INPUT_TOKENS)


def shares(step: Steps, row: int, block: int, writer: int, said: str) -> Message:
    """The tables are wrong, too: a request's own row has the state that another one writes."""
    taken = step.state_indices[1, writer]
    own = step.tables.block_table(2)[step.request_rows[row]]
    parts = [step.state_indices[1, row : row + 1], step.initial_state_indices[1, row : row + 1]]
    if step.has_drafts:
        parts.append(step.token_state_indices[1, step.starts[row] : step.starts[row + 1]])
    for part in (own, *parts):
        part[part == block] = taken
    return Message(said.format(block=taken), "a block of its own", row, group=2)


def two_write(step: Steps, row: int, block: int) -> list[Message]:
    """Of two requests that write a state, either may be the one that is named."""
    said = "writes block {block}, as request %s does"
    one = shares(step, row, block, 2, said % NAMES[2])
    return [one, one._replace(given=one.given.replace(NAMES[2], NAMES[row]), req=2)]


@breaks(Rule.STATE_SHARED, holding_states)
def state_that_two_write(step):
    return two_write(step, 3, step.state_indices[1, 3].item())


@breaks(Rule.STATE_SHARED, holding_states, with_drafts=True)
def state_of_a_draft_that_two_write(step):
    return two_write(step, 0, step.token_state_indices[1, 1].item())


@breaks(Rule.STATE_SHARED, holding_states)
def state_that_another_writes(step):
    row = 1 if step.has_drafts else 2  # the other one reads from where it writes
    block = step.initial_state_indices[1, row].item()
    return shares(step, row, block, 3, "reads block {block}, which request four writes")


@breaks(Rule.STATE_SHARED, holding_states, with_drafts=True)
def state_of_two_drafts(step):
    table = step.tables.block_table(2)[step.request_rows[0]]
    kept, lost = step.token_state_indices[1, 1:3].tolist()
    for array in (table, step.token_state_indices[1]):
        array[array == lost] = kept
    return Message(f"writes block {kept} after two of its tokens", "a block of its own", 0, group=2)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(
    ("has_drafts", "name"),
    [
        pytest.param(has_drafts, name, id=f"{name}-drafts" if has_drafts else name)
        for name in CASES
        for has_drafts in (False, True)
        if has_drafts or name not in WITH_DRAFTS
    ],
)
def test_a_message_has_the_numbers_of_the_step_before(name, has_drafts, rows):
    rule, make, plant = CASES[name]
    made = make(has_drafts, ROWS[rows])
    expected = plant(made)
    fault = find_fault(made.step, made.limits)
    assert fault is not None and fault.rule == rule
    error = explain_fault(made.step, made.limits, fault, NAMES)
    either = expected if isinstance(expected, list) else [expected]
    assert str(error) in [message.line(rule) for message in either]
    names = [None if message.req is None else NAMES[message.req] for message in either]
    assert error.rule == rule.title and error.request in names


def test_the_message_of_every_rule_is_read():
    rules = {rule for rule in Rule if rule > Rule.HOLDS}
    assert {*SAID, *(rule for rule, _, _ in CASES.values())} == READS.keys() == rules


def verify(step: PreparedStep, limits: np.ndarray, **batch: Any) -> None:
    """Check a step as a runner does that has just prepared it."""
    flight, batch_of_runner = SimpleNamespace(step=step), SimpleNamespace(**batch)
    runner = SimpleNamespace(in_flight=flight, input_batch=batch_of_runner)
    StepCheck(VOCAB, limits[1:].tolist()).verify(runner, None)


def test_states_are_checked_even_after_a_pass_without_faults():
    """It writes, and checks, what comes before them."""
    made = holding_states(True, ROWS["rows elsewhere"])
    made.step.rule = Rule.HOLDS
    verify(made.step, made.limits, req_ids=NAMES)
    expected = Entry("initial_state_indices", 0, to=77, said=BLOCKS)(made)
    with pytest.raises(StepCheckError) as raised:
        verify(made.step, made.limits, req_ids=NAMES)
    assert str(raised.value) == expected.line(Rule.STATE_BLOCKS)


def test_a_fault_in_a_dummy_run_is_named_before_any_request_came():
    """The batch of V2's runner knows of no request until then."""
    made = attending(False, ROWS["rows in place"])
    nothing = np.empty(0, np.int32)
    batch = StepBatch(made.step.batch.tables, nothing, nothing, 0)
    step = prepare_step(batch, Padding(4, 1, mode=GraphMode.FULL))
    verify(step, made.limits)
    step.arrays.slot_mapping[1, 2] = 6
    with pytest.raises(StepCheckError) as raised:
        verify(step, made.limits)
    assert str(raised.value) == Message(6, -1, None, 2, 1).line(Rule.PADDING_TOKENS)


@given(random_batches(), st.booleans(), st.integers(0, 5))
def test_prepared_steps_break_no_rule(batch, in_full_graph, blocks_per_chunk):
    step = local_step(batch, blocks_per_chunk) if blocks_per_chunk else batch.step()
    if in_full_graph and batch.capture_sizes is not None:
        step.padding = replace(step.padding, mode=GraphMode.FULL)
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
