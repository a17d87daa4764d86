"""Latent attention beyond the rows of `verify-device`."""

import pytest
import torch

from ascend_emulator import profiles
from ascend_emulator.operators import latent_rows
from tests.emulator.operators.calls import call
from tests.emulator.operators.formula import assert_close
from tests.emulator.operators.latent_calls import (
    INTERLEAVE,
    LATENT_WRITE,
    UPDATE,
    absorbed,
    fused,
    interleaved,
    latent_write,
    update_arguments,
)

LENGTHS = ((5, 1), (130, 1), (16, 3), (0, 2))


def test_rows_past_a_length_are_not_read(seed):
    arguments = absorbed(LENGTHS, seed)
    expected, _ = fused(arguments)
    for row, (computed, new) in zip(arguments["block_table"].tolist(), LENGTHS):
        length = computed + new
        for plane in ("key", "key_rope"):
            arguments[plane][row[length // 128], length % 128 :] = float("nan")
    output, _ = fused(arguments)
    assert torch.equal(output, expected)


def test_heads_before_requests_hold_the_same_rows(seed):
    """vllm-ascend's layout of decodes: query by request and head, blocks by head."""
    packed = absorbed([(5, 1), (130, 1)], seed) | {"atten_mask": None, "sparse_mode": 0}
    expected, _ = fused(packed)
    by_head = {
        **{name: packed[name].unsqueeze(2) for name in ("query", "query_rope")},
        **{name: packed[name].unsqueeze(1) for name in ("key", "value", "key_rope")},
        "input_layout": "BNSD_NBSD",
        "actual_seq_qlen": None,
    }
    output, _ = fused(packed | by_head)
    assert torch.equal(output[:, :, 0], expected.transpose(0, 1))


@pytest.mark.parametrize("update_type", [0, 1])
def test_update(update_type):
    arguments = update_arguments(3, update_type=update_type, dtype=torch.float32)
    output, lse = call(UPDATE, arguments)
    sums = torch.stack(arguments["lse"]).double()
    shares = sums.softmax(0)
    outputs = torch.stack(arguments["local_out"]).double()
    wanted = (shares.unsqueeze(-1) * outputs).sum(0)
    torch.testing.assert_close(output.double(), wanted, rtol=1e-5, atol=1e-5)
    assert lse.shape == ((6,) if update_type else (0,))
    if update_type:
        torch.testing.assert_close(lse.double(), sums.logsumexp(0), rtol=1e-5, atol=1e-5)


def pairs_rotated(row, cos, sin):
    """A row's neighbours as complex numbers, and their parts apart; angles may differ by half."""
    row, cos, sin = (tensor.double() for tensor in (row, cos, sin))
    first = row[::2] * cos[:32] - row[1::2] * sin[:32]
    second = row[1::2] * cos[32:] + row[::2] * sin[32:]
    return torch.cat((first, second))


@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_neighbours_are_rotated_and_parted(steps, dtype, seed):
    arguments = interleaved(dtype, seed, steps)
    output = call(INTERLEAVE, arguments)
    for token in range(3):
        factors = [arguments[name][token, 0, 0] for name in ("cos", "sin")]
        for head in range(4):
            for step in range(steps):
                expected = pairs_rotated(arguments["x"][token, head, step], *factors)
                assert_close(output[token, head, step] / 4, expected / 4, dtype)


@pytest.mark.parametrize("is_output_kv", [False, True])
def test_latent_rows_are_normed_rotated_and_written(is_output_kv, seed):
    arguments = latent_write(seed, is_output_kv=is_output_kv)
    caches = [arguments[name].clone().view(48, -1) for name in ("k_cache", "ckv_cache")]
    _, _, ropes, latents = call(LATENT_WRITE, arguments)
    for token, slot in enumerate((40, -1, 3)):
        row = arguments["kv"][token].flatten().double()
        rope = pairs_rotated(row[512:], *(arguments[n][token].flatten() for n in ("cos", "sin")))
        latent = row[:512] / (row[:512].square().mean() + 1e-5).sqrt()
        latent = latent * arguments["gamma"].double()
        for expected, rows in ((rope, ropes), (latent, latents)):
            if is_output_kv:
                assert_close(rows[token].flatten() / 4, expected / 4, torch.bfloat16)
            else:
                assert rows.isnan().all()
        if slot >= 0:
            caches[0][slot], caches[1][slot] = rope, latent
    for name, expected in zip(("k_cache", "ckv_cache"), caches):
        assert_close(arguments[name].view(48, -1) / 4, expected.double() / 4, torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_padding_writes_no_row_from_cann_91_on(dtype):
    """As in graphs of vllm-ascend, whose slots are padded with -1."""
    plane, rows = torch.zeros(6, 4), torch.arange(1.0, 13).view(3, 4)
    slots = torch.tensor([[5], [-1], [2]], dtype=dtype)
    with profiles.using("9.1"):
        assert latent_rows.scatter_nd_update_(plane, slots, rows) is plane
    assert torch.equal(plane[[5, 2]], rows[[0, 2]])
    assert not plane[[0, 1, 3, 4]].any()
