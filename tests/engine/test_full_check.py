"""The full check: faults of each kind, planted between the steps of a real runner, are named.

That it stays silent in mixed traffic is seen wherever episodes are played (tests/differential).
"""

from dataclasses import replace

import pytest
from vllm.lora.request import LoRARequest

from tests.helpers.engine import generate, greedy, make_model, runner_of
from tests.helpers.stepping import bookkeep, new_request, prepare, scheduler_output
from tests.helpers.v2 import ALSO_V2, engine_of
from vllm_npu_prep.observe.check import StepCheck
from vllm_npu_prep.observe.check_level import make_check
from vllm_npu_prep.observe.violation import StepCheckError
from vllm_npu_prep.prep.checks import Rule
from vllm_npu_prep.prep.state import AttentionState
from vllm_npu_prep.runner.v1 import runner as v1_runner
from vllm_npu_prep.runner.v2 import runner as v2_runner
from vllm_npu_prep.runner.v2.order import BatchOrder

BLOCK_SIZE = 16
PROMPT_A, PROMPT_B = list(range(2, 22)), list(range(30, 40))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model"), num_hidden_layers=1)


def settings(**others):
    return {
        "block_size": BLOCK_SIZE,
        "num_gpu_blocks_override": 64,
        "additional_config": {"npu_prep": {"check": "full", "mask": "dense"}},
        **others,
    }


@pytest.fixture(scope="module", params=ALSO_V2)
def llm(model, request):
    with engine_of(request.param, model, async_scheduling=False, **settings()) as llm:
        yield llm


class Steps:
    """Two requests on a runner whose check begins anew: A owns blocks 1 and 2, B block 3."""

    updates, adds_row, appends = "_update_states", "add_row", "append_row"

    def __init__(self, runner):
        self.runner = runner
        self.tables = runner.preparer.tables
        self.clear()
        runner.step_check = make_check("full", runner)

    def clear(self):
        """Forget the requests of earlier tests."""
        self.runner._update_states(scheduler_output({}, finished=set(self.runner.requests)))
        self.runner.block_tables.clear()

    def run(self, output):
        """A step in which each request samples 7."""
        prepare(self.runner, output)
        bookkeep(self.runner, output, dict.fromkeys(output.num_scheduled_tokens, 7))

    def row(self, req_id):
        """Of a request in the tables."""
        return self.runner.input_batch.req_id_to_index[req_id]

    def resumed(self, output):
        """A after preemption, with new blocks."""
        cached = output.scheduled_cached_reqs
        cached.resumed_req_ids, cached.new_block_ids[0] = {"A"}, ([5, 6],)
        return output

    def first(self):
        """Both prompts."""
        new = [new_request("A", PROMPT_A, [1, 2]), new_request("B", PROMPT_B, [3])]
        self.step({"A": 20, "B": 10}, new=new)
        return self

    def step(self, counts, **others):
        self.run(scheduler_output(counts, **others))

    def decode(self, **others):
        """Each samples once more."""
        self.run(self.decoded(**others))

    def decoded(self, *, without=(), **others):
        lengths = {"A": ([], 20, 1), "B": ([], 10, 1)}
        cached = {req_id: state for req_id, state in lengths.items() if req_id not in without}
        counts = dict.fromkeys(cached, 1) | others.pop("counts", {})
        return scheduler_output(counts, cached=cached | others.pop("cached", {}), **others)

    def table(self):
        return self.tables.block_table(0)


