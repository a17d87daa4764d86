"""Valid calls of the operators of latent attention, and calls that break one demand each."""

import torch

from ascend_emulator import profiles
from tests.emulator.operators.calls import V2, call, spoiled, strided, triangle

LATENT, ROPE, HEAD = 512, 64, 128


def absorbed(
    lengths=((5, 1), (130, 1), (16, 3)),
    seed=0,
    *,
    heads=4,
    block_size=128,
    dtype=torch.bfloat16,
    **changes,
):
    """Attention over latent rows in a cache; the truth is in ``lengths`` (cached, new)."""
    generator = torch.Generator().manual_seed(seed)
    tokens = sum(new for _, new in lengths)
    needed = [-(-sum(pair) // block_size) for pair in lengths]
    table = torch.zeros(len(lengths), max(needed), dtype=torch.int32)
    ids = (torch.randperm(sum(needed), generator=generator) + 1).int().tolist()
    for row, count in enumerate(needed):
        table[row, :count] = torch.tensor([ids.pop() for _ in range(count)])

    def random(*shape):
        return torch.randn(*shape, generator=generator).to(dtype)

    latent = random(sum(needed) + 1, block_size, LATENT)
    ends = torch.tensor([new for _, new in lengths]).cumsum(0).tolist()
    return {
        "query": random(tokens, heads, LATENT),
        "key": latent,
        "value": latent,
        "query_rope": random(tokens, heads, ROPE),
        "key_rope": random(*latent.shape[:2], ROPE),
        "atten_mask": triangle(),
        "sparse_mode": 3,
        "input_layout": "TND",
        "actual_seq_qlen": ends,
        "actual_seq_kvlen": [sum(pair) for pair in lengths],
        "num_query_heads": heads,
        "num_key_value_heads": 1,
        "softmax_scale": 0.05,
        "block_table": table,
        "block_size": block_size,
        **changes,
    }


def projected(lengths=(5, 1, 9), kv_lengths=None, seed=0, *, heads=4, dtype=torch.bfloat16, **more):
    """Attention over K and V of every head."""
    generator = torch.Generator().manual_seed(seed)
    kv_lengths = kv_lengths or lengths

    def random(*shape):
        return torch.randn(*shape, generator=generator).to(dtype)

    tokens, rows = sum(lengths), sum(kv_lengths)
    return {
        "query": random(tokens, heads, HEAD),
        "key": random(rows, heads, HEAD),
        "value": random(rows, heads, HEAD),
        "query_rope": random(tokens, heads, ROPE),
        "key_rope": random(rows, heads, ROPE),
        "atten_mask": triangle(),
        "sparse_mode": 3,
        "input_layout": "TND",
        "actual_seq_qlen": torch.tensor(lengths).cumsum(0).tolist(),
        "actual_seq_kvlen": torch.tensor(kv_lengths).cumsum(0).tolist(),
        "num_query_heads": heads,
        "num_key_value_heads": heads,
        "softmax_scale": 0.07,
        **more,
    }


def fused(arguments):
    """Call the second version."""
    return call(V2, arguments)


def in_docs(arguments):
    """Call it where the documentation counts."""
    with profiles.using("docs"):
        fused(arguments)


def paged_projected(**changes):
    cache = torch.zeros(4, 128, HEAD, dtype=torch.bfloat16)
    rope = torch.zeros(4, 128, ROPE, dtype=torch.bfloat16)
    return projected(
        (1, 1),
        heads=1,
        key=cache,
        value=cache,
        key_rope=rope,
        block_table=torch.tensor([[1], [2]], dtype=torch.int32),
        block_size=128,
        actual_seq_kvlen=[5, 7],
        **changes,
    )


def gather_arguments(**changes):
    """Pieces of three contexts, of 40, 16 and 5 rows."""
    generator = torch.Generator().manual_seed(1)

    def random(*shape):
        return torch.randn(*shape, generator=generator).bfloat16()

    return {
        "key_cache": random(9, 16, 1, LATENT),
        "value_cache": random(9, 16, 1, ROPE),
        "block_tables": torch.tensor([[3, 1, 4, 8], [5, 2, 0, 0], [7, 6, 0, 0]], dtype=torch.int32),
        "seq_lens": torch.tensor([40, 16, 5], dtype=torch.int32),
        "key": torch.zeros(61, 1, LATENT, dtype=torch.bfloat16),
        "value": torch.zeros(61, 1, ROPE, dtype=torch.bfloat16),
        "seq_offset": torch.tensor([16, 16, 0], dtype=torch.int32),
        **changes,
    }


def update_arguments(parts=2, rows=6, size=16, dtype=torch.bfloat16, **changes):
    generator = torch.Generator().manual_seed(2)
    return {
        "lse": [torch.randn(rows, generator=generator) for _ in range(parts)],
        "local_out": [torch.randn(rows, size, generator=generator).to(dtype) for _ in range(parts)],
        "update_type": 1,
        **changes,
    }


GATHER = "npu::npu_gather_pa_kv_cache"
UPDATE = "npu::npu_attention_update"


def gather(**changes):
    call(GATHER, gather_arguments(**changes))


def spoiled_gather(**changes):
    call(GATHER, spoiled(gather_arguments(), **changes))


def update(*args, **changes):
    call(UPDATE, update_arguments(*args, **changes))


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


ROPE_VIOLATIONS = {
    "both ropes": [lambda: fused(absorbed(query_rope=None))],
    "head size with rope": [
        lambda: fused(
            spoiled(
                projected(),
                **dict.fromkeys(("query", "key", "value"), lambda t: t[..., :64].contiguous()),
            )
        )
    ],
    "size of rope": [
        lambda: fused(spoiled(absorbed(), query_rope=lambda r: r[..., :32].contiguous())),
        lambda: fused(spoiled(absorbed(), key_rope=lambda r: r[1:])),
        lambda: fused(spoiled(projected(), key_rope=lambda r: r[:, :1].contiguous())),
    ],
    "dtype of rope": [lambda: fused(spoiled(absorbed(), key_rope=torch.Tensor.half))],
    "contiguous rope": [
        lambda: fused(spoiled(absorbed(), query_rope=strided)),
        lambda: fused(spoiled(projected(), key_rope=strided)),
    ],
    "heads over latent rows": [lambda: fused(absorbed(heads=3)), lambda: fused(absorbed(heads=40))],
    "one head of latent rows": [
        lambda: fused(absorbed(heads=1, num_key_value_heads=0)),
    ],
    "layout with rope": [
        lambda: fused(projected(input_layout="TND_NTD")),
    ],
    "block size with rope": [lambda: fused(absorbed(block_size=1040))],
    "query tokens over latent rows": [lambda: in_docs(absorbed([(0, 17), (3, 1)]))],
    "documented block size with rope": [lambda: in_docs(absorbed(block_size=64))],
    "bfloat16 of projected keys": [lambda: in_docs(projected(dtype=torch.float16))],
    "no cache of projected keys": [lambda: in_docs(paged_projected())],
}

GATHER_VIOLATIONS = {
    "cache form": [
        lambda: spoiled_gather(key_cache=lambda c: c.flatten(2)),
        lambda: spoiled_gather(value_cache=lambda c: c[1:]),
    ],
    "result form": [lambda: spoiled_gather(key=torch.Tensor.half)],
    "rows": [lambda: spoiled_gather(key=lambda k: k[1:], value=lambda v: v[1:])],
    "integers": [
        lambda: spoiled_gather(seq_lens=torch.Tensor.long),
        lambda: gather(seq_offset=int32(16, 16)),
    ],
    "offset": [lambda: gather(seq_offset=int32(16, 16, 4))],
    "block ids": [
        lambda: spoiled_gather(block_tables=lambda t: t + 5),
        lambda: gather(seq_offset=int32(32, 16, 0)),
    ],
    "contiguous": [
        lambda: spoiled_gather(value=strided),
        lambda: spoiled_gather(key_cache=strided),
    ],
}

UPDATE_VIOLATIONS = {
    "parts": [lambda: update(17), lambda: update(lse=[torch.zeros(6)])],
    "part form": [
        lambda: update(local_out=[torch.zeros(6, 16), torch.zeros(6, 8)]),
        lambda: update(dtype=torch.float64),
    ],
    "head_dim": [lambda: update(size=12)],
    "lse form": [
        lambda: update(lse=[torch.zeros(6, 1)] * 2),
        lambda: update(lse=[torch.zeros(6).half()] * 2),
    ],
    "update_type": [lambda: update(update_type=2)],
}


def matmul_of_heads(**changes):
    """Three tokens of four heads, times a matrix for each head."""
    return {
        "input": torch.randn(3, 4, 32, generator=torch.Generator().manual_seed(3)),
        "weight": torch.randn(4, 32, 16, generator=torch.Generator().manual_seed(4)),
        "perm_x1": [1, 0, 2],
        **changes,
    }


TRANSPOSE = "npu::npu_transpose_batchmatmul"


def transposed(**changes):
    call(TRANSPOSE, matmul_of_heads(**changes))


TRANSPOSE_VIOLATIONS = {
    "dtype": [lambda: transposed(weight=torch.zeros(4, 32, 16).half())],
    "shapes": [
        lambda: transposed(weight=torch.zeros(3, 32, 16)),
        lambda: transposed(weight=torch.zeros(4, 16, 16)),
        lambda: transposed(input=torch.zeros(3, 128)),
    ],
    "permutations": [
        lambda: transposed(perm_x1=[2, 0, 1]),
        lambda: transposed(perm_y=[0, 1, 2]),
    ],
    "sizes": [
        lambda: transposed(weight=torch.zeros(4, 32, 20)),
        lambda: transposed(input=torch.zeros(1, 128, 512), weight=torch.zeros(128, 512, 16)),
    ],
    "unused arguments": [lambda: transposed(batch_split_factor=2)],
}
