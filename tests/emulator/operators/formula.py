"""Attention by its definition, one query token and one head at a time, in float64.

Written apart from the references: it knows positions and visibility, and neither layouts nor masks.
"""

import math

import torch


def causal(position, column):
    return column <= position


def everything(position, column):
    return True


def window(size):
    """Token p sees p-size+1..p."""
    return lambda position, column: position - size < column <= position


def band(before, after):
    return lambda position, column: position - before <= column <= position + after


def attention(queries, keys, values, scale, visible, *, origin="lower right"):
    """Outputs ``[Q, N, D]`` and logarithms ``[Q, N]`` of each request.

    `visible` says whether the query at a position sees a column; positions count such that the last
    query stands at the last column, or with ``origin="upper left"`` the first at the first.
    """
    outputs, logarithms = [], []
    for query, key, value in zip(queries, keys, values):
        num_rows, num_heads, _ = query.shape
        num_columns, num_kv_heads = key.shape[:2]
        first = num_columns - num_rows if origin == "lower right" else 0
        output = torch.zeros(query.shape, dtype=torch.float64)
        logarithm = torch.full((num_rows, num_heads), math.inf, dtype=torch.float64)
        for row in range(num_rows):
            seen = [j for j in range(num_columns) if visible(first + row, j)]
            for head in range(num_heads):
                kv_head = head * num_kv_heads // num_heads
                if not seen:
                    continue
                scores = key[seen, kv_head].double() @ query[row, head].double() * scale
                largest = scores.max()
                weights = (scores - largest).exp()
                logarithm[row, head] = largest + weights.sum().log()
                output[row, head] = weights @ value[seen, kv_head].double() / weights.sum()
        outputs.append(output)
        logarithms.append(logarithm)
    return outputs, logarithms


def of_batch(batch, visible=causal, **kwargs):
    """The same for a `calls.Batch`."""
    return attention(batch.queries, batch.keys, batch.values, batch.scale, visible, **kwargs)


TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 1.6e-2, torch.float32: 2e-6}


def assert_close(actual, expected, dtype):
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(actual.double(), expected, atol=tolerance, rtol=tolerance)
