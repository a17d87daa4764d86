"""What the V2 runner keeps by slot: samples, block tables, values, and the order of a batch."""

from functools import partial

import numpy as np
import pytest
import torch
from vllm.v1.core.sched.output import SchedulerOutput

from tests.helpers.stepping import new_request, scheduler_output
from tests.helpers.traffic import Traffic
from vllm_npu_prep.runner.v2 import block_tables as block_tables_module
from vllm_npu_prep.runner.v2.block_tables import NPUBlockTables
from vllm_npu_prep.runner.v2.buffers import RowValues, StagedRows
from vllm_npu_prep.runner.v2.order import BatchOrder, batch_of_step
from vllm_npu_prep.runner.v2.request_states import UNKNOWN_TOKEN, NPURequestState, Samples

CPU = torch.device("cpu")


class Drawn:
    """Samples of steps, and each request's last one kept beside them."""

    def __init__(self, num_slots: int) -> None:
        self.samples, self.last = Samples(num_slots), {}
        self.token = 0

    def step(self, slots: list[int], prompts: set[int] = frozenset(), discard: set[int] = ()):
        """A step: what it continues from, then a new sample for each request."""
        batch = np.array(slots)
        found = self.samples.find(batch, np.array([slot not in prompts for slot in slots]))
        for slot, row in zip(slots, found.rows.tolist()):
            if slot in prompts:
                assert row == -1
            else:
                assert int(found.token_ids[row]) == self.last[slot], slot
        tokens = list(range(self.token, self.token + len(slots)))
        self.token += len(slots)
        thrown = np.array([slot in discard for slot in slots])
        self.samples.keep(torch.tensor(tokens, dtype=torch.int32), batch, thrown)
        self.last.update({s: t for s, t in zip(slots, tokens) if s not in discard})
        return found


def test_a_slot_forgets_the_sample_of_its_former_request():
    drawn = Drawn(3)
    drawn.step([0, 1], prompts={0, 1})
    drawn.samples.forget(1)
    drawn.step([0])
    assert drawn.samples.num_older == 0, "nothing is kept of the former request"
    drawn.step([1, 0], prompts={1})
    drawn.step([0, 1])


def test_random_traffic_finds_every_sample(seed):
    traffic, drawn = Traffic(seed), Drawn(12)
    for _ in range(300):
        for slot in [slot for slot in drawn.last if traffic.chance(0.05, "finished")]:
            drawn.samples.forget(slot)
            del drawn.last[slot]
        slots = traffic.shuffled(range(12))[: traffic.number(1, 12)]
        prompts = {slot for slot in slots if slot not in drawn.last}
        chunks = {slot for slot in prompts if traffic.chance(0.3, "chunk")}
        drawn.step(slots, prompts, chunks)
        traffic.count["left out"] += len(drawn.last.keys() - set(slots))
    assert min(traffic.count[what] for what in ("finished", "chunk", "left out")) > 20


def batch_order(decode_threshold: int = 0) -> BatchOrder:
    return BatchOrder(np.zeros(6, np.int32), decode_threshold)


def placed(order: BatchOrder, **scheduled: int) -> str:
    """Names of a step's requests in the order of the batch."""
    return "".join(order.of_step(scheduled))


def test_requests_that_stay_keep_their_places():
    order = batch_order()
    assert placed(order, a=9, b=1, c=1, d=1) == "abcd"
    assert placed(order, a=1, c=1, d=1) == "adc", "the last fills the hole"
    assert placed(order, a=1, c=1, d=7, e=1, f=1) == "adcef"
    assert placed(order, f=1, e=1, d=1, c=1, a=1) == "adcef"


def test_decodes_come_first_and_keep_their_places():
    order = batch_order(decode_threshold=2)
    assert placed(order, a=7, b=1, c=3, d=2) == "bdac"
    assert placed(order, a=7, b=1, c=3, d=1) == "bdac"
    assert placed(order, a=1, b=1, c=3, d=2) == "bdac", "who is a decode now stays in its place"
    assert placed(order, e=9, a=1, b=1, c=1) == "bcae", "only one of them has to move"
    assert placed(order, f=9, e=9, c=1, b=1, a=1) == "bcaef"
    assert placed(order, c=1, e=1, f=1) == "ecf"


def block_tables() -> NPUBlockTables:
    return NPUBlockTables([4, 8], 3, 32, [6, 3], CPU)


def decodes(*req_ids: str, arrived: str = "") -> SchedulerOutput:
    """A step with a token for each request."""
    output = scheduler_output(dict.fromkeys(req_ids, 1))
    output.scheduled_new_reqs = [new_request(req_id, [5, 6, 7], [], 0) for req_id in arrived]
    return output


