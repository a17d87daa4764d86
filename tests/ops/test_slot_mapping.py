"""Slot mapping of vLLM's own block tables."""

import pytest
import torch
from vllm.v1.worker import block_table

from tests.helpers.triton_source import run_source
from vllm_npu_prep.ops.triton.slot_mapping import compute_slot_mapping


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


@pytest.mark.parametrize(
    ("world_size", "block_size", "interleave_size"), [(1, 4, 1), (2, 4, 1), (2, 4, 2), (3, 16, 16)]
)
def test_slots_of_a_rank_are_those_of_the_kernel_s_source(world_size, block_size, interleave_size):
    table = torch.randperm(120, generator=torch.Generator().manual_seed(0)).int().view(2, 60)
    starts = torch.tensor([0, 33, 40], dtype=torch.int32)
    positions = torch.cat([torch.arange(5, 38), torch.arange(50, 57)])
    for rank in range(world_size):
        theirs, ours = (torch.full((44,), -9) for _ in range(2))
        sizes = block_size, world_size, rank, interleave_size, -1, 1024
        kernel = block_table.ComputeSlotMappingKernel
        run_source(block_table, kernel, 3, 40, 44, starts, positions, table, 60, theirs, *sizes)
        compute_slot_mapping(40, 44, starts, positions, table, 60, ours, *sizes)
        assert ours.tolist() == theirs.tolist()
