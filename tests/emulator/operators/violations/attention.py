"""Calls of attention and of the cache, and tensors on the wrong side."""

from functools import partial

import torch

from ascend_emulator.operators import check_placement
from tests.emulator.operators import calls, latent_calls
from tests.emulator.operators.calls import (
    FUSION,
    PROMPTS,
    V1,
    V2,
    Batch,
    band,
    fused,
    fusion_arguments,
    strided,
    triangle,
)
from tests.emulator.operators.layer_calls import int32
from tests.emulator.operators.violations.breaking import (
    changed,
    every,
    in_profile,
    instead,
    int8,
    of,
    sized,
    zeros,
)

T = torch.Tensor
RESHAPE, SCATTER = "atb::_npu_reshape_and_cache", "npu::npu_scatter_pa_kv_cache"
FAMILIES = {}
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


def one(table):
    """The first row of a table alone."""
    return table[:1]


def padding_row_missing(**changes):
    """The last of two requests has no keys, and no row of the table."""
    lengths = {"actual_seq_lengths_kv": [4, 0]}
    return paged(LATER, head_size=64, block_table=one, **lengths, **NO_MASK, **changes)


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
    ("contiguous", packed(key=strided), paged(value=strided)),
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
    ("block table rows", paged(block_table=lambda t: t[:2]), padding_row_missing(form=4)),
    ("block table rows", paged(block_table=lambda t: torch.cat([t, t])), decoded(block_table=one)),
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
        ("contiguous query", packed(query=strided), packed()),
        ("sum of blocks", shared(5), shared(6)),
        ("rows of the table", padding_row_missing(**BF16), keys(4, 0, **NO_MASK)),
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
    ("distinct slots", *slots(int32(1, 2, 18, 4, 18)), *slots(int32(0, 63, 0, -1, 63))),
    ("cache_mode", scatter(cache_mode="PA_NZ")),
    ("compression", scatter(seq_lens=torch.ones(1))),
]


def atb(name, make, **sizes):
    return of(f"atb::{name}", lambda: make(**sizes)[0])


flash = atb("_npu_flash_attention", calls.flash_arguments)
unpad = atb("_npu_flash_attention_unpad", calls.unpad_arguments)
decode = atb("_npu_paged_attention", calls.decode_arguments)
splitfuse = atb("_npu_paged_attention_splitfuse", calls.splitfuse_arguments)
workspace = atb("_npu_paged_attention_get_workspace", calls.decode_arguments)
decode_of = partial(atb, "_npu_paged_attention", calls.decode_arguments)
ANY, CACHED = (flash, unpad, decode, splitfuse, workspace), (decode, splitfuse, workspace)

FAMILIES["atb attention"] = [
    ("dtype", *every(ANY, query=T.float)),
    ("same dtype", flash(key=T.bfloat16), *every(ANY, out=T.float)),
    ("rank", *every(ANY, query=lambda q: q.flatten(1))),
    ("contiguous", *every(ANY, query=strided), *every(CACHED, key_cache=strided)),
    ("num_heads", *every(ANY, num_heads=lambda n: n // 2)),
    ("num_kv_heads", *every(ANY, num_kv_heads=3), decode(num_kv_heads=0)),
    ("head size", atb("_npu_flash_attention", calls.flash_arguments, head_size=592)()),
    ("out", *every(ANY, out=lambda o: o[:-1])),
    ("key and value shapes", flash(key=lambda k: k[:-1]), unpad(value=lambda v: v[:-1])),
    ("cache form", *every(CACHED, key_cache=lambda c: c.flatten(2)), decode(num_kv_heads=4)),
    ("block size", decode_of(block_size=8)(), decode_of(block_size=256)()),
    ("block area", decode_of(head_size=256, block_size=128)()),
    ("block table", *every(CACHED, block_table=T.long)),
    ("block table rows", *every(CACHED, block_table=lambda t: t[:-1])),
    ("block ids", *every(CACHED, block_table=lambda t: t + 9)),
    ("length dtype", *every((flash, splitfuse), seq_len=T.long)),
    ("context lengths in table", *every(CACHED, context_lens=lambda n: n + 400)),
    ("one token for each request", decode(context_lens=lambda n: n[:-1])),
    ("sum of lengths", *every((flash, unpad), seq_len=lambda n: n.cumsum(0).int())),
    ("as many keys as queries", splitfuse(context_lens=lambda n: n.clamp(max=20))),
    ("mask dtype", *every((flash, splitfuse), mask=T.bool), splitfuse(mask=T.bfloat16)),
    ("square mask", flash(mask=lambda m: m[:5, :5].contiguous()), flash(mask=lambda m: m[0])),
    ("mask rows", splitfuse(mask=lambda m: m[:-1]), splitfuse(mask=lambda m: m[0])),
    ("workspace", decode(workspace=zeros(5, dtype=torch.uint8))),
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
    ("contiguous rope", absorbed(key_rope=strided), projected(key_rope=strided)),
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

interleaved = of(latent_calls.INTERLEAVE, latent_calls.interleaved)
FAMILIES["npu_interleave_rope"] = [
    ("dtype", interleaved(x=T.float)),
    ("same dtype", interleaved(sin=T.float)),
    ("shape", interleaved(x=lambda x: x[..., :32]), interleaved(x=lambda x: x[:, :0])),
    ("shape of factors", interleaved(sin=lambda s: s[:2]), interleaved(cos=lambda c: c[0])),
]

written = of(latent_calls.LATENT_WRITE, latent_calls.latent_write)
FAMILIES["npu_kv_rmsnorm_rope_cache"] = [
    ("dtype", written(kv=T.float), written(gamma=T.float), written(k_cache=T.half)),
    ("form", written(c_kv_scale=torch.ones(512)), written(v=zeros(3, 1, 1, 128))),
    ("cache_mode", written(cache_mode="Norm"), written(cache_mode="PA_NZ")),
    ("shapes", written(kv=lambda kv: kv[..., 1:]), written(cos=lambda c: c[:2])),
    ("index", written(index=T.int), written(index=lambda i: i[:2])),
    ("cache shape", written(k_cache=lambda c: c[:, :8].contiguous())),
    ("contiguous cache", written(ckv_cache=strided)),
    ("slots", written(index=lambda i: i + 8)),
]

update = of(latent_calls.UPDATE, latent_calls.update_arguments)
FAMILIES["npu_attention_update"] = [
    ("parts", update(lse=lambda p: p[:1] * 17, local_out=lambda p: p[:1] * 17)),
    ("part form", update(local_out=[torch.zeros(6, 16), torch.zeros(6, 8)])),
    ("head_dim", update(local_out=lambda parts: [part[:, :12].contiguous() for part in parts])),
    ("lse form", update(lse=[torch.zeros(6, 1)] * 2), update(lse=[zeros(6)] * 2)),
    ("update_type", update(update_type=2)),
]

FAMILIES["placement"] = [
    ("host tensor", lambda: check_placement("atb::_npu_paged_attention", {"context_lens": False})),
    ("device tensor", lambda: check_placement(V1, {"query": False, "block_table": True}, "out")),
]
