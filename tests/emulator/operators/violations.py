"""One call for each constraint that breaks it and nothing else.

``VIOLATIONS[family, name]`` is a list of functions without arguments that make such a call. Where
several arguments or both versions are concerned, there is one for each.
"""

import torch

from tests.emulator.operators.calls import (
    V1,
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
from vllm_npu_prep.emulator.operators import check_placement

LENGTHS = [(5, 2), (3, 1), (200, 7)]
FUSED, CACHE, ATB = "fused attention", "cache write", "atb attention"
NORMS, SWIGLU, ROTARY, PLACEMENT = "norms", "npu_swiglu", "npu_rotary_mul", "placement"


def packed(lengths=LENGTHS, heads=(4, 2), head_size=16, **changes):
    return Batch(lengths, heads=heads, head_size=head_size).packed(**changes)


def paged(lengths=LENGTHS, block_size=128, form=3, **changes):
    return Batch(lengths, block_size=block_size).paged(form, **changes)


def padded(layout, lengths=LENGTHS, **changes):
    return Batch(lengths).padded(layout, **changes)


def strided(tensor):
    """Same shape and values, not contiguous."""
    doubled = torch.stack([tensor, tensor], -1)[..., 0]
    assert not doubled.is_contiguous() and doubled.shape == tensor.shape
    return doubled


def spoiled(arguments, **functions):
    """Arguments with some of them replaced by a function of themselves."""
    return arguments | {name: function(arguments[name]) for name, function in functions.items()}


def out_call(arguments, **changes):
    query = arguments["query"]
    good = {"out": [torch.empty_like(query), torch.empty(query.shape[0], query.shape[1], 1)]}
    call(V1, arguments | good | changes, "out")


def one_token(layout="BSND", **changes):
    return padded(layout, [(3, 1), (9, 1)], **changes)


def meta(arguments, *names):
    """Some arguments without memory, for sizes that would not fit."""
    return spoiled(arguments, **{name: lambda tensor: tensor.to("meta") for name in names})


def many_blocks():
    arguments = Batch(LENGTHS).paged()
    blocks = 2**31 // (128 * 32) + 1
    huge = torch.empty(blocks, 128, 32, dtype=torch.float16, device="meta")
    return arguments | {"key": huge, "value": huge}


FUSED_VIOLATIONS = {
    "dtype": [
        lambda: fused(spoiled(packed(), query=torch.Tensor.float)),
        lambda: fused(spoiled(packed(), key=torch.Tensor.float)),
        lambda: fused(spoiled(paged(), value=lambda v: v.to(torch.int8))),
    ],
    "same dtype": [lambda: fused(spoiled(paged(), key=torch.Tensor.bfloat16), 2)],
    "contiguous": [
        lambda: fused(spoiled(packed(), query=strided)),
        lambda: fused(spoiled(packed(), key=strided)),
        lambda: fused(spoiled(paged(), value=strided)),
    ],
    "layout": [
        lambda: fused(packed(input_layout="NTD")),
        lambda: fused(packed(input_layout="tnd")),
    ],
    "rank": [lambda: fused(spoiled(packed(), query=lambda q: q.flatten(1)))],
    "rank of key": [lambda: fused(spoiled(packed(), key=lambda k: k.flatten(1)))],
    "key and value shapes": [lambda: fused(spoiled(paged(), value=lambda v: v[1:]))],
    "tokens": [
        lambda: fused(packed([(0, 65537)], (1, 1))),
        lambda: fused(meta(packed([(0, (1 << 20) + 1)], (1, 1)), "query", "key", "value"), 2),
    ],
    "BNSD_BSND": [lambda: fused(one_token("BNSD_BSND"))],
    "unsupported argument": [
        lambda: fused(packed(pse_shift=torch.zeros(1, 4, 2, 7))),
        lambda: fused(packed(learnable_sink=torch.zeros(4)), 2),
        lambda: fused(packed(antiquant_mode=1)),
    ],
    "inner_precise": [lambda: fused(packed(inner_precise=4))],
    "num_heads": [
        lambda: fused(packed(num_heads=2)),
        lambda: fused(padded("BSH", num_heads=3)),
        lambda: fused(padded("BNSD", num_heads=5), 2),
    ],
    "head limit": [lambda: fused(packed(heads=(257, 257)))],
    "num_key_value_heads": [
        lambda: fused(packed(num_key_value_heads=3)),
        lambda: fused(packed(heads=(65, 1))),
    ],
    "head size": [
        lambda: fused(packed(head_size=24)),
        lambda: fused(packed(head_size=528)),
    ],
    "row width": [lambda: fused(Batch(LENGTHS, heads=(256, 256), head_size=256).padded("BSH"))],
    "heads of key": [
        lambda: fused(packed(num_key_value_heads=4)),
        lambda: fused(padded("BSH", num_key_value_heads=4)),
        lambda: fused(padded("BNSD", num_key_value_heads=0)),
    ],
    "host lengths": [
        lambda: fused(packed(actual_seq_lengths=torch.tensor([2, 3, 10]))),
        lambda: fused(paged(actual_seq_lengths_kv=torch.tensor([7, 4, 207])), 2),
        lambda: fused(one_token(actual_seq_lengths_kv=[torch.tensor(4), torch.tensor(10)])),
    ],
    "lengths required": [
        lambda: fused(packed(actual_seq_lengths=None)),
        lambda: fused(paged(actual_seq_lengths_kv=None)),
    ],
    "requests": [
        lambda: fused(packed([(0, 1)] * 4097, (1, 1)), 2),
        lambda: fused(packed(actual_seq_lengths=[], actual_seq_lengths_kv=[])),
    ],
    "cumulative lengths": [
        lambda: fused(packed(actual_seq_lengths=[2, 1, 10])),
        lambda: fused(paged(actual_seq_lengths=[2, 1, 7])),
        lambda: fused(paged(actual_seq_lengths=[-1, 3, 10])),
    ],
    "last length": [
        lambda: fused(paged(actual_seq_lengths=[2, 3, 9])),
        lambda: fused(paged(actual_seq_lengths=[2, 3, 11]), 2),
    ],
    "equal counts": [lambda: fused(paged(actual_seq_lengths_kv=[7, 4]))],
    "cumulative kv lengths": [
        lambda: fused(packed(actual_seq_lengths_kv=[7, 4, 207])),
        lambda: fused(packed(actual_seq_lengths_kv=[7, 11, 217])),
    ],
    "count of lengths": [
        lambda: fused(padded("BSND", actual_seq_lengths=[2, 1])),
        lambda: fused(padded("BSND", actual_seq_lengths_kv=[7, 4]), 2),
    ],
    "lengths in query": [lambda: fused(padded("BSND", actual_seq_lengths=[2, 1, 8]))],
    "lengths in key": [lambda: fused(padded("BNSD", actual_seq_lengths_kv=[7, 4, 208]))],
    "batch of key": [
        lambda: fused(
            spoiled(padded("BSND"), key=lambda k: k[:2], value=lambda v: v[:2]),
        )
    ],
    "as many keys as queries": [
        lambda: fused(paged(actual_seq_lengths_kv=[1, 4, 207])),
        lambda: fused(paged(actual_seq_lengths_kv=[1, 4, 207], sparse_mode=4)),
    ],
    "block table": [
        lambda: fused(spoiled(paged(), block_table=torch.Tensor.long)),
        lambda: fused(spoiled(paged(), block_table=torch.flatten), 2),
    ],
    "block table contiguous": [lambda: fused(spoiled(paged(), block_table=lambda t: t[:, :2]))],
    "block table rows": [lambda: fused(spoiled(paged(), block_table=lambda t: t[:2]))],
    "kv lengths required": [
        lambda: fused(
            spoiled(paged(), query=lambda q: q[:3].unsqueeze(1))
            | {"input_layout": "BSND", "actual_seq_lengths_kv": None, "atten_mask": None}
            | {"sparse_mode": 0}
        )
    ],
    "kv lengths in table": [
        lambda: fused(paged(actual_seq_lengths_kv=[7, 4, 385])),
        lambda: fused(paged(actual_seq_lengths_kv=[7, -4, 207])),
    ],
    "block ids": [
        lambda: fused(spoiled(paged(), block_table=lambda t: t + 4)),
        lambda: fused(spoiled(paged(), block_table=lambda t: t - 9), 2),
    ],
    "cache form": [
        lambda: fused(paged(form=4, num_key_value_heads=4)),
        # The cache as the atb operators take it.
        lambda: fused(
            spoiled(
                paged(),
                key=lambda k: k.unflatten(2, (2, 16)),
                value=lambda v: v.unflatten(2, (2, 16)),
            )
        ),
        lambda: fused(paged(block_size=128) | {"block_size": 256}),
        lambda: fused(
            spoiled(paged([(3, 1), (9, 1)], form=4), query=lambda q: q.unsqueeze(1))
            | {"input_layout": "BSND", "atten_mask": None, "sparse_mode": 0}
        ),
    ],
    "cache row width": [
        lambda: fused(
            meta(Batch([(0, 1)], heads=(256, 256), head_size=272).paged(), "key", "value")
        )
    ],
    "cache elements": [lambda: fused(many_blocks())],
    "block size": [lambda: fused(paged([(3, 1), (9, 1)], block_size=8))],
    "block size of prompts": [
        lambda: fused(paged(block_size=64)),
        lambda: fused(paged(block_size=640), 2),
    ],
    "sparse_mode": [lambda: fused(packed(sparse_mode=5)), lambda: fused(packed(sparse_mode=-1))],
    "sparse modes of TND": [
        lambda: fused(packed(sparse_mode=0)),
        lambda: fused(packed(sparse_mode=1)),
        lambda: fused(paged(sparse_mode=2), 2),
    ],
    "sparse modes of one token": [
        lambda: fused(one_token(sparse_mode=3, atten_mask=triangle())),
        lambda: fused(one_token("BSH", sparse_mode=4, atten_mask=triangle(), pre_tokens=3)),
    ],
    "band is not empty": [lambda: fused(paged(sparse_mode=4, pre_tokens=1, next_tokens=-2))],
    "band reaches the keys": [
        lambda: fused(paged(sparse_mode=4, pre_tokens=-3, next_tokens=9)),
        lambda: fused(paged(sparse_mode=4, pre_tokens=99, next_tokens=-5), 2),
    ],
    "mask required": [
        lambda: fused(packed(atten_mask=None)),
        lambda: fused(paged(atten_mask=None, sparse_mode=4)),
        lambda: fused(one_token(sparse_mode=1)),
    ],
    "mask dtype": [
        lambda: fused(paged(atten_mask=triangle(torch.float16))),
        lambda: fused(paged(atten_mask=triangle(torch.int32)), 2),
    ],
    "mask contiguous": [lambda: fused(paged(atten_mask=triangle().T))],
    "compressed mask shape": [
        lambda: fused(paged(atten_mask=triangle()[:2047].contiguous())),
        lambda: fused(paged(atten_mask=triangle()[0])),
        lambda: fused(padded("BSND", atten_mask=triangle()[:7, :7].clone(), sparse_mode=2)),
    ],
    "full mask shape": [
        lambda: fused(one_token(atten_mask=torch.zeros(1, 10).bool())),
        lambda: fused(one_token(atten_mask=torch.zeros(2, 9).bool())),
        lambda: fused(one_token(atten_mask=torch.zeros(10).bool())),
        lambda: fused(padded("BSND", atten_mask=torch.zeros(3, 7, 207).bool())),
        lambda: fused(
            spoiled(paged([(3, 1), (9, 1)]), query=lambda q: q.unsqueeze(1))
            | {"input_layout": "BSND", "sparse_mode": 0, "atten_mask": torch.zeros(2, 255).bool()}
        ),
    ],
    "workspace": [
        lambda: out_call(packed(), workspace=torch.zeros(10**4)),
        lambda: out_call(packed(), workspace=torch.zeros(2, 10**4, dtype=torch.float16)),
    ],
    "workspace size": [lambda: out_call(packed(), workspace=torch.zeros(5, dtype=torch.float16))],
    "out": [lambda: out_call(packed(), out=[torch.empty(10, 4, 16, dtype=torch.float16)])],
    "attention_out": [
        lambda: out_call(packed(), out=[torch.empty(10, 4, 16), torch.empty(0)]),
        lambda: out_call(packed(), out=[torch.empty(10, 64).half(), torch.empty(0)]),
        lambda: out_call(packed(), out=[strided(torch.empty(10, 4, 16).half()), torch.empty(0)]),
    ],
    "softmax_lse out": [
        lambda: out_call(
            packed(softmax_lse_flag=True), out=[torch.empty(10, 4, 16).half(), torch.empty(1)]
        )
    ],
}

WRITERS = {
    "atb::_npu_reshape_and_cache": (cache_arguments, "slot_indices"),
    "npu::npu_scatter_pa_kv_cache": (scatter_arguments, "slot_mapping"),
}


def writes(**functions):
    """One call of each writer with arguments replaced; ``slots`` is the slots of either."""

    def build(name):
        make, slot_name = WRITERS[name]
        named = {slot_name if key == "slots" else key: f for key, f in functions.items()}
        return lambda: call(name, spoiled(make(), **named))

    return [build(name) for name in WRITERS]


def slots(*values, dtype=torch.int32):
    return lambda _: torch.tensor(values, dtype=dtype)


CACHE_VIOLATIONS = {
    "dtype": writes(
        **dict.fromkeys(("key", "value", "key_cache", "value_cache"), torch.Tensor.float)
    ),
    "same dtype": [
        *writes(value=torch.Tensor.bfloat16),
        *writes(key_cache=torch.Tensor.bfloat16),
        *writes(value_cache=torch.Tensor.bfloat16),
    ],
    "rank": writes(key=lambda k: k.flatten(1)),
    "key and value shapes": writes(value=lambda v: v[:4]),
    "cache form": [
        *writes(key_cache=lambda c: c.flatten(2)),
        # Heads before positions, as fused attention also takes it.
        *writes(value_cache=lambda c: c.transpose(1, 2).contiguous()),
    ],
    "cache blocks": writes(value_cache=lambda c: c[1:]),
    "contiguous": [*writes(key=strided), *writes(value=strided), *writes(slots=strided)],
    "contiguous cache": [*writes(key_cache=strided), *writes(value_cache=strided)],
    "slot dtype": [
        lambda: call(
            "atb::_npu_reshape_and_cache",
            cache_arguments(slot_indices=torch.tensor([17, 3, -1, 63, 18])),
        ),
        lambda: call(
            "npu::npu_scatter_pa_kv_cache",
            scatter_arguments(slot_mapping=torch.tensor([17, 3, 5, 6, 18], dtype=torch.int16)),
        ),
    ],
    "slot count": [
        *writes(slots=slots(1, 2, 3, 4)),
        *writes(slots=lambda s: s[None]),
    ],
    "slot range": [*writes(slots=slots(1, 2, 3, 4, 64)), *writes(slots=slots(1, 2, 3, 4, -2))],
    "distinct slots": [*writes(slots=slots(1, 2, 3, 4, 1)), *writes(slots=slots(0, 0, 0, -1, 1))],
    "cache_mode": [
        lambda: call("npu::npu_scatter_pa_kv_cache", scatter_arguments(cache_mode="PA_NZ")),
        lambda: call("npu::npu_scatter_pa_kv_cache", cache_arguments(slot_name="slot_mapping")),
    ],
    "compression": [
        lambda: call("npu::npu_scatter_pa_kv_cache", scatter_arguments(seq_lens=torch.ones(1)))
    ],
}


def atb(name, build, **functions):
    return lambda: call(f"atb::{name}", spoiled(build()[0], **functions))


def flash(**functions):
    return atb("_npu_flash_attention", flash_arguments, **functions)


def decode(**functions):
    return atb("_npu_paged_attention", decode_arguments, **functions)


def splitfuse(**functions):
    return atb("_npu_paged_attention_splitfuse", splitfuse_arguments, **functions)


def workspace(**functions):
    return atb("_npu_paged_attention_get_workspace", decode_arguments, **functions)


def decode_with(**changes):
    return lambda: call("atb::_npu_paged_attention", decode_arguments(**changes)[0])


ANY = (flash, decode, splitfuse, workspace)
CACHED = (decode, splitfuse, workspace)

ATB_VIOLATIONS = {
    "dtype": [spoil(query=torch.Tensor.float) for spoil in ANY],
    "same dtype": [
        flash(key=torch.Tensor.bfloat16),
        *(spoil(value_cache=torch.Tensor.bfloat16) for spoil in CACHED),
        *(spoil(out=torch.Tensor.float) for spoil in ANY),
    ],
    "rank": [spoil(query=lambda q: q.flatten(1)) for spoil in ANY],
    "contiguous": [
        *(spoil(query=strided) for spoil in ANY),
        flash(value=strided),
        flash(mask=strided),
        *(spoil(key_cache=strided) for spoil in CACHED),
        *(spoil(block_table=lambda t: t[:, :2]) for spoil in CACHED),
        *(spoil(out=strided) for spoil in ANY),
    ],
    "num_heads": [spoil(num_heads=lambda n: n // 2) for spoil in ANY],
    "num_kv_heads": [
        *(spoil(num_kv_heads=lambda n: 3) for spoil in ANY),
        decode(num_kv_heads=lambda n: 0),
    ],
    "head size": [
        lambda: call("atb::_npu_flash_attention", flash_arguments(head_size=592)[0]),
        decode_with(head_size=272, block_size=16),
    ],
    "out": [spoil(out=lambda o: o[:-1]) for spoil in ANY],
    "key and value shapes": [
        flash(key=lambda k: k[:-1]),
        flash(value=lambda v: v[:, :1].contiguous()),
    ],
    "cache form": [
        *(spoil(key_cache=lambda c: c.flatten(2)) for spoil in CACHED),
        *(spoil(value_cache=lambda c: c.transpose(1, 2).contiguous()) for spoil in CACHED),
        decode(num_kv_heads=lambda n: 4),
    ],
    "block size": [decode_with(block_size=8), decode_with(block_size=256)],
    "block area": [decode_with(head_size=256, block_size=128)],
    "block table": [spoil(block_table=torch.Tensor.long) for spoil in CACHED],
    "block table rows": [spoil(block_table=lambda t: t[:-1]) for spoil in CACHED]
    + [splitfuse(context_lens=lambda n: n[:-1], block_table=lambda t: t[:-1])],
    "block ids": [
        *(spoil(block_table=lambda t: t + 9) for spoil in CACHED),
        decode(block_table=lambda t: t - 99),
    ],
    "length dtype": [
        flash(seq_len=torch.Tensor.long),
        splitfuse(seq_len=torch.Tensor.long),
        splitfuse(context_lens=torch.Tensor.long),
        decode(context_lens=torch.Tensor.long),
    ],
    "context lengths in table": [
        *(spoil(context_lens=lambda n: n + 400) for spoil in CACHED),
        decode(context_lens=lambda n: n - 99),
    ],
    "one token for each request": [decode(context_lens=lambda n: n[:-1])],
    "sum of lengths": [
        flash(seq_len=lambda n: n.cumsum(0).int()),
        splitfuse(seq_len=lambda n: n + 1),
        flash(seq_len=lambda n: n - 2 + torch.tensor([8, 0, 0, 0], dtype=torch.int32)),
    ],
    "as many keys as queries": [splitfuse(context_lens=lambda n: n.clamp(max=20))],
    "mask dtype": [
        flash(mask=torch.Tensor.bool),
        splitfuse(mask=torch.Tensor.bool),
        splitfuse(mask=torch.Tensor.bfloat16),
    ],
    "square mask": [
        flash(mask=lambda m: m[:5, :5].contiguous()),
        flash(mask=lambda m: m[:-1]),
        flash(mask=lambda m: m[0]),
    ],
    "mask rows": [
        splitfuse(mask=lambda m: m[:-1]),
        splitfuse(mask=lambda m: m[:, :-1].contiguous()),
        splitfuse(mask=lambda m: m[0]),
    ],
    "workspace": [
        lambda: call(
            "atb::_npu_paged_attention",
            decode_arguments()[0] | {"workspace": torch.zeros(5, dtype=torch.uint8)},
        )
    ],
}


def norm(name="npu_rms_norm", **changes):
    good = {"gamma": torch.ones(8)}
    rows = {"input": torch.ones(3, 8)}
    if name == "npu_add_rms_norm":
        rows = {"x1": torch.ones(3, 8), "x2": torch.ones(3, 8)}
    return lambda: call(f"npu::{name}", good | rows | changes)


def swiglu(*shape, dim=-1, dtype=torch.float32):
    return lambda: call("npu::npu_swiglu", {"input": torch.ones(shape, dtype=dtype), "dim": dim})


def rotary(shape=(2, 3, 4, 8), factor=(1, 3, 1, 8), **changes):
    arguments = {"input": torch.ones(shape), "r1": torch.ones(factor), "r2": torch.ones(factor)}
    return lambda: call("npu::npu_rotary_mul", arguments | changes)


NORM_VIOLATIONS = {
    "dtype": [
        norm(input=torch.ones(3, 8).double()),
        norm("npu_add_rms_norm", x1=torch.ones(3, 8, dtype=torch.int32)),
    ],
    "same dtype": [norm(gamma=torch.ones(8).half())],
    "rank": [norm(input=torch.ones(8)), norm(input=torch.ones(*[1] * 8, 8))],
    "gamma shape": [norm(gamma=torch.ones(4)), norm(gamma=torch.ones(3, 8))],
    "equal shapes": [
        norm("npu_add_rms_norm", x2=torch.ones(1, 8)),
        norm("npu_add_rms_norm", x2=torch.ones(3, 8).half()),
    ],
}
SWIGLU_VIOLATIONS = {
    "dtype": [swiglu(3, 8, dtype=torch.float64)],
    "rank": [swiglu(), swiglu(*[2] * 9)],
    "dim": [swiglu(3, 8, dim=2)],
    "even": [swiglu(3, 8, dim=0)],
}
ROTARY_VIOLATIONS = {
    "dtype": [rotary(input=torch.ones(2, 3, 4, 8).double())],
    "same dtype": [rotary(r1=torch.ones(1, 3, 1, 8).half())],
    "rank": [rotary((3, 4, 8), (3, 1, 8))],
    "head size": [rotary((2, 3, 4, 7), (1, 3, 1, 7)), rotary((1, 2, 1, 896), (1, 2, 1, 896))],
    "batch and heads": [
        rotary((1000, 3, 2, 8), (1, 3, 1, 8)),
        rotary((50, 3, 20, 8), (1, 3, 1, 8), rotary_mode="interleave"),
    ],
    "rotary_mode": [rotary(rotary_mode="neox")],
    "r1 layout": [
        rotary(factor=(1, 3, 4, 8)),
        rotary(factor=(1, 1, 1, 8)),
        rotary(factor=(2, 3, 1, 8), rotary_mode="interleave"),
    ],
    "equal shapes": [rotary(r2=torch.ones(2, 3, 1, 8))],
    "rotate": [rotary(rotate=torch.ones(8)), rotary(rotate=torch.ones(8, 4))],
}
PLACEMENT_VIOLATIONS = {
    "host tensor": [
        lambda: check_placement("atb::_npu_flash_attention", {"query": False, "seq_len": False}),
        lambda: check_placement("atb::_npu_paged_attention", {"context_lens": False}),
    ],
    "device tensor": [
        lambda: check_placement(V1, {"query": False, "block_table": True}, "out"),
        lambda: check_placement("atb::_npu_paged_attention", {"block_table": True}),
    ],
}

VIOLATIONS = {
    (family, name): calls
    for family, table in {
        FUSED: FUSED_VIOLATIONS,
        CACHE: CACHE_VIOLATIONS,
        ATB: ATB_VIOLATIONS,
        NORMS: NORM_VIOLATIONS,
        SWIGLU: SWIGLU_VIOLATIONS,
        ROTARY: ROTARY_VIOLATIONS,
        PLACEMENT: PLACEMENT_VIOLATIONS,
    }.items()
    for name, calls in table.items()
}
