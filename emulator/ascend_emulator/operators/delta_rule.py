"""References of the gated delta rule: by token over states in a cache, and by chunks.

A head's state ``S [Dv, Dk]`` maps keys to values. A token decays it by ``exp(g)``, replaces the
share ``beta`` of what it knows of the key by the value, and reads it by the query.
"""

import torch

from ascend_emulator.api import touch
from ascend_emulator.operators.constraint import Call, shape_of

RECURRENT = "npu::npu_recurrent_gated_delta_rule"
CHUNK = "npu::npu_chunk_gated_delta_rule"
STATES = ("state",)  # of which blocks alone are touched
MOST_TOKENS = 8  # of a sequence
MOST_HEADS, MOST_CHUNK_HEADS = 256, 64
LARGEST_HEAD, CHUNK_HEAD = 256, 128


def recurrent_gated_delta_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    state: torch.Tensor,
    *,
    beta: torch.Tensor | None = None,
    scale: float | None = None,
    actual_seq_lengths: torch.Tensor | None = None,
    ssm_state_indices: torch.Tensor | None = None,
    num_accepted_tokens: torch.Tensor | None = None,
    g: torch.Tensor | None = None,
    gk: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute ``[T, Nv, Dv]``, and write the state after each token to that token's block."""
    call = Call("npu_recurrent_gated_delta_rule", RECURRENT)
    demand = call.demand
    given = beta, scale, actual_seq_lengths, ssm_state_indices
    demand("all given", not any(each is None for each in given), [type(each) for each in given])
    assert beta is not None and scale is not None
    assert actual_seq_lengths is not None and ssm_state_indices is not None
    for name, each in (("query", query), ("key", key), ("value", value), ("beta", beta)):
        demand("dtype", each.dtype == torch.bfloat16, each.dtype, name)
    demand("dtype of states", state.dtype == torch.bfloat16, state.dtype)
    _check_shapes(call, query, key, value, beta, state, len(state))
    (tokens, key_heads, key_dim), (value_heads, value_dim) = query.shape, value.shape[1:]
    fits = max(key_heads, value_heads) <= MOST_HEADS and value_heads % key_heads == 0
    fits = fits and max(key_dim, value_dim) <= LARGEST_HEAD
    demand("heads", fits, f"{shape_of(query)} and {shape_of(value)}", "query")
    demand("room for all tokens", len(state) >= tokens, f"{len(state)} blocks, {tokens} tokens")
    demand("contiguous states", state.is_contiguous(), f"strides {state.stride()}")
    accepted, lengths = num_accepted_tokens, actual_seq_lengths
    counts = torch.ones_like(lengths) if accepted is None else accepted
    integers = lengths, ssm_state_indices, counts
    fits = all(each.dtype == torch.int32 and each.dim() == 1 for each in integers)
    fits = fits and len(ssm_state_indices) == tokens and len(counts) == len(lengths)
    demand("integers", fits, [f"{shape_of(each)} {each.dtype}" for each in integers])
    fits = bool(((lengths >= 1) & (lengths <= MOST_TOKENS)).all()) and int(lengths.sum()) == tokens
    demand("lengths", fits, f"{lengths.tolist()} of {tokens} tokens")
    demand("accepted", bool(((counts >= 1) & (counts <= lengths)).all()), counts.tolist())
    inside = (ssm_state_indices >= 0) & (ssm_state_indices < len(state))
    demand("state indices", bool(inside.all()), ssm_state_indices.tolist())
    own = [each.unique() for each in ssm_state_indices.split(lengths.tolist())]
    shared = torch.cat(own)
    shared = shared[shared > 0]
    demand("one sequence a state", len(shared.unique()) == len(shared), ssm_state_indices.tolist())
    for name, each in (("query", query), ("key", key)):
        demand("lengths of vectors", not (each.abs() > 1).any(), each.abs().max().item(), name)
    _check_decays(call, g, tokens, value_heads)
    demand("rates", not ((beta < 0) | (beta > 1)).any(), beta.tolist())
    demand("no decays of elements", gk is None, "a tensor")
    touch(state, ssm_state_indices, write=True)
    output, start = torch.empty_like(value), 0
    for length, count in zip(lengths.tolist(), counts.tolist()):
        own_states = ssm_state_indices[start : start + length].tolist()
        current = state[own_states[count - 1]].float()
        for token, block in enumerate(own_states, start):
            current, output[token] = _step(current, query, key, value, beta, g, scale, token)
            state[block] = current.to(state.dtype)
        start += length
    return output


