"""``npu_fusion_attention`` over packed requests against the definition in float64."""

import torch

from tests.emulator.operators import formula
from tests.emulator.operators.calls import Batch, call
from tests.emulator.operators.fusion_calls import (
    FUSION,
    MORE_KEYS,
    SAME_KEYS,
    fusion,
    fusion_arguments,
)


def test_modes_have_no_effect_without_a_mask(seed):
    batch = Batch(MORE_KEYS, seed)
    output = fusion(batch, sparse_mode=4, pre_tockens=1, next_tockens=0)
    expected, _ = formula.of_batch(batch, formula.everything)
    formula.assert_close(output, torch.cat(expected), batch.dtype)


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
