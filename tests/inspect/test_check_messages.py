"""Every message of the cheap check: its numbers are those of a reading token by token.

Each rule is broken in steps with drafts and without, where rows of the tables are those of the
batch (vLLM's V1 runner) and where they are not (V2). What a message has to say is written from the
requests and from the oracle.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest

from tests.helpers.batches import RandomBatch, at_slots, drafts_step, local_step, state_step
from tests.helpers.forced_messages import ending
from tests.prep.test_context_shards import shared_step
from vllm_npu_prep.observe.check import READS, StepCheck, explain_fault
from vllm_npu_prep.observe.violation import StepCheckError
from vllm_npu_prep.prep.batch import PreparedStep, StepBatch, prepare_step
from vllm_npu_prep.prep.checks import NO_SLOTS, Rule, find_fault
from vllm_npu_prep.prep.context_shards import ContextShards
from vllm_npu_prep.prep.oracle import (
    OracleRequest,
    oracle_local_requests,
    oracle_state_step,
    oracle_step,
)
from vllm_npu_prep.prep.padding import GraphMode, Padding

VOCAB, BLOCK_SIZE, MAX_MODEL_LEN, NUM_INPUT_TOKENS, NUM_DRAFTS = 150_000, 4, 40, 20, 2
NAMES = ["one", "two", "three", "four"]
ROWS = {"rows in place": [0, 1, 2, 3, 4, 5], "rows elsewhere": [3, 0, 5, 1, 4, 2]}
DCP = 2, 1, 2  # ranks, the one of the step, neighbours on one rank


def requests_of(has_drafts: bool) -> list[OracleRequest]:
    """Two decodes, a chunk of a prompt and a prompt."""
    return [
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


@dataclass
class Steps:
    """A step that breaks no rule, and what a reading of its requests says."""

    step: PreparedStep
    requests: list[OracleRequest]
    group: int  # the last one of its kind, whose blocks have ids of their own
    more: int  # what is added to the blocks of `requests` there
    said: dict[str, Any]
    limits: np.ndarray
    has_drafts: bool

    def __getattr__(self, name: str) -> Any:
        return getattr(self.step.arrays, name)

    @property
    def slots(self) -> list[int]:
        """Row of each request in the tables."""
        return self.step.slots.tolist()

    def first(self, req: int) -> int:
        """A request's first token of the step."""
        return sum(request.num_scheduled_tokens for request in self.requests[:req])

    def states(self, name: str) -> Any:
        """Blocks of states, by the oracle."""
        return [block + self.more * (block > 0) for block in self.said[name]]


