"""References of vllm-ascend's custom operators, beside formulas."""

import torch

from ascend_emulator.operators import custom, elementwise, moe_gating
from tests.emulator.operators.formula import random
from tests.emulator.operators.layer_calls import gating
from tests.emulator.operators.violations.custom import shrink, sums, swiglu_rows


def test_a_norm_with_a_bias_is_the_norm_and_the_bias():
    x, residual, gamma, beta = (random(*shape, seed=n) for n, shape in enumerate(SHAPES))
    plain, _, total = elementwise.add_rms_norm(x, residual, gamma)
    normed, _, same = custom.add_rms_norm_bias(x, residual, gamma, beta)
    torch.testing.assert_close(normed, plain + beta)
    assert torch.equal(total, same)


SHAPES = ((3, 8), (3, 8), (8,), (8,))


def test_rows_go_through_the_adapter_of_their_index():
    call = shrink()
    custom.bgmv_shrink(**call)
    rows = [0.5 * call["weight"][1, 0].float() @ call["x"][0].float(), torch.zeros(8)]
    torch.testing.assert_close(call["y"][:2], torch.stack(rows))
    wide, half = torch.ones(3, 40, dtype=torch.bfloat16), random(2, 16, 8, dtype=torch.bfloat16)
    out = custom.bgmv_expand(call["y"], half, call["indices"], wide, 20, 16)
    expected = torch.ones(3, 40)
    expected[0, 20:36] += half[1].float() @ call["y"][0]
    expected[2, 20:36] += half[0].float() @ call["y"][2]
    torch.testing.assert_close(out, expected.bfloat16())
    assert out is wide


def test_a_slice_wider_than_an_adapter_takes_the_next_rows():
    """As the kernel finds them; vllm-ascend passes such slices of padded logits."""
    weight, x = random(2, 16, 8, dtype=torch.bfloat16), torch.ones(2, 8)
    y, indices = torch.zeros(2, 24, dtype=torch.bfloat16), torch.tensor([0, 1])
    first, second = custom.bgmv_expand(x, weight, indices, y, 0, 24)
    rows = weight.flatten(0, 1).float().sum(1).bfloat16()
    assert torch.equal(first, rows[:24])
    assert torch.equal(second[:8], rows[24:]) and second[8:].isnan().all()


def test_groups_of_int8_rows_are_activated_and_rounded():
    call = swiglu_rows()
    output, scales, _ = custom.grouped_matmul_swiglu_quant(**call)
    for row, group in enumerate((0, 1, 1, 1)):
        product = call["x"][row].double() @ call["weight"][group].double()
        product = product * call["weight_scale"][group].double() * 0.25
        wanted = torch.nn.functional.silu(product[:3]) * product[3:]
        torch.testing.assert_close(
            scales[row].double(), wanted.abs().max() / 127, rtol=1e-5, atol=0
        )
        assert (output[row].double() * scales[row] - wanted).abs().max() <= 0.51 * scales[row]
    assert (output[4] == -128).all() and scales[4].isnan()


def test_scaled_sums_are_activated_and_rounded():
    call = sums()
    scaled = call["x"].double() * call["weight_scale"] * call["activation_scale"][:, None]
    gate, up = scaled.chunk(2, -1)
    plain = torch.nn.functional.silu(gate) * up
    limited = gate.clamp(max=7)
    limited = limited * torch.sigmoid(1.5 * limited) * (up.clamp(-7, 7) + 0.5)
    numbers = {"clamp_limit": 7.0, "glu_alpha": 1.5, "glu_bias": 0.5}
    for wanted, how in (plain, {}), (plain, {"swiglu_mode": 0, **numbers}), (limited, numbers):
        output, scales = custom.dequant_swiglu_quant(**call | how)
        largest = wanted.abs().amax(1)
        torch.testing.assert_close(scales.double(), largest / 127, rtol=1e-5, atol=0)
        assert (output * scales[:, None].double() - wanted).abs().max() <= 0.51 * scales.max()


def test_requests_give_their_adapter_to_all_of_their_rows():
    call = shrink() | {"x": random(6, 16, dtype=torch.bfloat16), "y": torch.zeros(6, 8)}
    indices = call.pop("indices")
    custom.sgmv_shrink(**call, lora_indices=indices, seq_len=torch.tensor([2, 1, 2]))
    single = call | {"y": torch.zeros(6, 8)}
    custom.bgmv_shrink(**single, indices=torch.tensor([1, 1, -1, 0, 0, -1]))
    assert torch.equal(call["y"], single["y"]) and call["y"][:2].any()


def test_weights_of_a_softmax_may_be_divided_by_their_sum():
    call = gating() | {"norm_type": moe_gating.SOFTMAX, "routed_scaling_factor": 2.5}
    bias = call.pop("bias")
    common = {"group_select_mode": 0, "out_flag": False, "eps": 1e-20} | call
    weights, ids, _ = custom.gating_top_k(**common, renorm=1, bias_opt=bias)
    plain, same, _ = moe_gating.gating_top_k(**common, bias=bias)
    assert torch.equal(ids, same)
    divided = 2.5 * plain.float() / plain.float().sum(-1, keepdim=True)
    torch.testing.assert_close(weights.float(), divided, rtol=2e-2, atol=2e-2)
