"""Operators of experts against formulas of one pair, one row or one token at a time, in float64."""

import pytest
import torch

from tests.emulator.operators import layer_calls as calls
from tests.emulator.operators.calls import call
from tests.emulator.operators.formula import DTYPES, assert_close, random
from tests.helpers.four_bits import numbers_in

EXPERT_OF_PAIR = [expert for chosen in calls.IDS for expert in chosen]
ACTIVE = [(expert, pair) for pair, expert in enumerate(EXPERT_OF_PAIR) if 1 <= expert < 4]
BY_EXPERT = [pair for _, pair in sorted(ACTIVE)]
"""Pairs of active experts in the order of their rows: by expert, then by token."""


@pytest.mark.parametrize("smooth", [None, 1, 3])
def test_rows_are_quantised_by_their_largest_number(smooth, seed):
    factors = None if smooth is None else random(smooth, 8, dtype=torch.float32).abs() + 0.5
    arguments = calls.routing(seed, quant_mode=1, scale=factors)
    values, _, _, scales = call(calls.INIT_ROUTING, arguments)
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
    arguments = calls.unpermute(seed, dtype)
    arguments["probs"] = arguments["probs"].to(of_probs)
    rows, probs = arguments["permuted_tokens"].double(), arguments["probs"].double()
    rows_read = rows.clone()
    arguments["permuted_tokens"][[2, 4]] = float("nan")  # of no pair
    output, again = call(calls.TOKEN_UNPERMUTE, arguments)
    expected = torch.stack(
        (
            rows_read[3] * probs[0, 0] + rows_read[0] * probs[0, 1],
            rows_read[5] * probs[1, 1],  # the other row is past the last one
            rows_read[1] * probs[2, 0],  # the other has no probability
        )
    )
    assert output.dtype == dtype and again is arguments["permuted_tokens"]
    assert_close(output, expected, dtype)


@pytest.mark.parametrize("kept", [None, 0, 7, -3])
@pytest.mark.parametrize("ids", [torch.int32, torch.int64])
def test_pairs_are_sorted_by_expert(kept, ids, seed):
    arguments = calls.permute(seed, num_out_tokens=kept, indices=torch.tensor(calls.IDS).to(ids))
    rows, places = call(calls.PERMUTE, arguments)
    order = sorted(range(12), key=lambda pair: (EXPERT_OF_PAIR[pair], pair))
    assert places.dtype == torch.int32 and places.tolist() == [order.index(p) for p in range(12)]
    wanted = [pair // 2 for pair in order][: kept or None]
    assert torch.equal(rows, arguments["tokens"][wanted])


def test_without_probabilities_there_is_one_row_a_token(seed):
    arguments = calls.unpermute(seed, torch.float32, probs=None)
    arguments["sorted_indices"] = torch.tensor([3, 0, 99, 5, 1, 2], dtype=torch.int32)
    output, _ = call(calls.TOKEN_UNPERMUTE, arguments)
    rows = arguments["permuted_tokens"]
    assert torch.equal(output[[0, 1, 3, 4, 5]], rows[[3, 0, 5, 1, 2]])
    assert not output[2].any()


def test_without_scales_there_is_one_row_a_token_or_none(seed):
    arguments = calls.finalize(seed, scales=None)
    output = call(calls.FINALIZE_ROUTING, arguments)
    rows = arguments["expanded_permuted_rows"][:, 0]
    assert torch.equal(output[[0, 1, 3, 6]], rows[[3, 0, 2, 1]])
    assert not output[[2, 4, 5, 7]].any()


def test_one_group_is_given_by_its_end():
    arguments = calls.rows(group_list=torch.tensor([4]), group_list_type=0)
    arguments["weight"] = [arguments["weight"][0][:1]]
    (output,) = call(calls.GROUPED_MATMUL, arguments)
    assert output[:4].isfinite().all() and output[4:].isnan().all()


@pytest.mark.parametrize("groups", [1, 2])
def test_rows_multiply_packed_weights_of_their_expert(seed, groups):
    """Groups of inputs have scales and offsets of their own."""
    arguments = calls.int4_rows(seed, groups)
    (got,) = call(calls.GROUPED_MATMUL, arguments)
    (x,), (words,) = arguments["x"], arguments["weight"]
    levels = torch.from_numpy((numbers_in(words) + 8) % 16 - 8).double()  # [3, 64, 8]
    scale, offset = (
        arguments[f"antiquant_{each}"][0].double().view(3, groups, 1, 8)
        for each in ("scale", "offset")
    )
    weight = ((levels.unflatten(1, (groups, -1)) + offset) * scale).flatten(1, 2)
    expected = torch.cat([x[:2].double() @ weight[0], x[2:5].double() @ weight[2]])
    torch.testing.assert_close(got[:5].double(), expected, rtol=5e-3, atol=2e-2)


def levels_of(words):
    return torch.from_numpy((numbers_in(words) + 8) % 16 - 8).double()


def scales_of(bits):
    return bits.int().view(torch.float32).double()


def packed_expected(x, words, bits, added, tokens):
    """Rows, less 8, times scaled levels, and what was added, times the scales of tokens."""
    groups = levels_of(words).unflatten(0, (len(bits), -1))
    weight = (groups * scales_of(bits)[:, None]).flatten(0, 1)
    return ((x.double() - 8) @ weight + added.double()) * tokens.double()[:, None]


@pytest.mark.parametrize("groups", [0, 2])
def test_int8_rows_multiply_packed_weights(seed, groups):
    """Bits that the kernel doesn't read change nothing; sums are rounded to float16."""
    arguments = calls.int4_matmul(seed, groups)
    got = call(calls.QUANT_MATMUL, arguments)
    scale, tokens = arguments["scale"].view(-1, 16), arguments["pertoken_scale"].flatten()
    given = arguments["x1"], arguments["x2"], scale, arguments["offset"], tokens
    torch.testing.assert_close(got.double(), packed_expected(*given), rtol=4e-3, atol=1.0)
    unread = call(calls.QUANT_MATMUL, arguments | {"scale": arguments["scale"] + 0x1FFF})
    assert torch.equal(unread, got)


@pytest.mark.parametrize("groups", [1, 2])
def test_int8_rows_of_experts_multiply_packed_weights(seed, groups):
    arguments = calls.int8_rows_of_int4(seed, groups)
    (got,) = call(calls.GROUPED_MATMUL, arguments)
    (x,), (words,), (tokens,) = (arguments[n] for n in ("x", "weight", "per_token_scale"))
    for rows, expert in ((slice(0, 2), 0), (slice(2, 5), 2)):
        of_expert = (arguments[name][0][expert] for name in ("scale", "bias"))
        expected = packed_expected(x[rows], words[expert], *of_expert, tokens[rows])
        torch.testing.assert_close(got[rows].double(), expected, rtol=4e-3, atol=1.0)
    assert got[5:].isnan().all()


def test_sums_of_int8_rows_are_exact_in_int32():
    arguments = calls.int8_rows() | {"output_dtype": calls.CODES[torch.int32]}
    rows, weights = arguments["x"][0].double(), arguments["weight"][0].double()
    (output,) = call(calls.GROUPED_MATMUL, arguments | {"scale": None, "per_token_scale": None})
    expected = torch.cat((rows[:2] @ weights[0], rows[2:5] @ weights[2]))
    assert output.dtype == torch.int32 and torch.equal(output[:5].double(), expected)