def test_a_row_is_sent_whole_to_another_request_only():
    states, tables = NPURequestState(3, 16, 8, 0, 100, CPU), block_tables()
    in_tables = np.zeros(3, np.int32)
    order = BatchOrder(in_tables)

    def step(*req_ids: str, arrived: str = "") -> list[int]:
        """The request rows of the batch; all of their blocks reach the device."""
        for name in arrived:
            states.remove_request(name)
            states.add_request(name, 3, [5, 6, 7], 3, 4)
        tables.num_synced_blocks[:] = 1
        output = decodes(*req_ids, arrived=arrived)
        rows = batch_of_step(order, states, tables, output).idx_mapping_np.tolist()
        assert in_tables[: len(rows)].tolist() == rows
        return rows

    assert step("a", "b", arrived="ab") == [2, 1]
    assert tables.num_synced_blocks.tolist() == [[0, 0, 1]] * 2
    assert step("a", "b") == [2, 1]
    assert tables.num_synced_blocks.tolist() == [[1, 1, 1]] * 2
    assert step("b", "c", arrived="c") == [0, 1], "it takes the place of the one that left"
    assert tables.num_synced_blocks.tolist() == [[0, 1, 1]] * 2
    assert step("b") == [1], "the last one comes to the place of the first"
    assert tables.num_synced_blocks.tolist() == [[0, 1, 1]] * 2
    assert step("a", "b") == [1, 2]
    assert tables.num_synced_blocks.tolist() == [[1, 0, 1]] * 2
    states.remove_request("a")  # its row goes to the next that arrives
    assert step("b", "d", arrived="d") == [1, 2]
    assert step("b", "d", arrived="b") == [1, 2], "the same row, with other blocks"
    assert tables.num_synced_blocks.tolist() == [[0, 1, 1]] * 2
    for name in "db":
        states.remove_request(name)
    assert step("b", "d", arrived="db") == [2, 1], "another row in the same place"
    assert tables.num_synced_blocks.tolist() == [[0, 0, 1]] * 2


def test_more_blocks_than_a_request_can_have_are_refused():
    tables = block_tables()
    tables.append_block_ids(1, ([1, 2, 3, 4, 5], [7]), overwrite=True)
    with pytest.raises(
        ValueError, match="7 blocks of group 0 in request row 1: a request may have 6"
    ):
        tables.append_block_ids(1, ([6, 7], []), overwrite=False)


@pytest.mark.parametrize("given", [([4],), ([4, 5],), None])
def test_blocks_of_a_step_are_appended_together(given, monkeypatch):
    """One each, or by themselves where somebody gets several."""
    monkeypatch.setattr(block_tables_module, "TOGETHER", 4)
    tables = NPUBlockTables([16], 6, 32, [6], CPU)
    for request_row in range(6):
        tables.append_block_ids(request_row, ([1, 2, 3],), overwrite=True)
    order, each = np.array([5, 4, 3, 2, 1, 0]), [None, ([6],), ([7],), ([8],), ([9],)]
    tables.append_each(order, [*each, given])
    number = len(given[0]) if given else 0
    assert tables.num_blocks.tolist() == [[3 + number, 4, 4, 4, 4, 3]]
    rows = tables.block_table_flat_np.reshape(-1, 6)[:6]
    assert rows[:, 3].tolist() == [4 if given else 0, 9, 8, 7, 6, 0]
    assert rows[0, 4] == (5 if number > 1 else 0)
    tables.num_blocks[0, 4] = 6
    with pytest.raises(ValueError, match="in request row 4: a request may have 6"):
        tables.append_each(order, [*each, given])


def test_a_batch_is_made_again_when_it_may_differ():
    states, tables, order = NPURequestState(3, 16, 8, 2, 100, CPU), block_tables(), batch_order()
    for name in "abc":
        states.add_request(name, 3, [5, 6, 7], 3, 4)
    made = partial(batch_of_step, order, states, tables)
    rows = states.rows_of(["a", "b"])
    assert made(decodes("a", "b")).has_prefill is False
    states.advance(rows, [4, 4])
    kept = made(decodes("a", "b"))
    assert made(decodes("a", "b")) is kept
    tables.num_synced_blocks[:] = 1
    again = made(decodes("a", "b", arrived="b"))
    assert again is not kept, "a request that comes back has other blocks, maybe another row"
    assert tables.num_synced_blocks[0].tolist() == [1, 0, 1]
    assert made(decodes("b", "c")).req_ids == ["c", "b"], "as many others"
    assert made(decodes("a", "b")).req_ids == ["a", "b"]
    with_drafts = scheduler_output({"a": 3, "b": 3})
    with_drafts.scheduled_spec_decode_tokens = {"a": [-1, -1], "b": [-1, -1]}
    verifying = made(with_drafts)
    assert verifying.num_draft_tokens_np.tolist() == [2, 2]
    assert made(with_drafts) is verifying
    assert made(scheduler_output({"a": 2, "b": 1})).num_scheduled_tokens.tolist() == [2, 1]
    assert made(scheduler_output({"a": 1, "b": 2})).num_scheduled_tokens.tolist() == [1, 2]
    assert made(decodes("b")).idx_mapping_np.tolist() == [rows[1]]
    states.advance(rows, [4, 2])  # a block was lost, and the prompt is computed again
    assert made(decodes("b")).is_prefilling_np.tolist() == [True]


