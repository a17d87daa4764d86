"""Calls of norms, activations, rotations, int8 layers, products and recurrent layers."""

from functools import partial

import torch

from ascend_emulator.operators import delta_rule
from tests.emulator.operators import calls, latent_calls, layer_calls
from tests.emulator.operators.calls import strided
from tests.emulator.operators.layer_calls import int32
from tests.emulator.operators.violations.breaking import (
    every,
    in_profile,
    int8,
    of,
    sized,
    zeros,
)

T = torch.Tensor
FAMILIES = {}

ROWS = torch.ones(3, 8)
rms_norm = of("npu::npu_rms_norm", lambda: {"input": ROWS, "gamma": torch.ones(8)})
ADDED = {"x1": ROWS, "x2": ROWS, "gamma": torch.ones(8)}
add_rms_norm = of("npu::npu_add_rms_norm", lambda: ADDED)
FAMILIES["norms"] = [
    ("dtype", rms_norm(input=T.double), add_rms_norm(x1=T.int)),
    ("16 bits", of("npu::npu_add_rms_norm_cast", lambda: ADDED)()),
    ("same dtype", rms_norm(gamma=T.half)),
    ("rank", rms_norm(input=torch.ones(8)), rms_norm(input=torch.ones(*[1] * 8, 8))),
    ("gamma shape", rms_norm(gamma=torch.ones(4)), rms_norm(gamma=ROWS)),
    ("equal shapes", add_rms_norm(x2=torch.ones(1, 8)), add_rms_norm(x2=T.half)),
]

swiglu = of("npu::npu_swiglu", lambda: {"input": ROWS})
FAMILIES["npu_swiglu"] = [
    ("dtype", swiglu(input=T.double)),
    ("rank", swiglu(input=torch.ones(())), swiglu(input=torch.ones([2] * 9))),
    ("dim", swiglu(dim=2)),
    ("even", swiglu(dim=0)),
]

clipped = of(layer_calls.CLIPPED, layer_calls.clipped)
FAMILIES["npu_clipped_swiglu"] = [
    ("dtype", clipped(x=T.double)),
    ("contiguous", clipped(x=strided)),
    ("dim", clipped(dim=2), clipped(x=lambda x: x[0])),
    ("even", clipped(dim=0)),
    ("group_index", clipped(group_index=int32(3)), clipped(group_index=torch.tensor([[3]]))),
]

GELUS = ("npu_gelu", "npu_geglu", "npu_fast_gelu")
gelu, geglu, fast_gelu = (of(f"npu::{name}", lambda: {"input": ROWS}) for name in GELUS)
FAMILIES["gelu"] = [
    ("dtype", gelu(input=T.double), geglu(input=T.int), fast_gelu(input=T.int)),
    ("rank", gelu(input=torch.ones(())), geglu(input=torch.ones([2] * 9))),
    ("approximate", gelu(approximate="erf"), geglu(approximate=2)),
    ("dim", geglu(dim=2)),
    ("even", geglu(dim=0)),
]


def rotary(shape=(2, 3, 4, 8), factor=(1, 3, 1, 8), **changes):
    arguments = {"input": torch.ones(shape), "r1": torch.ones(factor), "r2": torch.ones(factor)}
    return of("npu::npu_rotary_mul", lambda: arguments)(**changes)


FAMILIES["npu_rotary_mul"] = [
    ("dtype", rotary(input=T.double)),
    ("same dtype", rotary(r1=T.half)),
    ("rank", rotary((3, 4, 8), (3, 1, 8))),
    ("head size", rotary((2, 3, 4, 7), (1, 3, 1, 7)), rotary((1, 2, 1, 896), (1, 2, 1, 896))),
    ("batch and heads", rotary((1000, 3, 2, 8)), rotary((50, 3, 20, 8), rotary_mode="interleave")),
    ("rotary_mode", rotary(rotary_mode="neox")),
    ("r1 layout", rotary(factor=(1, 3, 4, 8)), rotary(factor=(1, 1, 1, 8))),
    ("equal shapes", rotary(r2=torch.ones(2, 3, 1, 8))),
    ("rotate", rotary(rotate=torch.ones(8)), rotary(rotate=torch.ones(8, 4))),
]

