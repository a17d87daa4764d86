"""Slot mapping of vLLM's own block tables."""

import pytest
import torch
from vllm.v1.worker import block_table

from tests.helpers.triton_source import Source
from vllm_npu_prep.ops.triton.slot_mapping import compute_slot_mapping


@pytest.mark.parametrize(
    ("world_size", "block_size", "interleave_size"),
    [(1, 1, 1), (1, 4, 1), (2, 4, 1), (2, 4, 2), (3, 16, 16)],
)
def test_slots_of_a_rank_are_those_of_the_kernel_s_source(world_size, block_size, interleave_size):
    table = torch.randperm(120, generator=torch.Generator().manual_seed(0)).int().view(2, 60)
    starts = torch.tensor([0, 33, 40], dtype=torch.int32)
    positions = torch.cat([torch.arange(5, 38), torch.arange(50, 57)])
    for rank in range(world_size):
        theirs, ours = (torch.full((44,), -9) for _ in range(2))
        sizes = block_size, world_size, rank, interleave_size, -1, 1024
        given = 40, 44, starts, positions, table, 60
        Source(block_table, "kernel")[(3,)](*given, theirs, *sizes)
        compute_slot_mapping(*given, ours, *sizes)
        assert ours.tolist() == theirs.tolist()
