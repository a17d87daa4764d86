"""Slot mapping of vLLM's own block tables."""

import pytest
import torch

from vllm_npu_prep.ops.slot_mapping import compute_slot_mapping


@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_slot_mapping_of_upstreams_tables(block_size):
    table = torch.arange(40, dtype=torch.int32).view(2, 20) + 1
    positions = torch.tensor([3, 0, 1, 2])
    out = torch.zeros(6, dtype=torch.int64)
    starts = torch.tensor([0, 1, 4], dtype=torch.int32)
    compute_slot_mapping(4, 6, starts, positions, table, 20, out, block_size, 1, 0, 1, -1, 1024)
    expected = []
    for row, position in [(0, 3), (1, 0), (1, 1), (1, 2)]:
        block = int(table[row, position // block_size])
        expected.append(block * block_size + position % block_size)
    assert out.tolist() == [*expected, -1, -1]
