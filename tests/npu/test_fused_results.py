"""Each served combination of heads, blocks and release gives attention as its formula says.

The plugin's own code makes each call (`vllm_npu_prep.attention.kernels.fia`), over a torch_npu
whose operators are the references of the emulated card, on the host and without a process of its
own. The results are held against `vllm_npu_prep.verify.formulas`, which shares no code with the
references.
"""

import functools
import importlib
import itertools
import sys
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from ascend_emulator import profiles
from ascend_emulator.operators import REFERENCES, KernelRefusalError
from tests.npu.test_fused_releases import (
    BLOCK_SIZES,
    DTYPES,
    HEAD_SIZES,
    HEADS,
    RULES,
    is_served,
)
from vllm_npu_prep.attention.families import FIA
from vllm_npu_prep.attention.fused_releases import BatchLimits, Form, FusedCall
from vllm_npu_prep.prep.state import AttentionState
from vllm_npu_prep.verify.row import Verdict, compare
from vllm_npu_prep.verify.steps import AttentionForm, AttentionStep, layer_of, masks_for

CPU = torch.device("cpu")
FUSED, ENCODER = "npu_fused_infer_attention_score.out", "npu_fusion_attention"
STATES = {
    AttentionState.PrefillNoCache: ((0, 3), (0, 2)),
    AttentionState.ChunkedPrefill: ((15, 3), (2, 1)),
    AttentionState.DecodeOnly: ((16, 1), (2, 1)),
}
"""Tokens in the cache and in the step, of two requests: the first one's cross a block of 16."""
WINDOW = 2


class References:
    """A torch_npu whose operators are references; notes which were called."""

    def __init__(self) -> None:
        self.called: set[str] = set()
        for reference in REFERENCES:
            name = reference.name.split("::")[1]
            if reference.name.startswith("npu::"):
                target, attribute = self, name
                if reference.overload:
                    target, attribute = getattr(self, name), reference.overload
                full = ".".join(filter(None, (name, reference.overload)))
                setattr(target, attribute, self._noting(full, reference.function))

    def _noting(self, name, function):
        def call(*args, **kwargs):
            self.called.add(name)
            return function(*args, **kwargs)

        return call


@pytest.fixture(scope="module")
def fia():
    """The kernels' module and the operators below it."""
    name, operators = "vllm_npu_prep.attention.kernels.fia", References()
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "torch_npu", operators)
        patch.delitem(sys.modules, name, raising=False)
        yield SimpleNamespace(module=importlib.import_module(name), operators=operators)
        sys.modules.pop(name, None)


MASKS = masks_for(FIA, torch.bfloat16, CPU, 64)


def wrong_of(fia, form: AttentionForm, operator: str, limits: BatchLimits) -> str:
    """What is wrong with a step: the operator that was called, its result, or the cache."""
    fia.operators.called.clear()
    step = AttentionStep(form, CPU, fia.module.FiaKernels(limits))
    try:
        metadata = step.metadata(MASKS)
        step.write(metadata)
        output = step.attend(metadata)
    except KernelRefusalError as error:
        return str(error)
    attended = fia.operators.called - {"npu_scatter_pa_kv_cache"}
    if attended != {operator}:
        return f"{form}: {attended}"
    outcome = compare(output, expected_of(replace(form, block_size=0)), str(form))
    return "" if outcome.verdict is Verdict.SAME else f"{form}: {outcome}"


@functools.cache
def expected_of(form: AttentionForm) -> torch.Tensor:
    """What a step has to give: the same in blocks of any size."""
    kernels = SimpleNamespace(family=FIA)
    return AttentionStep(form, CPU, kernels).expected()


@pytest.mark.parametrize("profile", RULES)
@pytest.mark.parametrize("heads", HEADS)
def test_each_served_combination_computes_attention(fia, profile, heads):
    product = itertools.product(HEAD_SIZES, BLOCK_SIZES, DTYPES, (None, WINDOW))
    wrong, number = [], 0
    with profiles.using(profile):
        for head_size, block_size, dtype, window in product:
            if not is_served(profile, heads, dtype, head_size, block_size, window is not None):
                continue
            for state, lengths in STATES.items():
                number += 1
                layer = layer_of(*HEADS[heads], head_size)
                form = AttentionForm(state, lengths, layer, dtype, block_size, window)
                if problem := wrong_of(fia, form, FUSED, BatchLimits()):
                    wrong.append(problem)
    assert wrong == []
    assert number >= 36


