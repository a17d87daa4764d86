"""Requests updated and samples appended together: after each step as upstream leaves them.

Upstream's own methods run beside ours on random traffic, without a model: requests join, leave, are
preempted, resumed, left out, lose tokens, and change rows; drafts are accepted and rejected.
"""

import copy
import dataclasses
import hashlib
import inspect
import os
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.v1.outputs import SamplerOutput
from vllm.v1.worker.gpu_input_batch import InputBatch
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from tests.helpers.engine import make_model, runner_of
from tests.helpers.stepping import counted_exactly, new_request, scheduler_output, upstream_twin
from tests.helpers.traffic import Traffic
from tests.helpers.v2 import engine_of
from vllm_npu_prep.prep.bookkeeping import append_verified_tokens, write_draft_tokens
from vllm_npu_prep.runner.v1.bookkeeping import Bookkeeping
from vllm_npu_prep.runner.v1.request_updates import RequestUpdates, put_drafts_among_decodes

STEPS = 6 * int(os.environ.get("NPU_PREP_TEST_STEPS", "90"))
MAX_NUM_REQS, MAX_MODEL_LEN, BLOCK_SIZE, VOCAB, DRAFTS = 8, 64, 4, 100, 3


@pytest.fixture(scope="module")
def engine_runner(tmp_path_factory):
    model = make_model(tmp_path_factory.mktemp("qwen3"), num_hidden_layers=1)
    sizes = {"max_num_seqs": MAX_NUM_REQS, "max_model_len": MAX_MODEL_LEN}
    sizes |= {"block_size": BLOCK_SIZE, "async_scheduling": True}
    with engine_of("V1", model, load_format="dummy", **sizes) as llm:
        yield runner_of(llm)


@pytest.fixture
def ours(engine_runner):
    """Our runner, without requests."""
    yield engine_runner
    engine_runner._update_states(scheduler_output({}, finished=set(engine_runner.requests)))
    batch = engine_runner.input_batch
    batch.prev_sampled_token_ids = batch.prev_req_id_to_index = None
    batch.token_ids_cpu[:], batch.is_token_ids[:] = 0, False


def as_if_configured(runner: Any, asynchronous: bool, num_drafts: int, valid: list[int]) -> None:
    """Let a runner keep books as in an engine with other settings."""
    runner.use_async_scheduling = asynchronous
    runner.use_async_spec_decode = asynchronous and num_drafts > 0
    runner.num_spec_tokens = num_drafts
    runner.prev_num_draft_tokens = SimpleNamespace(np=np.zeros(MAX_NUM_REQS, np.int32))
    if hasattr(runner, "updates"):
        runner.updates = RequestUpdates(
            MAX_NUM_REQS, MAX_MODEL_LEN, num_spec_tokens=num_drafts, asynchronous=asynchronous
        )
        runner.bookkeeping = Bookkeeping(
            MAX_NUM_REQS,
            MAX_MODEL_LEN,
            asynchronous=asynchronous,
            read_back=runner._to_list,
            samples_np=runner.sampled_token_ids_pinned_cpu.numpy(),
        )
        counts = SimpleNamespace(read=lambda: np.array(valid, np.int32))
        runner.num_valid_tokens = counts
    else:
        runner._get_valid_sampled_token_count = lambda: list(valid)


@dataclasses.dataclass
class Request:
    """One request as its scheduler knows it."""

    name: str
    tokens: list[int]  # those that are known
    num_prompt_tokens: int
    num_computed_tokens: int = 0
    num_blocks: int = 0
    in_batch: bool = False
    was_preempted: bool = False
    # Of the step under way, None if there is none: its tokens and drafts, and what it sampled
    scheduled: int | None = None
    num_drafts: int = 0
    sampled: list[int] = dataclasses.field(default_factory=list)
    samples: bool = False

    @property
    def num_outputs(self) -> int:
        return len(self.tokens) - self.num_prompt_tokens

    @property
    def assumed(self) -> tuple[int, int]:
        """Computed and output tokens if every draft under way is accepted."""
        placeholders = 1 + self.num_drafts if self.samples else 0
        return self.num_computed_tokens + (self.scheduled or 0), self.num_outputs + placeholders

    def finish_step(self) -> None:
        """Learn what the step under way sampled."""
        if self.scheduled is not None:
            rejected = 1 + self.num_drafts - len(self.sampled) if self.samples else 0
            self.num_computed_tokens += self.scheduled - rejected
            self.tokens += self.sampled
        self.forget_step()

    def forget_step(self) -> None:
        self.scheduled, self.num_drafts, self.sampled, self.samples = None, 0, [], False

    def take_back(self) -> None:
        self.num_computed_tokens = self.num_blocks = 0
        self.was_preempted = True


