"""Valid calls of the operators with int8, and one call for each demand that breaks it alone."""

import torch

from tests.emulator.operators.calls import call, spoiled, strided

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


def instead(value):
    return lambda _: value


def spoil(name, make, **functions):
    """A call with some arguments replaced or added."""

    def run():
        arguments = make()
        added = {key: None for key in functions if key not in arguments}
        return call(name, spoiled(arguments | added, **functions))

    return run


def dynamic(**functions):
    return spoil(DYNAMIC, dynamic_arguments, **functions)


def quantize(**functions):
    return spoil(QUANTIZE, quantize_arguments, **functions)


def matmul(static=False, dtype=torch.float16, **functions):
    return spoil(MATMUL, lambda: matmul_arguments(0, dtype, static), **functions)


def norms(**functions):
    return [
        spoil(NORM, norm_arguments, **functions),
        spoil(STATIC_NORM, static_norm_arguments, **functions),
    ]


def static_norm(**functions):
    return spoil(STATIC_NORM, static_norm_arguments, **functions)


def swiglu(static=False, **functions):
    return spoil(SWIGLU, lambda: swiglu_arguments(static=static), **functions)


def grouped(**functions):
    return spoil("npu::npu_grouped_matmul", grouped_arguments, **functions)


def only(function):
    return lambda tensors: [function(tensors[0])]


