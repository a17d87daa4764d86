"""Our runner and upstream's own, step by step in one engine; `make soak` goes on for longer."""

import json
import os
from pathlib import Path

import numpy as np
import pytest

from examples.tiny_model import make_tokenizer
from tests.differential import __main__ as soak
from tests.differential import episodes
from tests.differential.episodes import VOCAB, Episode, play
from tests.differential.pair import DisagreementError
from tests.helpers.mixtures import MIXTURES
from tests.helpers.traffic import BAD_WORDS
from vllm_npu_prep.observe.violation import StepCheckError
from vllm_npu_prep.prep.bookkeeping import append_sampled_tokens
from vllm_npu_prep.prep.fused_pass import fill_step_at
from vllm_npu_prep.prep.state import AttentionState
from vllm_npu_prep.runner.v1 import runner as v1_runner
from vllm_npu_prep.runner.v2 import runner as runner_v2
from vllm_npu_prep.runner.v2.request_states import Samples

STEPS = int(os.environ.get("NPU_PREP_TEST_STEPS", "90"))
EPISODES = {
    8: {"drafts accepted", "drafts partly accepted", "drafts rejected", "dummy run", "full graph"},
    9: {"resumed", "dummy run", "full graph", "images encoded", "images placed"},
    11: {"resumed", "drafts accepted", "drafts rejected", "full graph", "piecewise graphs"},
    39: {"cached prefix", "images encoded", "images placed"},
    47: {"resumed", "preempted", "requests reset", "dummy run", "full graph"},
    73: {"life-cycle calls", "preempted", "drafter left out", "SpecDecoding", "DecodeOnly"},
    76: {"resumed", "preempted", "drafts partly accepted", "dummy run", "SpecDecoding"},
    112: {"resumed", "prefix cache reset", "drafts accepted", "aborted", "PrefillCacheHit"},
    155: {"resumed", "cached prefix", "drafts rejected", "aborted", "full graph"},
    226: {"dummy run", "life-cycle calls", "aborted", "piecewise graphs"},
    250: {"cached prefix", "resumed"},
}
"""Between them every kind of model and every part of an engine that is drawn; and what happens."""
EPISODES_OF_V2 = {
    36: {"resumed", "preempted", "full graph", "drafts accepted", "drafts partly accepted"},
    94: {"cached prefix", "aborted", "full graph", "piecewise graphs", "drafts rejected"},
    10: {"resumed", "cached prefix", "preempted", "dummy run", "full graph", "piecewise graphs"},
    7: {"cached prefix", "PrefillCacheHit"},
    11: {"resumed", "preempted", "full graph", "piecewise graphs", "drafts rejected"},
    29: {"resumed", "drafts rejected", "piecewise graphs", "aborted"},
    39: {"cached prefix", "dummy run", "aborted"},
    44: {"resumed", "preempted", "requests reset", "dummy run"},
    63: {"resumed", "cached prefix", "drafts partly accepted", "life-cycle calls"},
    126: {"resumed", "preempted", "requests reset", "aborted", "full graph"},
}
"""The same of engines on Model Runner V2."""
KEPT = sorted((Path(__file__).parent / "seeds").glob("*.json"))


@pytest.mark.parametrize(
    ("draw", "chosen"),
    [(Episode.draw_for_v2, EPISODES_OF_V2), (Episode.draw, EPISODES)],
    ids=["V2", "V1"],
)
def test_the_episodes_cover_every_part_of_an_engine(draw, chosen):
    covered = set().union(*(draw(seed).parts() for seed in chosen))
    assert covered == set().union(*(draw(seed).parts() for seed in range(300)))


def happened_in(episode):
    """What happened in an episode, and its attention states."""
    traffic = play(episode, STEPS)
    print(dict(traffic.count), dict(traffic.states))
    return {what for what, times in (traffic.count + traffic.states).items() if times}


@pytest.mark.parametrize("number", EPISODES_OF_V2)
def test_every_array_and_greedy_sample_of_v2_is_that_of_v1(number):
    """By request, because each runner has an order of its own."""
    assert happened_in(Episode.draw_for_v2(number)) >= EPISODES_OF_V2[number] | {"finished"}
    assert len(fill_step_at.signatures) == 1


@pytest.mark.parametrize("number", EPISODES)
def test_every_array_decision_and_sample_agrees(number):
    assert happened_in(Episode.draw(number)) >= EPISODES[number] | {"finished"}
    # Compiled at worker start, for the types that steps have: nothing was compiled in between.
    assert len(fill_step_at.signatures) == 1
    assert len(append_sampled_tokens.signatures) <= 1  # none where nothing is sampled


