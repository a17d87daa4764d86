"""What operators compute, by definition: float64 on the host, in plain torch.

The formulas share no code with kernels, masks or references of this project. A mistake would have
to be made twice, in two ways, to go unnoticed.
"""

import math
from collections.abc import Sequence

import torch


def visible(
    query_len: int,
    seq_len: int,
    window: int | None = None,
    causal: bool = True,
    rows: slice | torch.Tensor = slice(None),
) -> torch.Tensor:
    """Return which positions each query token of a request sees, bool ``[query_len, seq_len]``.

    With `rows`, only some query tokens are asked for.

    The last query token is the request's last token. With a window, token p sees p - window + 1 to
    p, and without causality also up to p + window - 1. With causality, tokens see only themselves
    and tokens before them.
    """
    tokens = torch.arange(seq_len - query_len, seq_len)[rows, None]
    distance = tokens - torch.arange(seq_len)[None, :]  # how far a column lies in the past
    seen = distance >= 0 if causal else torch.ones_like(distance, dtype=torch.bool)
    if window is not None:
        seen = seen & (distance.abs() < window)
    return seen


def attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, seen: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute softmax attention of one request.

    Parameters
    ----------
    query
        ``[query_len, num_heads, head_size]``, any float dtype.
    key, value
        ``[seq_len, num_kv_heads, head_size]``; consecutive query heads share a K/V head. Values
        may have another size.
    seen
        Bool ``[query_len, seq_len]``, from `visible`.

    Returns
    -------
    output
        Float64 ``[query_len, num_heads, size of values]``; 0 where a token sees nothing.
    lse
        Float64 ``[query_len, num_heads]``: the log-sum-exp of the scores.
    """
    num_heads, group = query.shape[1], query.shape[1] // key.shape[1]
    output = torch.zeros((*query.shape[:2], value.shape[-1]), dtype=torch.float64)
    lse = torch.full(query.shape[:2], -math.inf, dtype=torch.float64)
    some = seen.any(1)
    for head in range(num_heads):
        if head % group == 0:  # the heads of a group share them
            keys, values = key[:, head // group].double(), value[:, head // group].double()
        scores = (query[:, head].double() @ keys.T) * scale
        scores = scores.masked_fill(~seen, -math.inf)[some]
        lse[some, head] = scores.logsumexp(1)
        output[some, head] = (scores - scores.logsumexp(1, keepdim=True)).exp() @ values
    return output, lse


def index_scores(query: torch.Tensor, weights: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Compute how a lightning indexer scores the keys of one request, float64 ``[Q, S]``.

    Queries are ``[Q, heads, D]``, weights ``[Q, heads]`` and keys ``[S, D]``. A score is the sum
    over heads of the weight times the product of query and key, where the product is above 0.
    """
    scores = torch.zeros(len(query), len(key), dtype=torch.float64)
    for head in range(query.shape[1]):
        products = query[:, head].double() @ key.double().T
        scores += weights[:, head, None].double() * products.where(products > 0, 0.0)
    return scores


