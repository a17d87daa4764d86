"""The compiled family against a formula in float64, and against the reference family."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numba import njit

from tests.conftest import EXAMPLES
from tests.helpers.attention import BATCHES, TOLERANCE, Step
from vllm_npu_prep.attention.kernels import compiled, compiled_loops
from vllm_npu_prep.attention.kernels.compiled import CompiledKernels
from vllm_npu_prep.attention.kernels.reference import ReferenceKernels
from vllm_npu_prep.prep.elements import exp2
from vllm_npu_prep.prep.mask import MaskForm
from vllm_npu_prep.prep.state import AttentionState

KERNELS = CompiledKernels()
LONG = {  # computed, scheduled tokens: over several runs of keys, and prompts over several tiles
    AttentionState.DecodeOnly: [(300, 1), (127, 1), (128, 1), (0, 1)],
    AttentionState.SpecDecoding: [(254, 4), (125, 4), (1, 4)],
    AttentionState.ChunkedPrefill: [(200, 70), (0, 150), (40, 1)],
}


def check(state, seed, share_kv=False, **kwargs) -> None:
    step = Step(state, seed, form=MaskForm.COMPRESSED, **kwargs)
    tolerance = TOLERANCE[step.query.dtype]
    got = step.run(share_kv, kernels=KERNELS)
    torch.testing.assert_close(got.double(), step.formula(), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("state", BATCHES)
@pytest.mark.parametrize("window", [None, 3, 20])
def test_every_state_and_window_equals_the_formula(state, window, seed):
    check(state, seed, window=window)


@pytest.mark.parametrize("state", LONG)
@pytest.mark.parametrize("window", [None, 130])
def test_contexts_longer_than_a_run_of_keys(state, window, seed):
    check(state, seed, lengths=LONG[state], window=window, heads=(9, 3), block_size=16)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_equals_the_formula(dtype, seed):
    for state in BATCHES:
        check(state, seed, dtype=dtype, head_size=40)


@pytest.mark.parametrize("window", [None, 3, 20])
def test_without_causality_tokens_see_both_ways(window, seed):
    check(AttentionState.PrefillNoCache, seed, window=window, causal=False)


def test_layers_that_share_kv_read_the_cache(seed):
    for state in BATCHES:
        check(state, seed, share_kv=True)


@st.composite
def random_steps(draw) -> dict:
    state = draw(st.sampled_from(list(LONG)))
    lengths = [
        (draw(st.integers(0, 140)), 1 if state is AttentionState.DecodeOnly else count)
        for count in draw(st.lists(st.integers(1, 9), min_size=1, max_size=4))
    ]
    kv_heads = draw(st.integers(1, 3))
    return {
        "state": state,
        "lengths": lengths,
        "heads": (kv_heads * draw(st.integers(1, 5)), kv_heads),
        "head_size": draw(st.sampled_from([1, 8, 12, 33, 64])),
        "block_size": draw(st.sampled_from([1, 3, 16, 128])),
        "window": draw(st.sampled_from([None, 1, 2, 7, 50])),
        "soft_cap": draw(st.sampled_from([None, 0.5, 30.0])),
    }


@settings(max_examples=min(EXAMPLES, 200))
@given(random_steps(), st.integers(0, 2**16), st.integers(1, 3))
def test_results_and_sums_are_those_of_the_reference(drawn, seed, threads):
    """Whatever the heads, blocks, windows and caps, by one thread or several."""
    step = Step(**drawn, seed=seed, form=MaskForm.COMPRESSED)
    results, before = [], torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        for kernels in (KERNELS, ReferenceKernels()):
            step.metadata.kernel_plan = None
            cache, output = step.cache.clone(), torch.empty_like(step.query)
            lse = torch.empty(step.query.shape[:2])
            kernels.write_kv(step.key, step.value, cache, step.slots)
            given_to = step.query, None, cache, step.metadata, step.layer, output
            kernels.attend(*given_to, lse=lse)
            results.append((cache, output, lse))
    finally:
        torch.set_num_threads(before)
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-5, equal_nan=True)


def test_slots_below_zero_are_skipped(seed):
    step = Step(AttentionState.DecodeOnly, seed, unseen=0.0)
    step.slots[1] = -1
    expected = step.cache.clone()
    for kernels, cache in ((KERNELS, step.cache), (ReferenceKernels(), expected)):
        kernels.write_kv(step.key, step.value, cache, step.slots)
    assert torch.equal(step.cache, expected)


def test_many_heads_of_one_key_are_cut_into_parts(seed, monkeypatch):
    """As latent rows have them; a part has at most as many heads as a tile has rows."""
    check(AttentionState.SpecDecoding, seed, heads=(2 * compiled_loops.ROWS + 6, 2))
    check(AttentionState.ChunkedPrefill, seed, heads=(compiled_loops.ROWS + 1, 1))


def test_one_thread_is_enough_without_the_openmp_of_torch(seed, monkeypatch):
    monkeypatch.setattr(compiled, "openmp", lambda: None)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    check(AttentionState.ChunkedPrefill, seed)


@pytest.mark.parametrize("what", ["slots of 64 bits", "strided K", "one row less"])
def test_what_an_npu_kernel_rejects_is_rejected(what, seed):
    step = Step(AttentionState.ChunkedPrefill, seed, form=MaskForm.COMPRESSED)
    if what == "slots of 64 bits":
        step.slots = step.slots.long()
    elif what == "strided K":
        step.key = step.key.repeat(1, 2, 1)[:, ::2]
    else:
        step.metadata.block_tables = step.metadata.block_tables[:-1]
    with pytest.raises(AssertionError):
        step.run(kernels=KERNELS)


def test_powers_of_two_are_as_exact_as_float32():
    @njit
    def powers(xs):
        return np.array([exp2(x) for x in xs])

    xs = np.linspace(-124, 0, 20_001).astype(np.float32)
    np.testing.assert_allclose(powers(xs), np.exp2(xs.astype(np.float64)), rtol=4e-7)
