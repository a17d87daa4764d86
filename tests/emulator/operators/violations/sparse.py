"""Calls of both operators of sparse attention."""

from functools import partial

import torch

from tests.emulator.operators import sparse_calls
from tests.emulator.operators.calls import strided
from tests.emulator.operators.layer_calls import int32
from tests.emulator.operators.violations.breaking import in_profile, of, sized

T = torch.Tensor
FAMILIES = {}
INDEXER, ATTENTION = sparse_calls.INDEXER, sparse_calls.ATTENTION

choose, attend = of(INDEXER, sparse_calls.indexer), of(ATTENTION, sparse_calls.attention)
choose_of = partial(sized, INDEXER, sparse_calls.indexer)
attend_of = partial(sized, ATTENTION, sparse_calls.attention)


def fresh(operator, make, planes, layout):
    return of(operator, lambda: sparse_calls.fresh(make(), planes, layout))


KEYS = sparse_calls.indexer, ("key",)
PLANES = sparse_calls.attention, ("key", "value", "key_rope")
choose_fresh, choose_batch = (fresh(INDEXER, *KEYS, layout) for layout in ("TND", "BSND"))
attend_fresh, attend_batch = (fresh(ATTENTION, *PLANES, layout) for layout in ("TND", "BSND"))


def shared(call, call_fresh, call_batch, lengths, layout):
    """Violations of what both operators demand; two arguments have other names in each."""
    ends, table = "actual_seq_lengths_query", "block_table"
    return [
        ("layouts", call(layout_query="BNSD"), call_fresh(**{layout: "BSND"})),
        ("sparse_mode", call(sparse_mode=1)),
        ("limits", call(pre_tokens=2048), call(next_tokens=0)),
        ("ranks", call(query=lambda q: q[None]), call_fresh(key=lambda k: k[None])),
        ("lengths of queries required", call(**{ends: None})),
        ("lengths of keys required", call(**{lengths: None}), call_fresh(**{lengths: None})),
        ("integers", call(**{ends: T.long}), call(**{lengths: lambda n: n[1:]})),
        ("lengths of queries", call(**{ends: int32(1, 4, 3, 10)}), call(**{ends: lambda e: e + 1})),
        ("lengths of keys", call(**{lengths: lambda n: n + 200}), call(**{lengths: lambda n: -n})),
        ("block table for blocks", call(block_table=None), call_fresh(block_table=int32(0))),
        ("block table", call(**{table: T.long}), call(**{table: lambda t: t[1:]})),
        ("block ids", call(**{table: lambda t: t + 9}), call(**{table: lambda t: -t})),
        ("batch of keys", call_batch(key=lambda k: k[1:])),
    ]


FAMILIES["npu_lightning_indexer"] = [
    *shared(choose, choose_fresh, choose_batch, "actual_seq_lengths_key", "layout_key"),
    ("one head of keys", choose(key=lambda k: k.expand(-1, -1, 2, -1).contiguous())),
    ("dtype", choose(query=T.float), choose(key=T.half)),
    ("head size", choose(query=lambda q: q[..., :64], key=lambda k: k[..., :64].contiguous())),
    ("heads", choose_of(heads=65)),
    ("weights", choose(weights=lambda w: w[1:]), choose(weights=lambda w: w[..., None])),
    ("dtype of weights", choose(weights=T.half)),
    ("weights of 8.5", in_profile("8.5", choose(weights=T.float))),
    ("contiguous", *(in_profile("docs", choose(**{n: strided})) for n in ("query", "weights"))),
    ("contiguous keys", choose(key=strided)),
    ("sparse_count", *(choose(sparse_count=n) for n in (0, 2049, 9216))),
    ("sparse_count of 8.5", in_profile("8.5", choose(sparse_count=3072))),
    ("return_value", choose(return_value=True)),
    ("block size", choose_of(block_size=40), choose_of(block_size=1040)),
]

FAMILIES["npu_sparse_flash_attention"] = [
    *shared(attend, attend_fresh, attend_batch, "actual_seq_lengths_kv", "layout_kv"),
    ("attention_mode", attend(attention_mode=0)),
    ("sinks", attend(sinks=torch.zeros(4))),
    ("values", attend(value=None)),
    ("both ropes", attend(query_rope=None), attend(key_rope=None)),
    ("one head of keys", attend(key=lambda k: k.expand(-1, -1, 2, -1).contiguous())),
    ("dtype", attend(query=T.float), attend(value=T.half), attend(key_rope=T.half)),
    ("heads", attend_of(heads=3), attend_of(heads=256)),
    ("head sizes", attend(query_rope=lambda r: r[..., :32].contiguous())),
    ("shapes", attend(query_rope=lambda r: r[1:]), attend(value=lambda v: v[1:])),
    ("values are keys", attend(value=lambda v: v + 1)),
    ("contiguous", *(in_profile("docs", attend(**{n: strided})) for n in ("query", "query_rope"))),
    ("contiguous keys", *(attend(**{n: strided}) for n in ("key", "value", "key_rope"))),
    ("choice", attend(sparse_indices=T.long), attend(sparse_indices=lambda s: s[1:])),
    ("block of a choice", *(attend(sparse_block_size=n) for n in (0, 3, 256))),
    ("blocks of both", attend_of(block_size=48, sparse_block_size=32)),
    (
        "chosen positions",
        attend(sparse_indices=lambda s: s - 3),
        attend(sparse_indices=lambda s: s * 0 + 2**29, sparse_block_size=16),
    ),
    ("order of a choice", attend(sparse_indices=lambda s: s.where(torch.arange(16) > 0, -1))),
    ("softmax_lse", attend(return_softmax_lse=True)),
    ("block size", attend_of(block_size=40), attend_of(block_size=1040)),
]