class Scheduled(Traffic):
    """Random steps, as vLLM's schedulers give them."""

    def __init__(self, seed: int, asynchronous: bool, num_drafts: int) -> None:
        super().__init__(seed, (0, VOCAB), longest=19)
        self.asynchronous, self.num_drafts = asynchronous, num_drafts
        self.requests: dict[str, Request] = {}
        self.next_block = 0
        self.waited = False  # for the last step, as in a pause, before this one was scheduled
        self.ends: list[int] = []  # of the step's rows, without drafts

    def blocks(self, request: Request, num_tokens: int) -> list[int]:
        count = max(0, -(-num_tokens // BLOCK_SIZE) - request.num_blocks)
        request.num_blocks += count
        self.next_block += count
        return [block % 50 + 1 for block in range(self.next_block - count, self.next_block)]

    def step(self) -> Any:
        """What the scheduler says next; asynchronous: mostly before it knows what the last step
        gave."""
        busy = self.chance(0.4)
        self.waited = self.asynchronous and self.chance(0.1, "waited")
        for request in self.requests.values() if self.waited else ():
            request.finish_step()
        finished = {
            name
            for name, request in self.requests.items()
            if request.assumed[0] + 3 * (1 + DRAFTS) >= MAX_MODEL_LEN
            or (busy and self.chance(0.05, "finished"))
        }
        for name in finished:
            del self.requests[name]
        cached, all_tokens, drafts, new, resumed = {}, {}, {}, [], set()
        flights = []  # scheduled tokens and drafts, which begin after the last step was finished
        requests = list(self.requests.values())
        if self.chance(0.2, "in another order"):  # which needn't be that of rows
            requests = self.shuffled(requests)
        for request in requests:
            was_in_batch = request.in_batch
            if was_in_batch and busy and self.chance(0.06):
                if self.chance(0.5, "preempted"):
                    request.finish_step()
                    request.take_back()
                else:
                    self.count["left out"] += 1
                request.in_batch = False
                continue
            if not was_in_batch and not (busy and self.chance(0.5)):
                continue
            if was_in_batch and busy and self.chance(0.03, "preempted and resumed"):
                request.forget_step()
                request.take_back()
            elif not self.asynchronous and request.num_outputs > 1 and self.chance(0.02, "lost"):
                del request.tokens[-1:]
                request.num_computed_tokens = len(request.tokens) - 1
            computed, outputs = request.assumed
            num_tokens, count = request.num_prompt_tokens + outputs, 0
            num_new = self.number(1, num_tokens - computed)
            if outputs and num_tokens == computed + 1 and not request.was_preempted:
                count = self.number(0, self.num_drafts)
                num_new += count
            if count:
                drafts[request.name] = [-1] * count if self.asynchronous else self.tokens(count)
            if not was_in_batch or request.was_preempted:
                all_tokens[request.name] = list(request.tokens)
            if request.was_preempted:
                resumed.add(request.name)
                request.was_preempted = False
            blocks = self.blocks(request, computed + num_new)
            cached[request.name] = (blocks, computed, outputs)
            flights.append((request, num_new, count))
        while busy and len(self.requests) < MAX_NUM_REQS and self.chance(0.4):
            name, prompt, *_ = self.request()
            request = self.requests[name] = Request(name, prompt, len(prompt))
            num_new = self.number(1, len(prompt))
            new.append(new_request(name, list(prompt), self.blocks(request, num_new)))
            flights.append((request, num_new, 0))
            self.count["arrived"] += 1
        for request in self.requests.values():
            request.finish_step()
        for request, num_new, count in flights:
            request.scheduled, request.num_drafts, request.in_batch = num_new, count, True
        counts = {request.name: num_new for request, num_new, _ in flights}
        output = scheduler_output(counts, new=new, cached=cached, finished=finished)
        output.scheduled_cached_reqs.resumed_req_ids = resumed
        output.scheduled_cached_reqs.all_token_ids = all_tokens
        output.scheduled_spec_decode_tokens = drafts
        self.count["drafts"] += len(drafts)
        return output

    def sample(self, req_ids: list[str]) -> list[list[int]]:
        """Tokens that the step samples for each row, [] for a sample that doesn't count."""
        rows, eager = [], self.pick(0.2, 0.5, 0.9)
        self.ends.clear()
        for name in req_ids:
            request = self.requests[name]
            assert request.scheduled is not None
            end = request.num_computed_tokens + request.scheduled - request.num_drafts
            self.ends.append(end)
            request.samples = end == len(request.tokens)
            if request.samples:
                kept = self.kept(request.num_drafts, eager)
                request.sampled = self.tokens(kept + 1)
                self.count["rejected" if kept < request.num_drafts else "accepted"] += 1
            rows.append(list(request.sampled))
        return rows


def append(runner: Any, output: Any, rows: list[list[int]], num_drafts: int) -> Any:
    """Let a runner book samples as after a forward pass; no token has the end of the vocabulary."""
    batch, width = runner.input_batch, 1 + max((len(d) for d in output[1].values()), default=0)
    filled = [row or [7] for row in rows]
    nothing = (-1, batch.vocab_size)[len(batch.req_ids) % 2]
    filled = [row + [nothing] * (width - len(row)) for row in filled]
    sampled = torch.tensor(filled, dtype=torch.int32)
    runner.discard_request_mask.np[: len(rows)] = [not row for row in rows]
    batch.prev_sampled_token_ids = None
    if runner.use_async_scheduling and num_drafts:  # its drafter has set it
        batch.prev_sampled_token_ids = sampled[:, :1]
    total = output[0].total_num_scheduled_tokens
    samples = SamplerOutput(sampled_token_ids=sampled, logprobs_tensors=None)
    return runner._bookkeeping_sync(output[0], samples, None, torch.zeros(total, 1), total)


def update_as_upstream(runner: Any, output: Any, waited: bool) -> None:
    """Upstream's update, with the counts that are exact on the host before a step is prepared."""
    if waited:
        counted_exactly(runner, output)
    correct_counts = runner._update_states(output)
    if runner.use_async_spec_decode:
        if correct_counts is not None:
            correct_counts()
        batch = runner.input_batch
        for name, row in batch.req_id_to_index.items():
            if name in (batch.prev_req_id_to_index or {}):
                batch.num_tokens_no_spec[row] = batch.num_computed_tokens_cpu[row] + 1


def state_of(runner: Any, request_states_are_read: bool) -> dict[str, Any]:
    """All that an update or its step's samples left, of requests and of rows."""
    batch = runner.input_batch
    num_reqs = batch.num_reqs
    left: dict[str, Any] = {
        "rows": (list(batch.req_ids), dict(batch.req_id_to_index)),
        "token_ids_cpu": batch.token_ids_cpu[:num_reqs].tolist(),
        "is_token_ids": batch.is_token_ids[:num_reqs].tolist(),
        "drafts": [list(drafts) for drafts in batch.spec_token_ids[:num_reqs]],
        "outputs": [list(tokens) for tokens in batch.req_output_token_ids],
        "previous": batch.prev_req_id_to_index,
        "blocks": [
            [row[:owned].tolist() for row, owned in zip(table.block_table.np, owned_by_row)]
            for table in batch.block_table.block_tables
            for owned_by_row in [table.num_blocks_per_row[:num_reqs].tolist()]
        ],
        "update": (batch.batch_update_builder._removed, batch.batch_update_builder.added),
    }
    for name in ("num_tokens_no_spec", "num_prompt_tokens", "num_computed_tokens_cpu"):
        left[name] = getattr(batch, name)[:num_reqs].tolist()
    for name, state in runner.requests.items():
        left[name] = {
            field.name: copy.deepcopy(getattr(state, field.name))
            for field in dataclasses.fields(state)
            if request_states_are_read or field.name != "num_computed_tokens"
        }
        if (row := batch.req_id_to_index.get(name)) is not None:
            assert batch.req_output_token_ids[row] is state.output_token_ids
    return left


@pytest.mark.parametrize("num_drafts", [0, DRAFTS], ids=["no-drafts", "drafts"])
@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_every_step_leaves_what_upstream_leaves(ours, asynchronous, num_drafts):
    """Requests, rows and tables after each update and after each step's samples."""
    traffic = Scheduled(3, asynchronous, num_drafts)
    upstream, valid, quiet = upstream_twin(ours), [], 0
    for runner in (ours, upstream):
        as_if_configured(runner, asynchronous, num_drafts, valid)
    update = ours.updates.update_plain_requests

    def counted(*args: Any) -> Any:
        nonlocal quiet
        done = update(*args)
        quiet += done[0] is None
        return done

    ours.updates.update_plain_requests = counted
    with torch.inference_mode():
        for step in range(STEPS):
            output = traffic.step()
            update_as_upstream(upstream, copy.deepcopy(output), traffic.waited)
            ours.speculation.last_ends = np.array(traffic.ends, np.int32)
            ours._update_states(copy.deepcopy(output))
            followed = num_drafts > 0
            assert state_of(ours, followed) == state_of(upstream, followed), f"step {step}"
            rows = traffic.sample(ours.input_batch.req_ids)
            valid[:] = [len(row) for row in rows]
            if rows:
                each = (output, output.scheduled_spec_decode_tokens)
                theirs = append(upstream, each, rows, num_drafts)
                mine = append(ours, each, rows, num_drafts)
                assert mine == theirs, f"samples of step {step}"
                assert state_of(ours, followed) == state_of(upstream, followed), f"step {step}"
            if len(rows) > 1 and traffic.chance(0.05, "swapped"):
                for runner in (ours, upstream):
                    runner.input_batch.swap_states(0, len(rows) - 1)
            if not asynchronous:
                for request in traffic.requests.values():
                    request.finish_step()
    expected = {"finished", "preempted", "left out", "preempted and resumed", "in another order"}
    expected |= {"arrived", "accepted", "swapped"}
    expected |= {"drafts", "rejected"} if num_drafts else set()
    expected |= {"waited"} if asynchronous else {"lost"}
    assert {what for what, times in traffic.count.items() if times} >= expected
    assert quiet > STEPS / 4
    assert len(append_verified_tokens.signatures) <= 1
    assert len(write_draft_tokens.signatures) <= 1


DONE_HERE = {
    GPUModelRunner._update_states: "326599f31b27",
    GPUModelRunner._may_reorder_batch: "5120046bb6f4",
    GPUModelRunner._process_encoder_cache_scheduler_output: "b8748250dd84",
    GPUModelRunner._bookkeeping_sync: "13c3e81003a7",
    InputBatch.update_req_spec_token_ids: "44ebcd8666c2",
    InputBatch.condense: "49c263ad7095",
    InputBatch.refresh_metadata: "c587491f51bc",
}
"""Methods of upstream that `RequestUpdates` and `Bookkeeping` do the work of, and a digest of their
source. When one changes, look at what it does now, change these two, then the digest."""


@pytest.mark.parametrize("method", DONE_HERE, ids=lambda method: method.__qualname__)
def test_upstream_still_does_what_is_done_here(method):
    source = inspect.getsource(method).encode()
    assert hashlib.sha256(source).hexdigest()[:12] == DONE_HERE[method]


class Order:
    """The order of a batch, as far as rows that change places need it."""

    def __init__(self, req_ids):
        self.req_ids = list(req_ids)

    @property
    def req_id_to_index(self):
        return {req_id: row for row, req_id in enumerate(self.req_ids)}

    def swap_states(self, row, other):
        rows = self.req_ids
        rows[row], rows[other] = rows[other], rows[row]


@pytest.mark.parametrize(
    ("order", "resumed", "expected"),
    [
        ("a P p d", [], "a d P p"),
        ("a P d p", [], "a d P p"),
        ("a d P p", [], "a d P p"),
        ("a P p e", ["e"], "a e P p"),
        ("a P d p e", ["e"], "a d e P p"),
    ],
)
def test_requests_with_drafts_stand_behind_leading_decodes(order, resumed, expected):
    """``d`` and ``e`` come with drafts, ``p`` comes with a prompt, ``a`` and ``P`` were there."""
    batch = Order(order.split())
    tokens = {"a": 3, "P": 9, "p": 7, "d": 3, "e": 3}
    step = SimpleNamespace(
        scheduled_spec_decode_tokens={"a": [1, 2], "d": [-1, -1], "e": [-1, -1]},
        num_scheduled_tokens={req_id: tokens[req_id] for req_id in batch.req_ids},
        scheduled_new_reqs=[
            SimpleNamespace(req_id=req_id) for req_id in "pd" if req_id in batch.req_ids
        ],
        scheduled_cached_reqs=SimpleNamespace(resumed_req_ids=resumed),
    )
    put_drafts_among_decodes(step, batch, decode_threshold=3)
    assert batch.req_ids == expected.split()
