"""Valid calls of the operators of latent attention, and calls that break one demand each."""

import torch

from tests.emulator.operators.calls import V2, call, triangle

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


def matmul_of_heads(**changes):
    """Three tokens of four heads, times a matrix for each head."""
    return {
        "input": torch.randn(3, 4, 32, generator=torch.Generator().manual_seed(3)),
        "weight": torch.randn(4, 32, 16, generator=torch.Generator().manual_seed(4)),
        "perm_x1": [1, 0, 2],
        **changes,
    }


TRANSPOSE = "npu::npu_transpose_batchmatmul"