def test_rows_of_running_requests_are_looked_up_after_one_left():
    states = NPURequestState(3, 16, 8, 0, 100, CPU)
    for name in "ab":
        states.add_request(name, 3, [5, 6, 7], 3, 4)
    rows = states.running_rows(["a", "b"])
    assert states.running_rows(["a", "b"]) is rows
    assert rows.tolist() == states.rows_of(["a", "b"]).tolist()
    for name in "ab":
        states.remove_request(name)
    states.add_request("b", 3, [5, 6, 7], 3, 4)
    states.add_request("a", 3, [5, 6, 7], 3, 4)
    assert states.running_rows(["a", "b"]).tolist() == states.rows_of(["a", "b"]).tolist()
    assert states.running_rows(["b"]).tolist() == states.rows_of(["b"]).tolist()


def test_samples_stay_where_they_are_until_one_is_discarded():
    """The rows of a batch that stays are one array, as `BatchOrder` keeps it."""
    samples, batch, nobody = Samples(3), np.array([2, 0]), np.zeros(2, bool)
    for discard, rows in (
        (nobody, [0, 1]),
        (nobody, [0, 1]),
        (~nobody, [-1, -1]),
        (nobody, [0, 1]),
    ):
        samples.keep(torch.tensor([5, 6], dtype=torch.int32), batch, discard)
        assert samples.find(batch).rows.tolist() == rows
    samples.forget(0)
    samples.keep(torch.tensor([7, 8], dtype=torch.int32), batch, nobody)
    assert samples.find(batch).rows.tolist() == [0, 1]


def test_counts_of_requests_by_slot():
    states = NPURequestState(3, 16, 8, 0, 100, CPU)
    states.add_request("a", 3, [5, 6, 7], 0, 4)
    states.add_request("b", 2, [5, 6, 9, 9], 2, 4)  # resumed, with a prefix in the cache
    slot = states.req_id_to_index["a"]
    assert states.token_ids[slot, :8].tolist() == [5, 6, 7] + [UNKNOWN_TOKEN] * 5
    slots = states.rows_of(["a", "b"])
    assert slots.tolist() == [states.req_id_to_index[name] for name in "ab"]
    states.advance(slots, [2, 6])
    assert states.num_tokens[slots].tolist() == [3, 7]
    assert states.num_computed_prefill_tokens[slots].tolist() == [2, 4]
    assert states.remove_request("a") == slot and states.remove_request("a") is None
    states.add_request("c", 1, [8], 0, 2)
    assert states.req_id_to_index["c"] == slot
    assert states.token_ids[slot, :4].tolist() == [8] + [UNKNOWN_TOKEN] * 3


def test_stages_enter_what_the_scheduler_tells():
    states = NPURequestState(3, 16, 8, 0, 100, CPU)
    states.add_request("a", 3, [5, 6, 7], 0, 4)
    states.add_request("b", 4, [5, 6, 9, 9], 0, 4)
    slots = states.rows_of(["b", "a"])
    states.advance(slots, [2, 4])
    states.enter_samples(slots, [[9, 9], [8]])
    assert states.token_ids[slots, :6].tolist() == [
        [5, 6, 9, 9, UNKNOWN_TOKEN, UNKNOWN_TOKEN],
        [5, 6, 7, UNKNOWN_TOKEN, 8, UNKNOWN_TOKEN],
    ]


def test_rows_are_written_together_and_the_last_write_counts():
    rows = StagedRows((3, 4), torch.float32, CPU)
    rows.stage_write(0, 1, {1.5: 0, 2.5: 0}.keys())
    rows.stage_write(2, 0, [7, 8, 9, 10])
    rows.stage_write(0, 2, [4])
    rows.apply_write()
    assert rows.gpu.tolist() == [[0, 1.5, 4, 0], [0] * 4, [7, 8, 9, 10]]
    with pytest.raises(ValueError, match="2 values from column 3 on, of 4"):
        rows.stage_write(1, 3, [1, 2])
    lengths = StagedRows(3, torch.int32, CPU)
    lengths.stage_write_elem(2, 5)
    lengths.apply_write()
    assert lengths.gpu.tolist() == [0, 0, 5]


