"""One call for each constraint that breaks it and nothing else.

``VIOLATIONS[family, name]`` is a list of functions without arguments that make such a call. Where
several arguments or both versions are concerned, there is one for each.
"""

import torch

from ascend_emulator import profiles
from ascend_emulator.operators import check_placement
from tests.emulator.operators.calls import (
    V1,
    cache_arguments,
    call,
    decode_arguments,
    flash_arguments,
    matmul_arguments,
    mrope_arguments,
    scatter_arguments,
    splitfuse_arguments,
    spoiled,
    strided,
)
from tests.emulator.operators.delta_calls import CHUNK_VIOLATIONS, RECURRENT_VIOLATIONS
from tests.emulator.operators.expert_calls import EXPERT_VIOLATIONS
from tests.emulator.operators.fused_violations import FUSED_VIOLATIONS
from tests.emulator.operators.fusion_calls import FUSION_VIOLATIONS
from tests.emulator.operators.int8_calls import INT8_VIOLATIONS
from tests.emulator.operators.kernel_violations import KERNEL_VIOLATIONS
from tests.emulator.operators.latent_calls import (
    GATHER_VIOLATIONS,
    ROPE_VIOLATIONS,
    TRANSPOSE_VIOLATIONS,
    UPDATE_VIOLATIONS,
)

FUSED, CACHE, ATB = "fused attention", "cache write", "atb attention"
NORMS, SWIGLU, ROTARY, PLACEMENT = "norms", "npu_swiglu", "npu_rotary_mul", "placement"
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
    if name.startswith("npu_add_rms_norm"):
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
    "16 bits": [norm("npu_add_rms_norm_cast")],
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


def gelu(name="npu_gelu", rows=(3, 8), dtype=torch.float32, **changes):
    return lambda: call(f"npu::{name}", {"input": torch.ones(rows, dtype=dtype)} | changes)


GELU_VIOLATIONS = {
    "dtype": [gelu(dtype=torch.float64), gelu("npu_geglu", dtype=torch.int32)],
    "rank": [gelu(rows=()), gelu("npu_geglu", rows=[2] * 9)],
    "approximate": [gelu(approximate="erf"), gelu("npu_geglu", approximate=2)],
    "dim": [gelu("npu_geglu", dim=2)],
    "even": [gelu("npu_geglu", dim=0)],
}


def on_85(broken):
    """The call in the profile of 8.5."""

    def run():
        with profiles.using("8.5"):
            broken()

    return run


def mrope(**functions):
    return lambda: call("npu::npu_mrope", spoiled(mrope_arguments(), **functions))


def sections(*sizes, positions=3, **changes):
    arguments = mrope_arguments(positions=torch.ones(positions, 5, dtype=torch.int64))
    return lambda: call("npu::npu_mrope", arguments | {"mrope_section": list(sizes)} | changes)


def instead(value):
    return lambda _: value


MROPE_VIOLATIONS = {
    "dtype": [
        mrope(**dict.fromkeys(("query", "key", "cos_sin_cache"), torch.Tensor.double)),
    ],
    "same dtype": [mrope(key=torch.Tensor.float), mrope(cos_sin_cache=torch.Tensor.float)],
    "positions dtype": [mrope(positions=torch.Tensor.short)],
    "rank": [mrope(query=lambda q: q.view(5, 4, 128)), mrope(cos_sin_cache=lambda c: c[None])],
    "positions shape": [
        mrope(positions=lambda p: p[None]),
        sections(16, 24, 24, positions=4),
        lambda: call("npu::npu_mrope", mrope_arguments(mrope_section=[16, 24, 24])),
    ],
    "token count": [
        mrope(positions=lambda p: p[:4]),
        mrope(key=lambda k: k[:4]),
        mrope(**dict.fromkeys(("positions", "query", "key"), lambda each: each[:0])),
    ],
    "whole heads": [mrope(key=lambda k: k[:, :-32].contiguous())],
    "head size": [mrope(head_size=instead(16)), mrope(head_size=instead(0))],
    "rotary size": [
        mrope(cos_sin_cache=lambda c: c[:, :16].contiguous()),
        mrope(head_size=instead(64)),
    ],
    "dense rows": [mrope(query=strided)],
    "rotary_mode": [lambda: call("npu::npu_mrope", mrope_arguments(rotary_mode="interleaved"))],
    "cache_mode": [
        lambda: call("npu::npu_mrope", mrope_arguments(cache_mode="interleave")),
        sections(16, 16, 16, 16, positions=4, cache_mode="interleave"),
    ],
    "cache_mode of 8.5": [on_85(sections(24, 20, 20, cache_mode="interleave"))],
    "heads of 8.5": [
        on_85(mrope(query=lambda q: q[:, :128].repeat(1, 54))),
        on_85(
            lambda: call(
                "npu::npu_mrope",
                mrope_arguments(rotary_mode="interleave", head_size=64)
                | {
                    "query": torch.ones(5, 95 * 64).half(),
                    "cos_sin_cache": torch.ones(64, 64).half(),
                },
            )
        ),
    ],
    "mrope_section": [sections(16, 16, 32), sections(8, 12, 12)],
    "positions range": [
        mrope(positions=lambda p: p + 60),
        mrope(positions=lambda p: p - 9),
    ],
}


