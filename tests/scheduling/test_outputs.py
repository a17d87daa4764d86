"""What traffic rarely shows: the order of outputs, decodes with nothing to compute, odd rows."""

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.pooling_params import PoolingParams
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.outputs import DraftTokenIds
from vllm.v1.request import Request, RequestStatus, StreamingUpdate

from tests.scheduling.engines import draw, hasher, make
from vllm_npu_prep.compat.releases import is_since
from vllm_npu_prep.scheduling.outputs import Rows, UpstreamRow
from vllm_npu_prep.scheduling.requests import SPECIAL, note
from vllm_npu_prep.scheduling.running import DecodeBatch

NOT_READ: Any = None


def joined(theirs: EngineCoreOutput) -> list[str]:
    """Ids of outputs: of rows a and b by us, and between them a row c that upstream got."""
    rows = Rows(NOT_READ, NOT_READ, NOT_READ)
    rows.outputs = {0: [EngineCoreOutput("a", [1]), EngineCoreOutput("b", [2])]}
    rows.first = {0: 0}
    rows.handed = [UpstreamRow("c", 0, before=1)]
    outputs = rows.join({0: EngineCoreOutputs(outputs=[theirs])})
    return [each.request_id for each in outputs[0].outputs]


@pytest.mark.parametrize(
    ("theirs", "order"),
    [
        (EngineCoreOutput("c", [3]), ["a", "c", "b"]),
        (EngineCoreOutput("c", [3], finish_reason=FinishReason.ERROR), ["a", "c", "b"]),
        (EngineCoreOutput("c", [], finish_reason=FinishReason.STOP), ["a", "c", "b"]),
        # Not of its row: it failed otherwise, and upstream tells of it after all rows
        (EngineCoreOutput("c", [], finish_reason=FinishReason.ERROR), ["a", "b", "c"]),
        (EngineCoreOutput("d", [], finish_reason=FinishReason.ERROR), ["a", "b", "d"]),
    ],
    ids=["tokens", "tokens that a grammar refused", "no tokens", "failed", "another failed"],
)
def test_an_output_of_upstream_s_is_where_its_row_is(theirs, order):
    assert joined(theirs) == order


def decode(computed: int, placeholders: int, last_length: int) -> SimpleNamespace:
    return SimpleNamespace(
        is_prefill_chunk=False,
        num_computed_tokens=computed,
        num_tokens_with_spec=computed + 1 - placeholders,
        num_output_placeholders=placeholders,
        last_length=last_length,
        next_decode_eligible_step=0,
    )


def test_the_last_decode_with_something_to_compute_is_found():
    decodes = make(draw(2), ours=True).decodes
    goes_on = decode(10, 1, last_length=40)
    has_all = decode(20, 1, last_length=21)  # its last token is on its way
    longest = decodes.scheduler.max_model_len
    at_the_end = decode(longest - 1, 1, last_length=2 * longest)
    prompt = SimpleNamespace(is_prefill_chunk=True)
    running: Any = [goes_on, goes_on, has_all, at_the_end, prompt]
    assert decodes.last_to_schedule(running) == 1
    assert decodes.last_to_schedule([has_all, at_the_end]) == 0


def test_a_decode_that_is_kept_apart_has_nothing_to_compute_yet():
    decodes = make(draw(2, asynchronous=True, v2=True), ours=True).decodes
    assert decodes._staggers
    now, later = decode(10, 1, last_length=40), decode(10, 1, last_length=40)
    now.next_decode_eligible_step = decodes.scheduler.current_step + 1
    later.next_decode_eligible_step = decodes.scheduler.current_step + 2
    assert [decodes.waits(each) for each in (now, later)] == [False, True]  # type: ignore[arg-type]


def test_tokens_of_resumed_and_of_taken_requests_are_joined():
    step = SchedulerOutput.make_empty()
    step.scheduled_cached_reqs.all_token_ids = {"resumed": [1]}
    DecodeBatch(all_token_ids={"taken": [2]}).join(step)
    assert list(step.scheduled_cached_reqs.all_token_ids.items()) == [
        ("taken", [2]),
        ("resumed", [1]),
    ]


@pytest.mark.parametrize("status", [RequestStatus.PREEMPTED, RequestStatus.FINISHED_ABORTED])
def test_a_row_of_a_request_that_does_not_run_is_upstream_s(status):
    """One that was aborted stays in the books while a connector sends its blocks."""
    plain = {"num_stale_output_tokens": 0, "prefill_stats": None, "events": [], "traits": 0}
    request = SimpleNamespace(status=status, client_index=0, **plain)
    scheduler = make(draw(2), ours=True)
    scheduler.requests["r"] = request
    step = SchedulerOutput.make_empty()
    step.num_scheduled_tokens = {"r": 1}
    sampled: Any = SimpleNamespace(req_id_to_index={"r": 0}, sampled_token_ids=[[7]])
    assert list(Rows(scheduler, step, sampled).items()) == [("r", 1)]


@pytest.mark.skipif(is_since("0.33.0"), reason="parts of vLLM 0.33's sessions follow answers only")
@pytest.mark.parametrize("ours", [False, True])
def test_a_session_that_sampled_nothing_keeps_its_whole_prompt(ours):
    """Its next part may come before any answer: nothing is there to be left out."""
    scheduler = make(draw(2), ours=ours)
    params = SamplingParams(temperature=0.0, max_tokens=4)
    session = Request("s", [11, 12, 13], params, None, block_hasher=hasher(4), resumable=True)
    scheduler.add_request(session)
    session.num_computed_tokens = session.num_prompt_tokens
    part = StreamingUpdate(None, [21, 22], 4, 0.0, params)
    scheduler._update_request_as_session(session, part)
    assert session.prompt_token_ids == list(session.all_token_ids) == [11, 12, 13, 21, 22]
    assert session.num_computed_tokens == 3


def test_a_request_that_has_ended_gets_no_drafts():
    scheduler = make(draw(2), ours=True)
    request = Request("r", [1, 2, 3], SamplingParams(), None)
    scheduler.add_request(request)
    request.status = RequestStatus.FINISHED_ABORTED
    request.is_prefill_chunk = False
    scheduler.update_draft_token_ids(DraftTokenIds(["r"], [[4, 5]]))
    assert request.spec_token_ids == []


@pytest.mark.parametrize(
    ("options", "pooling", "special"),
    [
        ({}, False, 0),
        ({}, True, SPECIAL),
        ({"logprobs": 1}, False, SPECIAL),
        ({"prompt_logprobs": 1}, False, SPECIAL),
    ],
    ids=["plain", "pooled", "log-probabilities", "of the prompt"],
)
def test_requests_whose_rows_are_upstream_s_are_noted(options, pooling, special):
    params = SamplingParams(max_tokens=4, **options)
    task = PoolingParams(task="embed") if pooling else None
    assert note(Request("r", [1, 2, 3], params, task), 100).traits & SPECIAL == special
