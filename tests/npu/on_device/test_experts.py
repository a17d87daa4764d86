"""Experts on the device: results are those of the form in torch, and launches are counted.

Rows of no active expert hold NaN on this runtime, so that a result that reads one is NaN.
"""

from types import SimpleNamespace

import pytest
import torch
from vllm.config import set_current_vllm_config
from vllm.forward_context import override_forward_context
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.router.router_factory import create_fused_moe_router

import ascend_emulator
from tests.helpers.engine import (
    REPLAYED,
    engine,
    engine_config,
    generate,
    graphs,
    greedy,
    make_model,
    runner_of,
)
from tests.helpers.expert_counts import ExpertCounts
from tests.helpers.fused import settings
from tests.helpers.mixtures import MIXTURES
from tests.helpers.prompts import prompts_of
from vllm_npu_prep.ops import moe_method
from vllm_npu_prep.ops.moe_method import activation_of, apply_experts
from vllm_npu_prep.ops.moe_topk import register_operators
from vllm_npu_prep.ops.npu import experts as fused_experts
from vllm_npu_prep.ops.npu.experts import (
    OwnedExperts,
    UnquantisedExperts,
    add_gated,
    can_finalize,
    compute_experts,
)
from vllm_npu_prep.ops.npu.routing import GatingRouter, SoftmaxRouter, fused_router
from vllm_npu_prep.records.record_file import read_record, record_files
from vllm_npu_prep.runner.common import CommonRunner

TOKENS, HIDDEN, INNER, EXPERTS = 23, 32, 16, 8
SWITCHES = ("experts", "gating", "gating_softmax")


@pytest.fixture(autouse=True, scope="module")
def operators_of_routing():
    register_operators()


def random_layer(seed, k=3, dtype=torch.float16, activation=MoEActivation.SILU, padding=2):
    """Inputs and weights on the host; expert 5 gets no token, the last tokens are padding."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    x = normal(TOKENS, HIDDEN).to(dtype)
    w13 = (normal(EXPERTS, INNER * (2 if activation.is_gated else 1), HIDDEN) / 4).to(dtype)
    w2 = (normal(EXPERTS, HIDDEN, INNER) / 4).to(dtype)
    weights = normal(TOKENS, k).softmax(-1)
    ids = (normal(TOKENS, EXPERTS) - 99 * torch.eye(EXPERTS)[5]).topk(k).indices.int()
    if padding:
        ids[-padding:] = torch.tensor([[-1], [EXPERTS]])[-padding:]
    return x, w13, w2, weights, ids


def on_device(
    layer,
    share=range(EXPERTS),
    activation=MoEActivation.SILU,
    padding=True,
    is_final=False,
    **options,
):
    """The result for the experts of a share, on the host, and counters."""
    x, w13, w2, weights, ids = layer
    numbers = torch.full((EXPERTS,), -1, dtype=torch.int32)
    numbers[list(share)] = torch.arange(len(share), dtype=torch.int32)
    owned = OwnedExperts.of(numbers.npu(), EXPERTS)
    mine = list(share)
    held = SimpleNamespace(w13_weight=w13[mine].npu(), w2_weight=w2[mine].npu())
    one_launch = fused_experts.ONE_LAUNCH.get(activation)
    activate = activation_of(activation) if one_launch is None else one_launch[1]
    arguments = [each.npu() for each in (x, weights, ids)]
    torch.npu.synchronize()
    with torch.inference_mode(), ascend_emulator.count() as c:
        options |= {"has_padding": padding, "is_final": is_final}
        result = compute_experts(*arguments, owned, UnquantisedExperts(held, activate), **options)
    return result.cpu(), c


def in_torch(layer, share=range(EXPERTS), activation=MoEActivation.SILU, **options):
    """The same by the form for the CPU fallback, from float32."""
    x, w13, w2, weights, ids = layer
    numbers = torch.full((EXPERTS + 1,), -1, dtype=torch.int32)
    numbers[list(share)] = torch.arange(len(share), dtype=torch.int32)
    mine, nobody = list(share), ids == EXPERTS
    wide = [each.float() for each in (x, w13[mine], w2[mine])]
    ids = ids.masked_fill(nobody, -1)
    return apply_experts(*wide, weights, ids, activation, numbers, **options)


def asked_of(counts):
    """What the device was asked to do; memory apart."""
    return {name: n for name, n in counts.nonzero().items() if name != "peak_memory_bytes"}


def assert_near(got, expected, tolerance=0.02):
    assert got.isfinite().all()
    torch.testing.assert_close(
        got.float(), expected.float(), rtol=0, atol=tolerance * float(expected.abs().max())
    )


SHARES = {
    "all": (range(EXPERTS), 6),
    "neighbours": (range(2, 5), 6),
    "the last ones": (range(5, EXPERTS), 6),
    "one": (range(3, 4), 6),
    "one without a token": (range(5, 6), 6),
    "every third": (range(1, EXPERTS, 3), 7),
}
"""Experts of this rank, and launches: five, the indices of pairs without a row, new numbers."""


def check_share(share, layer, **options):
    """Compare what the device computes with torch's; returns its launches."""
    mine, _ = SHARES[share]
    got, counts = on_device(layer, mine, **options)
    assert got.dtype == layer[0].dtype
    expected = in_torch(layer, mine)
    if share == "one without a token":
        assert not expected.any()
        assert not got.any()
    else:
        assert_near(got, expected)
    assert not got[-2:].any(), "padding gets nothing"
    asked = asked_of(counts)
    assert set(asked) == {"launches"}, "no copies and no syncs"
    return asked["launches"]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("share", SHARES)
