"""Each known misbehaviour changes a result, says nothing, and is off unless it is named."""

from pathlib import Path

import pytest
import torch

from ascend_emulator import faults, profiles
from ascend_emulator.errors import EmulatorError
from tests.emulator.operators.calls import (
    DECODES,
    MIXED,
    PROMPTS,
    Batch,
    cache_arguments,
    call,
    decode_arguments,
    flash_arguments,
    fused,
    scatter_arguments,
    splitfuse_arguments,
    triangle,
)
from tests.emulator.operators.fusion_calls import band, fusion
from tests.emulator.operators.latent_calls import absorbed, projected
from tests.emulator.operators.latent_calls import fused as fused_latent

PAGE = Path(__file__).parents[3] / "docs" / "changing" / "emulator.md"
NO_MASK = {"sparse_mode": 0, "atten_mask": None}
WINDOW = {"sparse_mode": 4, "pre_tokens": 3, "next_tokens": 0}
WRITERS = {
    "atb::_npu_reshape_and_cache": cache_arguments,
    "npu::npu_scatter_pa_kv_cache": scatter_arguments,
}


def of_fused(lengths, form, **changes):
    """Output of a call; rows of its cache that nobody wrote are 9."""

    def run():
        batch = Batch(lengths, dtype=torch.bfloat16)
        arguments = batch.paged(**changes) if form == "paged" else batch.packed(**changes)
        for plane in ("key", "value"):
            arguments[plane] = arguments[plane].nan_to_num(9.0)
        return fused(arguments)[0]

    return run


def lse():
    return fused(Batch(DECODES).paged(softmax_lse_flag=True))[1]


def of_fusion(**changes):
    return lambda: fusion(Batch(MIXED), **changes)


def of_atb(operator, make, dtype=torch.bfloat16):
    def run():
        arguments, _ = make(dtype=dtype)
        for plane in {"key_cache", "value_cache"} & set(arguments):
            arguments[plane] = arguments[plane].nan_to_num(9.0)
        call(operator, arguments)
        return arguments["out"]

    return run


def of_write(operator):
    def run():
        arguments = WRITERS[operator]()
        slot_name = next(name for name in arguments if name.startswith("slot"))
        arguments[slot_name] = torch.tensor([17, 3, -1, 60, 18], dtype=torch.int32)
        call(operator, arguments)
        return torch.stack([arguments["key_cache"], arguments["value_cache"]])

    return run


def of_swiglu(columns):
    """Scales of rows whose largest product is in the last column."""
    x = torch.ones(2, 2 * columns, dtype=torch.float16)
    x[:, columns - 1] = x[:, -1] = 4
    arguments = {"x": x, "activate_left": True, "quant_mode": 1}
    return lambda: call("npu::npu_dequant_swiglu_quant", arguments)[1]


def of_latent(make):
    return lambda: fused_latent(make())[0]


