"""Routing and experts against a scalar reading, a token and an expert at a time, in float64."""

import math
import threading
from types import SimpleNamespace

import pytest
import torch
from vllm.forward_context import override_forward_context
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.router.router_factory import create_fused_moe_router

from tests.helpers.thread_ranks import on_ranks
from vllm_npu_prep.device import communicator
from vllm_npu_prep.device.communicator import NPUCommunicator
from vllm_npu_prep.errors import PrepError
from vllm_npu_prep.ops.moe_method import TorchMoEMethod, apply_experts
from vllm_npu_prep.ops.moe_topk import register_operators
from vllm_npu_prep.ops.npu.routing import _takes_groups
from vllm_npu_prep.quantization.experts import Int8Experts

TOKENS, HIDDEN, INTERMEDIATE, EXPERTS = 23, 12, 10, 8

register_operators()


def scalar_routing(
    logits: list[float],
    k: int,
    *,
    sigmoid: bool = False,
    bias: list[float] | None = None,
    groups: tuple[int, int] | None = None,
    renormalize: bool = True,
    scale: float = 1.0,
) -> dict[int, float]:
    """Weights by expert of one token."""
    if sigmoid:
        scores = [1 / (1 + math.exp(-x)) for x in logits]
    else:
        total = sum(math.exp(x) for x in logits)
        scores = [math.exp(x) / total for x in logits]
    choice = [s + b for s, b in zip(scores, bias)] if bias else scores
    allowed = list(range(len(logits)))
    if groups:
        number, kept = groups
        size = len(logits) // number
        members = [allowed[i * size : (i + 1) * size] for i in range(number)]
        best = 2 if bias else 1  # a group counts by its two best with a bias, else by its best
        rank = [sum(sorted((choice[e] for e in m), reverse=True)[:best]) for m in members]
        top = sorted(range(number), key=lambda g: -rank[g])[:kept]
        allowed = [e for g in top for e in members[g]]
    chosen = sorted(allowed, key=lambda e: -choice[e])[:k]
    total = sum(scores[e] for e in chosen) if renormalize else 1.0
    return {e: scores[e] / total * scale for e in chosen}


ROUTINGS = {
    "softmax": {},
    "softmax, not renormalised": {"renormalize": False},
    "softmax with a bias": {"bias": True, "renormalize": False},
    "sigmoid": {"sigmoid": True},
    "sigmoid, not renormalised": {"sigmoid": True, "renormalize": False},
    "sigmoid with a bias": {"sigmoid": True, "bias": True, "scale": 2.5},
    "groups": {"groups": (4, 2), "renormalize": False, "scale": 1.5},
    "groups by sigmoid with a bias": {"groups": (4, 2), "sigmoid": True, "bias": True},
}


@pytest.mark.parametrize("case", ROUTINGS)
@pytest.mark.parametrize("k", [1, 3])
def test_routers_choose_and_weigh_as_a_scalar_reading(case, k, seed):
    """vLLM's own routers on this plugin's operators."""
    settings = dict(ROUTINGS[case])
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(TOKENS, EXPERTS, generator=generator)
    biased = settings.pop("bias", False)
    bias = torch.randn(EXPERTS, generator=generator) * 0.3 if biased else None
    groups = settings.get("groups")
    router = create_fused_moe_router(
        top_k=k,
        global_num_experts=EXPERTS,
        renormalize=settings.get("renormalize", True),
        use_grouped_topk=groups is not None,
        num_expert_group=groups and groups[0],
        topk_group=groups and groups[1],
        scoring_func="sigmoid" if settings.get("sigmoid") else "softmax",
        routed_scaling_factor=settings.get("scale", 1.0),
        e_score_correction_bias=bias,
    )
    weights, ids = router.select_experts(torch.zeros(TOKENS, HIDDEN), logits)
    assert weights.dtype == torch.float32
    assert ids.dtype == torch.int32
    corrected = 0
    for row in range(TOKENS):
        args = logits[row].double().tolist(), k
        expected = scalar_routing(*args, bias=bias.tolist() if biased else None, **settings)
        corrected += biased and set(expected) != set(scalar_routing(*args, **settings))
        got = dict(zip(ids[row].tolist(), weights[row].tolist()))
        assert got == pytest.approx(expected, rel=1e-5)
    assert bool(corrected) == biased, "a bias that changes no choice tests nothing"


