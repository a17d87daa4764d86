"""Latent attention beyond the rows of `verify-device`."""

import pytest
import torch

from tests.emulator.operators.calls import call
from tests.emulator.operators.latent_calls import (
    UPDATE,
    absorbed,
    fused,
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
