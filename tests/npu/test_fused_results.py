"""Each served combination of heads, blocks and release gives attention as its formula says.

The plugin's own code makes each call (`vllm_npu_prep.attention.kernels.fia`), over a torch_npu whose
operators are the references of the emulated card, on the host and without a process of its own. The
results are held against `vllm_npu_prep.verify.formulas`, which shares no code with the references.
"""

import importlib
import itertools
import sys
from types import SimpleNamespace

import pytest
import torch

from ascend_emulator import faults, profiles
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
from vllm_npu_prep.attention.fused_releases import BatchLimits
from vllm_npu_prep.prep.state import AttentionState
from vllm_npu_prep.verify.row import Verdict
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
    outcome = step.check_attention(output)
    return "" if outcome.verdict is Verdict.SAME else f"{form}: {outcome}"


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