def test_values_are_copied_when_they_have_changed(monkeypatch):
    copied = []
    monkeypatch.setattr(
        "vllm_npu_prep.runner.v2.buffers.async_tensor_h2d",
        lambda values, **_: copied.append(values.copy()),
    )
    values = RowValues(torch.device("meta"), 3, torch.float32)
    values.copy_to_uva()
    values.np[1] = 2
    values.copy_to_uva()
    values.copy_to_uva()
    assert [each.tolist() for each in copied] == [[0, 2, 0]]
    on_host = RowValues(CPU, 3, torch.int64)
    on_host.np[0] = 4
    assert on_host.gpu.tolist() == [4, 0, 0]


def test_drafts_follow_their_sample():
    """Also those of a request that sits a step out; each twice, as the fused pass scatters them."""
    samples, last = Samples(5, 2), {}

    def step(slots, discard=()):
        batch = np.array(slots)
        found = samples.find(batch, np.array([slot in last for slot in slots]))
        for slot, row in zip(slots, found.rows.tolist()):
            if slot in last:
                assert found.num_drafts == 2
                assert found.by_row[row].tolist() == last[slot]
                assert found.num_rows * 5 == len(found.token_ids)
        tokens = torch.tensor(slots, dtype=torch.int32) + 10 * len(last)
        drafts = torch.stack((tokens + 100, tokens + 200), 1)
        thrown = np.array([slot in discard for slot in slots])
        samples.keep(tokens, batch, thrown, drafts)
        for slot, token in zip(slots, tokens.tolist()):
            if slot not in discard:
                last[slot] = [token, token + 100, token + 200, token + 100, token + 200]
        return samples.num_older

    assert step([0, 1, 2], discard={1}) == 0
    assert step([0, 2, 1]) == step([2, 1, 0]) == 0
    assert step([0, 2]) == 1
    assert step([2, 1]) == step([3]) - 2 == 1
    assert step([0, 1, 2, 3]) == 0


class Counts:
    """Counts of accepted tokens that are on the host already."""

    def __init__(self, *values: int) -> None:
        self.values = np.array(values, np.int32)

    def read(self) -> np.ndarray:
        return self.values


def test_counts_of_the_scheduler_lose_rejected_drafts():
    """Whether the scheduler has waited for the step or not; requests without drafts keep theirs."""
    states = NPURequestState(4, 64, 32, 3, 100, CPU)
    slots = np.array([2, 0, 1])
    states.num_computed_tokens_np[slots] = 20, 30, 40
    scheduled, drafts = np.array([4, 1, 3]), np.array([3, 0, 2], np.int32)
    states.begin_step(slots, scheduled, drafts)
    kept = torch.zeros(3, dtype=torch.int32), slots, np.zeros(3, bool)
    states.samples.keep(*kept, torch.zeros(3, 3, dtype=torch.int32))
    valid = Counts(2, 1, 3)  # one draft of three, none of none, both
    assert states.exact_counts(slots, [24, 31, 43], valid).tolist() == [22, 31, 43]
    assert states.exact_counts(slots, [22, 31, 43], valid).tolist() == [22, 31, 43]
    assert states.exact_counts(slots[::-1], [43, 31, 24], valid).tolist() == [43, 31, 22]
    assert states.exact_counts(np.array([3]), [7], valid).tolist() == [7], "was not in the step"
    states.req_id_to_index["a"] = 2
    states.remove_request("a")
    assert states.exact_counts(np.array([2]), [24], valid).tolist() == [24], "another request"
    states.begin_step(np.array([0]), np.ones(1), None)
    assert states.exact_counts(np.array([1]), [43], valid).tolist() == [43], "an older step"


def test_counts_are_those_of_a_last_step_that_left_some_out():
    states = NPURequestState(4, 64, 32, 1, 100, CPU)
    keep, slots = states.samples.keep, np.array([1])
    keep(torch.zeros(2, dtype=torch.int32), np.array([0, 2]), np.zeros(2, bool), torch.zeros(2, 1))
    states.num_computed_tokens_np[slots] = 20
    states.begin_step(slots, np.array([2]), np.array([1], np.int32))
    keep(torch.zeros(1, dtype=torch.int32), slots, np.zeros(1, bool), torch.zeros(1, 1))
    assert states.samples.num_older == 2
    assert states.exact_counts(slots, [22], Counts(1)).tolist() == [21]


def test_the_host_enters_samples_for_which_it_has_waited():
    states = NPURequestState(3, 8, 32, 0, 100, CPU)
    states.num_computed_tokens_np[:] = 2, 7, 0
    slots, discard = np.array([1, 2, 0]), np.array([False, True, False])
    states.append_samples(slots, discard, np.array([1, 3, 4]), np.array([5, 6, 7]))
    known = {
        tuple(place): int(states.token_ids[tuple(place)])
        for place in np.argwhere(states.token_ids != UNKNOWN_TOKEN).tolist()
    }
    assert known == {(0, 6): 7}, "neither a chunk's sample nor one past the end of the context"
