"""What a step calls, and whom it looks at: regression guards that hold on a busy machine."""

import sys
from collections import Counter, deque
from operator import attrgetter

import pytest
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.request_queue import FCFSRequestQueue
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request

from tests.scheduling.engines import EOS, draw, hasher, make
from tests.scheduling.state import view_scheduler

REQUESTS = 256
BUDGETS = dict.fromkeys(("asynchronous", "synchronous", "drafts"), (75, 50))
"""Most calls that ``schedule`` and ``update_from_output`` may make in a step where no request gets
a block, for 256 decodes."""


LOOKED_AT: list[str] = []
"""Requests that wait, and of which something was read: code in C, which calls no Python function
for each of them, reads attributes, too."""


class Waiting(Request):
    """A request that waits, and notes when something of it is read."""

    def __getattribute__(self, name):
        LOOKED_AT.append(super().__getattribute__("request_id"))
        return super().__getattribute__(name)


class Queue(FCFSRequestQueue):
    """A queue of requests that notes who is gone through."""

    def __iter__(self):
        for request in super().__iter__():
            LOOKED_AT.append(request.request_id)
            yield request


def steady(
    *,
    ours: bool,
    asynchronous: bool,
    num_drafts: int = 0,
    number: int = REQUESTS,
    waiting: int = 0,
    connector: str = "",
):
    """A scheduler with that many decodes and requests that wait; a function that runs a step."""
    settings = draw(
        0,
        asynchronous=asynchronous,
        max_num_seqs=number,
        budget=max(8192, number * (1 + num_drafts)),
        max_model_len=2048,
        blocks=number * 16 + 10,
        block_size=128,
        groups=("full",),
        num_drafts=num_drafts,
        method="ngram" if num_drafts else "",
        loras=0,
        v2=False,
        stagger=1,
        media=False,
        kv_events=False,
        connector=connector,
        stages=1,
        fewest=4,
        log_stats=True,
    )
    scheduler = make(settings, ours=ours)
    for index in range(number + waiting):
        params = SamplingParams(temperature=0.0, max_tokens=1500, stop_token_ids=[1, 2])
        params._eos_token_id = EOS
        prompt = [10 + index % 300] * 20
        request = Request(f"r{index}", prompt, params, None, block_hasher=hasher(128))
        scheduler.add_request(request)
        if index >= number:
            request.__class__ = Waiting
    scheduler.waiting.__class__ = Queue
    flight = deque()

    def step(count):
        output = count("schedule", scheduler.schedule)
        flight.append(output)
        if len(flight) > asynchronous:
            output = flight.popleft()
            ids = list(output.num_scheduled_tokens)
            result = ModelRunnerOutput(
                req_ids=ids,
                req_id_to_index={each: row for row, each in enumerate(ids)},
                sampled_token_ids=[
                    [9] * len(output.scheduled_spec_decode_tokens.get(each, [0])) for each in ids
                ],
            )
            count("update_from_output", lambda: scheduler.update_from_output(output, result))

    step.scheduler = scheduler
    return step


def calls_of(step, before: int = 6) -> Counter:
    """Python calls of a step, by method of the scheduler, after some others."""
    calls = Counter()
    for _ in range(before):
        step(lambda name, call: call())

    def count(name, call):
        def profile(frame, event, argument):
            calls[name] += event == "call"

        sys.setprofile(profile)
        try:
            return call()
        finally:
            sys.setprofile(None)

    LOOKED_AT.clear()
    step(count)
    return calls


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_step_that_upstream_fails_changes_no_count(asynchronous, monkeypatch):
    step = steady(ours=True, asynchronous=asynchronous, num_drafts=3, number=8)
    for _ in range(6):
        step(lambda name, call: call())
    before = view_scheduler(step.scheduler)

    def fail(*_):
        raise RuntimeError("a bug of upstream's")

    monkeypatch.setattr(Scheduler, "schedule", fail)
    with pytest.raises(RuntimeError, match="upstream's"):
        step.scheduler.schedule()
    assert view_scheduler(step.scheduler) == before


@pytest.mark.parametrize("case", BUDGETS)
def test_a_step_of_decodes_makes_no_call_for_each_request(case):
    options = {"asynchronous": case != "synchronous", "num_drafts": 3 * (case == "drafts")}
    calls = calls_of(steady(ours=True, **options))
    print(case, dict(calls))
    schedule, update = BUDGETS[case]
    # An output is an object for each request, made without a call of Python code
    assert 0 < calls["schedule"] <= schedule
    assert 0 < calls["update_from_output"] <= update


def test_upstream_s_scheduler_calls_some_dozen_for_each_request():
    """What is counted is what it seems to be."""
    calls = calls_of(steady(ours=False, asynchronous=True))
    assert calls["schedule"] > 10 * REQUESTS
    assert calls["update_from_output"] > 5 * REQUESTS


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_step_looks_at_no_request_that_waits(asynchronous):
    """Nor does it make a call for any."""
    counts = {}
    for waiting in (100, 10_000):
        step = steady(ours=True, asynchronous=asynchronous, number=64, waiting=waiting)
        counts[waiting] = calls_of(step)
        assert len(set(LOOKED_AT)) <= 1
    assert counts[100] == counts[10_000]


def test_calls_do_not_grow_with_requests():
    few, many = (steady(ours=True, asynchronous=True, number=number) for number in (64, 4096))
    assert calls_of(few) == calls_of(many, before=16)  # prompts of 4096 take ten steps


@pytest.mark.parametrize("scan", [list, lambda queue: any(map(attrgetter("priority"), queue))])
def test_a_scan_of_those_who_wait_is_seen_even_if_c_makes_it(scan):
    step = steady(ours=True, asynchronous=True, number=64, waiting=1000)
    scheduler = step.scheduler
    end_of_prefix = scheduler._end_of_prefix
    scheduler._end_of_prefix = lambda *args: (scan(scheduler.waiting), end_of_prefix(*args))[1]
    calls_of(step)
    assert len(set(LOOKED_AT)) == 1000
