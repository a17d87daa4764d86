"""Our runner and upstream's own, step by step in one engine; `make soak` goes on for longer."""

import json
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from vllm import SamplingParams

from examples.tiny_model import make_tokenizer
from tests.differential import __main__ as soak
from tests.differential import episodes
from tests.differential.episodes import MAX_MODEL_LEN, VOCAB, Episode, Serving, play
from tests.differential.invariants import BrokenInvariantError, Invariants
from tests.differential.pair import DisagreementError
from tests.helpers.engine import graphs
from tests.helpers.mixtures import MIXTURES
from tests.helpers.traffic import BAD_WORDS
from vllm_npu_prep.observe.violation import StepCheckError
from vllm_npu_prep.prep.bookkeeping import append_sampled_tokens
from vllm_npu_prep.prep.fused_pass import fill_step_at
from vllm_npu_prep.prep.state import AttentionState
from vllm_npu_prep.runner.v1 import runner as v1_runner
from vllm_npu_prep.runner.v2 import runner as runner_v2
from vllm_npu_prep.runner.v2.states import Samples

STEPS = int(os.environ.get("NPU_PREP_TEST_STEPS", "90"))
EPISODES = {
    8: {"drafts accepted", "drafts partly accepted", "drafts rejected", "dummy run", "full graph"},
    9: {"resumed", "dummy run", "full graph", "images encoded", "images placed"},
    11: {"resumed", "drafts accepted", "drafts rejected", "full graph", "piecewise graphs"},
    39: {"cached prefix", "images encoded", "images placed"},
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
    29: {"resumed", "dummy run", "piecewise graphs", "aborted"},
    39: {"cached prefix", "dummy run", "aborted"},
    44: {"resumed", "preempted", "requests reset", "dummy run"},
    126: {"resumed", "preempted", "requests reset", "aborted", "full graph"},
}
"""The same of engines on Model Runner V2."""
KEPT = sorted((Path(__file__).parent / "seeds").glob("*.json"))


def test_the_episodes_cover_every_part_of_an_engine():
    covered = set().union(*(Episode.draw(seed).parts() for seed in EPISODES))
    assert covered == set().union(*(Episode.draw(seed).parts() for seed in range(300)))


def test_the_episodes_of_v2_cover_every_part_of_its_engines():
    covered = set().union(*(Episode.draw_for_v2(seed).parts() for seed in EPISODES_OF_V2))
    assert covered == set().union(*(Episode.draw_for_v2(seed).parts() for seed in range(300)))


@pytest.mark.parametrize("number", EPISODES)
def test_every_array_decision_and_sample_agrees(number):
    traffic = play(Episode.draw(number), STEPS)
    print(number, dict(traffic.count), dict(traffic.states))
    # Compiled at worker start, for the types that steps have: nothing was compiled in between.
    assert len(fill_step_at.signatures) == 1
    assert len(append_sampled_tokens.signatures) <= 1  # none where nothing is sampled
    happened = {what for what, times in (traffic.count + traffic.states).items() if times}
    assert happened >= EPISODES[number] | {"finished"}


@pytest.mark.parametrize("number", EPISODES_OF_V2)
def test_every_array_and_greedy_sample_of_v2_is_that_of_v1(number):
    """By request, because each runner has an order of its own."""
    traffic = play(Episode.draw_for_v2(number), STEPS)
    print(number, dict(traffic.count), dict(traffic.states))
    assert len(fill_step_at.signatures) == 1
    happened = {what for what, times in (traffic.count + traffic.states).items() if times}
    assert happened >= EPISODES_OF_V2[number] | {"finished"}


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
    player = soak.Coverage(on_device)
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


@pytest.mark.parametrize(("drafter", "step"), [("other", 12), ("same", 2)])
def test_the_context_s_end_is_reached_beside_others(monkeypatch, drafter, step):
    """Drafts that were rejected don't count, though beside penalties lists of outputs are kept
    otherwise: the last token has room. Drafts end there request by request: the other one's cache
    has no holes, and a model goes on accepting what it drafts itself."""
    penalties = {"presence_penalty": 0.5} if drafter == "other" else {}
    asked = [(130, MAX_MODEL_LEN, {}), (5, 60, penalties)]

    def act(self):
        if self.count["steps"] == step * self.count["arrived"] < 2 * step:
            length, most, more = asked[self.count["arrived"]]
            name, prompt = f"r{self.count['arrived']}", {"prompt_token_ids": self.tokens(length)}
            params = SamplingParams(temperature=0, max_tokens=most, ignore_eos=True, **more)
            self.core.add_request(name, prompt, params)
            self.features[name] = {"penalties"} if more else set()
            self.count["arrived"] += 1

    monkeypatch.setattr(Serving, "act", act)
    drafts = {"method": "draft_model", "num_speculative_tokens": 3, "model": drafter}
    settings = {"async_scheduling": True, "max_num_seqs": 2, "max_num_batched_tokens": 96}
    settings |= {"additional_config": {}, "speculative_config": drafts}
    count = play(Episode(0, "Qwen3", settings), steps=step + 1).count
    print(dict(count))
    assert count["finished"] == 2
    assert (count["drafts rejected"] > 30) == (drafter == "other")
    assert (count["drafts accepted"] > 15) == (drafter == "same")


