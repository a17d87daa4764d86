"""Arguments of valid calls of the operators of latent attention."""

from functools import partial

import torch

from tests.emulator.operators.calls import V2, call, triangle
from tests.emulator.operators.formula import random

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
    drawn = partial(random, dtype=dtype, seed=seed)
    tokens = sum(new for _, new in lengths)
    needed = [-(-sum(pair) // block_size) for pair in lengths]
    table = torch.zeros(len(lengths), max(needed), dtype=torch.int32)
    ids = (torch.randperm(sum(needed), generator=generator) + 1).int().tolist()
    for row, count in enumerate(needed):
        table[row, :count] = torch.tensor([ids.pop() for _ in range(count)])

    latent = drawn(sum(needed) + 1, block_size, LATENT)
    ends = torch.tensor([new for _, new in lengths]).cumsum(0).tolist()
    return {
        "query": drawn(tokens, heads, LATENT),
        "key": latent,
        "value": latent,
        "query_rope": drawn(tokens, heads, ROPE),
        "key_rope": drawn(*latent.shape[:2], ROPE),
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


def projected(lengths=(5, 1, 9), *, heads=4, dtype=torch.bfloat16, **more):
    """Attention over K and V of every head."""
    rows, ropes = (random(sum(lengths), heads, size, dtype=dtype) for size in (HEAD, ROPE))
    return {
        **dict.fromkeys(("query", "key", "value"), rows),
        **dict.fromkeys(("query_rope", "key_rope"), ropes),
        "atten_mask": triangle(),
        "sparse_mode": 3,
        "input_layout": "TND",
        "actual_seq_qlen": torch.tensor(lengths).cumsum(0).tolist(),
        "actual_seq_kvlen": torch.tensor(lengths).cumsum(0).tolist(),
        "num_query_heads": heads,
        "num_key_value_heads": heads,
        "softmax_scale": 0.07,
        **more,
    }


def fused(arguments):
    """Call the second version."""
    return call(V2, arguments)


def paged_projected():
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
    )


def gather_arguments(**changes):
    """Pieces of three contexts, of 40, 16 and 5 rows."""
    return {
        "key_cache": random(9, 16, 1, LATENT, dtype=torch.bfloat16),
        "value_cache": random(9, 16, 1, ROPE, dtype=torch.bfloat16),
        "block_tables": torch.tensor([[3, 1, 4, 8], [5, 2, 0, 0], [7, 6, 0, 0]], dtype=torch.int32),
        "seq_lens": torch.tensor([40, 16, 5], dtype=torch.int32),
        "key": torch.zeros(61, 1, LATENT, dtype=torch.bfloat16),
        "value": torch.zeros(61, 1, ROPE, dtype=torch.bfloat16),
        "seq_offset": torch.tensor([16, 16, 0], dtype=torch.int32),
        **changes,
    }


def update_arguments(parts=2, dtype=torch.bfloat16, **changes):
    return {
        "lse": [random(6, seed=part) for part in range(parts)],
        "local_out": [random(6, 16, dtype=dtype, seed=part) for part in range(parts)],
        "update_type": 1,
        **changes,
    }


GATHER = "npu::npu_gather_pa_kv_cache"
UPDATE = "npu::npu_attention_update"


def matmul_of_heads():
    """Three tokens of four heads, times a matrix for each head."""
    return {"input": random(3, 4, 32), "weight": random(4, 32, 16), "perm_x1": [1, 0, 2]}


TRANSPOSE = "npu::npu_transpose_batchmatmul"


def interleaved(dtype=torch.bfloat16, seed=0, steps=1):
    """Rotary parts of three tokens of four heads, at `steps` positions each."""
    factors = {
        name: random(3, 1, 1, ROPE, dtype=dtype, seed=seed + 1 + i)
        for i, name in enumerate(("cos", "sin"))
    }
    return {"x": random(3, 4, steps, ROPE, dtype=dtype, seed=seed), **factors}


def latent_write(seed=0, dtype=torch.bfloat16, **changes):
    """Three rows and their slots, of which one is nobody's."""
    factors = interleaved(dtype, seed)
    return {
        "kv": random(3, 1, 1, LATENT + ROPE, dtype=dtype, seed=seed),
        "gamma": random(LATENT, dtype=dtype, seed=seed + 3),
        **{name: factors[name] for name in ("cos", "sin")},
        "index": torch.tensor([40, -1, 3]),
        "k_cache": random(3, 16, 1, ROPE, dtype=dtype, seed=seed + 4),
        "ckv_cache": random(3, 16, 1, LATENT, dtype=dtype, seed=seed + 5),
        "cache_mode": "PA",
        **changes,
    }


INTERLEAVE = "npu::npu_interleave_rope"
LATENT_WRITE = "npu::npu_kv_rmsnorm_rope_cache"
