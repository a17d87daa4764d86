"""Calls of vllm-ascend's custom operators."""

import torch

from ascend_emulator.operators import custom
from tests.emulator.operators.formula import random
from tests.emulator.operators.violations.breaking import changed

T = torch.Tensor


def shrink():
    """Three rows, of which the second has no adapter, and two adapters of rank 8."""
    return {
        "x": random(3, 16, dtype=torch.bfloat16),
        "weight": random(2, 1, 8, 16, dtype=torch.bfloat16, seed=1),
        "indices": torch.tensor([1, -1, 0]),
        "y": torch.zeros(3, 8),
        "scale": 0.5,
    }


def shrinks(**changes):
    return lambda: custom.bgmv_shrink(**changed(shrink(), changes))


def expands(**changes):
    call = {"y": random(3, 40, dtype=torch.bfloat16), "slice_offset": 20, "slice_size": 16}
    call |= {"x": torch.zeros(3, 8), "weight": random(2, 16, 8, dtype=torch.bfloat16)}
    call |= {"indices": torch.tensor([1, -1, 0])}
    return lambda: custom.bgmv_expand(**changed(call, changes))


def swiglu_rows():
    """Five rows and two groups; the last row is in no group."""
    return {
        "x": torch.arange(-10, 10, dtype=torch.int8).view(5, 4),
        "weight": torch.arange(-24, 24, dtype=torch.int8).view(2, 4, 6),
        "weight_scale": random(2, 6, dtype=torch.bfloat16).abs(),
        "x_scale": torch.full((5,), 0.25),
        "group_list": torch.tensor([1, 4]),
    }


def groups(**changes):
    return lambda: custom.grouped_matmul_swiglu_quant(**changed(swiglu_rows(), changes))


def sums():
    """Three rows of 64 int32 sums, and float32 scales of columns and rows."""
    return {
        "x": torch.arange(-96, 96, dtype=torch.int32).view(3, 64),
        "weight_scale": random(64, seed=1).float().abs(),
        "activation_scale": torch.tensor([0.5, 0.25, 0.125]),
        "quant_mode": 1,
        "swiglu_mode": 1,
    }


def scaled(**changes):
    return lambda: custom.dequant_swiglu_quant(**changed(sums(), changes))


FAMILIES = {
    "custom operators": [
        (
            "plain sums",
            scaled(quant_mode=0),
            scaled(activate_left=False),
            scaled(group_index=torch.tensor([3])),
            scaled(bias=torch.zeros(64)),
        ),
        ("sums", scaled(x=T.long), scaled(x=lambda x: x[:, :32]), scaled(x=lambda x: x[0])),
        (
            "scales of sums",
            scaled(weight_scale=None),
            scaled(weight_scale=T.bfloat16),
            scaled(weight_scale=lambda s: s[:32]),
            scaled(activation_scale=lambda s: s[:2]),
        ),
        (
            "numbers of swiglu",
            scaled(swiglu_mode=2),
            scaled(clamp_limit=-1.0),
            scaled(glu_alpha=float("inf")),
            scaled(glu_bias=float("nan")),
        ),
        ("adapter dtypes", shrinks(x=T.float), shrinks(y=T.half)),
        ("adapter shapes", shrinks(weight=lambda w: w[0, 0]), shrinks(y=lambda y: y[:2])),
        ("adapter rank", shrinks(y=torch.zeros(3, 4))),
        (
            "plain swiglu",
            groups(swiglu_limit=7.0),
            groups(bias=torch.zeros(2, 6)),
            groups(offset=torch.zeros(2, 6)),
        ),
        (
            "dtypes of groups",
            groups(x=T.half),
            groups(x_scale=T.half),
            groups(weight_scale=T.double),
            groups(group_list=T.int),
        ),
        (
            "shapes of groups",
            groups(weight_scale=lambda s: s[:1]),
            groups(weight=lambda w: w[..., :5], weight_scale=lambda s: s[:, :5]),
            groups(
                weight=torch.zeros(2, 4, 10242, dtype=torch.int8),
                weight_scale=torch.ones(2, 10242),
            ),
        ),
        ("ends of groups", groups(group_list=torch.tensor([3, 1]))),
        ("adapter indices", shrinks(indices=T.int)),
        ("adapter width", shrinks(x=lambda x: x[:, :8])),
        (
            "adapter slice",
            expands(slice_offset=25),
            expands(slice_offset=-1),
            expands(slice_size=4),
        ),
    ]
}
