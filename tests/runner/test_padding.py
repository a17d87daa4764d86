"""Padding is decided once for each set of counts, by whoever is asked for graphs."""

from types import SimpleNamespace

import numpy as np
import pytest
from vllm.config import CUDAGraphMode
from vllm.forward_context import BatchDescriptor

from vllm_npu_prep.errors import PrepError
from vllm_npu_prep.graph.counts import EAGER
from vllm_npu_prep.prep.batch import StepBatch
from vllm_npu_prep.prep.padding import GraphMode, Padding, full_padding, no_padding
from vllm_npu_prep.runner.padding import CacheLimits, StepPadding
from vllm_npu_prep.runner.step import DummyRun

FULL = (CUDAGraphMode.FULL, BatchDescriptor(8, num_reqs=8, uniform=True))
MIXED = (CUDAGraphMode.FULL, BatchDescriptor(8, num_reqs=3))
PIECEWISE = (CUDAGraphMode.PIECEWISE, BatchDescriptor(16))
NONE = (CUDAGraphMode.NONE, BatchDescriptor(5))


class Dispatcher:
    """Gives one answer, and notes what it was asked."""

    def __init__(self, answer=FULL) -> None:
        self.answer, self.asked = answer, []

    def __call__(self, batch, counts):
        assert not counts.eager, "no limits of the cache"
        asked = counts.num_reqs, counts.query_len, counts.num_encoder_reqs, counts.takes_embeds
        assert asked[0] == batch.num_reqs
        self.asked.append(asked)
        return (*self.answer, False, None, None)


def batch(*num_scheduled_tokens: int, takes_embeds: bool = False) -> StepBatch:
    counts = np.array(num_scheduled_tokens, np.int32)
    tables = None  # which decides nothing
    drafts = np.zeros_like(counts)
    return StepBatch(tables, counts, drafts, int(counts.sum()), takes_embeds=takes_embeds)


def padding_by(dispatcher: Dispatcher, **settings) -> StepPadding:
    return StepPadding(dispatcher, lambda: (GraphMode.FULL_AND_PIECEWISE, 16), **settings)


@pytest.mark.parametrize(
    ("answer", "expected", "kind"),
    [
        (FULL, full_padding(8, 8, 1), "full graph"),
        (MIXED, full_padding(8, 3, 0), "full graph"),
        (PIECEWISE, Padding(16, 5, mode=GraphMode.PIECEWISE), "piecewise graphs"),
        (NONE, no_padding(5, 5), EAGER + "no graph was captured for such a batch"),
    ],
)
def test_the_dispatchers_answer_becomes_padding_and_is_handed_on(answer, expected, kind):
    padding = padding_by(Dispatcher(answer))
    decision = padding.decide(batch(1, 1, 1, 1, 1), 0, 0)
    assert decision.padding == expected
    assert decision.dispatched[:2] == answer
    assert decision.kind == kind
    assert padding.counts.by_kind == {kind: 1}
    assert padding.counts.last == kind


def test_the_dispatcher_is_asked_once_for_the_same_counts():
    dispatcher = Dispatcher()
    padding = padding_by(dispatcher)
    first = padding.decide(batch(1, 1, 1), 0, 0)
    assert padding.decide(batch(1, 1, 1), 0, 0) is first
    assert dispatcher.asked == [(3, 1, 0, False)]
    others = [
        (batch(1, 1), 0, 0),  # requests
        (batch(1, 2), 0, 0),  # tokens, which requests do not share evenly
        (batch(2, 2), 0, 0),
        (batch(1, 3), 0, 0),  # as many tokens and requests, not as many for each
        (batch(2, 1, 1), 0, 0),  # as many tokens, another request
        (batch(1, 1, 1), 1, 0),  # an image
        (batch(1, 1, 1), 0, 1),  # an adapter
        (batch(1, 1, 1, takes_embeds=True), 0, 0),
    ]
    for other in others:
        padding.decide(*other)
    assert len(dispatcher.asked) == 1 + len(others)
    assert padding.counts.by_kind["full graph"] == 2 + len(others)


def test_ranks_that_have_to_agree_are_asked_in_every_step():
    dispatcher = Dispatcher()
    padding = padding_by(dispatcher, depends_on_counts_only=False)
    for _ in range(3):
        padding.decide(batch(1, 1), 0, 0)
    assert len(dispatcher.asked) == 3


