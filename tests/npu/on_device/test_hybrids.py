"""Gated delta nets on the device: launches, states that move, drafts, images."""

from collections import Counter
from typing import Any

import pytest
from vllm.forward_context import get_forward_context

from tests.helpers.counting import ModuleCounts, PreparationCounts
from tests.helpers.engine import engine, generate, graphs, greedy, make_model, runner_of
from tests.helpers.fused import forget_layers, settings
from tests.helpers.hybrids import EXPERTS, ON_NPUS, make_model_that_sees
from tests.helpers.mtp import make_mtp_model
from tests.helpers.prompts import prompts_of
from tests.helpers.v2 import RUNNERS, engine_of
from tests.helpers.vision import Reference, serve, tokens_of, watch
from tests.npu.models import CLOSE
from tests.npu.on_device.test_multimodal import requests_of

LINEAR = "model.layers.0.linear_attn"
OF_DECODES = {
    "Qwen3_5": {"launches": 28, "hidden_copies": 3},
    "Qwen3Next": {"launches": 33, "hidden_copies": 1},
}
"""Of a layer of linear attention in a step of decodes, projections and norm included. Qwen3.5's
queries, keys and values, and its gate, are slices of one projection; Qwen3-Next's interleaves
heads."""
OF_128 = {**ON_NPUS, "head_dim": 256}
"""A state fills the K of 128 tokens."""
DRAFTS = {"speculative_config": {"method": "mtp", "num_speculative_tokens": 3}}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    sizes = {**OF_128, "spread": 0.1, "embedding_scale": 20}
    return make_model(tmp_path_factory.mktemp("hybrid") / "model", "Qwen3_5", **sizes)


def builders_of(runner: Any) -> list[Any]:
    return [builder for _, builder, _ in runner.preparer.builders if builder.holds_states]


@pytest.mark.parametrize("runner_name", RUNNERS)
@pytest.mark.parametrize("family", OF_DECODES)
def test_a_layer_of_decodes_stays_within_its_budget(model, tmp_path, family, runner_name):
    """In the last step, three requests decode: one call of each operator for all of them."""
    if family == "Qwen3Next":
        model = make_model(tmp_path, family, **OF_128, **EXPERTS)
    forget_layers()
    with engine_of(runner_name, model, **settings("bfloat16")) as llm:
        counted = ModuleCounts(runner_of(llm).get_model(), [LINEAR])
        generate(llm, [[5, 6, 7], [8, 4], [9, 10]], greedy(3))
    assert counted.counts[LINEAR] == OF_DECODES[family], "no other copies and no syncs"


MOST_TO_PREPARE = {"V1": 2, "V2": 3}
"""Launches of a step that moves no state; V2 puts samples at their slots when one is wanted that
the last step lacks."""


@pytest.mark.parametrize("runner_name", RUNNERS)
def test_states_follow_requests_into_their_next_block(model, runner_name):
    """In full graphs of decodes; a step that moves no state has the copy and launches of others.

    Without the prefix cache a request has one block, and nothing moves but the empty state of a
    prompt of one token. Such steps have two launches more for each layer and request.
    """
    forget_layers()
    prompts = [list(range(3, 129)), list(range(100, 226)), [9, 8, 7]]
    tokens, moved, launches = {}, {}, {}
    for cached in (True, False):
        how = settings("bfloat16") | graphs("FULL_DECODE_ONLY", 4)
        how["max_num_batched_tokens"] = 512  # other chunks would round states elsewhere
        how |= {"enable_prefix_caching": cached, "max_num_seqs": 4}
        with engine_of(runner_name, model, **how) as llm:
            runner = runner_of(llm)
            assert str(runner.device) == "npu:0"
            counts = PreparationCounts(runner)
            tokens[cached] = [generate(llm, given, greedy(8)) for given in ([[7]], prompts)]
            kinds = Counter(runner.padding.counts.by_kind)
            moved[cached] = [builder.num_moved for builder in builders_of(runner)]
        assert kinds["full graph"] > 4
        assert {step["h2d_copies"] for step in counts.steps} == {1}
        assert set().union(*counts.steps) == {"h2d_copies", "h2d_bytes", "launches"}
        launches[cached] = Counter(step["launches"] for step in counts.steps)
    print(launches, moved)
    assert tokens[True] == tokens[False]
    assert moved == {True: [3, 3, 3], False: [1, 1, 1]}
    most = MOST_TO_PREPARE[runner_name]
    of_moves = {cached: sum(n > most for n in each.elements()) for cached, each in launches.items()}
    assert of_moves == {True: 2, False: 1}, "one step moves the states of two requests"
    expected = {n + moved for n in range(1, most + 1) for moved in (0, 6, 12)}
    assert all(set(each) <= expected for each in launches.values())


