"""Gated delta nets on the device: launches of a layer, and what a step's preparation takes."""

from collections import Counter
from typing import Any

import pytest
import torch

from tests.helpers.counting import ModuleCounts, PreparationCounts
from tests.helpers.engine import engine, generate, graphs, greedy, make_model, runner_of
from tests.helpers.fused import forget_layers, settings
from tests.helpers.hybrids import EXPERTS, ON_NPUS, make_model_that_sees
from tests.helpers.prompts import prompts_of
from tests.helpers.quantized import QUANTIZE, rounded_model
from tests.helpers.step_logits import greedy_steps
from tests.helpers.v2 import RUNNERS, engine_of
from tests.helpers.vision import Reference, chat, make_image, make_video, serve, tokens_of, watch
from tests.npu.close_calls import CLOSE

LINEAR = "model.layers.0.linear_attn"
OF_DECODES = {"launches": 28, "hidden_copies": 3}
"""Of a layer of linear attention in a step of decodes, projections and norm included. Qwen3.5's
queries, keys and values, and its gate, are slices of one projection."""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Qwen3.5 whose states fill the K of 128 tokens."""
    sizes = {**ON_NPUS, "head_dim": 256, "spread": 0.1, "embedding_scale": 20}
    return make_model(tmp_path_factory.mktemp("hybrid") / "model", "Qwen3_5", **sizes)


def builders_of(runner: Any) -> list[Any]:
    return [builder for _, builder, _ in runner.preparer.builders if builder.holds_states]


@pytest.mark.parametrize("runner_name", RUNNERS)
def test_a_layer_of_decodes_stays_within_its_budget(model, runner_name):
    """In the last step, three requests decode: one call of each operator for all of them."""
    forget_layers()
    with engine_of(runner_name, model, **settings("bfloat16")) as llm:
        counted = ModuleCounts(runner_of(llm).get_model(), [LINEAR])
        generate(llm, [[5, 6, 7], [8, 4], [9, 10]], greedy(3))
    print(counted.counts)
    assert counted.counts[LINEAR] == OF_DECODES, "no other copies and no syncs"


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
        how = settings("bfloat16") | graphs("FULL_AND_PIECEWISE", 4, 16)
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


INT8 = {
    "Qwen3-Next": ("Qwen3Next", EXPERTS, "modelslim", False),
    "Qwen3.5": ("Qwen3_5", {}, "compressed-tensors", False),
}
BOUND = 0.7
"""Logits beside float32, in standard deviations: a level more or less here and there. A wrong scale
moves them by several."""


@pytest.mark.parametrize("name", INT8)
def test_int8_projections(tmp_path, seed, name):
    """Of linear attention, attention and experts; logits near those of rounded weights."""
    family, config, *how = INT8[name]
    sizes = {**ON_NPUS, **config, "head_dim": 256, "spread": 0.1, "embedding_scale": 20}
    model = make_model(tmp_path / "float", family, **sizes)
    QUANTIZE(model, tmp_path / "int8", *how)
    forget_layers()
    prompts, worst = prompts_of(seed, [5, 33, 17, 1]), 0.0
    with engine(tmp_path / "int8", **settings("bfloat16")) as llm:
        steps = greedy_steps(llm, prompts, 6)
        layer = runner_of(llm).get_model().model.layers[0].linear_attn
        assert layer.fused is not None and layer.in_proj_qkvz.weight.dtype == torch.int8
        assert layer.out_proj.weight.dtype == torch.int8 != layer.in_proj_ba.weight.dtype
    network = rounded_model(model, tmp_path / "int8")
    for prompt, tokens, logits in zip(prompts, steps.tokens, steps.logits, strict=True):
        with torch.no_grad():
            expected = network(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
        worst = max(worst, float((logits - expected).abs().max() / expected.std()))
    print(f"{name}: {worst:.3f} standard deviations")
    assert worst < BOUND


def test_images_and_videos_beside_text(tmp_path, seed):
    """Of Qwen3.5 as published checkpoints name it; tokens part at close calls only."""
    sizes = {"linear_key_head_dim": 128, "linear_value_head_dim": 128, "head_dim": 256}
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25}
    rope |= {"mrope_section": [12, 10, 10], "mrope_interleaved": True}
    sizes |= {"rope_parameters": rope, "initializer_range": 0.1}
    folder = make_model_that_sees(tmp_path / "model", **sizes)
    first, question = make_image(seed), "What is a slot mapping?"
    requests = [
        chat(first, question),
        chat(question),
        chat(make_image(seed + 1, 90, 60), " or ", first, question),
        chat(make_video(seed), question),
    ]
    reference = Reference(folder)
    answers = reference.answers(requests, 12)
    how = settings("bfloat16") | graphs("FULL_AND_PIECEWISE", 4, 16, 32)
    how |= {"skip_tokenizer_init": False, "max_num_batched_tokens": 32}
    with engine(folder, **how) as llm:
        runner, watched = runner_of(llm), watch(llm)
        outputs = serve(llm, requests, greedy(12))
        kinds, encoded = Counter(runner.padding.counts.by_kind), runner.inputs.counts.encoded
    watched.check_positions(outputs, answers)
    assert encoded == 3 and kinds["full graph"] > 4
    parted = 0
    for request, answer, tokens in zip(requests, answers, tokens_of(outputs), strict=True):
        if tokens != answer.tokens:
            step = next(i for i, pair in enumerate(zip(tokens, answer.tokens)) if len({*pair}) > 1)
            logits = reference.logits_of(request, step)
            margin = (logits[answer.tokens[step]] - logits[tokens[step]]) / logits.std()
            assert margin < CLOSE, f"step {step}: {float(margin):.3f} apart"
            parted += 1
    print(f"{parted} of {len(requests)} part")
    assert parted <= 2, "noise leaves a random model in doubt more often than text"