def limits(logits=None, **changes):
    rows = torch.zeros(3, 9) if logits is None else logits
    good = {"logits": rows, "p": torch.full((3,), 0.5), "k": torch.full((3,), 4).int()}
    return lambda: call("npu::npu_top_k_top_p", good | changes)


TOP_K_TOP_P_VIOLATIONS = {
    "dtype": [limits(torch.zeros(3, 9).double())],
    "rank": [limits(torch.zeros(3, 3, 9))],
    "limits": [limits(p=None, k=None)],
    "limit dtype": [limits(p=torch.ones(3).half()), limits(k=torch.full((3,), 4))],
    "limit shape": [limits(p=torch.ones(3, 1)), limits(k=torch.ones(2).int())],
    "p range": [limits(p=torch.full((3,), 1.5)), limits(p=torch.full((3,), float("nan")))],
    "k range": [limits(k=torch.zeros(3).int()), limits(k=torch.full((3,), 10).int())],
}


def matmuls(**functions):
    return lambda: call("npu::npu_grouped_matmul", spoiled(matmul_arguments(), **functions))


def first(function):
    return lambda tensors: [function(tensors[0]), *tensors[1:]]


GROUPED_MATMUL_VIOLATIONS = {
    "not grouped": [
        matmuls(group_type=instead(2)),
        matmuls(split_item=instead(2)),
        lambda: call(
            "npu::npu_grouped_matmul", matmul_arguments() | {"group_list": torch.tensor([2, 3])}
        ),
    ],
    "tensor count": [matmuls(x=lambda x: x[:1]), matmuls(bias=lambda b: b[:1])],
    "dtype": [
        matmuls(weight=first(torch.Tensor.float)),
        matmuls(x=lambda x: [each.double() for each in x]),
    ],
    "shapes": [matmuls(x=first(lambda x: x[:, :4].contiguous())), matmuls(x=first(lambda x: x[0]))],
    "contiguous": [matmuls(x=first(strided))],
    "transposed alike": [matmuls(weight=first(torch.Tensor.contiguous))],
    "inner limit": [
        matmuls(
            x=lambda _: [torch.zeros(1, 65536).half()] * 2,
            weight=lambda _: [torch.zeros(4, 65536).half().t()] * 2,
            bias=instead(None),
        )
    ],
    "bias": [matmuls(bias=first(torch.Tensor.float)), matmuls(bias=first(lambda b: b[:1]))],
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
        "gelu": GELU_VIOLATIONS,
        "npu_mrope": MROPE_VIOLATIONS,
        "npu_top_k_top_p": TOP_K_TOP_P_VIOLATIONS,
        "npu_grouped_matmul": GROUPED_MATMUL_VIOLATIONS,
        PLACEMENT: PLACEMENT_VIOLATIONS,
        "npu_fusion_attention": FUSION_VIOLATIONS,
        "fused attention, rope": ROPE_VIOLATIONS,
        "npu_gather_pa_kv_cache": GATHER_VIOLATIONS,
        "npu_attention_update": UPDATE_VIOLATIONS,
        "npu_transpose_batchmatmul": TRANSPOSE_VIOLATIONS,
        "npu_recurrent_gated_delta_rule": RECURRENT_VIOLATIONS,
        "npu_chunk_gated_delta_rule": CHUNK_VIOLATIONS,
        **EXPERT_VIOLATIONS,
        **INT8_VIOLATIONS,
    }.items()
    for name, calls in table.items()
} | {
    key: [violation.violate for violation in violations]
    for key, violations in KERNEL_VIOLATIONS.items()
}
