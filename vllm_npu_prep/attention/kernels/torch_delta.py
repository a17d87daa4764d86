"""Gated delta nets in torch: the convolution, and the gated delta rule by token and by chunk.

A head's state ``S`` ``[value_dim, key_dim]`` maps keys to values. Token ``i`` with key ``k``, value
``v``, decay ``g`` (a logarithm, at most 0) and rate ``beta`` changes it and reads it by a query::

    S_i = exp(g_i) S_(i-1) + u_i k_i^T    with    u_i = beta_i (v_i - exp(g_i) S_(i-1) k_i)
    o_i = S_i q_i

Inserting the first line into itself gives a whole chunk at once. With ``G_i``, the sum of the
decays up to ``i``, the ``u`` of a chunk solve a triangular system::

    u_i + beta_i sum_(j<i) exp(G_i - G_j) (k_i k_j) u_j = beta_i (v_i - exp(G_i) S_0 k_i)
    o_i = exp(G_i) S_0 q_i + sum_(j<=i) exp(G_i - G_j) (q_i k_j) u_j

Keys and queries have length 1, queries are divided by the root of their dimension, and all is
computed in float32, as transformers' ``torch_chunk_gated_delta_rule`` does (``models/qwen3_next``).
"""

from typing import NamedTuple

import torch
from torch.nn import functional

CHUNK = 64
"""The tokens that are computed at once, as in transformers and in flash-linear-attention."""

EPSILON = 1e-6  # added to squared lengths


class RuleInputs(NamedTuple):
    """The inputs of the gated delta rule for some tokens, in float32."""

    query: torch.Tensor  # [T, H, key_dim], of length 1 / sqrt(key_dim)
    key: torch.Tensor  # [T, H, key_dim], of length 1
    value: torch.Tensor  # [T, H, value_dim]
    decay: torch.Tensor  # [T, H], at most 0
    rate: torch.Tensor  # [T, H], between 0 and 1

    def of_tokens(self, tokens: slice) -> "RuleInputs":
        return RuleInputs(*(each[tokens] for each in self))


def rule_inputs(
    mixed: torch.Tensor,  # [T, 2 * num_k_heads * key_dim + num_v_heads * value_dim]
    a: torch.Tensor,  # [T, num_v_heads]
    b: torch.Tensor,  # [T, num_v_heads]
    a_log: torch.Tensor,  # [num_v_heads] float32
    dt_bias: torch.Tensor,  # [num_v_heads]
    key_dim: int,
    value_dim: int,
) -> RuleInputs:
    """Split the output of the convolution, and compute decays and rates from the gates.

    Parameters
    ----------
    mixed
        Queries, keys and values of all heads, one after the other. Several heads of values may
        share a head of keys.
    a, b
        What decays and rates are computed from.
    a_log, dt_bias
        The layer's parameters.
    key_dim, value_dim
        The sizes of one head.
    """
    num_v_heads = a.shape[-1]
    width = (mixed.shape[-1] - num_v_heads * value_dim) // 2
    query, key, value = mixed.float().split([width, width, num_v_heads * value_dim], -1)
    repeats = num_v_heads * key_dim // width
    heads = [each.unflatten(-1, (-1, key_dim)) for each in (query, key)]
    query, key = (each.repeat_interleave(repeats, 1) if repeats > 1 else each for each in heads)
    query, key = (
        each * torch.rsqrt(each.square().sum(-1, keepdim=True) + EPSILON) for each in (query, key)
    )
    decay = -a_log.float().exp() * functional.softplus(a.float() + dt_bias.float())
    return RuleInputs(
        query * key_dim**-0.5,
        key,
        value.unflatten(-1, (-1, value_dim)),
        decay,
        b.float().sigmoid(),
    )


def convolve(
    x: torch.Tensor,  # [T, width]
    weight: torch.Tensor,  # [width, kernel_size]
    bias: torch.Tensor | None,  # [width]
    last: torch.Tensor,  # [kernel_size - 1, width]: inputs before x
) -> tuple[torch.Tensor, torch.Tensor]:
    """Convolve one sequence over its tokens, each channel separately, and apply SiLU.

    Returns
    -------
    convolved, last
        ``[T, width]``, and the sequence's last ``kernel_size - 1`` inputs.
    """
    inputs = torch.cat((last.to(x.dtype), x))
    convolved = functional.conv1d(
        inputs.t().unsqueeze(0), weight.unsqueeze(1), bias, groups=len(weight)
    )
    return functional.silu(convolved.squeeze(0).t()), inputs[len(x) :]


def convolve_next(
    x: torch.Tensor,  # [R, width], one token of each sequence
    weight: torch.Tensor,  # [width, kernel_size]
    bias: torch.Tensor | None,  # [width]
    last: torch.Tensor,  # [R, kernel_size - 1, width]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Do what `convolve` does for the next token of several sequences."""
    inputs = torch.cat((last.to(x.dtype), x.unsqueeze(1)), 1)
    convolved = (inputs * weight.t()).sum(1)
    if bias is not None:
        convolved = convolved + bias
    return functional.silu(convolved), inputs[:, 1:]


def update_states(
    given: RuleInputs,  # of R sequences, one token each
    states: torch.Tensor,  # [R, H, value_dim, key_dim] float32
) -> tuple[torch.Tensor, torch.Tensor]:
    """Apply the rule to the next token of several sequences.

    Returns
    -------
    outputs, states
        ``[R, H, value_dim]`` and the new states, both float32.
    """
    query, key, value, decay, rate = given
    states = states * decay.exp()[..., None, None]
    known = (states * key.unsqueeze(2)).sum(-1)
    change = (value - known) * rate.unsqueeze(-1)
    states = states + change.unsqueeze(-1) * key.unsqueeze(2)
    return (states * query.unsqueeze(2)).sum(-1), states


def scan(
    given: RuleInputs,  # of one sequence
    state: torch.Tensor,  # [H, value_dim, key_dim] float32
) -> tuple[torch.Tensor, torch.Tensor]:
    """Apply the rule to the next tokens of one sequence, `CHUNK` tokens at a time.

    Returns
    -------
    outputs, state
        ``[T, H, value_dim]`` and the new state, both float32.
    """
    outputs = []
    for start in range(0, len(given.query), CHUNK):
        output, state = _scan_chunk(given.of_tokens(slice(start, start + CHUNK)), state)
        outputs.append(output)
    return torch.cat(outputs), state


def _scan_chunk(given: RuleInputs, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    query, key, value = (each.transpose(0, 1) for each in given[:3])  # [H, T, dim]
    rate = given.rate.t().unsqueeze(-1)  # [H, T, 1]
    total = given.decay.t().cumsum(-1)  # [H, T]
    # exp(G_i - G_j) for j <= i, else 0; for later tokens it could be too large for a float
    between = total.unsqueeze(-1) - total.unsqueeze(-2)
    lower = torch.ones_like(between, dtype=torch.bool).tril()
    between = between.masked_fill(~lower, float("-inf")).exp()
    since_start = total.exp().unsqueeze(-1)
    keys = key.transpose(1, 2)
    system = rate * (key @ keys) * between  # its diagonal is not read
    known = (key * since_start) @ state.transpose(1, 2)
    changes = torch.linalg.solve_triangular(
        system, rate * (value - known), upper=False, unitriangular=True
    )
    outputs = (query * since_start) @ state.transpose(1, 2) + ((query @ keys) * between) @ changes
    to_end = (total[:, -1:] - total).exp().unsqueeze(-1)
    state = state * total[:, -1].exp()[:, None, None] + changes.transpose(1, 2) @ (key * to_end)
    return outputs.transpose(0, 1), state