mrope = of("npu::npu_mrope", calls.mrope_arguments)


def sections(*sizes, positions=3, **changes):
    ones = torch.ones(positions, 5, dtype=torch.int64)
    return mrope(positions=ones, mrope_section=list(sizes), **changes)


FAMILIES["npu_mrope"] = [
    ("dtype", mrope(query=T.double, key=T.double, cos_sin_cache=T.double)),
    ("same dtype", mrope(key=T.float), mrope(cos_sin_cache=T.float)),
    ("positions dtype", mrope(positions=T.short)),
    ("rank", mrope(query=lambda q: q.view(5, 4, 128)), mrope(cos_sin_cache=lambda c: c[None])),
    ("positions shape", mrope(positions=lambda p: p[None]), mrope(mrope_section=[16, 24, 24])),
    ("token count", mrope(positions=lambda p: p[:4]), mrope(key=lambda k: k[:4])),
    ("whole heads", mrope(key=lambda k: k[:, :-32].contiguous())),
    ("head size", mrope(head_size=16), mrope(head_size=0)),
    ("rotary size", mrope(cos_sin_cache=lambda c: c[:, :16].contiguous()), mrope(head_size=64)),
    ("dense rows", mrope(query=strided)),
    ("rotary_mode", mrope(rotary_mode="interleaved")),
    ("cache_mode", mrope(cache_mode="interleave")),
    ("cache_mode of 8.5", in_profile("8.5", sections(24, 20, 20, cache_mode="interleave"))),
    ("heads of 8.5", in_profile("8.5", mrope(query=lambda q: q[:, :128].repeat(1, 54)))),
    ("mrope_section", sections(16, 16, 32), sections(8, 12, 12)),
    ("positions range", mrope(positions=lambda p: p + 60), mrope(positions=lambda p: p - 9)),
]

embedded = of(layer_calls.ROTARY, layer_calls.rotary)
FAMILIES["npu_rotary_embedding"] = [
    ("dtype", embedded(query=T.float), embedded(cos_sin_cache=T.float), embedded(key=T.bfloat16)),
    ("positions dtype", embedded(positions=T.short)),
    ("shapes", embedded(head_size=8), embedded(positions=lambda p: p[:3])),
    ("contiguous", embedded(query=strided), embedded(key=strided)),
    ("positions range", embedded(positions=lambda p: p + 1), embedded(positions=lambda p: p - 1)),
]


limits = of(
    "npu::npu_top_k_top_p",
    lambda: {"logits": torch.zeros(3, 9), "p": torch.full((3,), 0.5), "k": int32(4, 4, 4)},
)
FAMILIES["npu_top_k_top_p"] = [
    ("dtype", limits(logits=T.double)),
    ("rank", limits(logits=torch.zeros(3, 3, 9))),
    ("limits", limits(p=None, k=None)),
    ("limit dtype", limits(p=T.half), limits(k=T.long)),
    ("limit shape", limits(p=torch.ones(3, 1)), limits(k=int32(1, 1))),
    ("p range", limits(p=torch.full((3,), 1.5)), limits(p=torch.full((3,), float("nan")))),
    ("k range", limits(k=int32(0, 0, 0)), limits(k=int32(10, 10, 10))),
]


def padded(indices):
    return torch.cat((indices[:-1], torch.full_like(indices[:1], -1)))


scatter = of(layer_calls.SCATTER, layer_calls.scatter)
FAMILIES["npu_scatter_nd_update"] = [
    ("dtype", scatter(input=T.double, updates=T.double)),
    ("same dtype", scatter(updates=T.half)),
    ("indices dtype", scatter(indices=T.short)),
    ("shapes", scatter(indices=lambda i: i[0]), scatter(updates=lambda u: u[:2])),
    ("indices range", scatter(indices=lambda i: i + 1), scatter(indices=lambda i: i - 1)),
    ("padding", *(in_profile(name, scatter(indices=padded)) for name in ("8.5", "docs"))),
]