BROKEN = {
    ("npu_grouped_matmul, int8 rows", "one tensor each"): [
        grouped(weight=lambda w: w * 2),
        grouped(split_item=instead(0)),
    ],
    ("npu_grouped_matmul, int8 rows", "form"): [
        grouped(bias=instead([torch.zeros(3, 6, dtype=torch.int32)])),
        grouped(act_type=instead(5)),
    ],
    ("npu_grouped_matmul, int8 rows", "dtype"): [grouped(weight=only(torch.Tensor.half))],
    ("npu_grouped_matmul, int8 rows", "shapes"): [
        grouped(x=only(lambda x: x[:, :4].contiguous())),
        grouped(weight=only(lambda w: w[0])),
    ],
    ("npu_grouped_matmul, int8 rows", "contiguous"): [
        grouped(x=only(strided)),
        grouped(weight=only(strided)),
    ],
    ("npu_grouped_matmul, int8 rows", "inner limit"): [
        grouped(
            x=instead([torch.zeros(7, 65536, dtype=torch.int8)]),
            weight=instead([torch.zeros(3, 6, 65536, dtype=torch.int8).transpose(1, 2)]),
        )
    ],
    ("npu_grouped_matmul, int8 rows", "result"): [
        grouped(output_dtype=instead(None)),
        grouped(output_dtype=instead(CODES[torch.int32])),
    ],
    ("npu_grouped_matmul, int8 rows", "scale"): [
        grouped(scale=instead(None)),
        grouped(scale=only(torch.Tensor.bfloat16)),
        grouped(scale=only(lambda s: s.t().contiguous())),
    ],
    ("npu_grouped_matmul, int8 rows", "token scale"): [
        grouped(per_token_scale=instead(None)),
        grouped(per_token_scale=only(torch.Tensor.half)),
        grouped(per_token_scale=only(lambda s: s[:5])),
    ],
    ("npu_grouped_matmul, int8 rows", "group list"): [
        grouped(group_list=instead(None)),
        grouped(group_list=torch.Tensor.int),
        grouped(group_list_type=instead(2)),
    ],
    ("npu_grouped_matmul, int8 rows", "group sizes"): [
        grouped(group_list=instead(torch.tensor([2, -1, 3]))),
        grouped(group_list=instead(torch.tensor([2, 3, 3]))),
    ],
    ("npu_dynamic_quant", "dtype"): [dynamic(input=torch.Tensor.float)],
    ("npu_dynamic_quant", "rank"): [dynamic(input=lambda x: x[0])],
    ("npu_dynamic_quant", "form"): [
        dynamic(smooth_scales=instead(numbers(8))),
        dynamic(dst_type=instead(CODES[torch.int32])),
        dynamic(quant_mode=instead("pertensor")),
    ],
    ("npu_quantize", "dtype"): [quantize(input=torch.Tensor.double)],
    ("npu_quantize", "form"): [
        quantize(div_mode=instead(False)),
        quantize(dtype=instead(CODES[torch.int32])),
    ],
    ("npu_quantize", "scale dtype"): [quantize(scales=torch.Tensor.half)],
    ("npu_quantize", "offset dtype"): [
        quantize(zero_points=torch.Tensor.float),
        quantize(zero_points=torch.Tensor.bfloat16),
    ],
    ("npu_quantize", "sizes"): [
        quantize(zero_points=lambda z: z.repeat(8)),
        quantize(scales=lambda s: s.repeat(5), zero_points=lambda z: z.repeat(5)),
    ],
    ("npu_quantize", "axis"): [quantize(axis=instead(2))],
    ("npu_quant_matmul", "dtype"): [
        matmul(x1=torch.Tensor.half),
        matmul(x2=lambda x: x.int()),
    ],
    ("npu_quant_matmul", "form"): [
        matmul(offset=instead(torch.zeros(6))),
        matmul(group_sizes=instead([0, 0, 32])),
    ],
    ("npu_quant_matmul", "shapes"): [
        matmul(x1=lambda x: x[:, :4].contiguous()),
        matmul(x1=lambda x: x[None]),
    ],
    ("npu_quant_matmul", "layout"): [matmul(x2=strided)],
    ("npu_quant_matmul", "inner limit"): [
        matmul(
            static=True,
            x1=instead(torch.zeros(1, 65536, dtype=torch.int8)),
            x2=instead(torch.zeros(6, 65536, dtype=torch.int8).t()),
        )
    ],
    ("npu_quant_matmul", "result"): [
        matmul(output_dtype=instead(None)),
        matmul(output_dtype=instead(6)),
    ],
    ("npu_quant_matmul", "scale dtype"): [
        matmul(scale=torch.Tensor.bfloat16),
        matmul(scale=torch.Tensor.long),
        matmul(static=True, dtype=torch.bfloat16, scale=torch.Tensor.long),
    ],
    ("npu_quant_matmul", "scale shape"): [
        matmul(scale=lambda s: s[:5]),
        matmul(scale=lambda s: s[:, None]),
    ],
    ("npu_quant_matmul", "token scale"): [
        matmul(pertoken_scale=torch.Tensor.half),
        matmul(pertoken_scale=lambda s: s[:, None]),
        matmul(pertoken_scale=lambda s: s[:4]),
    ],
    ("npu_quant_matmul", "bias"): [
        matmul(bias=lambda b: b[:5]),
        matmul(bias=torch.Tensor.bfloat16),
        matmul(static=True, bias=torch.Tensor.float),
    ],
    ("norms to int8", "dtype"): norms(**dict.fromkeys(("x1", "x2", "gamma"), torch.Tensor.float)),
    ("norms to int8", "rank"): [
        spoil(NORM, norm_arguments, x1=lambda x: x[0], x2=lambda x: x[0]),
        static_norm(x1=lambda x: x[(None,) * 7], x2=lambda x: x[(None,) * 7]),
    ],
    ("norms to int8", "equal shapes"): [
        *norms(x2=lambda x: x[:4]),
        *norms(x2=torch.Tensor.bfloat16),
    ],
    ("norms to int8", "gamma"): [
        *norms(gamma=lambda g: g[:4]),
        *norms(gamma=torch.Tensor.bfloat16),
    ],
    ("norms to int8", "epsilon"): [spoil(NORM, norm_arguments, epsilon=instead(0.0))],
    ("norms to int8", "factors"): [
        spoil(NORM, norm_arguments, smooth_scale1=instead(numbers(4))),
        spoil(NORM, norm_arguments, smooth_scale1=instead(numbers(8, dtype=torch.float32))),
    ],
    ("norms to int8", "form"): [
        spoil(NORM, norm_arguments, smooth_scale2=instead(numbers(8))),
        *norms(beta=instead(numbers(8))),
        spoil(NORM, norm_arguments, output_mask=instead([True, True])),
        static_norm(div_mode=instead(False)),
        static_norm(axis=instead(0)),
    ],
    ("norms to int8", "scale dtype"): [static_norm(scales1=torch.Tensor.bfloat16)],
    ("norms to int8", "offset dtype"): [static_norm(zero_points1=torch.Tensor.bfloat16)],
    ("norms to int8", "static shapes"): [
        static_norm(scales1=lambda s: s[:1]),
        static_norm(zero_points1=lambda z: z[:1]),
    ],
    ("npu_dequant_swiglu_quant", "dtype"): [swiglu(x=torch.Tensor.float)],
    ("npu_dequant_swiglu_quant", "shape"): [
        swiglu(x=lambda x: x[0]),
        swiglu(x=lambda x: x[:, :11].contiguous()),
    ],
    ("npu_dequant_swiglu_quant", "form"): [
        swiglu(weight_scale=instead(torch.ones(1, 12))),
        swiglu(group_index=instead(torch.tensor([5]))),
    ],
    ("npu_dequant_swiglu_quant", "mode"): [
        swiglu(swiglu_mode=instead(1)),
        swiglu(activate_dim=instead(0)),
    ],
    ("npu_dequant_swiglu_quant", "quant_mode"): [swiglu(quant_mode=instead(2))],
    ("npu_dequant_swiglu_quant", "static scales"): [
        swiglu(quant_mode=instead(0)),
        swiglu(static=True, quant_scale=torch.Tensor.half),
        swiglu(static=True, quant_offset=lambda o: o.repeat(5)),
        swiglu(quant_scale=instead(torch.ones(1))),
    ],
}

INT8_VIOLATIONS = {
    family: {name: calls for (of, name), calls in BROKEN.items() if of == family}
    for family, _ in BROKEN
}
"""By family and name of the demand."""
