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
@pytest.mark.parametrize("block_size", [1, 2, 16, 128])
def test_any_block_size(state, block_size, seed):
    check(Step(state, seed, block_size=block_size))


@pytest.mark.parametrize("heads", [(1, 1), (6, 6), (8, 1), (12, 4)])
@pytest.mark.parametrize(
    "state",
    [AttentionState.DecodeOnly, AttentionState.ChunkedPrefill, AttentionState.PrefillNoCache],
)
def test_grouped_query_heads(state, heads, seed):
    check(Step(state, seed, heads=heads))


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
def test_small_tiles_cut_requests_and_queries_without_changing_the_result(
    state, form, window, seed, monkeypatch
):
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


def spoil(step: Step, what: str) -> None:
    metadata = step.metadata
    if what == "slots of 64 bits":
        step.slots = step.slots.long()
    elif what == "fewer slots than tokens":
        step.slots = step.slots[:-1]
    elif what == "strided K":
        step.key = step.key.repeat(1, 2, 1)[:, ::2]
    elif what == "interleaved planes":
        step.cache = torch.stack([step.cache[0], step.cache[1]], -1).movedim(-1, 0)
    elif what == "cache of another dtype":
        step.cache = step.cache.half()
    elif what == "block table of 64 bits":
        metadata.block_tables = metadata.block_tables.long()
    elif what == "one row less":
        metadata.block_tables = metadata.block_tables[:-1]
    elif what == "lengths not cumulative":
        lengths = metadata.query_lens
        metadata.query_start_loc_np = np.concatenate([[0], lengths]).astype(np.int32)
    elif what == "sequence shorter than its query":
        metadata.seq_lens_np = metadata.seq_lens_np * 0 + 1
    elif what == "mask too narrow":
        metadata.attn_mask = metadata.attn_mask[:, :-1]
    elif what == "mask of rank 1":
        metadata.attn_mask = metadata.attn_mask[0]
    elif what == "constant mask too small":
        metadata.attn_mask = torch.ones(8, 8, dtype=torch.int8)
    else:
        raise ValueError(what)


@pytest.mark.parametrize(
    "what",
    [
        "slots of 64 bits",
        "fewer slots than tokens",
        "strided K",
        "interleaved planes",
        "cache of another dtype",
        "block table of 64 bits",
        "one row less",
        "lengths not cumulative",
        "sequence shorter than its query",
        "mask too narrow",
        "mask of rank 1",
        "constant mask too small",
    ],
)
def test_what_an_npu_kernel_rejects_is_rejected(what, seed):
    step = Step(AttentionState.ChunkedPrefill, seed)
    step.run()
    step.metadata.kernel_plan = None
    spoil(step, what)
    with pytest.raises(AssertionError):
        step.run()


def test_memory_of_tiles_counts_keys_and_values_three_times():
    """A row of a tile is read from the cache, and turned into float32 for each product."""
    few = reference.tile_bytes(4, 1, 64, 32, 2, max_seq_len=100)
    more = reference.tile_bytes(4, 3, 64, 32, 2, max_seq_len=100)
    assert more - few == reference.TILE_ROWS * 2 * (64 + 32) * (2 + 4 + 4)
