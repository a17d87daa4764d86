"""Our runner and upstream's own, step by step in one engine; `make soak` goes on for longer."""

import json
import os
from pathlib import Path

import numpy as np
import pytest

from tests.differential.episodes import Episode, play
from tests.differential.invariants import BrokenInvariantError
from tests.differential.upstream import DisagreementError
from vllm_npu_prep import model_runner
from vllm_npu_prep.prep.kernels import book_tokens, fill_step_at
from vllm_npu_prep.prep.state import AttentionState

STEPS = int(os.environ.get("NPU_PREP_TEST_STEPS", "120"))
EPISODES = {
    3: {"cached prefix", "dummy run", "full graph", "piecewise graphs"},
    5: {"resumed", "cached prefix", "dummy run", "full graph"},
    9: {"dummy run", "full graph"},
    17: {"resumed", "cached prefix", "prefix cache reset", "piecewise graphs"},
    20: {"resumed", "cached prefix", "prefix cache reset"},
    27: {"cached prefix", "dummy run"},
}
"""Between them every kind of model and every part of an engine that is drawn; and what happens."""
KEPT = sorted((Path(__file__).parent / "seeds").glob("*.json"))


def test_the_episodes_cover_every_part_of_an_engine():
    covered = set().union(*(Episode.draw(seed).parts() for seed in EPISODES))
    assert covered == set().union(*(Episode.draw(seed).parts() for seed in range(300)))


@pytest.mark.parametrize("number", EPISODES)
def test_every_array_decision_and_sample_agrees(number):
    traffic = play(Episode.draw(number), STEPS)
    print(number, dict(traffic.count), dict(traffic.states))
    # Compiled at worker start, for the types that steps have: nothing was compiled in between.
    assert len(fill_step_at.signatures) == 1
    assert len(book_tokens.signatures) <= 1  # none where nothing is sampled
    happened = {what for what, times in traffic.count.items() if times}
    assert happened >= EPISODES[number] | {"aborted", "finished"}


@pytest.mark.parametrize("path", KEPT, ids=[path.stem for path in KEPT])
def test_episodes_that_failed_once_agree(path):
    play(Episode(**json.loads(path.read_text())), STEPS)


def wrong_position(step):
    step.arrays.positions[step.total_num_scheduled_tokens - 1] += 1


def slot_of_another_block(step):
    step.arrays.slot_mapping[0, 0] += step.batch.tables.block_sizes[0]


def other_samples_discarded(step):
    step.arrays.discard_request_mask[:] ^= True


def wrong_state(step):
    if step.attn_state == AttentionState.DecodeOnly:
        step.attn_state = AttentionState.ChunkedPrefill


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        (wrong_position, DisagreementError),
        (slot_of_another_block, DisagreementError),
        (other_samples_discarded, DisagreementError),
        (wrong_state, BrokenInvariantError),
    ],
)
def test_a_fault_is_noticed(monkeypatch, fault, error):
    prepare = model_runner.prepare_step

    def planted(*args):
        step = prepare(*args)
        if step.num_reqs:
            fault(step)
        return step

    monkeypatch.setattr(model_runner, "prepare_step", planted)
    with pytest.raises(error):
        play(Episode.draw(5), STEPS)


def test_episodes_are_functions_of_their_seed():
    assert Episode.draw(7) == Episode.draw(7)
    again = Episode(**json.loads(Episode.draw(7).dumps()))
    assert again == Episode.draw(7)
    assert np.unique([Episode.draw(seed).dumps() for seed in range(20)]).size == 20