def test_images_and_videos_beside_text(tmp_path, seed):
    """Of Qwen3.5 as published checkpoints name it; tokens part at close calls only."""
    sizes = {"linear_key_head_dim": 128, "linear_value_head_dim": 128, "head_dim": 256}
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25}
    rope |= {"mrope_section": [12, 10, 10], "mrope_interleaved": True}
    sizes |= {"rope_parameters": rope, "initializer_range": 0.1}
    folder = make_model_that_sees(tmp_path / "model", **sizes)
    requests, reference = requests_of(seed), Reference(folder)
    answers = reference.answers(requests, 12)
    how = settings("bfloat16") | graphs("FULL_AND_PIECEWISE", 4, 16, 32)
    how |= {"skip_tokenizer_init": False, "max_num_batched_tokens": 32}
    with engine_of("V1", folder, **how) as llm:
        runner, watched = runner_of(llm), watch(llm)
        outputs = serve(llm, requests, greedy(12))
        kinds, encoded = Counter(runner.padding.counts.by_kind), runner.inputs.counts.encoded
    watched.check_positions(outputs, answers)
    assert encoded == 3 and kinds["full graph"] > 4
    parted = 0
    for request, answer, tokens in zip(requests, answers, tokens_of(outputs), strict=True):
        if tokens != answer.tokens:
            step = next(i for i, pair in enumerate(zip(tokens, answer.tokens)) if len({*pair}) > 1)
            logits = reference.logits_behind(request, answer.tokens)[step]
            margin = (logits[answer.tokens[step]] - logits[tokens[step]]) / logits.std()
            assert margin < CLOSE, f"step {step}: {float(margin):.3f} apart"
            parted += 1
    print(f"{parted} of {len(requests)} part")
    assert parted <= 2, "noise leaves a random model in doubt more often than text"


OF_DRAFTS = {"Qwen3Next": (43, 5), "Qwen3_5": (38, 7)}
"""Launches of a layer of linear attention in a step in which each request has a token and three
drafts, however many requests there are, projections and norm included; and most strided inputs that
operators copy."""
OF_OTHER_DRAFTS = {"Qwen3Next": (36, 8, 4), "Qwen3_5": (31, 8, 8)}
"""Where requests have different numbers of drafts: launches, those of each request, and copies."""


@pytest.mark.parametrize("runner_name", RUNNERS)
@pytest.mark.parametrize("family", OF_DRAFTS)
def test_a_layer_of_drafts_stays_within_its_budget(tmp_path, family, runner_name):
    """In each step of decodes; those near the end of the context have fewer drafts."""
    sizes = {**OF_128, **(EXPERTS if family == "Qwen3Next" else {})}
    model, _ = make_mtp_model(tmp_path, family, **sizes)
    forget_layers()
    uniform, ragged = [], []
    how = settings("bfloat16") | DRAFTS
    with engine_of(runner_name, model, max_model_len=64, **how) as llm:
        layer = runner_of(llm).get_model().get_submodule(LINEAR)
        counted = ModuleCounts(runner_of(llm).get_model(), [LINEAR])

        def note(*args: Any) -> None:
            metadata = (get_forward_context().attn_metadata or {}).get(layer.prefix)
            if metadata is not None and metadata.num_prefills == 0:
                kind = uniform if metadata.uniform_decode_len else ragged
                kind.append((metadata.decode_lens, counted.counts[LINEAR]))

        layer.register_forward_hook(note)
        generate(llm, prompts_of(5, [20, 35, 37]), greedy(64))
    print(family, [counts for _, counts in uniform], ragged)
    assert {len(lens) for lens, _ in ragged} >= {2, 3}
    launches, copies = OF_DRAFTS[family]
    full = [counts for lens, counts in uniform if lens == [4, 4, 4]]
    assert len(full) > 5 and {counts["launches"] for counts in full} == {launches}
    assert max(counts.get("hidden_copies", 0) for _, counts in uniform) == copies
    launches, each, copies = OF_OTHER_DRAFTS[family]
    for lens, counts in ragged:
        assert counts["launches"] == launches + each * len(lens)
    assert max(counts["hidden_copies"] for _, counts in ragged) == copies
    for _, counts in uniform + ragged:
        assert set(counts) <= {"launches", "hidden_copies"}, "no other copies and no syncs"


def test_a_graph_for_more_drafts_than_states_is_replayed(tmp_path):
    """The operator takes as many tokens as there are states: a graph has several of its calls.

    Requests that run have states of their own, so later calls are of padding alone.
    """
    model, _ = make_mtp_model(tmp_path, "Qwen3_5", **OF_128)
    forget_layers()
    how = settings("bfloat16", check="full") | graphs("FULL_DECODE_ONLY", 16) | DRAFTS
    how |= {"max_model_len": 128, "max_num_seqs": 4, "num_gpu_blocks_override": 14}
    with engine(model, **how) as llm:
        generate(llm, prompts_of(5, [9, 7]), greedy(20))
        assert runner_of(llm).padding.counts.by_kind["full graph"] > 3