def finished(
    step: PreparedStep,
    requests: list[OracleRequest],
    slots: list[int],
    group: int,
    more: int,
    said: dict[str, Any],
) -> Steps:
    """The step in its rows, with the blocks that each request needs."""
    moved = at_slots(step.batch, slots[: step.num_reqs])
    step = prepare_step(moved, step.padding, step.layout)
    step.padding = dataclasses.replace(step.padding, mode=GraphMode.FULL)
    tables, limits = step.batch.tables, [VOCAB]
    holds_states = tables.shape.states.groups
    for each in range(tables.shape.num_groups):
        needed = -(-step.seq_lens // tables.tokens_per_block(each))
        tables.num_blocks[each, step.slots] = needed + NUM_DRAFTS * (each in holds_states)
        num_slots = (1 + int(tables.block_table(each).max())) * int(tables.block_sizes[each])
        limits.append(NO_SLOTS if each in holds_states else num_slots)
    has_drafts = any(request.num_draft_tokens for request in requests)
    made = Steps(step, requests, group, more, said, np.array(limits, np.int64), has_drafts)
    assert find_fault(step, made.limits) is None
    return made


def attending(has_drafts: bool, slots: list[int]) -> Steps:
    """A step of attention, the first and the last group in chunks of two blocks; padded."""
    requests = requests_of(has_drafts)
    batch = RandomBatch(requests, BLOCK_SIZE, MAX_MODEL_LEN, [NUM_INPUT_TOKENS], None, True)
    said = oracle_step(requests, block_size=BLOCK_SIZE, max_model_len=MAX_MODEL_LEN)
    return finished(local_step(batch, 2), requests, slots, 2, 1000, said)


def holding_states(has_drafts: bool, slots: list[int]) -> Steps:
    """A step with states of whole blocks, as with the prefix cache; padded."""
    requests = requests_of(has_drafts)
    num_drafts = NUM_DRAFTS * has_drafts
    if has_drafts:
        step = drafts_step(requests, MAX_MODEL_LEN, num_drafts, BLOCK_SIZE)
    else:
        batch = RandomBatch(requests, BLOCK_SIZE, MAX_MODEL_LEN, [NUM_INPUT_TOKENS], None, True)
        step = state_step(batch, 1, keeps_states=True)
    said = oracle_state_step(
        requests,
        decode_threshold=1 + num_drafts,
        block_size=BLOCK_SIZE,
        num_drafts=num_drafts,
    )
    made = finished(step, requests, slots, 2, 1000, said)
    made.step.padding = dataclasses.replace(step.padding, mode=GraphMode.PIECEWISE)
    return made


def on_a_rank(has_drafts: bool, slots: list[int]) -> Steps:
    """A step of a rank that keeps a part of each context; padded."""
    requests = requests_of(has_drafts)
    batch = RandomBatch(requests, BLOCK_SIZE, MAX_MODEL_LEN, None, None, True)
    said = oracle_step(requests, block_size=BLOCK_SIZE, max_model_len=MAX_MODEL_LEN, dcp=DCP)
    padding = NUM_INPUT_TOKENS - sum(request.num_scheduled_tokens for request in requests)
    step = shared_step(batch, ContextShards(*DCP), 1, padding)
    return finished(step, requests, slots, 0, 0, said)


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
CASES: dict[str, tuple[Rule, Callable[[bool, list[int]], Steps], Plant]] = {}
WITH_DRAFTS: set[str] = set()  # cases of arrays that only steps with drafts have


def breaks(rule: Rule, make: Callable = attending, with_drafts: bool = False) -> Callable:
    """Name a function that breaks a rule in a step, and returns what is to be said of it."""

    def add(plant: Plant) -> Plant:
        CASES[plant.__name__] = rule, make, plant
        WITH_DRAFTS.update({plant.__name__} if with_drafts else ())
        return plant

    return add


@breaks(Rule.STARTS_AT_ZERO)
def starts_late(step):
    step.query_start_loc[0] = 1
    return Message(1, 0)


@breaks(Rule.QUERY_LENS)
def query_one_longer(step):
    first, count = step.first(1), step.requests[1].num_scheduled_tokens
    step.query_start_loc[2] += 1
    allowed = f"{count} scheduled tokens of {NUM_INPUT_TOKENS}"
    return Message(f"{first} to {first + count + 1}", allowed, 1)


@breaks(Rule.ENDS_AT_TOKENS)
def fewer_tokens_than_scheduled(step):
    step.step.batch.total_num_scheduled_tokens += 1
    return Message(step.first(4), step.first(4) + 1)


@breaks(Rule.SEQ_LENS)
def length_one_more(step):
    step.seq_lens[2] += 1
    return Message("12 of 6 computed", "11 of 6 computed", 2)


@breaks(Rule.SEQ_LENS)
def computed_one_less(step):
    step.num_computed_tokens[1] -= 1
    end = step.said["seq_lens"][1]
    return Message(f"{end} of 4 computed", f"{end} of 5 computed", 1)


@breaks(Rule.MODEL_LEN)
def past_the_model(step):
    step.step.batch.tables.num_computed_tokens[step.slots[1]] = MAX_MODEL_LEN
    step.num_computed_tokens[1] = MAX_MODEL_LEN
    step.seq_lens[1] = end = MAX_MODEL_LEN + step.requests[1].num_scheduled_tokens
    return Message(end, f"up to max_model_len {MAX_MODEL_LEN}", 1)


@breaks(Rule.BLOCKS)
def without_its_last_block(step):
    step.step.batch.tables.num_blocks[2, step.slots[2]] -= 1
    return Message(11, "up to 8 in its 2 blocks", 2, group=2)


@breaks(Rule.BLOCKS, holding_states)
def without_a_block_for_its_state(step):
    step.step.batch.tables.num_blocks[2, step.slots[2]] = 2
    return Message(11, "up to 8 in its 2 blocks", 2, group=2)


@breaks(Rule.BLOCKS, on_a_rank)
def without_the_last_block_of_all_ranks(step):
    step.step.batch.tables.num_blocks[0, step.slots[2]] = 1
    return Message(11, "up to 8 in its 1 block", 2, group=0)


@breaks(Rule.POSITIONS)
def position_off_by_one(step):
    token = step.first(2) + 3
    step.positions[token] += 1
    right = step.said["positions"][token]
    return Message(right + 1, right, 2, token)


@breaks(Rule.VOCABULARY)
def id_past_the_vocabulary(step):
    token = step.first(1)
    step.input_ids[token] = VOCAB
    return Message(VOCAB, f"0 to {VOCAB - 1}", 1, token)


@breaks(Rule.SLOTS)
def slot_past_the_cache(step):
    token, end = step.first(3) + 1, int(step.limits[3])
    step.slot_mapping[2, token] = end
    return Message(end, f"{BLOCK_SIZE} to {end - 1}", 3, token, 2)


@breaks(Rule.SLOTS, on_a_rank)
def table_with_the_null_block(step):
    """Its first token here is that at position 2, the last one of the first run on rank 1."""
    step.step.batch.tables.block_table(0)[step.slots[3], 0] = 0
    token = step.first(3) + 2
    step.slot_mapping[0, token] = 0
    return Message(0, f"{BLOCK_SIZE} to {step.limits[1] - 1}", 3, token, 0)


@breaks(Rule.LAST_SLOT)
def last_slot_in_another_block(step):
    token = step.first(1) - 1
    right = step.said["slot_mapping"][token] + 1000 * BLOCK_SIZE
    step.slot_mapping[2, token] += BLOCK_SIZE
    allowed = f"{right}, in its block {right // BLOCK_SIZE}"
    return Message(right + BLOCK_SIZE, allowed, 0, token, 2)


@breaks(Rule.MAX_QUERY_LEN)
def longest_query_too_short(step):
    step.step.max_query_len -= 1
    return Message(step.said["max_query_len"] - 1, step.said["max_query_len"])


@breaks(Rule.MAX_SEQ_LEN)
def longest_sequence_too_short(step):
    step.step.max_seq_len -= 1
    return Message(step.said["max_seq_len"] - 1, step.said["max_seq_len"])


@breaks(Rule.LOGITS)
def logits_of_padding(step):
    indices, end = step.said["logits_indices"], step.first(4)
    step.logits_indices[len(indices) - 1] = end
    return Message(f"token {end} in {[*indices[:-1], end]}", f"rising, below {end}")


@breaks(Rule.LOGITS)
def logits_twice(step):
    indices, end = list(step.said["logits_indices"]), step.first(4)
    step.logits_indices[len(indices) - 1] = indices[-1] = indices[-2]
    return Message(f"token {indices[-2]} in {indices}", f"rising, below {end}", 2)


@breaks(Rule.PADDING_TOKENS)
def padding_that_writes(step):
    token = NUM_INPUT_TOKENS - 1
    step.slot_mapping[2, token] = 5
    return Message(5, -1, None, token, 2)


@breaks(Rule.PADDING_TOKENS, on_a_rank)
def padding_that_writes_on_a_rank(step):
    token = NUM_INPUT_TOKENS - 1
    step.slot_mapping[0, token] = 5
    return Message(5, -1, None, token, 0)


def padding_request(step, *, length: int, computed: int = 0) -> Message:
    end = step.first(4)
    step.seq_lens[4], step.num_computed_tokens[4] = length, computed
    given = f"tokens {end} to {NUM_INPUT_TOKENS}, length {length}, {computed} of them computed"
    allowed = (
        f"tokens that rise to {NUM_INPUT_TOKENS} at most, and a length that is their number, up to "
        f"max_model_len {MAX_MODEL_LEN}, 0 of them computed"
    )
    return Message(given, allowed, more=" (padding request 4)")


@breaks(Rule.PADDING_REQS)
def padding_with_a_length_of_its_own(step):
    return padding_request(step, length=1)


@breaks(Rule.PADDING_REQS)
def padding_with_computed_tokens(step):
    return padding_request(step, length=NUM_INPUT_TOKENS - step.first(4), computed=3)


@breaks(Rule.ENDS_AT_INPUT_TOKENS)
def graph_that_ends_early(step):
    step.query_start_loc[4:], step.seq_lens[4:] = step.first(4), 0
    return Message(step.first(4), NUM_INPUT_TOKENS)


def virtual(step) -> dict[str, list[Any]]:
    sizes = {"attention_chunk_size": 2 * BLOCK_SIZE, "block_size": BLOCK_SIZE}
    return oracle_local_requests(step.requests, **sizes)


@breaks(Rule.LOCAL_QUERY_LENS)
def virtual_requests_that_fall(step):
    starts = virtual(step)["query_start_loc"]
    step.chunk_local_query_start_loc[2] = starts[1] - 1
    given = f"{starts[1]} to {starts[1] - 1}"
    allowed = f"rising from 0 to {NUM_INPUT_TOKENS} at most"
    return Message(given, allowed, more=" (virtual request 1)")


@breaks(Rule.LOCAL_SEQ_LENS)
def virtual_length_one_more(step):
    said = virtual(step)
    length, computed = said["seq_lens"][2], said["num_computed_tokens"][2]
    step.chunk_local_seq_lens[2] += 1
    given = f"{length + 1} of {computed} computed"
    allowed = f"{length} of {computed} computed, up to a chunk of 8"
    return Message(given, allowed, more=" (virtual request 2)")


@breaks(Rule.LOCAL_ENDS_AT_TOKENS)
def virtual_requests_that_end_early(step):
    last, end = len(virtual(step)["seq_lens"]) - 1, step.first(4)
    step.chunk_local_query_start_loc[last + 1] -= 1
    step.chunk_local_seq_lens[last] -= 1
    return Message(end - 1, end, more=f" (virtual request {last})")


@breaks(Rule.LOCAL_ENDS_AT_INPUT_TOKENS)
def graph_of_virtual_requests_that_ends_early(step):
    count = len(virtual(step)["seq_lens"])
    step.chunk_local_query_start_loc[count:] = step.first(4)
    step.chunk_local_seq_lens[count:] = 0
    return Message(step.first(4), NUM_INPUT_TOKENS)


@breaks(Rule.NO_SLOT, holding_states)
def slot_of_a_layer_with_states(step):
    token = step.first(2) + 1
    step.slot_mapping[2, token] = 9
    return Message(9, -1, 2, token, 2)


@breaks(Rule.STATE_BEGINS, holding_states)
def begins_with_a_state(step):
    step.has_initial_state[3] = True
    return Message(True, "False, with 0 computed tokens", 3)


@breaks(Rule.STATE_BEGINS, holding_states)
def continues_without_a_state(step):
    step.has_initial_state[2] = False
    return Message(False, "True, with 6 computed tokens", 2)


def reads_and_writes(step, req: int, reads: int, writes: int) -> Message:
    """A wrong read or write of a request that has computed tokens."""
    before = step.states("initial_state_indices")[req]
    after = step.states("state_indices")[req]
    given = f"reads block {reads}, writes block {writes}"
    allowed = f"reads block {before}, writes block {after}, and neither is the null block"
    return Message(given, allowed, req, group=2)


@breaks(Rule.STATE_BLOCKS, holding_states)
def decode_that_writes_another_state(step):
    """With drafts, the state of its first token is at the end of the block that it fills."""
    step.state_indices[1, 0] = 77
    return reads_and_writes(step, 0, step.states("initial_state_indices")[0], 77)


@breaks(Rule.STATE_BLOCKS, holding_states)
def decode_that_reads_another_state(step):
    step.initial_state_indices[1, 0] = 77
    return reads_and_writes(step, 0, 77, step.states("state_indices")[0])


@breaks(Rule.STATE_BLOCKS, holding_states)
def second_decode_that_reads_another_state(step):
    step.initial_state_indices[1, 1] = 77
    return reads_and_writes(step, 1, 77, step.states("state_indices")[1])


@breaks(Rule.STATE_BLOCKS, holding_states)
def chunk_that_writes_another_state(step):
    step.state_indices[1, 2] = 77
    return reads_and_writes(step, 2, step.states("initial_state_indices")[2], 77)


@breaks(Rule.STATE_BLOCKS, holding_states)
def prompt_that_writes_another_state(step):
    step.state_indices[1, 3] = 77
    right = step.states("state_indices")[3]
    allowed = f"writes block {right}, which is not the null block"
    return Message("writes block 77", allowed, 3, group=2)


@breaks(Rule.STATE_BLOCKS, holding_states, with_drafts=True)
def draft_that_writes_another_state(step):
    token = step.first(0) + 2
    step.token_state_indices[1, token] = 77
    right = step.states("token_state_indices")[token]
    allowed = f"writes block {right}, which is not the null block"
    return Message("writes block 77", allowed, 0, token, 2)


def shares(step, row: int, block: int, writer: int, said: str) -> Message:
    """The tables are wrong, too: a request's own row has the state that another one writes."""
    taken = step.states("state_indices")[writer]
    own = step.step.batch.tables.block_table(2)[step.slots[row]]
    first, arrays = step.first(row), [step.state_indices[1], step.initial_state_indices[1]]
    places = [slice(row, row + 1)] * 2
    if step.has_drafts:
        arrays.append(step.token_state_indices[1])
        places.append(slice(first, first + step.requests[row].num_scheduled_tokens))
    for array in (own, *(array[place] for array, place in zip(arrays, places))):
        array[array == block] = taken
    return Message(said.format(block=taken), "a block of its own", row, group=2)


def two_write(step, row: int, block: int) -> list[Message]:
    """Of two requests that write a state, either may be the one that is named."""
    said = "writes block {block}, as request %s does"
    one = shares(step, row, block, 2, said % NAMES[2])
    return [one, one._replace(given=one.given.replace(NAMES[2], NAMES[row]), req=2)]


@breaks(Rule.STATE_SHARED, holding_states)
def state_that_two_write(step):
    return two_write(step, 3, step.states("state_indices")[3])


@breaks(Rule.STATE_SHARED, holding_states, with_drafts=True)
def state_of_a_draft_that_two_write(step):
    return two_write(step, 0, step.states("token_state_indices")[1])


@breaks(Rule.STATE_SHARED, holding_states)
def state_that_another_writes(step):
    row = 1 if step.has_drafts else 2  # the other one reads from where it writes
    block = step.states("initial_state_indices")[row]
    return shares(step, row, block, 3, "reads block {block}, which request four writes")


@breaks(Rule.STATE_SHARED, holding_states, with_drafts=True)
def state_of_two_drafts(step):
    table = step.step.batch.tables.block_table(2)[step.slots[0]]
    kept, lost = step.states("token_state_indices")[1:3]
    for array in (table, step.token_state_indices[1]):
        array[array == lost] = kept
    return Message(f"writes block {kept} after two of its tokens", "a block of its own", 0, group=2)


@breaks(Rule.STATE_PADDING, holding_states)
def padding_with_a_state(step):
    step.has_initial_state[4] = True
    return Message("an initial state", "none", more=" (padding request 4)")


@breaks(Rule.STATE_PADDING, holding_states)
def padding_that_writes_a_state(step):
    step.state_indices[1, 4] = 9
    given = "reads block 0, writes block 9"
    return Message(given, "the null block", group=2, more=" (padding request 4)")


@breaks(Rule.STATE_PADDING, holding_states)
def padding_that_reads_a_state(step):
    step.initial_state_indices[1, 4] = 9
    given = "reads block 9, writes block 0"
    return Message(given, "the null block", group=2, more=" (padding request 4)")


@breaks(Rule.STATE_PADDING, holding_states, with_drafts=True)
def padding_with_accepted_tokens(step):
    step.num_accepted_tokens[4] = 2
    return Message("2 accepted tokens", 1, more=" (padding request 4)")


@breaks(Rule.STATE_PADDING, holding_states, with_drafts=True)
def token_of_a_prompt_with_a_state(step):
    token = step.first(3) + 1
    step.token_state_indices[1, token] = 9
    return Message("block 9", "the null block", 3, token, 2)


@breaks(Rule.STATE_PADDING, holding_states, with_drafts=True)
def padding_token_with_a_state(step):
    token = step.first(4) + 1
    step.token_state_indices[1, token] = 9
    return Message("block 9", "the null block", None, token, 2)


@breaks(Rule.STATE_ACCEPTED, holding_states, with_drafts=True)
def one_accepted_token_less(step):
    step.num_accepted_tokens[0] = 2
    return Message(2, 3, 0)


@breaks(Rule.STATE_ACCEPTED, holding_states, with_drafts=True)
def accepted_tokens_where_none_is_computed(step):
    step.num_accepted_tokens[3] = 2
    return Message(2, 1, 3)


@breaks(Rule.SHARDED_SLOTS, on_a_rank)
def slot_of_another_rank(step):
    token = step.first(2) + 2  # position 8: the first of the second block, on rank 0
    step.slot_mapping[0, token] = 55
    return Message("55 on rank 1", "-1: rank 0 keeps position 8", 2, token, 0)


@breaks(Rule.SHARDED_SLOTS, on_a_rank)
def slot_in_another_block_of_a_rank(step):
    token = step.first(2) + 4  # position 10
    right = step.said["slot_mapping"][token]
    step.slot_mapping[0, token] += BLOCK_SIZE
    allowed = f"{right}, in its block {right // BLOCK_SIZE}"
    return Message(f"{right + BLOCK_SIZE} on rank 1", allowed, 2, token, 0)


def kept(step, req: int, length: int, computed: int) -> Message:
    lens = [step.said[f"dcp_local_{name}_lens"][req] for name in ("seq", "context")]
    given = f"{length}, {computed} of them computed"
    return Message(
        given, f"{lens[0]}, {lens[1]} of them computed, which rank 1 keeps", req, group=0
    )


@breaks(Rule.SHARDED_LENS, on_a_rank)
def length_of_a_rank_one_more(step):
    step.dcp_local_seq_lens[2] += 1
    computed = step.said["dcp_local_context_lens"][2]
    return kept(step, 2, step.said["dcp_local_seq_lens"][2] + 1, computed)


@breaks(Rule.SHARDED_LENS, on_a_rank)
def computed_tokens_of_a_rank_one_less(step):
    step.dcp_local_context_lens[0] -= 1
    computed = step.said["dcp_local_context_lens"][0]
    return kept(step, 0, step.said["dcp_local_seq_lens"][0], computed - 1)


@breaks(Rule.SHARDED_LENS, on_a_rank)
def padding_that_a_rank_keeps(step):
    step.dcp_local_seq_lens[4] = 3
    allowed = "0, 0 of them computed, which rank 1 keeps"
    return Message("3, 0 of them computed", allowed, group=0, more=" (padding request 4)")


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
def test_a_message_has_the_numbers_of_a_scalar_reading(name, has_drafts, rows):
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
    assert {rule for rule, _, _ in CASES.values()} == READS.keys() == rules


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
    expected = decode_that_reads_another_state(made)
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
