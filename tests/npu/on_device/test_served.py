"""Each combination of heads, head size and blocks that a release serves gives its formula's result.

Which these are is `SERVED` of `tests.npu.test_fused_releases`.
"""

import itertools

import pytest
import torch

from ascend_emulator import profiles
from tests.npu.test_fused_releases import BLOCK_SIZES, DTYPES, HEAD_SIZES, HEADS, is_served
from vllm_npu_prep.attention.kernels import make_kernels
from vllm_npu_prep.prep.state import AttentionState
from vllm_npu_prep.verify.row import Verdict
from vllm_npu_prep.verify.steps import AttentionForm, AttentionStep, layer_of

STATES = {
    AttentionState.PrefillNoCache: ((0, 3), (0, 2)),
    AttentionState.ChunkedPrefill: ((15, 3), (2, 1)),
    AttentionState.DecodeOnly: ((16, 1), (2, 1)),
}
"""Tokens in the cache and in the step, of two requests: the first one's cross a block of 16."""
WINDOW = 2


@pytest.mark.parametrize("heads", HEADS)
def test_each_served_combination_computes_attention(heads):
    profile, kernels, number, wrong = profiles.current().name, make_kernels("fia"), 0, []
    product = itertools.product(HEAD_SIZES, BLOCK_SIZES, DTYPES, (None, WINDOW), STATES)
    for head_size, block_size, dtype, window, state in product:
        if is_served(profile, heads, dtype, head_size, block_size, window is not None):
            number += 1
            layer = layer_of(*HEADS[heads], head_size)
            form = AttentionForm(state, STATES[state], layer, dtype, block_size, window)
            outcome = AttentionStep(form, torch.device("npu:0"), kernels).run()
            if outcome.verdict is not Verdict.SAME:
                wrong.append((form, outcome))
    assert wrong == []
    assert number >= 36