def test_sizes_that_changed_are_asked_for_again():
    dispatcher = Dispatcher(PIECEWISE)
    padding = padding_by(dispatcher)
    padding.decide(batch(1, 1), 0, 0)
    dispatcher.answer = NONE
    padding.forget()
    assert padding.decide(batch(1, 1), 0, 0).padding.mode is GraphMode.NONE


@pytest.mark.parametrize(
    ("dummy_run", "answer", "uniform_decode", "expected"),
    [
        (DummyRun(False), NONE, False, None),
        (DummyRun(False), PIECEWISE, False, Padding(16, 0, mode=GraphMode.PIECEWISE)),
        (DummyRun(False), FULL, True, full_padding(8, 8, 3)),
        (DummyRun(True), NONE, True, full_padding(6, 2, 3)),
        (DummyRun(True), NONE, False, full_padding(6, 2, 0)),
    ],
    ids=["stays upstream's", "pieces", "full graph", "warm-up of decodes", "warm-up"],
)
def test_a_dummy_run_becomes_a_step_if_a_graph_is_involved(
    dummy_run, answer, uniform_decode, expected
):
    padding = padding_by(Dispatcher(), decode_query_len=3)
    assert padding.of_dummy_run(dummy_run, answer, 6, 2, uniform_decode) == expected
    assert not padding.counts.by_kind, "dummy runs are no steps"


def test_a_step_with_more_blocks_than_the_cache_runs_eagerly():
    """Shared blocks count for each request: 3 requests of 5 blocks, padded to 8 requests."""
    asked = []

    def dispatch(batch, counts):
        asked.append(counts.eager)
        return NONE if counts.eager else FULL

    padding = StepPadding(dispatch, lambda: (GraphMode.FULL_DECODE_ONLY, 16))
    step = batch(1, 1, 1)
    computed = np.array([64, 64, 79, 0], np.int32)
    step.tables = SimpleNamespace(num_computed_tokens=computed, request_rows=np.arange(4))
    assert padding.decide(step, 0, 0).padding.mode is GraphMode.FULL, "without limits"
    padding.cache_limits = CacheLimits(num_blocks=3 * 5 + 5, block_size=16)
    assert padding.decide(step, 0, 0).padding.mode is GraphMode.FULL
    padding.cache_limits = CacheLimits(num_blocks=3 * 5 + 4, block_size=16)
    decision = padding.decide(step, 0, 0)
    assert decision.padding.mode is GraphMode.NONE
    assert "more blocks than the cache has" in decision.kind
    assert asked == [False, True], "each answer is kept"


def test_ranks_that_share_prompts_pad_as_the_one_with_the_most():
    """A graph has eight tokens of each rank; no request is padded."""
    asked = []

    def dispatch(batch, counts):
        asked.append((counts.num_tokens, counts.num_reqs, counts.query_len, counts.eager))
        return NONE if counts.eager else FULL

    padding = padding_by(dispatch, num_ranks=2)
    assert padding.decide(batch(7, 1), 0, 0).padding.num_input_tokens == 2 * 8
    step = batch(1, 1, 1)
    computed = np.array([64, 64, 79, 0], np.int32)
    step.tables = SimpleNamespace(num_computed_tokens=computed, request_rows=np.arange(4))
    padding.cache_limits = CacheLimits(num_blocks=3 * 5 + 16, block_size=16)
    assert padding.decide(step, 0, 0).padding == Padding(16, 3, 1, GraphMode.FULL)
    padding.cache_limits = CacheLimits(num_blocks=3 * 5 + 15, block_size=16)
    assert padding.decide(step, 0, 0).padding == no_padding(2 * 5, 3)
    # Chunks of two tokens: the first rank has three of the prompt, and the decode
    assert asked == [(4, 3, 0, False), (2, 2, 1, False), (2, 2, 1, True)]


def test_a_request_that_no_call_can_serve_is_refused_at_start_up():
    limits = CacheLimits(num_blocks=4, block_size=16)
    limits.refuse_long_requests(64)
    with pytest.raises(PrepError, match=r"--max-model-len 65.*give at most 64"):
        limits.refuse_long_requests(65)