class SlotSteps(Steps):
    """The same on Model Runner V2, whose steps are whole ones of a small model."""

    updates, adds_row, appends = "update_requests", "append_block_ids", "append_block_ids"

    def clear(self):
        runner, sample = self.runner, type(self.runner).sample

        def sevens(*args):
            found = sample(runner, *args)
            found[0].sampled_token_ids.fill_(7)
            return found

        runner.sample = sevens
        self.run(scheduler_output({}, finished=set(runner.req_states.req_id_to_index)))
        runner.order = BatchOrder(runner.preparer.tables.request_rows)

    def run(self, output):
        self.runner.execute_model(output)
        self.runner.sample_tokens(None)

    def row(self, req_id):
        return self.runner.req_states.req_id_to_index[req_id]

    def resumed(self, output):
        """To V2, it is new."""
        new = new_request("A", PROMPT_A, [5, 6])
        new.prefill_token_ids.append(7)
        counts = output.num_scheduled_tokens
        return scheduler_output(counts, new=[new], cached={"B": ([], 11, 2)})


def steps_of(llm):
    """`Steps` of an engine's runner."""
    runner = runner_of(llm)
    return (Steps if hasattr(runner, "_model_forward") else SlotSteps)(runner)


FAULTS = {}


def said_of(rule, who, values, among=FAULTS):
    """What the check says of the fault that a function plants: its rule, of whom, and numbers."""

    def add(plant):
        among[plant] = rule, who, values
        return plant

    return add


def in_table(place, block):
    """Plant a block in A's row of the table."""

    def fault(steps, monkeypatch):
        steps.first().table()[steps.row("A"), place] = block
        steps.decode()

    return fault


FAULTS[in_table(1, 3)] = "write into another's block", "A", "block 3 of request B, allowed 2"
FAULTS[in_table(0, 0)] = "null block", "A", "given the null block, allowed 1"
FAULTS[in_table(1, 33)] = "wrong block", "A", "block 33, which no request was given"
FAULTS[in_table(0, 2)] = "wrong block", "A", "block 2, another one of its own, allowed 1"


def given_adapter(steps, monkeypatch, new, loads):
    """Have a request use adapter 1, of which `loads` says what is loaded."""
    new.lora_request = LoRARequest("adapter", 1, "/path")
    monkeypatch.setattr(steps.runner.step_check.ledger.owned, "load_of", loads.get)
    return new


@said_of("adapter", "C", "given load second of adapter 1, allowed load first")
def adapter_loaded_anew(steps, monkeypatch):
    loads = {1: "first"}
    new = given_adapter(steps, monkeypatch, new_request("C", PROMPT_A, [8, 9]), loads)
    steps.step({"C": 20}, new=[new])
    loads[1] = "second"
    steps.step({"C": 1}, cached={"C": ([], 20, 1)})


@said_of("content", "D, position 0", "last written by request C")
def cached_block_of_another_load(steps, monkeypatch):
    loads = {1: "first"}
    new = given_adapter(steps, monkeypatch, new_request("C", PROMPT_A, [8, 9]), loads)
    steps.step({"C": 20}, new=[new])
    loads[1] = "second"
    new = given_adapter(steps, monkeypatch, new_request("D", PROMPT_A, [8, 10], 16), loads)
    steps.step({"D": 4}, new=[new], finished={"C"})


@said_of("write after free", "B", "block 2, which request A freed, allowed 3")
def freed_block(steps, monkeypatch):
    steps.first().decode(without=["A"], finished={"A"})
    steps.table()[steps.row("B"), 0] = 2
    steps.step({"B": 1}, cached={"B": ([], 11, 2)})


@said_of("stale block", "A", "given block 1, which it had before it was preempted, allowed 5")
def block_from_before_preemption(steps, monkeypatch):
    steps.first()
    output = steps.decoded(without=["A"])
    output.preempted_req_ids = {"A"}
    steps.run(output)
    output = scheduler_output({"A": 21, "B": 1}, cached={"A": ([], 0, 1), "B": ([], 11, 2)})
    add_row = getattr(steps.runner.block_tables, steps.adds_row)

    def add_old_row(*args, **kwargs):
        add_row(*(([1, 2],) if each == ([5, 6],) else each for each in args), **kwargs)

    monkeypatch.setattr(steps.runner.block_tables, steps.adds_row, add_old_row)
    steps.run(steps.resumed(output))