@pytest.mark.parametrize("name", ["topk_softmax", "topk_sigmoid"])
def test_padding_is_routed_to_no_expert(name, seed):
    logits = torch.randn(4, EXPERTS, generator=torch.Generator().manual_seed(seed))
    weights, ids = torch.full((4, 2), 7.0), torch.full((4, 2), 7)
    is_padding = torch.tensor([False, False, True, True])
    scale = [1.0] if name == "topk_sigmoid" else []
    operator = getattr(torch.ops._moe_C, name)
    operator(weights, ids, torch.empty(0), logits, True, None, *scale, is_padding)
    assert (ids[:2] >= 0).all()
    assert (ids[2:] == -1).all()
    assert weights[:2].sum(1).tolist() == pytest.approx([1, 1])
    assert not weights[2:].any()


def test_padding_of_other_ranks_is_gathered_once():
    """In the first expert layer of a forward pass: those of all ranks, in their order."""
    asked = []

    def gather(mine, dim, sizes):
        asked.append((mine.tolist(), dim, sizes))
        return torch.cat([torch.tensor([1, 0], dtype=mine.dtype), mine])

    group = SimpleNamespace(all_gatherv=gather, rank_in_group=1)
    made = object.__new__(NPUCommunicator)
    made.all2all_manager = SimpleNamespace(
        _get_comm_group=lambda is_sequence_parallel: group,
        _get_sizes=lambda num_tokens, group: [2, num_tokens],
        dispatch_router_logits=lambda *given: "gathered",
    )
    context = SimpleNamespace(
        is_padding=torch.tensor([False, False, True, True]), additional_kwargs={}
    )
    with override_forward_context(context):
        for _ in range(2):
            tokens = torch.zeros(3, HIDDEN), torch.zeros(3, EXPERTS)
            assert made.dispatch_router_logits(*tokens) == "gathered"
    assert asked == [([0, 0, 1], 0, [2, 3])]
    assert context.is_padding.tolist() == [True, False, False, False, True]


def test_ranks_that_share_prompts_exchange_what_experts_need(monkeypatch):
    """Padding once in a forward pass; of the sum each rank gets what belongs to its own tokens."""
    here = threading.local()
    monkeypatch.setattr(communicator, "get_pcp_group", lambda: here.group)
    monkeypatch.setattr(communicator, "get_forward_context", lambda: here.context)
    x, logits = torch.arange(12.0).view(6, 2), torch.arange(18.0).view(6, 3)
    is_padding = torch.tensor([False, True, True, False, False, True])

    def of_rank(group):
        rank = group.rank_in_group
        mine = slice(3 * rank, 3 * rank + 3)
        context = SimpleNamespace(is_padding=is_padding[mine], additional_kwargs={})
        here.group, here.context = group, context
        for _ in range(2):  # expert layers
            rows, scores = communicator.gather_shared_prompts(x[mine], logits[mine])
        own = communicator.scatter_shared_prompts(rows * (rank + 1))
        return rows, scores, context.is_padding, own

    for rank, (rows, scores, padding, own) in enumerate(on_ranks(2, of_rank)):
        assert torch.equal(rows, x) and torch.equal(scores, logits)
        assert torch.equal(padding, is_padding)
        assert torch.equal(own, 3 * x[3 * rank : 3 * rank + 3])


def scalar_experts(x, w13, w2, topk_weights, topk_ids, activation, on_input):
    """Each token through each of its experts, in float64."""
    plain = {
        "silu": lambda v: v / (1 + math.exp(-v)),
        "gelu": lambda v: v * 0.5 * (1 + math.erf(v / math.sqrt(2))),
        "gelu_tanh": lambda v: (
            v * 0.5 * (1 + math.tanh(math.sqrt(2 / math.pi) * (v + 0.044715 * v**3)))
        ),
        "relu2": lambda v: max(v, 0.0) ** 2,
    }[activation.value.removesuffix("_no_mul")]
    output = torch.zeros(x.shape, dtype=torch.float64)
    for token, (row, weights, ids) in enumerate(zip(x.double(), topk_weights, topk_ids)):
        for weight, expert in zip(weights.tolist(), ids.tolist()):
            if expert < 0:
                continue
            hidden = w13[expert].double() @ (row * weight if on_input else row)
            if activation.is_gated:
                gate, up = hidden.chunk(2)
                hidden = torch.tensor([plain(g) for g in gate.tolist()]).double() * up
            else:
                hidden = torch.tensor([plain(h) for h in hidden.tolist()]).double()
            result = w2[expert].double() @ hidden
            output[token] += result if on_input else result * weight
    return output


