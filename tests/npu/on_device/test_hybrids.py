"""Gated delta nets on the device: launches of a layer, and what a step's preparation takes."""

from collections import Counter
from typing import Any

import pytest

from tests.helpers.counting import ModuleCounts, PreparationCounts
from tests.helpers.engine import engine, generate, graphs, greedy, make_model, runner_of
from tests.helpers.fused import forget_layers, settings
from tests.helpers.hybrids import ON_NPUS

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


def test_a_layer_of_decodes_stays_within_its_budget(model):
    """In the last step, three requests decode: one call of each operator for all of them."""
    forget_layers()
    with engine(model, **settings("bfloat16")) as llm:
        counted = ModuleCounts(runner_of(llm).get_model(), [LINEAR])
        generate(llm, [[5, 6, 7], [8, 4], [9, 10]], greedy(3))
    print(counted.counts)
    assert counted.counts[LINEAR] == OF_DECODES, "no other copies and no syncs"


def test_states_follow_requests_into_their_next_block(model):
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
        with engine(model, enable_prefix_caching=cached, max_num_seqs=4, **how) as llm:
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
    of_moves = {cached: sum(n > 2 for n in each.elements()) for cached, each in launches.items()}
    assert of_moves == {True: 2, False: 1}, "one step moves the states of two requests"
    assert all(set(each) <= {1, 2, 7, 8, 13, 14} for each in launches.values())
