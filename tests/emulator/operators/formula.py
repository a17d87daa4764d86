"""Attention by its definition, one request and one head at a time, in float64.

Written apart from the references: it knows positions and visibility, and neither layouts nor masks.
"""

import math

import torch


def random(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def causal(position, column):
    return column <= position


def everything(position, column):
    return (position >= position) & (column >= 0)


def window(size):
    """Token p sees p-size+1..p."""
    return lambda position, column: (column > position - size) & (column <= position)


def band(before, after):
    return lambda position, column: (column >= position - before) & (column <= position + after)


def attention(queries, keys, values, scale, visible, *, origin="lower right"):
    """Outputs ``[Q, N, D]`` and logarithms ``[Q, N]`` of each request.

    `visible` says whether the query at a position sees a column; positions count such that the last
    query stands at the last column, or with ``origin="upper left"`` the first at the first. Rows
    that see nothing are zero, their logarithm is +inf.
    """
    outputs, logarithms = [], []
    for query, key, value in zip(queries, keys, values):
        num_rows, num_heads, _ = query.shape
        num_columns, num_kv_heads = key.shape[:2]
        first = num_columns - num_rows if origin == "lower right" else 0
        positions = first + torch.arange(num_rows)[:, None]
        sees = visible(positions, torch.arange(num_columns)[None])
        output = torch.zeros(query.shape, dtype=torch.float64)
        logarithm = torch.zeros(num_rows, num_heads, dtype=torch.float64)
        for head in range(num_heads):
            kv_head = head * num_kv_heads // num_heads
            scores = query[:, head].double() @ key[:, kv_head].double().T * scale
            weights = torch.where(sees, scores.exp(), 0.0)
            total = weights.sum(1)
            output[:, head] = weights @ value[:, kv_head].double() / total.clamp(1e-300)[:, None]
            logarithm[:, head] = torch.where(total > 0, total.log(), math.inf)
        outputs.append(output)
        logarithms.append(logarithm)
    return outputs, logarithms


def of_batch(batch, visible=causal, **kwargs):
    """The same for a `calls.Batch`."""
    return attention(batch.queries, batch.keys, batch.values, batch.scale, visible, **kwargs)


DTYPES = [torch.float16, torch.bfloat16, torch.float32]
TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 1.6e-2, torch.float32: 2e-6}


def assert_close(actual, expected, dtype):
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(actual.double(), expected, atol=tolerance, rtol=tolerance)
