"""Tokens of the last step that count: by request, through every way in which rows change."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from vllm_npu_prep.prep.recurrent_states import RecurrentGroups
from vllm_npu_prep.prep.shape import EngineShape
from vllm_npu_prep.runner.accepted import AcceptedTokens

DRAFTS = 3


class Batch:
    """Requests whose rows a test changes."""

    def __init__(self, states: RecurrentGroups | None = None) -> None:
        self.accepted = AcceptedTokens(8)
        states = states or RecurrentGroups((0,), 1 + DRAFTS, DRAFTS)
        self.request_rows = np.arange(8)
        self.tables = SimpleNamespace(
            shape=EngineShape(states=states),
            num_computed_tokens=np.zeros(8, np.int32),
            request_rows=self.request_rows,
        )

    def step(
        self,
        *rows: tuple[str, int, int],
        known: str = "abcdef",
        resumed: str = "",
        new: str = "",
    ) -> list[int]:
        """Counts before a step of requests, their computed tokens and their scheduled ones."""
        ids = [req_id for req_id, _, _ in rows]
        computed = np.array([each for _, each, _ in rows], np.int32)
        self.tables.num_computed_tokens[self.request_rows[: len(rows)]] = computed
        scheduled = np.array([each for _, _, each in rows], np.int32)
        output: Any = SimpleNamespace(
            scheduled_new_reqs=[SimpleNamespace(req_id=req_id) for req_id in new],
            scheduled_cached_reqs=SimpleNamespace(resumed_req_ids=set(resumed)),
        )
        counts = self.accepted.count(self.tables, ids, set(known), scheduled, output)
        assert counts.dtype == np.int32
        return counts.tolist()


def test_drafts_that_were_accepted_count():
    batch = Batch()
    assert batch.step(("a", 0, 20)) == [1]
    assert batch.step(("a", 20, 4)) == [1], "a prefill keeps its last state only"
    assert batch.step(("a", 22, 4)) == [2], "one draft was accepted"
    assert batch.step(("a", 26, 1)) == [4], "all were"
    assert batch.step(("a", 27, 4)) == [1]


def test_a_short_chunk_of_a_prompt_keeps_a_state_for_each_token():
    batch = Batch()
    assert batch.step(("a", 0, 3)) == [1]
    assert batch.step(("a", 3, 20)) == [3]
    assert batch.step(("a", 23, 1)) == [1]


def test_a_request_after_a_prefill_keeps_one_state():
    batch = Batch()
    assert batch.step(("a", 10, 4), ("b", 0, 9), ("c", 0, 2)) == [1, 1, 1]
    assert batch.step(("a", 13, 4), ("b", 9, 4), ("c", 2, 4)) == [3, 1, 1]


@pytest.mark.parametrize("steps", [1, 3])
def test_a_request_that_was_left_out_of_steps_is_known_by_its_id(steps):
    batch = Batch()
    assert batch.step(("a", 10, 4), ("b", 10, 4)) == [1, 1]
    for step in range(steps):
        assert batch.step(("b", 13 + 3 * step, 4)) == [3]
    last = 13 + 3 * steps
    assert batch.step(("b", last, 4), ("a", 12, 4)) == [3, 2]


def test_rows_that_change_places_take_their_counts_along():
    batch = Batch()
    batch.step(("a", 10, 4), ("b", 10, 4), ("c", 10, 4))
    assert batch.step(("c", 14, 4), ("a", 11, 4), ("b", 13, 4)) == [4, 1, 3]


def test_a_request_that_lost_its_state_begins_with_none():
    batch = Batch()
    batch.step(("a", 10, 4))
    assert batch.step(("a", 0, 4)) == [1]


@pytest.mark.parametrize("how", ["resumed", "new"], ids=["resumed", "next part"])
@pytest.mark.parametrize("others", [0, 1], ids=["at once", "after a step"])
def test_who_begins_anew_begins_with_what_the_cache_has(others, how):
    """After preemption, or as a session whose next part arrives."""
    batch = Batch()
    batch.step(("b", 10, 4), ("a", 40, 4))
    for step in range(others):
        batch.step(("b", 11 + step, 4))
    assert batch.step(("b", 12, 4), ("a", 32, 9), **{how: "a"}) == [2 - others, 1]
    assert batch.step(("b", 13, 4), ("a", 41, 4)) == [1, 1]


def test_requests_may_be_at_slots_of_their_own():
    batch = Batch()
    batch.request_rows[:2] = 5, 2
    batch.step(("a", 10, 4), ("b", 20, 4))
    assert batch.step(("a", 13, 4), ("b", 21, 4)) == [3, 1]
    batch.request_rows[:2] = 2, 5
    assert batch.step(("b", 24, 4), ("a", 15, 4)) == [3, 2]


def test_requests_that_ended_are_forgotten():
    batch = Batch()
    batch.step(("a", 10, 4), ("b", 10, 4))
    batch.step(("b", 12, 4), known="b")
    assert batch.step(("b", 14, 4), ("a", 30, 4)) == [2, 1], "another request of this id"


def test_an_engine_without_drafts_counts_nothing():
    assert Batch(RecurrentGroups((0,))).step(("a", 3, 1)) == []
