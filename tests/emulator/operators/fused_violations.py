"""Calls of fused attention that break one constraint each and nothing else; see violations.py."""

import torch

from tests.emulator.operators.calls import V1, Batch, call, fused, spoiled, strided, triangle

LENGTHS = [(5, 2), (3, 1), (200, 7)]


def packed(lengths=LENGTHS, heads=(4, 2), head_size=16, **changes):
    return Batch(lengths, heads=heads, head_size=head_size).packed(**changes)


def paged(lengths=LENGTHS, block_size=128, form=3, **changes):
    return Batch(lengths, block_size=block_size).paged(form, **changes)


def padded(layout, lengths=LENGTHS, **changes):
    return Batch(lengths).padded(layout, **changes)


def out_call(arguments, **changes):
    query = arguments["query"]
    good = {"out": [torch.empty_like(query), torch.empty(query.shape[0], query.shape[1], 1)]}
    call(V1, arguments | good | changes, "out")


def one_token(layout="BSND", **changes):
    return padded(layout, [(3, 1), (9, 1)], **changes)


def meta(arguments, *names):
    """Some arguments without memory, for sizes that would not fit."""
    return spoiled(arguments, **{name: lambda tensor: tensor.to("meta") for name in names})


def many_requests(count, **changes):
    """Prompts of one token each."""
    lengths = list(range(1, count + 1))
    changes |= {"actual_seq_lengths": lengths, "actual_seq_lengths_kv": lengths}
    return Batch([(0, count)], heads=(2, 1)).packed(**changes)


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
        lambda: fused(many_requests(65537), 2),
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
    "block size": [
        lambda: fused(paged([(3, 1), (9, 1)], block_size=8)),
        lambda: fused(paged(block_size=1040), 2),
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
