"""``npu_fusion_attention`` over packed requests against the definition in float64."""

import pytest
import torch

from tests.emulator.operators import formula
from tests.emulator.operators.calls import Batch, call, triangle
from tests.emulator.operators.fusion_calls import (
    FUSION,
    MORE_KEYS,
    SAME_KEYS,
    band,
    fusion,
    fusion_arguments,
)


def same(batch, visible, **changes):
    expected, _ = formula.of_batch(batch, visible)
    formula.assert_close(fusion(batch, **changes), torch.cat(expected), batch.dtype)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("heads", [(4, 2), (4, 4), (6, 1)])
@pytest.mark.parametrize("lengths", [SAME_KEYS, MORE_KEYS])
def test_without_a_mask_everything_is_seen(lengths, heads, dtype, seed):
    same(Batch(lengths, seed, heads=heads, dtype=dtype), formula.everything)


def test_modes_have_no_effect_without_a_mask(seed):
    changes = {"sparse_mode": 4, "pre_tockens": 1, "next_tockens": 0}
    same(Batch(MORE_KEYS, seed), formula.everything, **changes)


@pytest.mark.parametrize("size", [0, 1, 5, 200])
def test_a_window_of_both_ways_is_a_band(size, seed):
    same(Batch(SAME_KEYS, seed), formula.band(size, size), **band(size))


def test_a_causal_mask_ends_in_the_lower_right_corner(seed):
    mask = triangle(torch.bool)
    same(Batch(MORE_KEYS, seed), formula.causal, atten_mask=mask, sparse_mode=3)


def test_one_full_mask_serves_every_request(seed):
    mask = torch.zeros(130, 130, dtype=torch.uint8)
    mask[:, 2] = 1
    batch = Batch(SAME_KEYS, seed)
    same(batch, lambda row, column: (column != 2) & (row == row), atten_mask=mask)


def test_a_tail_of_zero_lengths_takes_no_part(seed):
    batch = Batch(SAME_KEYS, seed)
    lengths = [*batch.cumulative(batch.query_lens), 0, 0]
    output = fusion(batch, actual_seq_qlen=lengths, actual_seq_kvlen=lengths)
    assert torch.equal(output, fusion(batch))


def test_results_that_only_training_reads_are_nan(seed):
    results = call(FUSION, fusion_arguments(Batch(SAME_KEYS, seed)))
    assert len(results) == 7 and results[4:] == (0, 0, 0)
    for result in results[1:3]:
        assert result.shape == (140, 4, 8) and result.dtype == torch.float32
        assert result.isnan().all()
    assert results[3].numel() == 0
