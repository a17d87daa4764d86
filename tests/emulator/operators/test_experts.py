"""Operators of experts against formulas of one pair, one row or one token at a time, in float64."""

import pytest
import torch

from tests.emulator.operators.calls import call
from tests.emulator.operators.expert_calls import (
    FINALIZE_ROUTING,
    GATING,
    GATING_SOFTMAX,
    GROUPED_MATMUL,
    IDS,
    INIT_ROUTING,
    TOKEN_UNPERMUTE,
    finalize_arguments,
    gating_arguments,
    random,
    routing_arguments,
    rows_arguments,
    softmax_arguments,
    unpermute_arguments,
)
from tests.emulator.operators.formula import assert_close
from tests.emulator.operators.test_elementwise import DTYPES

EXPERT_OF_PAIR = [expert for chosen in IDS for expert in chosen]
ACTIVE = [(expert, pair) for pair, expert in enumerate(EXPERT_OF_PAIR) if 1 <= expert < 4]
BY_EXPERT = [pair for _, pair in sorted(ACTIVE)]
"""Pairs of active experts in the order of their rows: by expert, then by token."""


@pytest.mark.parametrize("dtype", [*DTYPES, torch.int8])
def test_rows_are_sorted_and_inactive_ones_are_undefined(dtype, seed):
    arguments = routing_arguments(seed)
    arguments["x"] = (arguments["x"] * 9).to(dtype)
    values, row_of_pair, sizes, _ = call(INIT_ROUTING, arguments)
    assert torch.equal(values[: len(BY_EXPERT)], arguments["x"][[pair // 2 for pair in BY_EXPERT]])
    rest = values[len(BY_EXPERT) :]
    assert len(values) == 12 and bool((rest == -128 if dtype == torch.int8 else rest.isnan()).all())
    expected = [BY_EXPERT.index(pair) if pair in BY_EXPERT else -1 for pair in range(12)]
    assert row_of_pair.tolist() == expected and row_of_pair.dtype == torch.int32
    assert sizes.tolist() == [sum(e == expert for e, _ in ACTIVE) for expert in (1, 2, 3)]
    assert sizes.dtype == torch.int64


def test_experts_with_rows_are_listed_in_pairs():
    ids = torch.tensor([[3, 3], [1, 6]], dtype=torch.int32)
    x = torch.zeros(2, 8).half()
    arguments = routing_arguments(x=x, expert_idx=ids, active_num=4, expert_tokens_num_type=2)
    assert call(INIT_ROUTING, arguments)[2][:3].tolist() == [[1, 1], [3, 2], [0, 0]]


@pytest.mark.parametrize("smooth", [None, 1, 3])
def test_rows_are_quantised_by_their_largest_number(smooth, seed):
    factors = None if smooth is None else random(smooth, 8, dtype=torch.float32).abs() + 0.5
    arguments = routing_arguments(seed, quant_mode=1, scale=factors)
    values, _, _, scales = call(INIT_ROUTING, arguments)
    assert values.dtype == torch.int8
    for row, pair in enumerate(BY_EXPERT):
        expected = arguments["x"][pair // 2].double()
        if factors is not None:
            expected = expected * factors[0 if smooth == 1 else EXPERT_OF_PAIR[pair] - 1].double()
        assert float(scales[row]) == pytest.approx(float(expected.abs().max()) / 127, rel=1e-5)
        assert_close(values[row] * scales[row] / 4, expected / 4, torch.bfloat16)
    assert scales[len(BY_EXPERT) :].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("of_probs", DTYPES)
def test_rows_of_a_token_are_weighted_and_summed(dtype, of_probs, seed):
    arguments = unpermute_arguments(seed, dtype)
    arguments["probs"] = arguments["probs"].to(of_probs)
    rows, probs = arguments["permuted_tokens"].double(), arguments["probs"].double()
    rows_read = rows.clone()
    arguments["permuted_tokens"][[2, 4]] = float("nan")  # of no pair
    output, again = call(TOKEN_UNPERMUTE, arguments)
    expected = torch.stack(
        (
            rows_read[3] * probs[0, 0] + rows_read[0] * probs[0, 1],
            rows_read[5] * probs[1, 1],  # the other row is past the last one
            rows_read[1] * probs[2, 0],  # the other has no probability
        )
    )
    assert output.dtype == dtype and again is arguments["permuted_tokens"]
    assert_close(output, expected, dtype)


def test_without_probabilities_there_is_one_row_a_token(seed):
    arguments = unpermute_arguments(seed, torch.float32, probs=None)
    arguments["sorted_indices"] = torch.tensor([3, 0, 99, 5, 1, 2], dtype=torch.int32)
    output, _ = call(TOKEN_UNPERMUTE, arguments)
    rows = arguments["permuted_tokens"]
    assert torch.equal(output[[0, 1, 3, 4, 5]], rows[[3, 0, 5, 1, 2]])
    assert not output[2].any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("of_scales", ["the same", "float32"])
def test_rows_of_a_token_are_summed_though_it_lacks_some(dtype, of_scales, seed):
    if of_scales == "float32" and dtype == torch.float16:
        of_scales = "the same"  # the operator takes no others
    arguments = finalize_arguments(seed, dtype)
    if of_scales == "float32":
        arguments["scales"] = arguments["scales"].float() / 3
    scales, rows = arguments["scales"].double(), arguments["expanded_permuted_rows"].double()
    arguments["expanded_permuted_rows"][4:] = float("nan")  # of no pair
    output = call(FINALIZE_ROUTING, arguments)
    expected = torch.stack(
        (
            rows[3, 0] * scales[0, 0] + rows[0, 0] * scales[0, 1],
            rows[2, 0] * scales[1, 1],
            torch.zeros(16, dtype=torch.float64),
            rows[1, 0] * scales[3, 0],
        )
    )
    assert output.dtype == dtype
    assert_close(output, expected, dtype)


def test_without_scales_there_is_one_row_a_token_or_none(seed):
    arguments = finalize_arguments(seed, scales=None)
    output = call(FINALIZE_ROUTING, arguments)
    rows = arguments["expanded_permuted_rows"][:, 0]
    assert torch.equal(output[[0, 1, 3, 6]], rows[[3, 0, 2, 1]])
    assert not output[[2, 4, 5, 7]].any()


def test_rows_of_float16_are_summed_in_float16():
    scales = torch.ones(1, 3, dtype=torch.float16)
    rows = torch.tensor([2048.0, 1, 1], dtype=torch.float16).view(3, 1, 1)
    indices = torch.arange(3, dtype=torch.int32)
    given = {"scales": scales, "expanded_src_to_dst_row": indices}
    of_half = finalize_arguments(expanded_permuted_rows=rows, **given)
    assert call(FINALIZE_ROUTING, of_half).item() == 2048, "1 is lost each time"
    wide = {"expanded_permuted_rows": rows.float(), **given, "scales": scales.float()}
    assert call(FINALIZE_ROUTING, finalize_arguments(**wide)).item() == 2050


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("list_type", [0, 1])
def test_each_group_has_its_weight_and_rows_of_none_nothing(dtype, list_type, seed):
    arguments = rows_arguments(seed, dtype, group_list_type=list_type)
    if list_type == 0:
        arguments["group_list"] = arguments["group_list"].cumsum(0)
    x, weight = arguments["x"][0], arguments["weight"][0]
    arguments["x"][0][5:] = float("nan")
    (output,) = call(GROUPED_MATMUL, arguments)
    group_of_row = [0, 0, 2, 2, 2]
    expected = torch.stack([x[r].double() @ weight[g].double() for r, g in enumerate(group_of_row)])
    assert output.dtype == dtype and output.shape == (7, 6)
    assert_close(output[:5] / 8, expected / 8, dtype)
    assert output[5:].isnan().all()
    plain = arguments | {"weight": [weight.contiguous()], "split_item": 3}
    assert_close(call(GROUPED_MATMUL, plain)[0][:5] / 8, expected / 8, dtype)


def test_one_group_is_given_by_its_end():
    arguments = rows_arguments(group_list=torch.tensor([4]), group_list_type=0)
    arguments["weight"] = [arguments["weight"][0][:1]]
    (output,) = call(GROUPED_MATMUL, arguments)
    assert output[:4].isfinite().all() and output[4:].isnan().all()


def chosen_by_hand(row, k, scoring, bias, groups, kept, by_two):
    """Weights by expert, best first."""
    row = torch.tensor(row, dtype=torch.float64)
    scores = row.sigmoid() if scoring == "sigmoid" else row.softmax(-1)
    choice = (scores if bias is None else scores + bias.double()).tolist()
    size = len(choice) // groups
    ranked = []
    for group in range(groups):
        members = sorted(choice[group * size : (group + 1) * size])
        ranked.append((-sum(members[-2:]) if by_two else -members[-1], group))
    allowed = {group for _, group in sorted(ranked)[:kept]}
    experts = sorted((-choice[e], e) for e in range(len(choice)) if e // size in allowed)[:k]
    weights = {e: float(scores[e]) for _, e in experts}
    total = sum(weights.values()) if scoring == "sigmoid" else 1.0
    return {e: weight / total for e, weight in weights.items()}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("groups", [(1, 1), (4, 2), (4, 4)])
@pytest.mark.parametrize("by_two", [0, 1])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("norm_type", [0, 1])
def test_experts_are_chosen_within_the_best_groups(dtype, groups, by_two, biased, norm_type, seed):
    arguments = gating_arguments(
        seed,
        dtype,
        group_count=groups[0],
        k_group=groups[1],
        group_select_mode=by_two,
        norm_type=norm_type,
        routed_scaling_factor=2.5,
    )
    if not biased:
        arguments["bias"] = None
    weights, ids, scores = call(GATING, arguments | {"out_flag": True})
    scoring = "sigmoid" if norm_type else "softmax"
    logits = arguments["x"].double()
    assert ids.dtype == torch.int32 and weights.dtype == dtype and scores.dtype == torch.float32
    assert_close(scores, logits.sigmoid() if norm_type else logits.softmax(-1), torch.float32)
    for token, row in enumerate(logits.tolist()):
        options = arguments["bias"], *groups, by_two
        expected = chosen_by_hand(row, 3, scoring, *options)
        assert ids[token].tolist() == list(expected)
        by_hand = torch.tensor(list(expected.values())) * 2.5
        assert_close(weights[token], by_hand.double(), dtype)
    assert call(GATING, arguments)[2].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("renorm", [0, 1])
def test_softmax_of_the_best_or_the_best_of_the_softmax(dtype, renorm, seed):
    arguments = softmax_arguments(seed, dtype, renorm=renorm, output_softmax=True)
    weights, ids, softmax = call(GATING_SOFTMAX, arguments)
    expected = arguments["x"].double().softmax(-1)
    order = expected.sort(dim=-1, descending=True, stable=True)
    best, chosen = order.values[:, :3], order.indices[:, :3]
    by_hand = best / best.sum(-1, keepdim=True) if renorm else best
    assert weights.dtype == dtype and ids.dtype == torch.int32
    assert_close(weights[:4], by_hand[:4], dtype)
    assert ids[:4].tolist() == chosen[:4].tolist()
    if renorm:
        assert softmax.shape == (0,)
    else:
        assert_close(softmax, expected, torch.float32)


def test_a_finished_row_gets_the_number_of_experts():
    _, ids, _ = call(GATING_SOFTMAX, softmax_arguments())
    assert ids[4].tolist() == [12, 12, 12] and int(ids[:4].max()) < 12
