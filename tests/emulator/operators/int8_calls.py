"""Valid calls of the operators with int8, and one call for each demand that breaks it alone."""

import torch

DYNAMIC, QUANTIZE = "npu::npu_dynamic_quant", "npu::npu_quantize"
MATMUL, NORM = "npu::npu_quant_matmul", "npu::npu_add_rms_norm_dynamic_quant"
STATIC_NORM, SWIGLU = "npu::npu_add_rms_norm_quant", "npu::npu_dequant_swiglu_quant"
CODES = {torch.int8: 1, torch.int32: 3, torch.float16: 5, torch.qint8: 12, torch.bfloat16: 15}


def numbers(*shape, dtype=torch.float16, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def small(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-127, 128, shape, dtype=torch.int8, generator=generator)


def dynamic_arguments(seed=0, dtype=torch.float16):
    return {"input": numbers(5, 8, dtype=dtype, seed=seed)}


def quantize_arguments(seed=0, dtype=torch.float16, channels=1):
    """Scales and offsets for all, or for each column."""
    return {
        "input": numbers(5, 8, dtype=dtype, seed=seed) * 3,
        "scales": torch.rand(channels, generator=torch.Generator().manual_seed(seed)) / 50 + 0.01,
        "zero_points": torch.full((channels,), -7, dtype=torch.int32),
        "dtype": CODES[torch.qint8],
        "axis": -1,
    }


def matmul_arguments(seed=0, dtype=torch.float16, static=False):
    """A transposed x2; dynamic with a float bias, static with an int32 one."""
    scale = torch.rand(6, generator=torch.Generator().manual_seed(seed)) / 50
    arguments = {
        "x1": small(5, 8, seed=seed),
        "x2": small(6, 8, seed=seed + 1).t(),
        "scale": scale,
        "output_dtype": CODES[dtype],
    }
    if static:
        packed = scale.view(torch.int32).long() if dtype == torch.float16 else scale
        bias = torch.arange(6, dtype=torch.int32) * 100
        return arguments | {"scale": packed, "bias": bias}
    tokens = torch.rand(5, generator=torch.Generator().manual_seed(seed)) / 5
    return arguments | {"pertoken_scale": tokens, "bias": numbers(6, dtype=torch.float32)}


def norm_arguments(seed=0, dtype=torch.float16):
    return {
        "x1": numbers(5, 8, dtype=dtype, seed=seed),
        "x2": numbers(5, 8, dtype=dtype, seed=seed + 1),
        "gamma": numbers(8, dtype=dtype, seed=seed + 2),
        "epsilon": 1e-5,
    }


def static_norm_arguments(seed=0, dtype=torch.float16):
    is_half = dtype == torch.float16
    scales = torch.full((8,), 0.0234375, dtype=torch.float32 if is_half else dtype)
    offsets = torch.full((8,), 5, dtype=torch.int32 if is_half else dtype)
    return norm_arguments(seed, dtype) | {"scales1": scales, "zero_points1": offsets}


def swiglu_arguments(seed=0, dtype=torch.float16, static=False):
    arguments = {"x": numbers(5, 12, dtype=dtype, seed=seed), "activate_left": True}
    if not static:
        return arguments | {"quant_mode": 1}
    return arguments | {
        "quant_mode": 0,
        "quant_scale": torch.tensor([0.02]),
        "quant_offset": torch.tensor([3.0]),
    }


def grouped_arguments(seed=0, dtype=torch.float16, **changes):
    """Seven rows of three experts, of which the last two belong to none."""
    generator = torch.Generator().manual_seed(seed)
    kind = torch.float32 if dtype == torch.float16 else dtype
    return {
        "x": [small(7, 8, seed=seed)],
        "weight": [small(3, 6, 8, seed=seed + 1).transpose(1, 2)],
        "scale": [(torch.rand(3, 6, generator=generator) / 50).to(kind)],
        "per_token_scale": [torch.rand(7, generator=generator)],
        "group_list": torch.tensor([2, 0, 3]),
        "group_list_type": 1,
        "group_type": 0,
        "split_item": 2,
        "output_dtype": CODES[dtype],
        **changes,
    }