weight_quant = of(layer_calls.WEIGHT_QUANT, layer_calls.weight_quant)
int4_groups = of(layer_calls.WEIGHT_QUANT, layer_calls.int4_groups)
FAMILIES["npu_weight_quant_batchmatmul"] = [
    ("dtype", weight_quant(x=T.float), weight_quant(weight=T.long)),
    ("form", weight_quant(quant_scale=torch.ones(6))),
    (
        "groups",
        weight_quant(antiquant_group_size=32),
        int4_groups(antiquant_group_size=16),
        int4_groups(antiquant_group_size=64),
    ),
    ("shapes", weight_quant(x=lambda x: x[None]), weight_quant(weight=lambda w: w[:5])),
    (
        "scales",
        weight_quant(antiquant_scale=T.float),
        weight_quant(antiquant_offset=zeros(5)),
        int4_groups(antiquant_scale=zeros(1, 8)),
    ),
    ("bias", weight_quant(bias=T.float), weight_quant(bias=strided)),
    ("inner_precise", weight_quant(inner_precise=2)),
]

add = of(layer_calls.ADD, layer_calls.add)
FAMILIES["npu_matmul_add_fp32"] = [
    ("dtype", add(x=T.float), add(weight=T.bfloat16)),
    ("shapes", add(x=lambda x: x[:4])),
    ("sum", add(C=T.half), add(C=strided), add(C=lambda c: c[:3])),
]

cast = of("npu::npu_format_cast", lambda: {"input": zeros(4, 8), "acl_format": 29})
FAMILIES["npu_format_cast"] = [
    ("format", cast(acl_format=4)),
    ("dtypes", cast(customize_dtype=1), cast(input_dtype=1)),
]

dynamic = of(layer_calls.DYNAMIC, layer_calls.dynamic)
FAMILIES["npu_dynamic_quant"] = [
    ("dtype", dynamic(input=T.float)),
    ("rank", dynamic(input=lambda x: x[0])),
    ("form", dynamic(smooth_scales=zeros(8)), dynamic(quant_mode="pertensor")),
]

quantize = of(layer_calls.QUANTIZE, layer_calls.quantize)
multiplied = of(layer_calls.QUANTIZE, layer_calls.multiplied)
FAMILIES["npu_quantize"] = [
    ("dtype", quantize(input=T.double)),
    ("form", quantize(dtype=layer_calls.CODES[torch.int32])),
    ("scale dtype", quantize(scales=T.half)),
    ("offset dtype", quantize(zero_points=T.float), quantize(zero_points=T.bfloat16)),
    ("sizes", quantize(zero_points=lambda z: z.repeat(8))),
    ("axis", quantize(axis=2)),
    ("dtype of factors", multiplied(scales=T.float), multiplied(zero_points=T.float)),
    ("shape of factors", multiplied(zero_points=lambda z: z[:1]), multiplied(axis=-2)),
    ("axis of factors", multiplied(axis=2), multiplied(axis=-3)),
]

matmul = of(layer_calls.QUANT_MATMUL, layer_calls.quant_matmul)
static = of(layer_calls.QUANT_MATMUL, lambda: layer_calls.quant_matmul(static=True))
static_bf16 = of(layer_calls.QUANT_MATMUL, lambda: layer_calls.quant_matmul(torch.bfloat16, True))
FAMILIES["npu_quant_matmul"] = [
    ("dtype", matmul(x1=T.half), matmul(x2=T.half)),
    ("form", matmul(offset=torch.zeros(6)), matmul(group_sizes=[0, 0, 32])),
    ("shapes", matmul(x1=lambda x: x[:, :4].contiguous()), matmul(x1=lambda x: x[None])),
    ("layout", matmul(x2=strided)),
    ("inner limit", static(x1=int8(zeros(1, 65536)), x2=int8(zeros(6, 65536)).t())),
    ("result", matmul(output_dtype=None), matmul(output_dtype=6)),
    ("scale dtype", matmul(scale=T.bfloat16), matmul(scale=T.long), static_bf16(scale=T.long)),
    ("scale shape", matmul(scale=lambda s: s[:5]), matmul(scale=lambda s: s[:, None])),
    ("token scale", matmul(pertoken_scale=T.half), matmul(pertoken_scale=lambda s: s[:4])),
    ("bias", matmul(bias=lambda b: b[:5]), matmul(bias=T.bfloat16), static(bias=T.float)),
]