@said_of("block table", "A", "given 2 blocks, allowed 3")
def forgotten_block(steps, monkeypatch):
    steps.first()
    monkeypatch.setattr(steps.runner.block_tables, steps.appends, lambda *_, **__: None)
    steps.decode(cached={"A": ([4], 20, 1)})


@said_of("slot", "A, token 3, position 3", "given 16, allowed 19")
def slot_in_its_block(steps, monkeypatch):
    in_step(monkeypatch, lambda step: step.arrays.slot_mapping.__setitem__((0, 3), 16))
    steps.first()


@said_of(
    "write into another's block", "A, token 3, position 3", "given block 3 of request B, allowed 1"
)
def slot_in_a_foreign_block(steps, monkeypatch):
    in_step(monkeypatch, lambda step: step.arrays.slot_mapping.__setitem__((0, 3), 50))
    steps.first()


@said_of("use before write", "C, position 0", "given a slot of block 7 that nobody wrote, allowed")
def cached_block_that_nobody_wrote(steps, monkeypatch):
    new = [new_request("C", [*PROMPT_A[:16], 5], [7, 8], 16)]
    steps.first().decode(counts={"C": 1}, new=new)


@said_of("content", "C, position 15", "given a slot of block 1, last written by request A")
def cached_block_with_other_tokens(steps, monkeypatch):
    new = [new_request("C", [*PROMPT_A[:15], 5, 5], [1, 8], 16)]
    steps.first().decode(counts={"C": 1}, new=new)


@said_of("content", "C, position 0", "given a slot of block 1, last written by request B")
def cached_block_that_was_written_over(steps, monkeypatch):
    """B gets a block of A, which is gone; then C is told to find A's tokens there."""
    steps.first().decode(without=["A"], finished={"A"}, cached={"B": ([1], 10, 1)})
    steps.tables.token_ids[steps.row("B"), 11:18] = 7
    steps.step({"B": 7}, cached={"B": ([], 11, 2)})
    new = [new_request("C", [*PROMPT_A[:16], 5], [1, 8], 16)]
    steps.step({"B": 1, "C": 1}, cached={"B": ([], 18, 3)}, new=new)


@said_of(
    "write into another's block", "A, token 0, position 15", "given block 1, also of request C"
)
def shared_block_written(steps, monkeypatch):
    """C shares A's first block, and A is told to compute the end of it again."""
    new = [new_request("C", [*PROMPT_A[:16], 5], [1, 8], 16)]
    steps.first().decode(counts={"C": 1}, new=new)
    steps.step({"A": 6, "C": 1}, cached={"A": ([], 15, 2), "C": ([], 17, 1)})


@said_of("owners", "B", "given block 3, also of request C")
def block_handed_out_twice(steps, monkeypatch):
    new = [new_request("C", [5, 6], [3])]
    steps.first().decode(counts={"C": 2}, new=new)


@said_of("owners", "C", "block 4 twice")
def block_twice_in_a_row(steps, monkeypatch):
    steps.step({"C": 20}, new=[new_request("C", PROMPT_A, [4, 4])])


@said_of("computed tokens", "B", "given 11, allowed 10")
def counted_one_more(steps, monkeypatch):
    def add_one():
        steps.tables.num_computed_tokens[steps.row("B")] += 1
        steps.tables.token_ids[steps.row("B"), 11] = 7

    steps.first()
    in_tables(steps, monkeypatch, add_one)
    steps.decode()


@said_of("prompt", "B, token 24, position 4", "given 77, allowed 34")
def prompt_changed(steps, monkeypatch):
    def change():
        steps.tables.token_ids[steps.row("B"), 4] = 77

    in_tables(steps, monkeypatch, change)
    steps.first()


