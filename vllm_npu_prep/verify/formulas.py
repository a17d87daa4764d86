"""What operators compute, by definition: float64 on the host, plain torch.

These share no code with kernels, masks or references of this project. A mistake would have to be
made twice, in two ways, to go unnoticed.
"""

import math
from collections.abc import Sequence

import torch


def visible(
    query_len: int, seq_len: int, window: int | None = None, causal: bool = True
) -> torch.Tensor:
    """Which position each query token of a request sees.

    Parameters
    ----------
    query_len, seq_len
        Tokens of the request in this step, and in all. The last query token is the last token.
    window
        Token p sees p - window + 1 to p, and without causality also up to p + window - 1.
    causal
        Whether tokens see only themselves and tokens before them.

    Returns
    -------
    torch.Tensor
        Bool ``[query_len, seq_len]``, True where seen.
    """
    tokens = torch.arange(seq_len - query_len, seq_len)[:, None]
    distance = tokens - torch.arange(seq_len)[None, :]  # how far a column lies in the past
    seen = distance >= 0 if causal else torch.ones_like(distance, dtype=torch.bool)
    if window is not None:
        seen = seen & (distance.abs() < window)
    return seen


def attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, seen: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax attention of one request.

    Parameters
    ----------
    query
        ``[query_len, num_heads, head_size]``, any float dtype.
    key, value
        ``[seq_len, num_kv_heads, head_size]``; consecutive query heads share a K/V head.
    scale
        Factor of the scores.
    seen
        Bool ``[query_len, seq_len]``, of `visible`.

    Returns
    -------
    output
        Float64 ``[query_len, num_heads, head_size]``; 0 where a token sees nothing.
    lse
        Float64 ``[query_len, num_heads]``: the logarithm of the sum of exponentials.
    """
    num_heads, group = query.shape[1], query.shape[1] // key.shape[1]
    output = torch.zeros(query.shape, dtype=torch.float64)
    lse = torch.full(query.shape[:2], -math.inf, dtype=torch.float64)
    some = seen.any(1)
    for head in range(num_heads):
        keys, values = key[:, head // group].double(), value[:, head // group].double()
        scores = (query[:, head].double() @ keys.T) * scale
        scores = scores.masked_fill(~seen, -math.inf)[some]
        lse[some, head] = scores.logsumexp(1)
        output[some, head] = (scores - scores.logsumexp(1, keepdim=True)).exp() @ values
    return output, lse


def uniform_average(query: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """The mean of all values for each token and head: attention that ignores query and keys.

    Parameters
    ----------
    query
        ``[query_len, num_heads, head_size]``, for its shape.
    value
        ``[seq_len, num_kv_heads, head_size]``.
    """
    group = query.shape[1] // value.shape[1]
    mean = value.double().mean(0).repeat_interleave(group, 0)
    return mean.expand(query.shape).clone()


def paged_write(
    plane: torch.Tensor, rows: torch.Tensor, slots: Sequence[int], block_size: int
) -> torch.Tensor:
    """A plane of the KV cache after rows were written to their slots, one by one.

    Parameters
    ----------
    plane
        ``[num_blocks, block_size, num_kv_heads, head_size]`` before.
    rows
        ``[tokens, num_kv_heads, head_size]``.
    slots
        Of each token; those below 0 are not written.
    block_size
        Tokens of a block.
    """
    written = plane.clone()
    for row, slot in zip(rows, slots):
        if slot >= 0:
            written[slot // block_size][slot % block_size] = row
    return written


def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """``x / sqrt(mean(x^2) + epsilon) * weight`` over the last dimension, float64."""
    x = x.double()
    return x / ((x * x).sum(-1, keepdim=True) / x.shape[-1] + epsilon).sqrt() * weight.double()


def swiglu(x: torch.Tensor) -> torch.Tensor:
    """``a * sigmoid(a) * b``, a and b being the halves of the last dimension, float64."""
    half = x.shape[-1] // 2
    a, b = x[..., :half].double(), x[..., half:].double()
    return a / (1 + (-a).exp()) * b


def rotate_half(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding in the form of GPT-NeoX: element i and i + half are a pair, float64."""
    half = x.shape[-1] // 2
    x, cos, sin = x.double(), cos.double(), sin.double()
    rotated = torch.empty_like(x)
    rotated[..., :half] = x[..., :half] * cos[..., :half] - x[..., half:] * sin[..., :half]
    rotated[..., half:] = x[..., half:] * cos[..., half:] + x[..., :half] * sin[..., half:]
    return rotated