int4_matmul = of(layer_calls.QUANT_MATMUL, layer_calls.int4_matmul)
int4_channels = of(layer_calls.QUANT_MATMUL, lambda: layer_calls.int4_matmul(groups=0))


def wide_int4(inputs):
    """A matrix of so many inputs in groups."""
    words = torch.zeros(inputs, 2, dtype=torch.int32)
    scales = layer_calls.bits_of(inputs // 256, 16)
    return int4_matmul(x1=int8(zeros(5, inputs)), x2=words, scale=scales)


FAMILIES["npu_quant_matmul, int4 weights"] = [
    ("dtype", int4_matmul(x1=T.half)),
    ("form", int4_matmul(bias=torch.zeros(16)), int4_matmul(y_scale=torch.ones(16))),
    ("result", int4_matmul(output_dtype=None), int4_matmul(output_dtype=3)),
    ("contiguous", int4_matmul(x1=strided), int4_matmul(x2=strided)),
    ("shapes", int4_matmul(x1=lambda x: x[:, :256].contiguous())),
    ("channels of 8.5", in_profile("8.5", int4_channels())),
    ("groups", int4_matmul(group_sizes=[0, 0, 128]), int4_channels(group_sizes=[0, 0, 256])),
    ("scale", int4_matmul(scale=lambda s: s[:1]), int4_channels(scale=T.float)),
    ("upper halves", int4_matmul(scale=T.neg), int4_channels(scale=lambda s: s | 1 << 46)),
    ("token scale", int4_matmul(pertoken_scale=lambda s: s[0]), int4_matmul(pertoken_scale=None)),
    ("offset", int4_matmul(offset=None), int4_matmul(offset=T.half)),
    ("inner limit", wide_int4(29696), in_profile("8.5", wide_int4(18688))),
]

dynamic_norm = of(layer_calls.NORM, layer_calls.norm)
static_norm = of(layer_calls.STATIC_NORM, layer_calls.static_norm)
BOTH = (dynamic_norm, static_norm)
FAMILIES["norms to int8"] = [
    ("dtype", *every(BOTH, x1=T.float, x2=T.float, gamma=T.float)),
    ("rank", dynamic_norm(x1=lambda x: x[0], x2=lambda x: x[0])),
    ("equal shapes", *every(BOTH, x2=lambda x: x[:4]), *every(BOTH, x2=T.bfloat16)),
    ("gamma", *every(BOTH, gamma=lambda g: g[:4]), *every(BOTH, gamma=T.bfloat16)),
    ("epsilon", dynamic_norm(epsilon=0.0)),
    ("factors", dynamic_norm(smooth_scale1=zeros(4)), dynamic_norm(smooth_scale1=torch.zeros(8))),
    ("form", dynamic_norm(smooth_scale2=zeros(8)), dynamic_norm(output_mask=[True, True])),
    ("scale dtype", static_norm(scales1=T.bfloat16)),
    ("offset dtype", static_norm(zero_points1=T.bfloat16)),
    ("static shapes", static_norm(scales1=lambda s: s[:1])),
]

rounding = of(layer_calls.SWIGLU, layer_calls.swiglu)
static_swiglu = of(layer_calls.SWIGLU, lambda: layer_calls.swiglu(static=True))
FAMILIES["npu_dequant_swiglu_quant"] = [
    ("dtype", rounding(x=T.float)),
    ("shape", rounding(x=lambda x: x[0]), rounding(x=lambda x: x[:, :11].contiguous())),
    ("form", rounding(weight_scale=torch.ones(1, 12)), rounding(group_index=torch.tensor([5]))),
    ("mode", rounding(swiglu_mode=1), rounding(activate_dim=0)),
    ("quant_mode", rounding(quant_mode=2)),
    ("static scales", rounding(quant_mode=0), static_swiglu(quant_offset=lambda o: o.repeat(5))),
]

transposed = of(latent_calls.TRANSPOSE, latent_calls.matmul_of_heads)
FAMILIES["npu_transpose_batchmatmul"] = [
    ("dtype", transposed(weight=T.half)),
    ("shapes", transposed(weight=torch.zeros(3, 32, 16)), transposed(input=torch.zeros(3, 128))),
    ("permutations", transposed(perm_x1=[2, 0, 1]), transposed(perm_y=[0, 1, 2])),
    ("sizes", transposed(weight=torch.zeros(4, 32, 20))),
    ("unused arguments", transposed(batch_split_factor=2)),
]

recurrent = of(delta_rule.RECURRENT, layer_calls.recurrent)
chunk = of(delta_rule.CHUNK, layer_calls.chunk)


recurrent_of = partial(sized, delta_rule.RECURRENT, layer_calls.recurrent)
chunk_of = partial(sized, delta_rule.CHUNK, layer_calls.chunk, (1, 1))
FAMILIES["npu_recurrent_gated_delta_rule"] = [
    ("dtype", *(recurrent(**{n: T.half}) for n in ("query", "key", "value", "beta"))),
    ("dtype of states", recurrent(state=T.float)),
    ("all given", recurrent(beta=None), recurrent(scale=None), recurrent(ssm_state_indices=None)),
    ("shapes", recurrent(key=lambda k: k[:, :1]), recurrent(state=lambda s: s[:, :2].contiguous())),
    ("heads", recurrent_of(key_heads=3, value_heads=4, dim=16)),
    ("room for all tokens", recurrent(ssm_state_indices=lambda i: i % 4, state=lambda s: s[:4])),
    ("contiguous states", recurrent(state=strided)),
    ("integers", recurrent(actual_seq_lengths=T.long), recurrent(num_accepted_tokens=int32(1, 1))),
    ("lengths", recurrent(actual_seq_lengths=int32(1, 3, 2)), recurrent_of((9,), blocks=12)),
    ("accepted", recurrent(num_accepted_tokens=int32(1, 4, 1))),
    ("state indices", recurrent(ssm_state_indices=int32(1, 2, 3, 4, 9))),
    ("one sequence a state", recurrent(ssm_state_indices=int32(1, 2, 3, 4, 1))),
    ("lengths of vectors", recurrent(query=lambda q: q * 9), recurrent(key=lambda k: k * 9)),
    ("decays", recurrent(g=T.neg), recurrent(g=T.bfloat16), recurrent(g=lambda g: g[:, :1])),
    ("rates", recurrent(beta=lambda b: b + 1), recurrent(beta=T.neg)),
    ("no decays of elements", recurrent(gk=torch.zeros(5, 4, 128))),
]

FAMILIES["npu_chunk_gated_delta_rule"] = [
    ("dtype", *(chunk(**{n: T.half}) for n in ("query", "key", "value", "beta", "initial_state"))),
    ("all given", chunk(beta=None), chunk(initial_state=None), chunk(actual_seq_lengths=None)),
    ("shapes", chunk(key=lambda k: k[1:]), chunk(beta=lambda b: b[:, :1])),
    ("heads", chunk_of(key_heads=3, value_heads=4), chunk_of(dim=64)),
    ("lengths", chunk(actual_seq_lengths=int32(3, 2)), chunk(actual_seq_lengths=T.long)),
    ("decays", chunk(g=T.neg), chunk(g=T.double)),
]
