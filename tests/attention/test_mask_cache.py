"""Masks on the device agree with their numpy definition, and never change once handed out."""

import numpy as np
import pytest
import torch

from vllm_npu_prep.attention.mask_cache import MaskCache
from vllm_npu_prep.errors import PrepError
from vllm_npu_prep.prep.mask import MaskForm, MaskKind, MaskPlan, build_mask, plan_mask
from vllm_npu_prep.prep.state import AttentionState

BUDGET = 1 << 22


@pytest.mark.parametrize("state", AttentionState)
@pytest.mark.parametrize("form", MaskForm)
@pytest.mark.parametrize(
    "narrowed",
    [{}, *({"sliding_window": n} for n in (1, 3, 500)), {"attention_chunk_size": 1000}],
    ids=str,
)
def test_device_masks_equal_the_definition(state, form, narrowed, seed):
    cache = MaskCache(torch.device("cpu"), 1000, BUDGET)
    rng = np.random.default_rng(seed)
    for max_seq_len in (5, 130, 600, 20):
        positions = rng.integers(0, max_seq_len, 7)
        if narrowed.get("attention_chunk_size"):
            positions += 1000 * rng.integers(0, 5, 7)
        plan = plan_mask(state, form, 9, max_seq_len, **narrowed)
        expected = build_mask(plan, positions)
        mask = cache.build(plan, torch.from_numpy(positions))
        if expected is None:
            assert mask is None
        else:
            assert mask.numpy().dtype == expected.dtype
            assert np.array_equal(mask.numpy(), expected)


@pytest.mark.parametrize("window", [None, 5])
def test_encoders_have_a_mask_for_compressed_windows_only(window):
    for form in MaskForm:
        plan = plan_mask(
            AttentionState.PrefillNoCache, form, 4, 9, sliding_window=window, causal=False
        )
        if window and form == MaskForm.COMPRESSED:
            assert plan == MaskPlan(MaskKind.COMPRESSED, (2048, 2048), window)
        else:
            assert plan == MaskPlan(MaskKind.NONE, None, window)


def test_growing_leaves_masks_in_flight_alone():
    cache = MaskCache(torch.device("cpu"), 1000, BUDGET)
    small = plan_mask(AttentionState.PrefillNoCache, MaskForm.DENSE, 9, 9)
    before = cache.build(small, torch.arange(9))
    copy = before.clone()
    cache.build(plan_mask(AttentionState.PrefillNoCache, MaskForm.DENSE, 9, 900), torch.arange(9))
    assert torch.equal(before, copy)
    assert cache.build(small, torch.arange(9)).data_ptr() != before.data_ptr()


def test_a_matrix_beyond_the_budget_is_refused():
    cache = MaskCache(torch.device("cpu"), 10_000, 1 << 20)
    with pytest.raises(PrepError, match="mask_budget_bytes"):
        cache.build(
            plan_mask(AttentionState.PrefillNoCache, MaskForm.DENSE, 1, 2000), torch.arange(1)
        )