def uniform_average(query: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Return the mean of all values for each token and head: attention that ignores query and keys.

    Only the shape of the query, ``[query_len, num_heads, head_size]``, is read. The values are
    ``[seq_len, num_kv_heads, head_size]``.
    """
    group = query.shape[1] // value.shape[1]
    mean = value.double().mean(0).repeat_interleave(group, 0)
    return mean.expand(query.shape).clone()


def paged_write(
    plane: torch.Tensor, rows: torch.Tensor, slots: Sequence[int], block_size: int
) -> torch.Tensor:
    """Return a plane of the KV cache after rows were written to their slots, one by one.

    The plane, which isn't changed, is ``[num_blocks, block_size, num_kv_heads, head_size]``, and
    the rows are ``[tokens, num_kv_heads, head_size]``. Rows with a slot below 0 are not written.
    """
    written = plane.clone()
    for row, slot in zip(rows, slots):
        if slot >= 0:
            written[slot // block_size][slot % block_size] = row
    return written


def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """Compute ``x / sqrt(mean(x^2) + epsilon) * weight`` over the last dimension, float64."""
    x = x.double()
    return x / ((x * x).sum(-1, keepdim=True) / x.shape[-1] + epsilon).sqrt() * weight.double()


def swiglu(x: torch.Tensor) -> torch.Tensor:
    """Compute ``a * sigmoid(a) * b`` of the halves a and b of the last dimension, float64."""
    half = x.shape[-1] // 2
    a, b = x[..., :half].double(), x[..., half:].double()
    return a / (1 + (-a).exp()) * b


def rotated(x: torch.Tensor, rows: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """Rotate each pair of a head ``[T, heads, head_size]`` by its angle, float64.

    `rows` are cosines and sines ``[T, rotary_dim]``.
    """
    half = rows.shape[1] // 2
    cos, sin = rows[:, None, :half].double(), rows[:, None, half:].double()
    out = x.double().clone()
    if interleaved:
        first, second = slice(0, 2 * half, 2), slice(1, 2 * half, 2)
    else:
        first, second = slice(0, half), slice(half, 2 * half)
    one, other = x[..., first].double(), x[..., second].double()
    out[..., first], out[..., second] = one * cos - other * sin, other * cos + one * sin
    return out


def sums(rows: torch.Tensor, weights: torch.Tensor, row_of_pair: torch.Tensor) -> torch.Tensor:
    """Weight and add each token's rows: float64 ``[T, hidden]``.

    Rows are ``[pairs, hidden]``, weights ``[T, k]``, and `row_of_pair` ``[T * k]`` is -1 for a pair
    without a row.
    """
    output = torch.zeros(len(weights), rows.shape[1], dtype=torch.float64)
    for pair, row in enumerate(row_of_pair.tolist()):
        if row >= 0:
            token, k = divmod(pair, weights.shape[1])
            output[token] += weights[token, k].double() * rows[row].double()
    return output


def experts(
    x: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    share: Sequence[int],
) -> torch.Tensor:
    """Add the outputs of each token's experts in a share, with SwiGLU between two products.

    Parameters
    ----------
    x
        ``[T, hidden]``.
    w13, w2
        ``[experts, 2 * inner, hidden]``, gates first, and ``[experts, hidden, inner]``.
    weights, ids
        ``[T, k]``; ids of experts outside of the share count as none.

    Returns
    -------
    torch.Tensor
        Float64 ``[T, hidden]``.
    """
    output = torch.zeros(x.shape, dtype=torch.float64)
    for token, chosen in enumerate(ids.tolist()):
        for k, expert in enumerate(chosen):
            if expert in share:
                inner = swiglu(w13[expert].double() @ x[token].double())
                output[token] += float(weights[token, k]) * (w2[expert].double() @ inner)
    return output


def gating(
    logits: torch.Tensor,  # [T, experts]
    k: int,
    scoring: str,  # sigmoid, whose weights are divided by their sum, or softmax
    bias: torch.Tensor | None = None,
    groups: tuple[int, int] = (1, 1),
    factor: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute weights (float64) and ids (int64) of each token's k experts, both ``[T, k]``.

    Parameters
    ----------
    bias
        ``[experts]``, added for the choice alone. With a bias, a group counts by its two best
        experts.
    groups
        Number of groups of experts, and how many of them a token chooses from.
    """
    weights, ids = [], []
    number, kept = groups
    size = logits.shape[1] // number
    added = [0.0] * logits.shape[1] if bias is None else bias.double().tolist()
    for row in logits.double().tolist():
        if scoring == "sigmoid":
            scores = [1 / (1 + math.exp(-x)) for x in row]
        else:
            total = sum(math.exp(x) for x in row)
            scores = [math.exp(x) / total for x in row]
        choice = [score + extra for score, extra in zip(scores, added)]
        best = [
            sum(sorted(choice[g * size : (g + 1) * size], reverse=True)[: 1 if bias is None else 2])
            for g in range(number)
        ]
        allowed = sorted(range(number), key=lambda g: -best[g])[:kept]
        members = [e for g in sorted(allowed) for e in range(g * size, (g + 1) * size)]
        chosen = sorted(members, key=lambda e: -choice[e])[:k]
        whole = sum(scores[e] for e in chosen) if scoring == "sigmoid" else 1.0
        weights.append([scores[e] / whole * factor for e in chosen])
        ids.append(chosen)
    return torch.tensor(weights, dtype=torch.float64), torch.tensor(ids)


def delta_rule(
    query: torch.Tensor,  # [T, heads, key_dim]
    key: torch.Tensor,  # the same
    value: torch.Tensor,  # [T, heads, value_dim]
    g: torch.Tensor,  # [T, heads]: logarithms of decays
    beta: torch.Tensor,  # [T, heads]: rates
    scale: float,
    state: torch.Tensor,  # [heads, value_dim, key_dim]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the gated delta rule over the tokens of one sequence, one after the other.

    Returns
    -------
    output, state
        Float64: ``[T, heads, value_dim]``, and the state after the last token.
    """
    state, outputs = state.double(), []
    for token in range(len(value)):
        q, k, v = (each[token].double()[..., None] for each in (query, key, value))
        kept = state * g[token].double().exp()[:, None, None]
        rate = beta[token].double()[:, None, None]
        state = kept + rate * (v - kept @ k) @ k.transpose(1, 2)
        outputs.append((state @ q)[..., 0] * scale)
    return torch.stack(outputs), state


def gated_delta(
    mixed: torch.Tensor,  # [T, width]: queries, keys and values of all heads before the convolution
    last: torch.Tensor,  # [kernel_size - 1, width]: the inputs before these
    state: torch.Tensor,  # [num_v_heads, value_dim, key_dim]
    weight: torch.Tensor,  # the convolution's [width, kernel_size]
    a: torch.Tensor,
    b: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute a gated delta net over the tokens of one sequence, one after the other.

    Parameters
    ----------
    a, b
        ``[T, num_v_heads]``: decays are made of `a`, rates of `b`.
    a_log, dt_bias
        ``[num_v_heads]``.

    Returns
    -------
    output, last, state
        Float64: ``[T, num_v_heads, value_dim]``, and both parts of the state after the last token.
    """
    num_v_heads, value_dim, key_dim = state.shape
    inputs, width = torch.cat((last.double(), mixed.double())), mixed.shape[1]
    seen = inputs.unfold(0, weight.shape[1], 1)[: len(mixed)]  # [T, width, kernel_size]
    convolved = (seen * weight.double()).sum(-1)
    convolved = convolved / (1 + (-convolved).exp())
    keys, values = convolved.split([width - num_v_heads * value_dim, num_v_heads * value_dim], 1)
    vectors = keys.reshape(len(mixed), 2, -1, key_dim)
    vectors = vectors / (vectors.square().sum(-1, keepdim=True) + 1e-6).sqrt()
    query, key = vectors.repeat_interleave(num_v_heads // vectors.shape[2], 2).unbind(1)
    steps = (1 + (a.double() + dt_bias.double()).exp()).log()
    output, state = delta_rule(
        query,
        key,
        values.reshape(len(mixed), num_v_heads, value_dim),
        g=-a_log.double().exp() * steps,
        beta=1 / (1 + (-b.double()).exp()),
        scale=key_dim**-0.5,
        state=state,
    )
    return output, inputs[len(mixed) :], state
