"""The reference family against a formula in float64, and what it refuses as an NPU would."""

import numpy as np
import pytest
import torch

from tests.helpers.attention import BATCHES, TOLERANCE, Step
from vllm_npu_prep.attention.kernels import reference
from vllm_npu_prep.prep.mask import MaskForm
from vllm_npu_prep.prep.state import AttentionState


def check(step: Step, **kwargs) -> None:
    tolerance = TOLERANCE[step.query.dtype]
    torch.testing.assert_close(
        step.run(**kwargs).double(), step.formula(), atol=tolerance, rtol=tolerance
    )


@pytest.mark.parametrize("state", BATCHES)
@pytest.mark.parametrize("form", MaskForm)
@pytest.mark.parametrize("window", [None, 3, 20])
def test_every_state_form_and_window_equals_the_formula(state, form, window, seed):
    check(Step(state, seed, form=form, window=window))


@pytest.mark.parametrize("state", BATCHES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_equals_the_formula_within_tolerance(state, dtype, seed):
    check(Step(state, seed, dtype=dtype))


@pytest.mark.parametrize("state", BATCHES)
@pytest.mark.parametrize("form", MaskForm)
def test_logits_soft_cap(state, form, seed):
    check(Step(state, seed, soft_cap=1.5, form=form))


@pytest.mark.parametrize("window", [None, 3, 20])
@pytest.mark.parametrize("form", MaskForm)
@pytest.mark.parametrize("tile_pairs", [16, 1 << 20])
def test_without_causality_tokens_see_both_ways(window, form, tile_pairs, seed, monkeypatch):
    monkeypatch.setattr(reference, "TILE_PAIRS", tile_pairs)
    step = Step(AttentionState.PrefillNoCache, seed, form=form, window=window, causal=False)
    check(step)
    (plan,) = step.metadata.kernel_plan.values()
    assert (len(plan.chunks) > len(step.lengths)) == (tile_pairs == 16)


def test_layers_that_share_kv_read_the_cache(seed):
    for state in BATCHES:
        check(Step(state, seed), share_kv=True)


@pytest.mark.parametrize("state", BATCHES)
@pytest.mark.parametrize("form", MaskForm)
@pytest.mark.parametrize("window", [None, 3])
def test_small_tiles_do_not_change_the_result(state, form, window, seed, monkeypatch):
    monkeypatch.setattr(reference, "TILE_PAIRS", 16)
    monkeypatch.setattr(reference, "FEWEST_CHUNK_TOKENS", 1)
    monkeypatch.setattr(reference, "TILE_ROWS", 8)
    monkeypatch.setattr(reference, "KEPT_BYTES", 0)
    step = Step(state, seed, form=form, window=window)
    check(step)
    (plan,) = step.metadata.kernel_plan.values()
    assert not plan.tiles, "large steps keep nothing"
    if state == AttentionState.ChunkedPrefill:
        assert len(plan.chunks) > len(step.lengths), "no request was cut"


@pytest.mark.parametrize("window", [None, 512])
def test_long_prompts_need_memory_in_proportion_to_their_length(window, seed):
    """A tile is bounded in pairs and in rows, whatever the step; of a window it reads no more."""
    for query_len, seq_len, requests in [(4096, 65536, 1), (1, 4096, 256), (700, 700, 9)]:
        lengths = np.full(requests, query_len, np.int32)
        metadata = Step(AttentionState.ChunkedPrefill, seed).metadata
        metadata.attn_mask, metadata.sliding_window = None, window
        metadata.num_reqs = requests
        metadata.num_actual_tokens = int(lengths.sum())
        metadata.seq_lens_np = np.full(requests, seq_len, np.int32)
        starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        metadata.query_start_loc_np = starts
        metadata.block_tables = torch.zeros(requests, 1, dtype=torch.int32)
        plan = reference.plan_tiles(metadata, int(lengths.sum()))
        assert sum(c.query_len for chunks in plan.chunks for c in chunks) == lengths.sum()
        for chunks in plan.chunks:
            longest = max(c.num_columns for c in chunks)
            pairs = len(chunks) * longest * max(c.query_len for c in chunks)
            assert pairs <= reference.TILE_PAIRS
            assert len(chunks) == 1 or len(chunks) * longest <= reference.TILE_ROWS
            assert window is None or longest < 2 * window


@pytest.mark.parametrize("state", set(BATCHES) - {AttentionState.DecodeOnly})
@pytest.mark.parametrize("form", MaskForm)
def test_a_wrong_mask_gives_a_wrong_result(state, form, seed):
    step = Step(state, seed, form=form)
    right = step.run()
    step.metadata.attn_mask = torch.zeros_like(step.metadata.attn_mask)
    step.metadata.kernel_plan = None
    assert not torch.allclose(step.run(), right, atol=1e-2)


REJECTED = {  # whether it is the metadata's, the name, what is made of it
    "slots of 64 bits": (False, "slots", torch.Tensor.long),
    "fewer slots than tokens": (False, "slots", lambda slots: slots[:-1]),
    "strided K": (False, "key", lambda key: key.repeat(1, 2, 1)[:, ::2]),
    "interleaved planes": (False, "cache", lambda cache: torch.stack([*cache], -1).movedim(-1, 0)),
    "cache of another dtype": (False, "cache", torch.Tensor.half),
    "block table of 64 bits": (True, "block_tables", torch.Tensor.long),
    "one row less": (True, "block_tables", lambda table: table[:-1]),
    "lengths not cumulative": (True, "query_start_loc_np", lambda s: np.diff(s, prepend=s[:1])),
    "sequence shorter than its query": (True, "seq_lens_np", np.ones_like),
    "mask too narrow": (True, "attn_mask", lambda mask: mask[:, :-1]),
    "mask of rank 1": (True, "attn_mask", lambda mask: mask[0]),
    "constant mask too small": (True, "attn_mask", lambda _: torch.ones(8, 8).to(torch.int8)),
}


@pytest.mark.parametrize("what", REJECTED)
def test_what_an_npu_kernel_rejects_is_rejected(what, seed):
    step = Step(AttentionState.ChunkedPrefill, seed)
    step.run()
    step.metadata.kernel_plan = None
    of_metadata, name, change = REJECTED[what]
    spoiled = step.metadata if of_metadata else step
    setattr(spoiled, name, change(getattr(spoiled, name)))
    with pytest.raises(AssertionError):
        step.run()


def test_memory_of_tiles_counts_keys_and_values_three_times():
    """A row of a tile is read from the cache, and turned into float32 for each product."""
    few = reference.tile_bytes(4, 1, 64, 32, 2, max_seq_len=100)
    more = reference.tile_bytes(4, 3, 64, 32, 2, max_seq_len=100)
    assert more - few == reference.TILE_ROWS * 2 * (64 + 32) * (2 + 4 + 4)
