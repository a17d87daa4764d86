"""Each demand of a kernel is broken once and refused, by name."""

import pytest
import torch

from ascend_emulator.operators import (
    CONSTRAINTS,
    HOST_ARGUMENTS,
    KernelRefusalError,
    check_placement,
)
from ascend_emulator.operators.schemas import signature
from tests.emulator.operators.calls import Batch, cache_arguments, call, fused
from tests.emulator.operators.violations import VIOLATIONS

DEMANDS = [constraint for constraint in CONSTRAINTS if constraint.refused]


def test_a_row_with_nothing_visible_is_nan_or_corrected_to_zero(seed):
    batch = Batch([(3, 1), (3, 1)], seed)
    mask = torch.zeros(2, 4, dtype=torch.bool)
    mask[1] = True
    arguments = batch.padded("BSND", atten_mask=mask)
    output, _ = fused(arguments)
    assert output[0].isfinite().all() and output[1].isnan().all()
    output, lse = fused(arguments | {"inner_precise": 2, "softmax_lse_flag": True})
    assert (output[1] == 0).all() and lse[1].isposinf().all()


@pytest.mark.parametrize("constraint", DEMANDS, ids=lambda c: " / ".join(c.key))
def test_what_a_kernel_demands_is_demanded(constraint):
    violations = VIOLATIONS[constraint.key]
    assert violations, f"{constraint.key} has no violation: add one to violations/"
    for violate in violations:
        with pytest.raises(RuntimeError) as refusal:
            violate()
        assert isinstance(refusal.value, KernelRefusalError), refusal.value
        assert refusal.value.constraint is constraint, refusal.value
        message = str(refusal.value)
        assert (
            message.startswith(("npu::", "atb::", "_C_ascend::")) and constraint.demand in message
        )
        assert "argument " in message and "given " in message


def test_no_violation_is_left_over():
    assert set(VIOLATIONS) == {constraint.key for constraint in DEMANDS}


def test_messages_use_the_names_of_the_version_that_was_called():
    arguments = Batch([(5, 2)]).paged(actual_seq_lengths=[1])
    with pytest.raises(RuntimeError, match=r"score: argument actual_seq_lengths: given 1 for T 2"):
        fused(arguments)
    with pytest.raises(RuntimeError, match=r"score_v2: argument actual_seq_qlen: .*561002"):
        fused(arguments, version=2)


def test_a_refused_write_leaves_the_cache_alone():
    arguments = cache_arguments(slot_indices=torch.tensor([1, 2, 3, 4, 64], dtype=torch.int32))
    before = arguments["key_cache"].clone()
    with pytest.raises(KernelRefusalError):
        call("atb::_npu_reshape_and_cache", arguments)
    assert torch.equal(arguments["key_cache"], before)


def test_padding_may_repeat_a_slot_of_the_null_block():
    """As padding of vllm-ascend's drafts in graphs does; nobody reads this block."""
    slots = torch.tensor([0, 63, 0, -1, 18], dtype=torch.int32)
    arguments = cache_arguments(slot_indices=slots)
    call("atb::_npu_reshape_and_cache", arguments)
    rows = arguments["key_cache"].flatten(0, 1)
    assert torch.equal(rows[[63, 18]], arguments["key"][[1, 4]])


def test_placement_of_what_the_plugin_passes_is_accepted():
    check_placement("atb::_npu_flash_attention", {"query": False, "mask": False, "seq_len": True})
    check_placement("npu::npu_rms_norm", {"input": False, "gamma": False})


@pytest.mark.parametrize("operator", HOST_ARGUMENTS)
def test_host_arguments_are_arguments(operator):
    assert set(HOST_ARGUMENTS[operator]) <= set(signature(operator).parameters)