@pytest.mark.parametrize("block_size", [64, 128])
@pytest.mark.parametrize("profile", RULES)
def test_sequences_cross_the_larger_blocks_too(fia, profile, block_size):
    """A chunk over the end of a block, decodes at the ends of the first and of the second one."""
    states = {
        AttentionState.ChunkedPrefill: ((block_size - 2, 5), (2 * block_size - 1, 3), (7, 1)),
        AttentionState.DecodeOnly: ((block_size - 1, 1), (block_size, 1), (2 * block_size, 1)),
    }
    windows = (None, WINDOW, block_size + 3)  # a window that begins in the block before
    wrong, number = [], 0
    with profiles.using(profile):
        for heads, window in itertools.product(("equal", "grouped"), windows):
            dtype, head_size = torch.bfloat16, 64
            if not is_served(profile, heads, dtype, head_size, block_size, window is not None):
                continue
            for state, lengths in states.items():
                number += 1
                layer = layer_of(*HEADS[heads], head_size)
                form = AttentionForm(state, lengths, layer, dtype, block_size, window)
                if problem := wrong_of(fia, form, FUSED, BatchLimits()):
                    wrong.append(problem)
    assert wrong == []
    assert number == (0 if profile == "docs" and block_size == 64 else 12)


@pytest.mark.parametrize("heads", HEADS)
def test_the_cache_holds_what_was_written(fia, heads):
    for head_size, block_size, dtype in itertools.product(HEAD_SIZES, BLOCK_SIZES, DTYPES):
        lengths = STATES[AttentionState.ChunkedPrefill]
        layer = layer_of(*HEADS[heads][1:] * 2, head_size)  # caches have K/V heads only
        form = AttentionForm(AttentionState.ChunkedPrefill, lengths, layer, dtype, block_size)
        if block_size * head_size * layer.num_kv_heads > 1 << 16:
            continue  # more of the same, and the comparison reads all of it
        step = AttentionStep(form, CPU, fia.module.FiaKernels())
        step.write(step.metadata(MASKS))
        assert step.check_cache().verdict is Verdict.SAME, form


@pytest.mark.parametrize("profile", RULES)
def test_encoders_are_served_by_another_operator(fia, profile):
    """Of any heads: no release table applies to it, and start-up refuses more than 256 alone."""
    wrong = []
    with profiles.using(profile):
        product = itertools.product(HEADS, HEAD_SIZES, DTYPES, (None, WINDOW))
        for heads, head_size, dtype, window in product:
            layer = layer_of(*HEADS[heads], head_size)
            lengths = STATES[AttentionState.PrefillNoCache]
            state = AttentionState.PrefillNoCache
            form = AttentionForm(state, lengths, layer, dtype, 0, window, causal=False)
            if problem := wrong_of(fia, form, ENCODER, BatchLimits()):
                wrong.append(problem)
    assert wrong == []


def in_a_small_cache(step: AttentionStep) -> int:
    """Renumber the step's blocks from 1, and leave out those that it doesn't use."""
    used = np.unique(step.table)  # the null block first
    step.host_cache = step.host_cache[:, used]
    step.kv_cache = step.host_cache.clone()
    step.table = np.searchsorted(used, step.table).astype(np.int32)
    return len(used)


@pytest.mark.parametrize("profile", RULES)
def test_calls_are_split_where_blocks_are_limited(fia, profile):
    """4 requests of 3 blocks each, two of which they share, in a cache of 7."""
    lengths, split = ((260, 2), (259, 1), (258, 3), (300, 1)), 0
    for heads, head_size in itertools.product(HEADS, (64, 128, 192)):
        sizes = *HEADS[heads], head_size
        call = FusedCall(Form.CHUNK, "torch.bfloat16", *sizes, 128)
        limits = RULES[profile].limits([call])
        form = AttentionForm(
            AttentionState.ChunkedPrefill, lengths, layer_of(*sizes), torch.bfloat16, num_shared=2
        )
        for given in {limits, BatchLimits()}:
            step = AttentionStep(form, CPU, fia.module.FiaKernels(given))
            assert in_a_small_cache(step) == 7
            metadata = step.metadata(MASKS)
            step.write(metadata)
            with profiles.using(profile):
                if limits.apply and not given.apply:
                    with pytest.raises(KernelRefusalError, match="12 blocks in a cache of 7"):
                        step.attend(metadata)
                    continue
                output = step.attend(metadata)
            assert step.check_attention(output).verdict is Verdict.SAME, (heads, head_size)
            assert (len(metadata.kernel_plan) > 1) == limits.apply
            split += limits.apply
    assert split == {"9.1": 0, "8.5": 2, "docs": 12}[profile]