def chunk_gated_delta_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    beta: torch.Tensor | None = None,
    initial_state: torch.Tensor | None = None,
    actual_seq_lengths: torch.Tensor | None = None,
    scale: float | None = None,
    g: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute ``[T, Nv, Dv]`` and the state after each sequence, ``[B, Nv, Dv, Dk]``."""
    call = Call("npu_chunk_gated_delta_rule", CHUNK)
    demand = call.demand
    given = beta, initial_state, actual_seq_lengths, scale
    demand("all given", not any(each is None for each in given), [type(each) for each in given])
    assert beta is not None and scale is not None
    assert initial_state is not None and actual_seq_lengths is not None
    named = {"query": query, "key": key, "value": value, "beta": beta}
    for name, each in {**named, "initial_state": initial_state}.items():
        demand("dtype", each.dtype == torch.bfloat16, each.dtype, name)
    lengths = actual_seq_lengths
    _check_shapes(call, query, key, value, beta, initial_state, lengths.numel())
    (tokens, key_heads, key_dim), (value_heads, value_dim) = query.shape, value.shape[1:]
    fits = max(key_heads, value_heads) <= MOST_CHUNK_HEADS and value_heads % key_heads == 0
    fits = fits and key_dim == value_dim == CHUNK_HEAD
    demand("heads", fits, f"{shape_of(query)} and {shape_of(value)}", "query")
    fits = lengths.dtype == torch.int32 and lengths.dim() == 1
    fits = fits and bool((lengths >= 1).all()) and int(lengths.sum()) == tokens
    demand("lengths", fits, f"{lengths.tolist()} {lengths.dtype}, {tokens} tokens")
    _check_decays(call, g, tokens, value_heads)
    output, final, start = torch.empty_like(value), torch.empty_like(initial_state), 0
    for row, length in enumerate(lengths.tolist()):
        current = initial_state[row].float()
        for token in range(start, start + length):
            current, output[token] = _step(current, query, key, value, beta, g, scale, token)
        final[row] = current.to(final.dtype)
        start += length
    return output, final


def _check_shapes(
    call: Call,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
    num_states: int,
) -> None:
    fits = query.dim() == value.dim() == 3 and min(query.numel(), value.numel(), num_states) > 0
    fits = fits and query.shape == key.shape and len(query) == len(value)
    fits = fits and shape_of(beta) == shape_of(value)[:2]
    sizes = (num_states, *shape_of(value)[1:], query.shape[-1])
    fits = fits and shape_of(state) == sizes
    given = [shape_of(each) for each in (query, key, value, beta, state)]
    call.demand("shapes", fits, given, "query")


def _check_decays(call: Call, g: torch.Tensor | None, tokens: int, heads: int) -> None:
    if g is None:
        return
    fits = shape_of(g) == (tokens, heads) and g.dtype == torch.float32 and not (g > 0).any()
    call.demand("decays", fits, f"{shape_of(g)} {g.dtype}")


def _step(
    state: torch.Tensor,  # [Nv, Dv, Dk] float32
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    beta: torch.Tensor,
    g: torch.Tensor | None,
    scale: float,
    token: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the state after one token, and its output ``[Nv, Dv]``."""
    repeats = value.shape[1] // query.shape[1]
    q, k = (each[token].float().repeat_interleave(repeats, 0) for each in (query, key))
    if g is not None:
        state = state * g[token].exp()[:, None, None]
    known = (state @ k.unsqueeze(-1)).squeeze(-1)
    change = beta[token].float().unsqueeze(-1) * (value[token].float() - known)
    state = state + change.unsqueeze(-1) * k.unsqueeze(1)
    return state, (state @ (q * scale).unsqueeze(-1)).squeeze(-1).to(value.dtype)
