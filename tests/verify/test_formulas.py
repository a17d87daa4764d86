"""The float64 formulas of `verify-device`, beside examples by hand and torch's own operators."""

import math

import pytest
import torch
from torch.nn import functional

from vllm_npu_prep.verify import formulas


def test_who_sees_whom():
    assert formulas.visible(2, 4).int().tolist() == [[1, 1, 1, 0], [1, 1, 1, 1]]
    assert formulas.visible(2, 4, window=2).int().tolist() == [[0, 1, 1, 0], [0, 0, 1, 1]]
    assert formulas.visible(3, 3, causal=False).all()
    both_ways = formulas.visible(3, 3, window=2, causal=False)
    assert both_ways.int().tolist() == [[1, 1, 0], [1, 1, 1], [0, 1, 1]]


@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (4, 1)])
@pytest.mark.parametrize("window", [None, 3])
def test_attention_is_that_of_torch(heads, window, seed):
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(5, heads[0], 8, generator=generator)
    key, value = (torch.randn(11, heads[1], 8, generator=generator) for _ in range(2))
    seen = formulas.visible(5, 11, window)
    output, lse = formulas.attention(query, key, value, 0.3, seen)
    q, k, v = (x.double().transpose(0, 1)[None] for x in (query, key, value))
    expected = functional.scaled_dot_product_attention(
        q, k, v, attn_mask=seen, scale=0.3, enable_gqa=True
    )
    torch.testing.assert_close(output, expected[0].transpose(0, 1))
    one = [math.exp(float(query[0, 0] @ key[p, 0]) * 0.3) for p in range(11) if seen[0, p]]
    assert float(lse[0, 0]) == pytest.approx(math.log(sum(one)), rel=1e-5)


def test_an_index_score_is_a_weighted_sum_of_positive_products():
    query = torch.tensor([[[1.0, 2.0], [3.0, -1.0]]])  # one token of two heads
    key = torch.tensor([[1.0, 1.0], [-1.0, 2.0], [0.0, -1.0]])
    weights = torch.tensor([[2.0, -0.5]])
    # Products of the first head are 3, 3 and -2, those of the second one 2, -5 and 1
    scores = formulas.index_scores(query, weights, key)
    assert scores.tolist() == [[2 * 3 - 0.5 * 2, 2 * 3, -0.5 * 1]]


def test_a_token_that_sees_nothing_gets_zeros():
    output, lse = formulas.attention(
        torch.ones(2, 1, 4), torch.ones(0, 1, 4), torch.ones(0, 1, 4), 1.0, formulas.visible(2, 0)
    )
    assert not output.any()
    assert (lse == -math.inf).all()


def test_slots_below_zero_are_not_written():
    plane = torch.zeros(2, 2, 1, 1)
    rows = torch.tensor([[[5.0]], [[6.0]], [[7.0]]])
    written = formulas.paged_write(plane, rows, [3, -1, 0], 2)
    assert written.flatten().tolist() == [7, 0, 0, 5]
    assert not plane.any()


def test_norm_and_activation_are_those_of_torch(seed):
    generator = torch.Generator().manual_seed(seed)
    x, weight = torch.randn(3, 8, generator=generator), torch.randn(8, generator=generator)
    expected = functional.rms_norm(x.double(), (8,), weight.double(), 1e-6)
    torch.testing.assert_close(formulas.rms_norm(x, weight, 1e-6), expected)
    first, second = x.double().chunk(2, -1)
    torch.testing.assert_close(formulas.swiglu(x), functional.silu(first) * second)


def test_a_gated_delta_net_is_that_of_transformers(seed):
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_recurrent_gated_delta_rule

    generator = torch.Generator().manual_seed(seed)
    heads, dim, tokens = 4, 8, 6
    width = (2 * 2 + heads) * dim
    sizes = (tokens, width), (3, width), (heads, dim, dim), (width, 4), (tokens, heads)
    mixed, last, state, weight, a = (torch.randn(*s, generator=generator) for s in sizes)
    b = torch.randn(tokens, heads, generator=generator)
    a_log, dt_bias = (torch.randn(heads, generator=generator) for _ in range(2))
    output, new_last, new_state = formulas.gated_delta(
        mixed, last, state, weight, a, b, a_log, dt_bias
    )
    inputs = torch.cat((last, mixed))
    convolved = functional.silu(
        functional.conv1d(inputs.T[None], weight[:, None], groups=width)[0].T
    )
    query, key, value = (
        each.unflatten(-1, (-1, dim))
        for each in convolved.split([2 * dim, 2 * dim, heads * dim], 1)
    )
    query, key = (each.repeat_interleave(2, 1) for each in (query, key))
    g = -a_log.exp() * functional.softplus(a + dt_bias)
    wanted, wanted_state = torch_recurrent_gated_delta_rule(
        *(each[None] for each in (query, key, value, g, b.sigmoid())),
        initial_state=state.transpose(1, 2)[None],
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    torch.testing.assert_close(output.float(), wanted[0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(
        new_state.float(), wanted_state[0].transpose(1, 2), rtol=1e-4, atol=1e-4
    )
    assert torch.equal(new_last.float(), inputs[-3:])
