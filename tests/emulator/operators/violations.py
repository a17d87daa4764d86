"""Calls that break one demand and nothing else: a row has the demand's name and some of them.

``VIOLATIONS[family, name]`` is a list of functions without arguments that make such a call.
"""

from functools import partial

import torch

from ascend_emulator import profiles
from ascend_emulator.operators import check_placement, delta_rule
from ascend_emulator.operators.fused_kernel_constraints import family_name
from tests.emulator.operators import calls, latent_calls, layer_calls
from tests.emulator.operators.calls import (
    FUSION,
    PROMPTS,
    V1,
    V2,
    Batch,
    band,
    call,
    fused,
    fusion_arguments,
    strided,
    triangle,
)
from tests.emulator.operators.layer_calls import int32

T = torch.Tensor
RESHAPE, SCATTER = "atb::_npu_reshape_and_cache", "npu::npu_scatter_pa_kv_cache"


def changed(arguments, changes):
    """Arguments with some given, or replaced by a function of themselves."""
    return arguments | {
        name: change(arguments.get(name)) if callable(change) else change
        for name, change in changes.items()
    }


FAMILIES = {}
VALID = {}
"""Functions that make the arguments of a valid call, by operator and overload."""


def of(name, make, overload=""):
    """Function that makes a call of an operator, with some of its arguments changed."""
    VALID.setdefault((name, overload), make)
    return lambda **changes: lambda: call(name, changed(make(), changes), overload)


def sized(name, make, *lengths, **sizes):
    """The call of other sizes, with which it is refused."""
    return of(name, partial(make, *lengths, **sizes))()


def every(breakers, **changes):
    """The same change of several calls."""
    return [breaker(**changes) for breaker in breakers]


def in_profile(profile, violate):
    """The call in a profile."""

    def run():
        with profiles.using(profile):
            return violate()

    return run


def int8(tensor):
    return tensor.to(torch.int8)


def zeros(*shape, dtype=torch.float16):
    return torch.zeros(shape, dtype=dtype)


def first(function):
    """The same for the first tensor of a list."""
    return lambda tensors: [function(tensors[0]), *tensors[1:]]


def instead(value):
    return lambda _: value


LENGTHS = [(5, 2), (3, 1), (200, 7)]
ONE_TOKEN, LATER = [(3, 1), (9, 1)], [(3, 1), (200, 1)]
SIZES = ("dtype", "heads", "head_size", "block_size")
NO_MASK = {"sparse_mode": 0, "atten_mask": None}


def attention(make, lengths, version, changes):
    """A call of fused attention over a batch, of which `make` has the arguments."""
    sizes = {name: changes.pop(name) for name in SIZES if name in changes}
    return lambda: fused(changed(make(Batch(lengths, **sizes)), changes), version)


def packed(lengths=LENGTHS, version=1, **changes):
    return attention(Batch.packed, lengths, version, changes)


def paged(lengths=LENGTHS, version=1, form=3, **changes):
    return attention(lambda batch: batch.paged(form), lengths, version, changes)


def padded(layout, lengths=LENGTHS, version=1, **changes):
    return attention(lambda batch: batch.padded(layout), lengths, version, changes)


def one_token(layout="BSND", **changes):
    return padded(layout, ONE_TOKEN, **changes)


def decoded(**changes):
    """One token of each request over the cache, in a layout with a batch axis."""
    return paged(LATER, query=lambda q: q.unsqueeze(1), input_layout="BSND", **NO_MASK | changes)


def many_requests(count, version=1):
    """Prompts of one token each."""
    ends = list(range(1, count + 1))
    lengths = {"actual_seq_lengths": ends, "actual_seq_lengths_kv": ends}
    return packed([(0, count)], version, heads=(2, 1), **lengths)


def meta(tensor):
    """Without memory, for sizes that would not fit."""
    return tensor.to("meta")


