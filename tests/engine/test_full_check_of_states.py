"""The full check of an engine with states: faults planted between its steps are named.

One layer of linear attention beside one of attention, and the prefix cache: a request has a state
for each block of 16 tokens.
"""

from functools import partial

import pytest

from tests.engine.test_full_check import BLOCK_SIZE, PROMPT_A, PROMPT_B, Steps, in_step
from tests.engine.test_full_check import said_of as said
from tests.helpers.engine import make_model, runner_of
from tests.helpers.hybrids import FULL, GATED_DELTA, LINEAR
from tests.helpers.stepping import new_request, scheduler_output
from tests.helpers.v2 import engine_of
from vllm_npu_prep.observe.violation import StepCheckError

OF_STATES = 0  # the group; attention's is 1


@pytest.fixture(scope="module")
def runner(tmp_path_factory):
    config = {**GATED_DELTA, "num_hidden_layers": 2, "layer_types": [LINEAR, FULL]}
    model = make_model(tmp_path_factory.mktemp("model"), "Qwen3_5", **config)
    with engine_of(
        "V1",
        model,
        async_scheduling=False,
        enable_prefix_caching=True,
        block_size=BLOCK_SIZE,
        num_gpu_blocks_override=64,
        additional_config={"npu_prep": {"check": "full"}},
    ) as llm:
        groups = runner_of(llm).step_check.ledger.groups
        assert [group.holds_states for group in groups] == [True, False]
        assert {group.block_size for group in groups} == {BLOCK_SIZE}
        yield runner_of(llm)


class StateSteps(Steps):
    """A has states in blocks 1 and 2, K and V in 3 and 4; B a state in block 5, K and V in 6."""

    def first(self):
        """A's first block and B's prompt."""
        new = [request("A", PROMPT_A, [1, 2], [3, 4]), request("B", PROMPT_B, [5], [6])]
        return self.step({"A": 16, "B": 10}, new=new)

    def step(self, counts, cached=None, **others):
        """One step; `cached` maps a request to new blocks by group, and its computed tokens."""
        cached = cached or {}
        told = {req_id: ([], computed, 1) for req_id, (_, computed) in cached.items()}
        output = scheduler_output(counts, cached=told, **others)
        output.scheduled_cached_reqs.new_block_ids = [blocks for blocks, _ in cached.values()]
        self.run(output)
        return self

    def second(self, *, counts=(), **others):
        """The rest of A's prompt, and B's first decode."""
        cached = {"A": (None, 16), "B": (None, 10)}
        return self.step({"A": 4, "B": 1, **dict(counts)}, cached, **others)

    def table(self):
        return self.runner.input_batch.block_table[OF_STATES].block_table.np


def request(req_id, prompt, states, attention, computed=0):
    made = new_request(req_id, prompt, [], computed)
    made.block_ids = (states, attention)
    return made


FAULTS = {}
said_of = partial(said, among=FAULTS)


@said_of("use before write", "C", "block 7, whose recurrent state nobody wrote")
def state_that_nobody_wrote(steps, monkeypatch):
    new = [request("C", [*PROMPT_A[:16], 5], [7, 8], [3, 9], 16)]
    steps.first().second(counts={"C": 1}, new=new)


@said_of("state content", "C", "block 1, last written by request A")
def state_of_other_tokens(steps, monkeypatch):
    new = [request("C", [*PROMPT_A[:15], 5, 5], [1, 8], [3, 9], 16)]
    steps.first().second(counts={"C": 1}, new=new)


@said_of("state content", "C", "block 1, last written by request B")
def state_that_was_written_over(steps, monkeypatch):
    """B gets a block of A, which is gone; then C is told to find A's state there."""
    steps.first().step({"B": 7}, {"B": (([1], [10]), 10)}, finished={"A"})
    new = [request("C", [*PROMPT_A[:16], 5], [1, 8], [3, 9], 16)]
    steps.step({"C": 1}, new=new, finished={"B"})


@said_of("use before write", "C", "block 1, whose recurrent state nobody wrote")
def state_under_k_and_v(steps, monkeypatch):
    """The same, but B has written K and V there."""
    steps.first().step({"B": 7}, {"B": (([11], [1]), 10)}, finished={"A"})
    new = [request("C", [*PROMPT_A[:16], 5], [1, 8], [3, 9], 16)]
    steps.step({"B": 1, "C": 1}, {"B": (None, 17)}, new=new)


@said_of("state content", "A", "allowed the state after 18 tokens")
def state_of_a_block_too_far(steps, monkeypatch):
    """A goes back to its first block's end, where its state was not left but at its prompt's."""
    steps.first().second().step({"A": 1, "B": 1}, {"A": (None, 18), "B": (None, 11)})


@said_of("shared state", "A", "block 1, also of request C")
def shared_state_written(steps, monkeypatch):
    """C shares A's state, not its K and V, which were loaded; A is told to begin again."""
    steps.runner.step_check.ledger.owned.loads = True
    new = [request("C", [*PROMPT_A[:16], 5], [1, 8], [10, 9], 16)]
    steps.first().second(counts={"C": 1}, new=new)
    steps.step({"A": 16}, {"A": (None, 0)})


@said_of("write into another's block", "A", "block 5 of request B, allowed 2")
def another_ones_state(steps, monkeypatch):
    steps.first().table()[0, 1] = 5
    steps.step({"A": 4}, {"A": (None, 16)})


@said_of("initial state", "B", "given False, allowed True, with 10")
def empty_where_tokens_are_computed(steps, monkeypatch):
    steps.first()
    in_step(monkeypatch, lambda step: step.arrays.has_initial_state.__setitem__(0, False))
    steps.second()


@said_of("initial state", "B", "given True, allowed False")
def a_state_where_a_request_begins(steps, monkeypatch):
    in_step(monkeypatch, lambda step: step.arrays.has_initial_state.__setitem__(1, True))
    steps.first()


@pytest.mark.parametrize("plant", FAULTS, ids=lambda plant: plant.__name__)
def test_a_planted_fault_is_named(runner, monkeypatch, plant):
    steps = StateSteps(runner)
    with pytest.raises(StepCheckError) as raised:
        plant(steps, monkeypatch)
    rule, who, values = FAULTS[plant]
    said = str(raised.value)
    assert said.startswith(f'step check "{rule}": ') and "\n" not in said
    assert (f"request {who}" if who else "") in said and values in said


def test_steps_without_a_fault_are_silent(runner):
    """Also of a request that begins with another one's state, and of one in its former blocks."""
    steps = StateSteps(runner).first()
    new = [request("C", [*PROMPT_A[:16], 5], [1, 8], [3, 9], 16)]
    steps.second(counts={"C": 1}, new=new)
    steps.step(
        {"C": 1, "D": 10},
        {"C": (None, 17)},
        finished={"A", "B"},
        new=[request("D", PROMPT_B, [2], [5])],
    )