PAGED_DECODE = of_atb("atb::_npu_paged_attention", decode_arguments)
SPLITFUSE = of_atb("atb::_npu_paged_attention_splitfuse", splitfuse_arguments)
FLASH = of_atb("atb::_npu_flash_attention", flash_arguments)
CHANGED = {
    "uniform-average": [of_fused(PROMPTS, "fresh", **NO_MASK)],
    "wide-window": [
        of_fused(MIXED, "paged", **WINDOW, block_size=128),
        of_fused(PROMPTS, "fresh", **WINDOW),
        of_fusion(**band(3)),
    ],
    "unnarrowed-decode": [of_fused(DECODES, "paged", **WINDOW)],
    "upper-left-causal": [
        of_fused(MIXED, "paged"),
        of_fusion(atten_mask=triangle(torch.uint8), sparse_mode=3),
    ],
    "ignored-mask": [of_fused(PROMPTS, "fresh"), of_fusion(**band(3)), FLASH, SPLITFUSE],
    "early-maximum": [of_swiglu(7872)],
    "ignored-scale": [of_fused(MIXED, "paged"), of_fusion(), PAGED_DECODE, FLASH],
    "last-token-dropped": [of_fused(DECODES, "paged", **NO_MASK), of_fusion(), PAGED_DECODE],
    "interleaved-heads": [of_fused(DECODES, "paged", **NO_MASK), of_fusion(), PAGED_DECODE],
    "wrong-lse": [lse],
    "first-table-row": [of_fused(MIXED, "paged"), PAGED_DECODE, SPLITFUSE],
    "whole-block-read": [
        of_fused(DECODES, "paged", **NO_MASK),
        of_fused(MIXED, "paged"),
        PAGED_DECODE,
        SPLITFUSE,
    ],
    "ignored-rope": [of_latent(absorbed), of_latent(projected)],
    "padding-slot-written": [of_write(operator) for operator in WRITERS],
    "transposed-cache": [of_write(operator) for operator in WRITERS],
    "added-flags": [FLASH],
}
"""Calls that each fault changes; ``stale-lengths`` is in the runtime, see test_graphs.py."""
UNCHANGED = {
    "uniform-average": [of_fused(PROMPTS, "fresh"), of_fused(DECODES, "paged", **NO_MASK)],
    "wide-window": [of_fused(MIXED, "paged")],
    "unnarrowed-decode": [of_fused([(9, 5)], "paged", **WINDOW)],
    "upper-left-causal": [of_fused(PROMPTS, "fresh"), of_fused(MIXED, "paged", **WINDOW)],
    "wrong-lse": [of_fused(MIXED, "paged")],
    "added-flags": [of_atb("atb::_npu_flash_attention", flash_arguments, torch.float16)],
    "early-maximum": [of_swiglu(7840)],
}


@pytest.mark.parametrize(
    ("name", "run"), [(name, run) for name, runs in CHANGED.items() for run in runs]
)
def test_a_fault_changes_a_result_and_nothing_else_tells(name, run):
    right = run()
    with faults.using(name):
        wrong = run()
    assert wrong.shape == right.shape and wrong.dtype == right.dtype
    assert not torch.allclose(wrong, right, atol=1e-2, equal_nan=True)
    assert torch.equal(run().nan_to_num(), right.nan_to_num())


@pytest.mark.parametrize(
    ("name", "run"), [(name, run) for name, runs in UNCHANGED.items() for run in runs]
)
def test_a_fault_leaves_other_calls_alone(name, run):
    right = run()
    with faults.using(name):
        assert torch.equal(run().nan_to_num(), right.nan_to_num())


def test_every_fault_is_tried():
    assert set(CHANGED) | {"stale-lengths"} == set(faults.FAULTS)


def test_every_fault_and_profile_is_documented():
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    documented = {row.split("`")[1] for row in rows}
    assert {*faults.FAULTS, *profiles.PROFILES} <= documented


def test_faults_add_up():
    run = of_fused(MIXED, "paged")
    with faults.using("ignored-scale"):
        one = run()
    with faults.using("ignored-scale", "first-table-row"):
        assert not torch.allclose(run(), one, equal_nan=True)


def test_a_uniform_average_is_one():
    batch = Batch(PROMPTS)
    with faults.using("uniform-average"):
        output, _ = fused(batch.packed(**NO_MASK))
    averages = [rows.float().mean(0).repeat_interleave(2, 0) for rows in batch.values]
    counts = torch.tensor(batch.query_lens)
    wanted = torch.stack(averages).repeat_interleave(counts, 0)
    torch.testing.assert_close(output.float(), wanted, atol=2e-3, rtol=2e-3)


def test_an_unknown_fault_is_refused_with_the_list():
    with pytest.raises(
        EmulatorError, match=r"'slow' is not a fault; use some of: uniform-average \("
    ):
        faults.check(["wide-window", "slow"])