@pytest.mark.parametrize("path", KEPT, ids=[path.stem for path in KEPT])
def test_episodes_that_failed_once_agree(path):
    play(Episode(**json.loads(path.read_text())), STEPS)


@pytest.mark.parametrize("on_device", [False, True], ids=["cpu", "device"])
def test_soak_draws_for_its_device_and_keeps_what_fails(monkeypatch, tmp_path, on_device):
    """On an emulated card engines have experts, of which some are int8."""
    monkeypatch.setattr(soak, "SEEDS", tmp_path)
    played = []

    def fail(episode, steps):
        played.append(episode)
        raise DisagreementError("planted")

    monkeypatch.setattr(episodes, "play", fail)
    player = soak.Episodes(on_device)
    for seed in range(12):
        assert player.play(seed, 5)[0] == "failed"
    draw = Episode.draw_for_device if on_device else Episode.draw_for_soak
    assert played == [draw(seed) for seed in range(12)]
    kept = tmp_path / "device" if on_device else tmp_path
    assert Episode(**json.loads((kept / "3.json").read_text())) == draw(3)
    assert {each.runner for each in played} == ({"V1"} if on_device else {"V1", "V2"})
    if on_device:
        assert {each.family for each in played} == set(MIXTURES)
        assert {bool(each.int8) for each in played} == {False, True}


def wrong_position(step):
    step.arrays.positions[step.total_num_scheduled_tokens - 1] ^= 1  # stays in the context


def wrong_state(step):
    if step.attn_state == AttentionState.DecodeOnly:
        step.attn_state = AttentionState.ChunkedPrefill


def wrong_draft(step):
    if step.batch.num_draft_tokens[: step.num_reqs].any():
        step.arrays.draft_token_ids[0] += 1


def samples_of_others(find):
    def find_others(*args):
        found = find(*args)
        return found._replace(rows=np.roll(found.rows, 1))

    return find_others


def drafts_of_others(keep):
    def keep_others(*args):
        *given, drafts = args
        keep(*given, drafts.roll(1, 0))

    return keep_others


def in_steps(fault, prepare):
    def planted(*args):
        step = prepare(*args)
        if step.num_reqs:
            fault(step)
        return step

    return planted


@pytest.mark.parametrize(
    ("runner", "fault", "check"),
    [
        ("V1", wrong_state, "full"),  # upstream has no states
        ("V1", wrong_draft, "off"),
        ("V2", wrong_position, "off"),
        ("V2", samples_of_others, "full"),
        ("V2", drafts_of_others, "off"),
    ],
)
def test_a_fault_is_noticed(monkeypatch, runner, fault, check):
    """Beside upstream's runner, or by the full check."""
    episode = Episode.draw(5) if runner == "V1" else Episode.draw_for_v2(5)
    if fault is drafts_of_others:
        monkeypatch.setattr(Samples, "keep", drafts_of_others(Samples.keep))
    elif runner == "V2":
        del episode.settings["speculative_config"]
    if fault is samples_of_others:  # which the host has in synchronous steps
        monkeypatch.setattr(Samples, "find", samples_of_others(Samples.find))
        episode.settings["async_scheduling"] = True
    elif fault is not drafts_of_others:
        module = v1_runner if runner == "V1" else runner_v2
        monkeypatch.setattr(module, "prepare_step", in_steps(fault, module.prepare_step))
    episode.settings["additional_config"].setdefault("npu_prep", {})["check"] = check
    with pytest.raises(StepCheckError if check == "full" else DisagreementError):
        play(episode, STEPS)


def test_bad_words_are_made_of_tokens_that_models_have():
    """The demo model's tokenizer has more than they: vLLM refuses words by the tokenizer alone.
    Servers have a tokenizer that fits their model, so traffic draws none of the other words."""
    tokenizer = make_tokenizer()
    for word in BAD_WORDS:
        for text in (word, f" {word}"):
            tokens = tokenizer.encode(text, add_special_tokens=False)
            assert tokens and max(tokens) < VOCAB, (text, tokens)


def test_episodes_are_functions_of_their_seed():
    assert Episode.draw(7) == Episode.draw(7)
    again = Episode(**json.loads(Episode.draw(7).dumps()))
    assert again == Episode.draw(7)
    assert np.unique([Episode.draw(seed).dumps() for seed in range(20)]).size == 20