def wrong_position(step):
    step.arrays.positions[step.total_num_scheduled_tokens - 1] ^= 1  # stays in the context


def slot_of_another_block(step):
    step.arrays.slot_mapping[0, 0] += step.batch.tables.block_sizes[0]


def other_samples_discarded(step):
    step.arrays.discard_request_mask[:] ^= True


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
        ("V1", wrong_position, "off"),
        ("V1", slot_of_another_block, "off"),
        ("V1", other_samples_discarded, "off"),
        ("V1", wrong_state, "full"),  # upstream has no states
        ("V1", wrong_draft, "off"),
        ("V2", wrong_position, "off"),
        ("V2", slot_of_another_block, "off"),
        ("V2", other_samples_discarded, "off"),
        ("V2", samples_of_others, "off"),
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


def with_mask(change):
    """A fault of the mask, in steps that have one."""

    def fault(metadata, step):
        if metadata.attn_mask is None:
            return None
        return {"attn_mask": change(metadata.attn_mask.clone())}

    return fault


def flipped(mask):
    mask[-1, 0] = 1 - mask[-1, 0].int()
    return mask


def with_list(name, change):
    """A fault of a list on the host."""

    return lambda metadata, step: {name: change(getattr(metadata, name))}


def short_of_padding(metadata, step):
    """What captured attention would refuse: queries end where the real ones do."""
    if not metadata.in_full_graph or step.num_input_tokens == step.total_num_scheduled_tokens:
        return None
    starts = np.minimum(metadata.query_start_loc_np, step.total_num_scheduled_tokens)
    return {"query_start_loc_np": starts, "query_start_loc": torch.from_numpy(starts)}


def of_another_request(metadata, step):
    if step.num_reqs < 2:
        return None
    return {"block_tables": metadata.block_tables.roll(1, dims=0)}


OTHER_STATE = {state: AttentionState((state + 1) % len(AttentionState)) for state in AttentionState}
FAULTS_OF_LAYERS = {
    "state of layers": lambda metadata, step: {"attn_state": OTHER_STATE[step.attn_state]},
    "mask": with_mask(flipped),
    "dtype of the mask": with_mask(lambda mask: mask.float()),
    "lists of one length": with_list("seq_lens_np", lambda lens: lens[1:]),
    "queries on the device": with_list("query_start_loc_np", lambda starts: starts + 1),
    "lengths on the device": with_list("seq_lens_np", lambda lens: lens - 1),
    "queries of layers": short_of_padding,
    "device block table": of_another_request,
    "slots of layers": lambda metadata, step: {"slot_mapping": metadata.slot_mapping + 1},
    "longest sequence of layers": lambda metadata, step: {"max_seq_len": metadata.max_seq_len - 1},
}


def shared(request, other, manager):
    """Give a request a block of another one that no cache knows; None if there is none."""
    blocks = manager.coordinator.single_type_managers[0].req_to_blocks
    fresh = [block for block in blocks[other.request_id] if block.block_hash is None]
    if not fresh:
        return None
    blocks[request.request_id].append(fresh[-1])
    return blocks[request.request_id].pop


def test_a_fault_of_what_layers_are_given_is_noticed(monkeypatch):
    """Each kind of it, in a step that is right; and a block that two requests own."""
    check, noticed = Invariants.check, set()

    def expect(error, said, what, again, *args):
        with pytest.raises(error, match=f"^{said}:"):
            again(*args)
        noticed.add(what)

    def check_with_faults(self, output):
        check(self, output)
        watched, running = self.pair.watched[self.runner], self.scheduler.running
        step = watched.step
        true = watched.attn_metadata
        for what in FAULTS_OF_LAYERS.keys() - noticed:
            metadata = next(iter(true.values()))
            if changes := FAULTS_OF_LAYERS[what](metadata, step):
                watched.attn_metadata = dict.fromkeys(true, replace(metadata, **changes))
                expect(StepCheckError, f'step check "{what}"', what, self.check_layers, step)
        watched.attn_metadata = true
        if len(running) > 1 and (
            give_back := shared(*running[:2], self.scheduler.kv_cache_manager)
        ):
            what = "shared blocks are cached"
            expect(BrokenInvariantError, what, what, self.check_owners, output, {})
            give_back()

    monkeypatch.setattr(Invariants, "check", check_with_faults)
    settings = {
        "enable_chunked_prefill": True,
        "enable_prefix_caching": True,
        "async_scheduling": True,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 48,
        "block_size": 16,
        "num_gpu_blocks_override": 40,
    }
    play(Episode(0, "Qwen3", graphs("FULL", 4, 16, **settings)), steps=40)
    assert noticed == {*FAULTS_OF_LAYERS, "shared blocks are cached"}


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
