"""Transfers with random faults, as `make soak` plays them."""

import pytest

from tests.soak.transfers import SEEDS, play

KEPT = [int(line) for line in SEEDS.read_text().split()]


@pytest.mark.parametrize("seed", [1, *KEPT])
def test_no_fault_of_a_transfer_costs_a_token_or_a_block(seed):
    _, count = play(seed, 100)
    faults = [number for name, number in count.items() if name.startswith("transfers, ")]
    assert sum(faults) > 3 and count["answers, length"] > 3