def test_results_are_those_of_torch(share, dtype, seed):
    assert check_share(share, random_layer(seed, dtype=dtype)) == SHARES[share][1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("share", SHARES)
def test_a_sum_that_knows_its_pairs_takes_a_launch_less(share, dtype, seed):
    for k in (1, 2, 3, 4, 7):
        layer = random_layer(seed, k=k, dtype=dtype)
        assert check_share(share, layer, is_final=True) == SHARES[share][1] - 1


@pytest.mark.parametrize(
    "name", ["silu", "gelu", "gelu_tanh", "relu2", "silu_no_mul", "gelu_no_mul"]
)
def test_activations(name, seed):
    activation = MoEActivation(name)
    layer = random_layer(seed, activation=activation)
    got, _ = on_device(layer, activation=activation)
    assert_near(got, in_torch(layer, activation=activation))


@pytest.mark.parametrize("is_final", [False, True])
def test_the_routers_weight_may_be_that_of_the_input(is_final, seed):
    layer = random_layer(seed, k=1)
    options = {"apply_router_weight_on_input": True, "is_final": is_final}
    got, _ = on_device(layer, range(2, 7), **options)
    assert_near(got, in_torch(layer, range(2, 7), apply_router_weight_on_input=True))


@pytest.mark.parametrize("padding", [0, 2])
def test_without_padding_that_has_weights_no_index_is_changed(padding, seed):
    """Rows of padding hold NaN here, and the index of a pair without a row is -1."""
    layer = random_layer(seed, padding=padding)
    layer[3][TOKENS - padding :] = 0
    got, counts = on_device(layer, padding=False)
    assert_near(got, in_torch(layer))
    assert not got[TOKENS - padding :].any()
    assert asked_of(counts) == {"launches": 5}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_shared_experts_are_weighed_as_they_are_added(dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    routed, shared = (torch.randn(TOKENS, HIDDEN, generator=generator).to(dtype) for _ in range(2))
    gate = torch.randn(TOKENS, 1, generator=generator).to(dtype)
    arguments = [each.npu() for each in (routed, shared, gate)]
    torch.npu.synchronize()
    with torch.inference_mode(), ascend_emulator.count() as c:
        got = add_gated(*arguments)
    assert_near(got.cpu(), routed.float() + shared.float() * gate.float().sigmoid())
    assert asked_of(c) == {"launches": 2}


def test_a_graph_is_replayed_with_other_tokens_for_each_expert(seed):
    """Captured where no token has an expert of this rank, replayed with some, then with all."""
    layer = random_layer(seed)
    x, w13, w2, weights, ids = layer
    numbers = torch.full((EXPERTS,), -1, dtype=torch.int32)
    numbers[2:5] = torch.arange(3, dtype=torch.int32)
    owned = OwnedExperts.of(numbers.npu(), EXPERTS)
    held = SimpleNamespace(w13_weight=w13[2:5].npu(), w2_weight=w2[2:5].npu())
    format_ = UnquantisedExperts(held, fused_experts.ONE_LAUNCH[MoEActivation.SILU][1])
    inputs = [x.npu(), weights.npu(), torch.full_like(ids, EXPERTS).npu()]
    graph = torch.npu.NPUGraph()
    with torch.inference_mode(), torch.npu.graph(graph):
        output = compute_experts(*inputs, owned, format_, has_padding=True, is_final=False)
    graph.replay()
    assert not output.cpu().any()
    for chosen in (ids, torch.full_like(ids, 3)):
        if chosen is not ids:
            chosen[:, 1:] = torch.tensor([2, 4], dtype=torch.int32)
        inputs[2].copy_(chosen)
        graph.replay()
        assert_near(output.cpu(), in_torch((x, w13, w2, weights, chosen), range(2, 5)))


def test_a_map_that_does_not_number_experts_is_refused():
    with pytest.raises(moe_method.PrepError, match="must number the rank's experts from 0 on"):
        OwnedExperts.of(torch.tensor([-1, 1, 2, -1]), 4)
    with pytest.raises(moe_method.PrepError, match="cover 5 experts"):
        OwnedExperts.of(torch.tensor([-1, 0, 1, -1]), 5)


ROUTERS = {
    "softmax": ({}, SoftmaxRouter, 1),
    "softmax, not renormalised": ({"renormalize": False}, SoftmaxRouter, 1),
    "sigmoid": ({"scoring_func": "sigmoid"}, GatingRouter, 1),
    "sigmoid with a bias": (
        {"scoring_func": "sigmoid", "biased": True, "routed_scaling_factor": 2.5},
        GatingRouter,
        1,
    ),
    "groups": (
        {"num_expert_group": 3, "topk_group": 2, "renormalize": False},
        GatingRouter,
        1,
    ),
    "groups by sigmoid with a bias": (
        {"num_expert_group": 3, "topk_group": 2, "scoring_func": "sigmoid", "biased": True},
        GatingRouter,
        1,
    ),
}
"""Settings of vLLM's router, what stands in for it, and launches without padding."""


def by_logit(hidden_states, gating_output, topk, renormalize):
    """A choice that a model makes itself."""
    logits, ids = gating_output.topk(topk)
    return logits.float().sigmoid(), ids.int()


UNFUSED = {
    "sigmoid, not renormalised": {"scoring_func": "sigmoid", "renormalize": False},
    "softmax with a bias": {"biased": True},
    "groups of two": {"num_expert_group": 6, "topk_group": 4, "renormalize": False},
    "renormalised groups": {"num_expert_group": 3, "topk_group": 2},
    "another choice": {"custom_routing_function": by_logit},
}
"""Settings of routers that no operator computes."""


def make_router(num_experts=12, biased=False, **given):
    bias = torch.linspace(-0.3, 0.3, num_experts).npu() if biased else None
    return create_fused_moe_router(
        top_k=3,
        global_num_experts=num_experts,
        use_grouped_topk="num_expert_group" in given,
        e_score_correction_bias=bias,
        **given,
    )


def choose(router, logits, is_padding=None):
    """Weights by expert of each token, and launches."""
    config = SimpleNamespace(is_padding=is_padding, additional_kwargs={})
    with override_forward_context(config), torch.inference_mode():
        if is_padding is not None:
            router.select_experts(logits, logits)  # makes what all layers of a pass read
        torch.npu.synchronize()
        with ascend_emulator.count() as c:
            weights, ids = router.select_experts(logits, logits)
        rows = zip(ids.cpu().tolist(), weights.float().cpu().tolist(), strict=True)
    return [dict(zip(*row, strict=True)) for row in rows], c


@pytest.mark.parametrize("case", ROUTERS)
def test_routers_choose_as_vllms(case, seed):
    given, kind, launches = ROUTERS[case]
    theirs = make_router(**given)
    ours = fused_router(theirs, SWITCHES)
    assert type(ours) is kind
    logits = torch.randn(9, 12, generator=torch.Generator().manual_seed(seed)).npu()
    expected, of_theirs = choose(theirs, logits)
    got, counts = choose(ours, logits)
    for mine, wanted in zip(got, expected, strict=True):
        assert mine == pytest.approx(wanted, rel=1e-4)
    assert asked_of(counts) == {"launches": launches}
    assert of_theirs.launches > 3
    is_padding = (torch.arange(9) > 6).npu()
    got, counts = choose(ours, logits, is_padding)
    for mine, wanted in zip(got[:7], expected, strict=False):
        assert mine == pytest.approx(wanted, rel=1e-4)
    nobody = -1 if kind is GatingRouter else 12
    assert all(set(mine) == {nobody} for mine in got[7:]), "padding has the id of no expert"
    assert counts.launches <= launches + (kind is GatingRouter)


@pytest.mark.parametrize(
    ("dtype", "more"), [(torch.float32, 1), (torch.bfloat16, 2)], ids=["float32", "bfloat16"]
)
def test_padding_gets_no_weight_in_one_launch(dtype, more, seed):
    """Of weights in float32, whose bits are as wide as an id."""
    router = fused_router(make_router(scoring_func="sigmoid"), SWITCHES)
    logits = torch.randn(9, 12, generator=torch.Generator().manual_seed(seed)).to(dtype).npu()
    expected, plain = choose(router, logits)
    router.padding_has_weight = False
    for is_padding in (torch.arange(9) > 6, torch.arange(9) % 3 == 1, torch.zeros(9) > 1):
        got, counts = choose(router, logits, is_padding.npu())
        for mine, wanted, nowhere in zip(got, expected, is_padding.tolist(), strict=True):
            assert mine == ({-1: 0.0} if nowhere else wanted)
        assert asked_of(counts) == {"launches": plain.launches + more}


@pytest.mark.parametrize("case", UNFUSED)
def test_other_routers_are_vllms_and_send_padding_nowhere(case, seed):
    theirs = make_router(**UNFUSED[case])
    ours = fused_router(theirs, SWITCHES)
    assert not isinstance(ours, SoftmaxRouter | GatingRouter)
    logits = torch.randn(9, 12, generator=torch.Generator().manual_seed(seed)).npu()
    expected, _ = choose(theirs, logits)
    got, counts = choose(ours, logits, (torch.arange(9) > 6).npu())
    assert got[:7] == expected[:7]
    assert all(set(mine) == {-1} for mine in got[7:])
    assert not counts.syncs


@pytest.mark.parametrize("switch", ["gating", "gating_softmax"])
def test_a_switch_leaves_routers_to_vllm(switch):
    others = [name for name in SWITCHES if name != switch]
    given = {} if switch == "gating_softmax" else {"scoring_func": "sigmoid"}
    assert isinstance(fused_router(make_router(**given), SWITCHES), SoftmaxRouter | GatingRouter)
    assert not isinstance(fused_router(make_router(**given), others), SoftmaxRouter | GatingRouter)


def test_padding_of_replayed_graphs_reaches_no_expert(tmp_path, seed, monkeypatch):
    """Tokens of experts are those of the scheduled tokens, in every kind of step."""
    mode, (k, experts_of_layer) = "FULL_AND_PIECEWISE", (2, 6)
    model = make_model(tmp_path / "model", "Qwen3Moe", **MIXTURES["Qwen3Moe"])
    replace_layers, counted = CommonRunner._replace_layers, []

    def count(runner, model, drafter):
        replace_layers(runner, model, drafter)
        runner.expert_counts = ExpertCounts(model, runner.device)

    monkeypatch.setattr(CommonRunner, "_replace_layers", count)
    record = {"dir": str(tmp_path / "records")}
    with engine(model, **settings(record=record) | graphs(mode, 8, 48)) as llm:
        runner = runner_of(llm)
        execute_model = runner.execute_model

        def followed(scheduled, *args, **kwargs):
            result = execute_model(scheduled, *args, **kwargs)
            if scheduled.total_num_scheduled_tokens:
                counted.append(runner.expert_counts.read())
            return result

        monkeypatch.setattr(runner, "execute_model", followed)
        generate(llm, prompts_of(seed, [3, 1, 30, 7]), greedy(4))
        recorder, kinds = runner.recorder, runner.padding.counts.by_kind
        recorder.dump("the test")
    assert REPLAYED[mode] <= set(kinds)
    padded = set()
    for path, counts in zip(record_files(recorder.folder), counted, strict=True):
        step = read_record(path)
        scheduled = int(step.batch.num_scheduled_tokens.sum())
        (tokens,) = counts.values()
        assert len(tokens) == experts_of_layer and sum(tokens) == k * scheduled
        if step.settings.num_input_tokens > scheduled:
            padded.add(step.settings.kind)
    assert REPLAYED[mode] <= padded, "steps of both kinds of graphs had padding"


def test_what_kernels_cut_or_add_in_float16_is_not_finalised():
    assert can_finalize(torch.bfloat16, 7168) and can_finalize(torch.float32, 8192)
    assert not can_finalize(torch.float16, 7168)
    assert not can_finalize(torch.bfloat16, 8208)


def test_graphs_without_grouped_products_are_refused(tmp_path):
    """Counts would be read back, which a graph can't contain."""
    model = make_model(tmp_path, "Qwen3Moe", **MIXTURES["Qwen3Moe"])
    given = settings(fused={"off": ["experts"]}) | {"enforce_eager": False}
    config = engine_config(model, **given)
    with (
        set_current_vllm_config(config),
        pytest.raises(
            moe_method.PrepError, match=r'take "experts" out of .*, or use --enforce-eager'
        ),
    ):
        moe_method.check_sync_is_possible()
    eager = engine_config(model, **given | {"enforce_eager": True})
    with set_current_vllm_config(eager):
        moe_method.check_sync_is_possible()