def writing(**changes):
    """A call that writes to tensors given."""
    arguments = Batch(LENGTHS).packed()
    query = arguments["query"]
    out = [torch.empty_like(query), torch.empty(query.shape[0], query.shape[1], 1)]
    return of(V1, lambda: arguments | {"out": out}, "out")(**changes)


HUGE = instead(torch.empty(2**31 // (128 * 32) + 1, 128, 32, dtype=torch.float16, device="meta"))
FAMILIES["fused attention"] = [
    ("dtype", packed(query=T.float), packed(key=T.float), paged(value=int8)),
    ("same dtype", paged(version=2, key=T.bfloat16)),
    ("contiguous", packed(query=strided), packed(key=strided), paged(value=strided)),
    ("layout", packed(input_layout="NTD"), packed(input_layout="tnd")),
    ("rank", packed(query=lambda q: q.flatten(1))),
    ("rank of key", packed(key=lambda k: k.flatten(1))),
    ("key and value shapes", paged(value=lambda v: v[1:])),
    ("tokens", packed([(0, 65537)], heads=(1, 1))),
    ("BNSD_BSND", one_token("BNSD_BSND")),
    ("unsupported argument", packed(pse_shift=torch.zeros(1, 4, 2, 7)), packed(antiquant_mode=1)),
    ("inner_precise", packed(inner_precise=4)),
    ("num_heads", packed(num_heads=2), padded("BNSD", version=2, num_heads=5)),
    ("head limit", packed(heads=(257, 257))),
    ("num_key_value_heads", packed(num_key_value_heads=3), packed(heads=(65, 1))),
    ("head size", packed(head_size=24), packed(head_size=528)),
    ("row width", padded("BSH", heads=(256, 256), head_size=256)),
    ("heads of key", packed(num_key_value_heads=4), padded("BNSD", num_key_value_heads=0)),
    ("host lengths", packed(actual_seq_lengths=torch.tensor([2, 3, 10]))),
    ("lengths required", packed(actual_seq_lengths=None), paged(actual_seq_lengths_kv=None)),
    ("requests", many_requests(65537, 2), packed(actual_seq_lengths=[], actual_seq_lengths_kv=[])),
    ("cumulative lengths", packed(actual_seq_lengths=[2, 1, 10])),
    ("last length", paged(actual_seq_lengths=[2, 3, 9])),
    ("equal counts", paged(actual_seq_lengths_kv=[7, 4])),
    ("cumulative kv lengths", packed(actual_seq_lengths_kv=[7, 4, 207])),
    ("count of lengths", padded("BSND", actual_seq_lengths=[2, 1])),
    ("lengths in query", padded("BSND", actual_seq_lengths=[2, 1, 8])),
    ("lengths in key", padded("BNSD", actual_seq_lengths_kv=[7, 4, 208])),
    ("batch of key", padded("BSND", key=lambda k: k[:2], value=lambda v: v[:2])),
    ("as many keys as queries", paged(actual_seq_lengths_kv=[1, 4, 207])),
    ("block table", paged(block_table=T.long), paged(version=2, block_table=T.flatten)),
    ("block table contiguous", paged(block_table=lambda t: t[:, :2])),
    ("block table rows", paged(block_table=lambda t: t[:2])),
    ("kv lengths required", decoded(actual_seq_lengths_kv=None)),
    ("kv lengths in table", paged(actual_seq_lengths_kv=[7, 4, 385])),
    ("block ids", paged(block_table=lambda t: t + 4)),
    ("cache form", paged(form=4, num_key_value_heads=4)),
    ("cache row width", paged([(0, 1)], heads=(256, 256), head_size=272, key=meta, value=meta)),
    ("cache elements", paged(key=HUGE, value=HUGE)),
    ("block size", paged(ONE_TOKEN, block_size=8), paged(version=2, block_size=1040)),
    ("sparse_mode", packed(sparse_mode=5), packed(sparse_mode=-1)),
    ("sparse modes of TND", packed(sparse_mode=0), paged(version=2, sparse_mode=2)),
    ("sparse modes of one token", one_token(sparse_mode=3, atten_mask=triangle())),
    ("band is not empty", paged(sparse_mode=4, pre_tokens=1, next_tokens=-2)),
    ("band reaches the keys", paged(sparse_mode=4, pre_tokens=-3, next_tokens=9)),
    ("mask required", packed(atten_mask=None), one_token(sparse_mode=1)),
    ("mask dtype", paged(atten_mask=triangle(torch.float16))),
    ("mask contiguous", paged(atten_mask=triangle().T)),
    ("compressed mask shape", paged(atten_mask=lambda m: m[:2047].contiguous())),
    ("full mask shape", one_token(atten_mask=torch.zeros(1, 10).bool())),
    ("workspace", writing(workspace=torch.zeros(10**4)), writing(workspace=zeros(2, 10**4))),
    ("workspace size", writing(workspace=zeros(5))),
    ("out", writing(out=[zeros(10, 4, 16)])),
    ("attention_out", writing(out=[torch.empty(10, 4, 16), torch.empty(0)])),
    ("softmax_lse out", writing(softmax_lse_flag=True, out=[zeros(10, 4, 16), torch.empty(1)])),
]

BF16 = {"dtype": torch.bfloat16}
fresh, cached = partial(packed, **BF16), partial(paged, **BF16)
WINDOW = {"sparse_mode": 4, "pre_tokens": 7, "next_tokens": 0}
# What reaches PFA in TND on CANN 8.5.
EQUAL = {"heads": (4, 4), "head_size": 192}
wide = partial(cached, LATER, head_size=192)


def shared(blocks, **changes):
    """Three requests of two blocks each over a cache of few blocks."""
    caches = dict.fromkeys(("key", "value"), lambda cache: cache[:blocks].nan_to_num())
    return cached([(200, 1)] * 3, **caches, block_table=lambda table: table % blocks, **changes)


def keys(*lengths, **changes):
    """Two requests with so many keys."""
    return cached(LATER, actual_seq_lengths_kv=list(lengths), **changes)


# By kernel and profile: a demand, a call that it refuses, and one beside it that it takes.
BY_KERNEL = {
    ("route", "9.1"): [
        ("zero heads of a paged cache", cached(heads=(4, 4), num_key_value_heads=0), cached()),
    ],
    ("V3", "9.1"): [
        ("head size of V3", cached(form=4), cached(form=4, head_size=64)),
        ("head size of V3", fresh(inner_precise=2), fresh(inner_precise=2, head_size=192)),
        ("block size of V3", wide(block_size=576), cached(head_size=64, block_size=576)),
        ("block size of V3", wide(version=2, block_size=640), wide(version=2, block_size=512)),
    ],
    ("PFA", "8.5"): [
        ("dtype of PFA", packed(**EQUAL), fresh(**EQUAL)),
        ("head size of PFA", fresh(heads=(4, 4), head_size=96), fresh(head_size=96)),
        ("head size of PFA", cached(**WINDOW), cached(**WINDOW, head_size=128)),
        ("head size of PFA", cached(form=4, head_size=256), cached(head_size=256)),
        ("grouped heads of 192", fresh(**WINDOW, head_size=192), fresh(head_size=192)),
        ("window of 192", cached(**EQUAL, **WINDOW), cached(**EQUAL)),
        ("block size of PFA", cached(**EQUAL, block_size=64), cached(**EQUAL, block_size=256)),
        ("some keys", keys(0, 0, **EQUAL, **NO_MASK), keys(0, 1, **EQUAL, **NO_MASK)),
        ("sum of blocks in PFA", shared(5, **EQUAL), shared(6, **EQUAL)),
        ("lengths in PFA", fresh([(0, 1)] * 4097, heads=(1, 1), head_size=192), fresh(**EQUAL)),
    ],
    ("IFA", "8.5"): [
        ("head size 512 without rope", fresh(head_size=512), fresh(head_size=256)),
        ("block size of IFA", decoded(block_size=640), decoded(block_size=512)),
    ],
    ("documentation", "docs"): [
        ("sum of blocks", shared(5), shared(6)),
        ("number of lengths", many_requests(4097), many_requests(9)),
        ("keys for every query of mode 3", keys(0, 1), keys(1, 1)),
        ("keys for every query of mode 3", keys(0, 1), keys(0, 1, **NO_MASK)),
        ("block size of TND", cached(block_size=64), cached(LATER, block_size=64)),
        ("block size of TND", cached(LATER, 2, block_size=256), cached(LATER, 2)),
        ("inner_precise of TND", fresh(head_size=64, inner_precise=2), fresh(head_size=64)),
    ],
}

reshape, scatter = of(RESHAPE, calls.cache_arguments), of(SCATTER, calls.scatter_arguments)
WRITERS = (reshape, scatter)


def slots(change):
    """Slots of either writer."""
    return [reshape(slot_indices=change), scatter(slot_mapping=change)]


FAMILIES["cache write"] = [
    ("dtype", *every(WRITERS, key=T.float, value=T.float, key_cache=T.float, value_cache=T.float)),
    ("same dtype", *every(WRITERS, value=T.bfloat16), *every(WRITERS, value_cache=T.bfloat16)),
    ("rank", *every(WRITERS, key=lambda k: k.flatten(1))),
    ("key and value shapes", *every(WRITERS, value=lambda v: v[:4])),
    ("cache form", *every(WRITERS, key_cache=lambda c: c.flatten(2))),
    ("cache blocks", *every(WRITERS, value_cache=lambda c: c[1:])),
    ("contiguous", *every(WRITERS, key=strided), *every(WRITERS, value=strided), *slots(strided)),
    ("contiguous cache", *every(WRITERS, key_cache=strided), *every(WRITERS, value_cache=strided)),
    ("slot dtype", reshape(slot_indices=T.long), scatter(slot_mapping=T.short)),
    ("slot count", *slots(int32(1, 2, 3, 4)), *slots(lambda s: s[None])),
    ("slot range", *slots(int32(1, 2, 3, 4, 64)), *slots(int32(1, 2, 3, 4, -2))),
    ("distinct slots", *slots(int32(1, 2, 3, 4, 1)), *slots(int32(0, 0, 0, -1, 1))),
    ("cache_mode", scatter(cache_mode="PA_NZ")),
    ("compression", scatter(seq_lens=torch.ones(1))),
]


def atb(name, make, **sizes):
    return of(f"atb::{name}", lambda: make(**sizes)[0])


flash = atb("_npu_flash_attention", calls.flash_arguments)
decode = atb("_npu_paged_attention", calls.decode_arguments)
splitfuse = atb("_npu_paged_attention_splitfuse", calls.splitfuse_arguments)
workspace = atb("_npu_paged_attention_get_workspace", calls.decode_arguments)
decode_of = partial(atb, "_npu_paged_attention", calls.decode_arguments)
ANY, CACHED = (flash, decode, splitfuse, workspace), (decode, splitfuse, workspace)

FAMILIES["atb attention"] = [
    ("dtype", *every(ANY, query=T.float)),
    ("same dtype", flash(key=T.bfloat16), *every(ANY, out=T.float)),
    ("rank", *every(ANY, query=lambda q: q.flatten(1))),
    ("contiguous", *every(ANY, query=strided), *every(CACHED, key_cache=strided)),
    ("num_heads", *every(ANY, num_heads=lambda n: n // 2)),
    ("num_kv_heads", *every(ANY, num_kv_heads=3), decode(num_kv_heads=0)),
    ("head size", atb("_npu_flash_attention", calls.flash_arguments, head_size=592)()),
    ("out", *every(ANY, out=lambda o: o[:-1])),
    ("key and value shapes", flash(key=lambda k: k[:-1])),
    ("cache form", *every(CACHED, key_cache=lambda c: c.flatten(2)), decode(num_kv_heads=4)),
    ("block size", decode_of(block_size=8)(), decode_of(block_size=256)()),
    ("block area", decode_of(head_size=256, block_size=128)()),
    ("block table", *every(CACHED, block_table=T.long)),
    ("block table rows", *every(CACHED, block_table=lambda t: t[:-1])),
    ("block ids", *every(CACHED, block_table=lambda t: t + 9)),
    ("length dtype", *every((flash, splitfuse), seq_len=T.long)),
    ("context lengths in table", *every(CACHED, context_lens=lambda n: n + 400)),
    ("one token for each request", decode(context_lens=lambda n: n[:-1])),
    ("sum of lengths", flash(seq_len=lambda n: n.cumsum(0).int())),
    ("as many keys as queries", splitfuse(context_lens=lambda n: n.clamp(max=20))),
    ("mask dtype", *every((flash, splitfuse), mask=T.bool), splitfuse(mask=T.bfloat16)),
    ("square mask", flash(mask=lambda m: m[:5, :5].contiguous()), flash(mask=lambda m: m[0])),
    ("mask rows", splitfuse(mask=lambda m: m[:-1]), splitfuse(mask=lambda m: m[0])),
    ("workspace", decode(workspace=zeros(5, dtype=torch.uint8))),
]

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

gelu, geglu = (of(f"npu::{name}", lambda: {"input": ROWS}) for name in ("npu_gelu", "npu_geglu"))
FAMILIES["gelu"] = [
    ("dtype", gelu(input=T.double), geglu(input=T.int)),
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

matmuls = of("npu::npu_grouped_matmul", calls.matmul_arguments)
FAMILIES["npu_grouped_matmul"] = [
    ("not grouped", matmuls(group_type=2), matmuls(group_list=torch.tensor([2, 3]))),
    ("tensor count", matmuls(x=lambda x: x[:1]), matmuls(bias=lambda b: b[:1])),
    ("dtype", matmuls(weight=first(T.float)), matmuls(x=lambda x: [each.double() for each in x])),
    ("shapes", matmuls(x=first(lambda x: x[:, :4].contiguous())), matmuls(x=first(lambda x: x[0]))),
    ("contiguous", matmuls(x=first(strided))),
    ("transposed alike", matmuls(weight=first(T.contiguous))),
    ("inner limit", matmuls(x=[zeros(1, 65536)] * 2, weight=[zeros(4, 65536).t()] * 2, bias=None)),
    ("bias", matmuls(bias=first(T.float)), matmuls(bias=first(lambda b: b[:1]))),
]

grouped = of("npu::npu_grouped_matmul", layer_calls.rows)
FAMILIES["npu_grouped_matmul, rows"] = [
    ("one tensor each", grouped(x=lambda x: x * 2), grouped(split_item=0)),
    ("plain", grouped(bias=[zeros(3, 6)]), grouped(act_type=5), grouped(output_dtype=1)),
    ("dtype", grouped(weight=first(T.float)), grouped(x=first(T.double))),
    ("shapes", grouped(weight=first(lambda w: w[0]))),
    ("contiguous", grouped(x=first(strided))),
    ("inner limit", grouped(x=[zeros(7, 65536)], weight=[zeros(3, 6, 65536).mT])),
    ("group list", grouped(group_list=T.int), grouped(group_list=None), grouped(group_list_type=2)),
    ("group sizes", grouped(group_list=torch.tensor([2, -1, 3]))),
]

int8_rows = of("npu::npu_grouped_matmul", layer_calls.int8_rows)
FAMILIES["npu_grouped_matmul, int8 rows"] = [
    ("one tensor each", int8_rows(weight=lambda w: w * 2), int8_rows(split_item=0)),
    ("form", int8_rows(bias=[zeros(3, 6, dtype=torch.int32)]), int8_rows(act_type=5)),
    ("dtype", int8_rows(weight=first(T.half))),
    ("shapes", int8_rows(x=first(lambda x: x[:, :4].contiguous()))),
    ("contiguous", int8_rows(x=first(strided)), int8_rows(weight=first(strided))),
    ("inner limit", int8_rows(x=[int8(zeros(7, 65536))], weight=[int8(zeros(3, 6, 65536)).mT])),
    ("result", int8_rows(output_dtype=None)),
    ("scale", int8_rows(scale=None), int8_rows(scale=first(lambda s: s.t().contiguous()))),
    ("token scale", int8_rows(per_token_scale=None), int8_rows(per_token_scale=first(T.half))),
    ("group list", int8_rows(group_list=None), int8_rows(group_list_type=2)),
    ("group sizes", int8_rows(group_list=torch.tensor([2, -1, 3]))),
]

dynamic = of(layer_calls.DYNAMIC, layer_calls.dynamic)
FAMILIES["npu_dynamic_quant"] = [
    ("dtype", dynamic(input=T.float)),
    ("rank", dynamic(input=lambda x: x[0])),
    ("form", dynamic(smooth_scales=zeros(8)), dynamic(quant_mode="pertensor")),
]

quantize = of(layer_calls.QUANTIZE, layer_calls.quantize)
FAMILIES["npu_quantize"] = [
    ("dtype", quantize(input=T.double)),
    ("form", quantize(div_mode=False), quantize(dtype=layer_calls.CODES[torch.int32])),
    ("scale dtype", quantize(scales=T.half)),
    ("offset dtype", quantize(zero_points=T.float), quantize(zero_points=T.bfloat16)),
    ("sizes", quantize(zero_points=lambda z: z.repeat(8))),
    ("axis", quantize(axis=2)),
]

matmul = of(layer_calls.QUANT_MATMUL, layer_calls.quant_matmul)
static = of(layer_calls.QUANT_MATMUL, lambda: layer_calls.quant_matmul(static=True))
static_bf16 = of(layer_calls.QUANT_MATMUL, lambda: layer_calls.quant_matmul(torch.bfloat16, True))
FAMILIES["npu_quant_matmul"] = [
    ("dtype", matmul(x1=T.half), matmul(x2=T.int)),
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

routing = of(layer_calls.INIT_ROUTING, layer_calls.routing)
FAMILIES["npu_moe_init_routing_v2"] = [
    ("dtype", routing(x=T.double), routing(x=int8, quant_mode=1)),
    ("shapes", routing(x=lambda x: x[:5]), routing(expert_idx=T.flatten)),
    ("ids dtype", routing(expert_idx=T.long)),
    ("ids", routing(expert_idx=lambda ids: ids + 2)),
    ("expert_num", routing(expert_num=0), routing(expert_num=5121, expert_tokens_num_type=2)),
    ("active range", routing(active_expert_range=[2, 2]), routing(active_expert_range=[0, 8])),
    ("active_num", routing(active_num=-1), routing(active_num=11)),
    ("unsupported mode", routing(drop_pad_mode=1), routing(row_idx_type=1)),
    ("expert tokens", routing(expert_tokens_num_type=0), routing(expert_tokens_num_flag=False)),
    ("quant_mode", routing(quant_mode=0)),
    ("scale", routing(scale=torch.ones(5)), routing(quant_mode=1, scale=torch.ones(2, 8))),
]

unpermute = of(layer_calls.TOKEN_UNPERMUTE, layer_calls.unpermute)
FAMILIES["npu_moe_token_unpermute"] = [
    ("dtype", unpermute(permuted_tokens=T.double), unpermute(probs=T.int)),
    ("shapes", unpermute(probs=lambda p: p[:2]), unpermute(sorted_indices=lambda s: s.view(3, 2))),
    ("indices dtype", unpermute(sorted_indices=T.long)),
    ("negative index", unpermute(probs=torch.ones_like)),
    ("repeated index", unpermute(sorted_indices=lambda s: s.clamp(max=0))),
    ("unsupported mode", unpermute(padded_mode=True), unpermute(restore_shape=[3, 8])),
]

finalize = of(layer_calls.FINALIZE_ROUTING, layer_calls.finalize)
FAMILIES["npu_moe_finalize_routing"] = [
    ("dtype", finalize(expanded_permuted_rows=T.double), finalize(scales=T.half)),
    ("shapes", finalize(expanded_permuted_rows=lambda x: x[:, 0])),
    ("indices dtype", finalize(expanded_src_to_dst_row=T.long)),
    ("indices", finalize(expanded_src_to_dst_row=lambda i: i - 1)),
    (
        "cut rows",
        finalize(
            expanded_permuted_rows=zeros(4, 1, 8208, dtype=torch.bfloat16),
            scales=torch.ones(1, 4),
            expanded_src_to_dst_row=int32(0, 1, 2, 3),
        ),
    ),
    ("unsupported mode", finalize(drop_pad_mode=2), finalize(drop_pad_mode=0)),
    ("unsupported argument", finalize(skip1=zeros(4, 16, dtype=torch.bfloat16)), finalize(k=2)),
]

gating = of(layer_calls.GATING, layer_calls.gating)
FAMILIES["npu_moe_gating_top_k"] = [
    ("dtype", gating(x=T.double), gating(bias=T.half)),
    ("shapes", gating(bias=lambda b: b[:11]), gating(x=torch.zeros(2, 2049), bias=None)),
    ("k", gating(k=0), gating(k=7), gating(k_group=0), gating(k_group=5)),
    ("groups", gating(group_count=5), gating(group_count=6), gating(group_count=0)),
    ("padded groups", gating(x=torch.zeros(2, 195), bias=None, group_count=65)),
    ("modes", gating(norm_type=2), gating(group_select_mode=2)),
    ("renorm", gating(renorm=1)),
    ("no table", gating(input_ids=torch.zeros(5).int(), tid2eid=torch.zeros(9, 3).int())),
]

softmax = of(layer_calls.GATING_SOFTMAX, layer_calls.softmax)
FAMILIES["npu_moe_gating_top_k_softmax_v2"] = [
    ("dtype", softmax(x=T.double)),
    ("shapes", softmax(x=torch.zeros(5), finished=None), softmax(finished=T.int)),
    ("k", softmax(k=0), softmax(k=13), softmax(x=torch.zeros(5, 1030), k=1025)),
    ("renorm", softmax(renorm=2)),
]


def fusion_of(lengths, **sizes):
    return of(FUSION, lambda: fusion_arguments(Batch(lengths, **sizes)))


fusion_call = fusion_of(PROMPTS)


def banded(**changes):
    return fusion_call(**band(3, **changes))


def hidden_row():
    mask = torch.zeros(130, 130, dtype=torch.bool)
    mask[2] = True
    return mask


FAMILIES["npu_fusion_attention"] = [
    ("layout", fusion_call(input_layout="BSND")),
    ("dtype", fusion_call(query=T.double), fusion_call(value=T.bfloat16), fusion_call(key=T.float)),
    ("contiguous", *(fusion_call(**{name: strided}) for name in ("query", "key", "value"))),
    ("rank", fusion_call(query=lambda q: q.flatten(1))),
    ("key and value shapes", fusion_call(value=lambda v: v[:, :, :8].contiguous())),
    ("head_num", fusion_call(head_num=2)),
    ("head size", fusion_of([(0, 2)], head_size=784)()),
    ("tokens", fusion_call(query=meta(zeros(1, 4, 16)).repeat((1 << 20) + 1, 1, 1))),
    ("lengths required", fusion_call(actual_seq_qlen=None)),
    ("number of lengths", fusion_of([(0, 1)] * 1025)()),
    ("cumulative lengths", fusion_call(actual_seq_qlen=[5, 1, 130, 4])),
    ("sparse_mode", banded(sparse_mode=2)),
    ("mask dtype", banded(atten_mask=triangle(torch.int8))),
    ("mask shape", banded(atten_mask=triangle(torch.uint8)[:130, :130])),
    ("visible rows", fusion_call(atten_mask=hidden_row())),
    ("band is not empty", banded(next_tockens=-4)),
    ("keep_prob", fusion_call(keep_prob=0.9)),
    ("unsupported argument", fusion_call(pse=torch.zeros(1, 4, 1024, 130))),
]

projected = of(V2, latent_calls.projected)
absorbed = of(V2, latent_calls.absorbed)


absorbed_of = partial(sized, V2, latent_calls.absorbed)
projected_of = partial(sized, V2, latent_calls.projected)


def narrow(tensor):
    return tensor[..., :64].contiguous()


FAMILIES["fused attention, rope"] = [
    ("both ropes", absorbed(query_rope=None)),
    ("head size with rope", projected(query=narrow, key=narrow, value=narrow)),
    ("size of rope", absorbed(query_rope=lambda r: r[..., :32].contiguous())),
    ("dtype of rope", absorbed(key_rope=T.half)),
    ("contiguous rope", absorbed(query_rope=strided), projected(key_rope=strided)),
    ("heads over latent rows", absorbed_of(heads=3), absorbed_of(heads=40)),
    ("one head of latent rows", absorbed_of(heads=1, num_key_value_heads=0)),
    ("layout with rope", projected(input_layout="TND_NTD")),
    ("block size with rope", absorbed_of(block_size=1040)),
    ("query tokens over latent rows", in_profile("docs", absorbed_of([(0, 17), (3, 1)]))),
    ("documented block size with rope", in_profile("docs", absorbed_of(block_size=64))),
    ("bfloat16 of projected keys", in_profile("docs", projected_of(dtype=torch.float16))),
    ("no cache of projected keys", in_profile("docs", of(V2, latent_calls.paged_projected)())),
]

gather = of(latent_calls.GATHER, latent_calls.gather_arguments)
FAMILIES["npu_gather_pa_kv_cache"] = [
    ("cache form", gather(key_cache=lambda c: c.flatten(2)), gather(value_cache=lambda c: c[1:])),
    ("result form", gather(key=T.half)),
    ("rows", gather(key=lambda k: k[1:], value=lambda v: v[1:])),
    ("integers", gather(seq_lens=T.long), gather(seq_offset=int32(16, 16))),
    ("offset", gather(seq_offset=int32(16, 16, 4))),
    ("block ids", gather(block_tables=lambda t: t + 5), gather(seq_offset=int32(32, 16, 0))),
    ("contiguous", gather(value=strided), gather(key_cache=strided)),
]

update = of(latent_calls.UPDATE, latent_calls.update_arguments)
FAMILIES["npu_attention_update"] = [
    ("parts", update(lse=lambda p: p[:1] * 17, local_out=lambda p: p[:1] * 17)),
    ("part form", update(local_out=[torch.zeros(6, 16), torch.zeros(6, 8)])),
    ("head_dim", update(local_out=lambda parts: [part[:, :12].contiguous() for part in parts])),
    ("lse form", update(lse=[torch.zeros(6, 1)] * 2), update(lse=[zeros(6)] * 2)),
    ("update_type", update(update_type=2)),
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

FAMILIES["placement"] = [
    ("host tensor", lambda: check_placement("atb::_npu_paged_attention", {"context_lens": False})),
    ("device tensor", lambda: check_placement(V1, {"query": False, "block_table": True}, "out")),
]

VIOLATIONS = {
    (family, name): violations for family, rows in FAMILIES.items() for name, *violations in rows
}
for (kernel, profile), rows in BY_KERNEL.items():
    for name, refused, _ in rows:
        VIOLATIONS.setdefault((family_name(kernel), name), []).append(in_profile(profile, refused))