def random_experts(seed, activation, k):
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    rows = INTERMEDIATE * (2 if activation.is_gated else 1)
    x, w13, w2 = (
        normal(TOKENS, HIDDEN),
        normal(EXPERTS, rows, HIDDEN) * 0.3,
        normal(EXPERTS, HIDDEN, INTERMEDIATE) * 0.3,
    )
    weights = normal(TOKENS, k).softmax(-1)
    # Expert 5 gets no token, and two tokens are padding
    ids = (normal(TOKENS, EXPERTS) - 99 * torch.eye(EXPERTS)[5]).topk(k).indices.int()
    weights[-2:], ids[-2:] = 0, -1
    return x, w13, w2, weights, ids


@pytest.mark.parametrize("on_input", [False, True], ids=["out", "in"])
@pytest.mark.parametrize(
    "name", ["silu", "gelu", "gelu_tanh", "relu2", "silu_no_mul", "relu2_no_mul"]
)
def test_experts_compute_what_a_scalar_reading_computes(name, on_input, seed):
    activation = MoEActivation(name)
    args = random_experts(seed, activation, 1 if on_input else 3)
    got = apply_experts(*args, activation, apply_router_weight_on_input=on_input)
    expected = scalar_experts(*args, activation, on_input)
    torch.testing.assert_close(got.double(), expected, rtol=1e-4, atol=1e-5)
    assert not got[-2:].any()


def test_ranks_that_share_the_experts_sum_to_the_whole(seed):
    activation = MoEActivation.SILU
    x, w13, w2, weights, ids = random_experts(seed, activation, 3)
    whole = apply_experts(x, w13, w2, weights, ids, activation)
    parts = []
    for mine in (range(0, 8, 2), range(1, 8, 2)):
        expert_map = torch.full((EXPERTS,), -1, dtype=torch.int32)
        expert_map[list(mine)] = torch.arange(4, dtype=torch.int32)
        local = w13[list(mine)], w2[list(mine)]
        parts.append(apply_experts(x, *local, weights, ids, activation, expert_map))
    torch.testing.assert_close(parts[0] + parts[1], whole)
    assert not torch.allclose(parts[0], whole)


REFUSED = {
    "activation swiglustep": {"activation": MoEActivation.SWIGLUSTEP},
    "biases": {"has_bias": True},
    "a limit of SwiGLU": {"swiglu_limit": 7.0},
    "an alpha of SwiGLU": {"swiglu_alpha": 1.7},
    "a beta of SwiGLU": {"swiglu_beta": 1.0},
}


@pytest.mark.parametrize("method_class", [TorchMoEMethod, Int8Experts])
@pytest.mark.parametrize("what", REFUSED)
def test_experts_that_are_not_computed_are_refused_by_name(what, method_class):
    plain = {
        "activation": MoEActivation.SILU,
        "has_bias": False,
        "swiglu_limit": None,
        "swiglu_alpha": None,
        "swiglu_beta": None,
    }
    layer = SimpleNamespace(layer_name="layers.3.mlp", **{**plain, **REFUSED[what]})
    method = method_class.__new__(method_class)
    method.__dict__["moe"] = layer
    with pytest.raises(PrepError, match=rf"experts with {what} \(layers\.3\.mlp\)"):
        method.create_weights(layer, 8, 64, 32, torch.float32)


def test_sums_of_half_precision_are_rounded_once(seed):
    activation = MoEActivation.SILU
    x, w13, w2, weights, ids = random_experts(seed, activation, 3)
    half = [tensor.bfloat16() for tensor in (x, w13, w2)]
    got = apply_experts(*half, weights, ids, activation)
    assert got.dtype == torch.bfloat16
    each = [  # an expert a token, in float32 from the same roundings
        apply_experts(*half, torch.ones(TOKENS, 1), ids[:, i : i + 1], activation).float()
        * weights[:, i : i + 1]
        for i in range(3)
    ]
    torch.testing.assert_close(got, sum(each).bfloat16(), rtol=2**-8, atol=1e-6)


def test_groups_of_experts_are_counted_in_multiples_of_32():
    """The operator lays each group out so, in room for 2,048 experts."""
    assert _takes_groups(experts=64 * 3, top_k=2, number=64, kept=4)
    assert not _takes_groups(experts=65 * 3, top_k=2, number=65, kept=4)