@said_of("state", None, "given ChunkedPrefill, allowed DecodeOnly")
def wrong_state(steps, monkeypatch):
    steps.first()
    in_step(monkeypatch, lambda step: setattr(step, "attn_state", AttentionState.ChunkedPrefill))
    steps.decode()


@said_of("device", None, "on the device is the host's: given")
def copied_in_part(steps, monkeypatch):
    steps.first()
    submit = steps.runner.preparer.staging.submit
    monkeypatch.setattr(steps.runner.preparer.staging, "submit", lambda nbytes: submit(nbytes // 2))
    steps.decode()


@said_of("staging", None, "must not change before it is used again")
def buffer_written_too_early(steps, monkeypatch):
    staging, sent = steps.runner.preparer.staging, []
    acquire = staging.acquire
    monkeypatch.setattr(staging, "acquire", lambda *args: sent.append(acquire(*args)) or sent[-1])
    steps.first()
    in_step(monkeypatch, lambda step: sent[0].np.positions.__setitem__(0, 5))
    steps.decode()


@said_of("device block table", "B", "block 9 at place 0, allowed 3")
def device_table_changed(steps, monkeypatch):
    steps.first().runner.block_tables.device_rows(2)[0][1, 0] = 9
    steps.decode()


@said_of("requests", "Z", "given a request that never arrived")
def request_that_never_arrived(steps, monkeypatch):
    steps.first().decode(cached={"Z": ([], 5, 1)}, counts={"Z": 1})


@said_of("blocks", "B", "given 17, allowed up to 16")
def block_that_nobody_handed_out(steps, monkeypatch):
    """B's row has a second block, in which its 17th token is to be."""
    row = steps.first().row("B")
    steps.table()[row, 1], steps.tables.num_blocks[0, row] = 9, 2
    steps.tables.token_ids[row, 11:17] = 7
    steps.step({"B": 7}, cached={"B": ([], 10, 1)})


def in_step(monkeypatch, fault):
    """Plant a fault in what is prepared, before it is sent."""
    prepare_step = v1_runner.prepare_step

    def planted(*args):
        step = prepare_step(*args)
        fault(step)
        step.rule = Rule.NOT_CHECKED  # the pass that wrote it checked it without the fault
        return step

    for module in (v1_runner, v2_runner):
        monkeypatch.setattr(module, "prepare_step", planted)


def in_tables(steps, monkeypatch, fault):
    """Plant a fault in the tables of requests, when these have a step."""
    update = getattr(steps.runner, steps.updates)

    def updated(output):
        update(output)
        fault()

    monkeypatch.setattr(steps.runner, steps.updates, updated)


def flipped(mask):
    mask = mask.clone()
    mask[4, 2] = True
    return mask


def by(name, change):
    """Plant a fault in a field of what layers are given."""

    def fault(steps, monkeypatch):
        _, builder, _ = steps.runner.preparer.builders[0]
        build_step = builder.build_step

        def built(*args):
            metadata = build_step(*args)
            return replace(metadata, **{name: change(getattr(metadata, name))})

        monkeypatch.setattr(builder, "build_step", built)
        steps.first()

    return fault


FAULTS[by("attn_state", lambda _: AttentionState.SpecDecoding)] = (
    "state of layers",
    None,
    "given SpecDecoding, allowed PrefillNoCache",
)
FAULTS[by("attn_mask", lambda mask: None)] = "mask", None, "given None, allowed (20, 20)"
FAULTS[by("attn_mask", flipped)] = "mask", None, "row 4, column 2 of the mask"
FAULTS[by("seq_lens_np", lambda lens: lens[1:])] = "lists of one length", None, "given [2, 1, 2, 2]"
FAULTS[by("seq_lens", lambda lens: lens + 1)] = "lengths on the device", None, "given [21, 11]"
FAULTS[by("max_seq_len", lambda longest: longest - 1)] = "longest sequence of layers", None, "19"
FAULTS[by("slot_mapping", lambda slots: slots + 1)] = "slots of layers", None, "given [17"


@pytest.mark.parametrize("plant", FAULTS, ids=lambda plant: getattr(plant, "__name__", "fault"))
def test_a_planted_fault_is_named(llm, monkeypatch, plant):
    steps = steps_of(llm)
    with pytest.raises(StepCheckError) as raised:
        plant(steps, monkeypatch)
    rule, who, values = FAULTS[plant]
    said = str(raised.value)
    assert said.startswith(f'step check "{rule}": ') and "\n" not in said
    assert (f"request {who}" if who else "") in said and values in said


def test_steps_without_a_fault_are_silent(llm):
    """Also those that share, resume, grow, and begin where another one ended."""
    steps = steps_of(llm).first()
    new = [new_request("C", [*PROMPT_A[:16], 5], [1, 8], 16)]
    steps.decode(counts={"C": 1}, new=new)
    steps.step({"C": 1, "D": 17}, cached={"C": ([], 17, 1)}, finished={"A", "B"},
               new=[new_request("D", PROMPT_A[:17], [2, 3], 0)])  # fmt: skip


def test_blocks_of_a_preempted_request_may_go_to_another_at_once(llm):
    steps = steps_of(llm).first()
    output = steps.decoded(
        without=["A"], counts={"E": 17}, new=[new_request("E", PROMPT_A[:17], [1, 2], 0)]
    )
    output.preempted_req_ids = {"A"}
    steps.run(output)


@pytest.mark.parametrize("llm", ["V2"], indirect=True)
def test_what_a_preempted_request_had_generated_is_known(llm):
    """To V2 it is a new request. It reads blocks that another one writes in the same step."""
    again = new_request("A", PROMPT_A, [5, 6, 8], 32)
    again.prefill_token_ids += [7] * 13
    other = new_request("C", [*PROMPT_A, *[7] * 12], [5, 6])
    steps_of(llm).first().step({"A": 1, "C": 32}, new=[again, other])


@pytest.mark.parametrize("runner_name", ALSO_V2)
def test_a_sample_in_the_place_of_another_is_noticed(model, monkeypatch, runner_name):
    """Under asynchronous scheduling, where it never was on the host."""
    with engine_of(runner_name, model, async_scheduling=True, **settings()) as llm:
        steps = steps_of(llm).first()
        staging = steps.runner.preparer.staging
        send = staging.send
        monkeypatch.setattr(staging, "send", lambda step, ids: send(step, ids.flip(0) + 1))
        with pytest.raises(StepCheckError, match="request A, token 0: given 8, allowed 7"):
            steps.decode()
        monkeypatch.undo()
        steps = steps_of(llm).first()
        if runner_name == "V1":
            steps.runner.block_tables.previous_rows[:2] = [1, 0]
        else:
            rows = steps.runner.req_states.samples.rows
            rows[[steps.row("A"), steps.row("B")]] = [1, 0]
        with pytest.raises(StepCheckError, match="request A: given 1, allowed 0"):
            steps.decode()


@pytest.mark.parametrize("runner_name", ALSO_V2)
def test_a_violation_ends_the_engine_before_the_step_runs(model, monkeypatch, runner_name):
    """The cheap check is on unless it is switched off."""
    prompts, params = [PROMPT_A, PROMPT_B], greedy(4)
    in_step(monkeypatch, lambda step: step.arrays.input_ids.__setitem__(0, 1 << 20))
    unchecked = {"additional_config": {"npu_prep": {"check": "off"}}}
    with engine_of(runner_name, model, **unchecked) as llm:
        assert runner_of(llm).step_check is None
    with engine_of(runner_name, model, additional_config={}) as llm:
        assert type(runner_of(llm).step_check) is StepCheck
        with pytest.raises(StepCheckError, match=r'"vocabulary".*token 0: given 1048576') as raised:
            generate(llm, prompts, params)
    assert (raised.value.rule, raised.value.token) == ("vocabulary", 0)
