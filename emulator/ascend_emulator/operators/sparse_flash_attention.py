"""Reference of ``npu_sparse_flash_attention``: latent attention over chosen rows of the cache."""

from typing import Any, NamedTuple

import torch

from ascend_emulator import faults, profiles
from ascend_emulator.operators.constraint import Call, shape_of
from ascend_emulator.operators.sparse_requests import NO_LIMIT, ROWS_AT_ONCE, Requests

SPARSE_FLASH_ATTENTION = "npu::npu_sparse_flash_attention"
ABSORBED = 2
"""The only mode of attention: keys are latent rows, which are values, too."""

LATENT, ROPE = 512, 64
HEADS = (1, 2, 4, 8, 16, 32, 64, 128)


class Choice(NamedTuple):
    """What some tokens attend to, at the point ``choice``."""

    entries: Any  # [tokens, sparse_size]: positions, or blocks of several, and -1
    read: Any  # [tokens, sparse_size] bool: entries that the kernel reads


def sparse_flash_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor | None,
    sparse_indices: torch.Tensor,
    scale_value: float,
    *,
    block_table: torch.Tensor | None = None,
    actual_seq_lengths_query: torch.Tensor | None = None,
    actual_seq_lengths_kv: torch.Tensor | None = None,
    query_rope: torch.Tensor | None = None,
    key_rope: torch.Tensor | None = None,
    sparse_block_size: int = 1,
    layout_query: str = "BSND",
    layout_kv: str = "BSND",
    sparse_mode: int = 3,
    pre_tokens: int = NO_LIMIT,
    next_tokens: int = NO_LIMIT,
    attention_mode: int = 0,
    return_softmax_lse: bool = False,
    sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return ``attention_out`` like `query`, and the softmax's maximum and sum if asked."""
    requests = Requests(
        Call("npu_sparse_flash_attention", SPARSE_FLASH_ATTENTION),
        query,
        key,
        actual_seq_lengths_query,
        actual_seq_lengths_kv,
        block_table,
        layout_query,
        layout_kv,
        sparse_mode,
    )
    demand = requests.call.demand
    demand("attention_mode", attention_mode == ABSORBED, attention_mode)
    demand("sinks", sinks is None, "a tensor")
    demand("values", value is not None, None)
    ropes = query_rope, key_rope
    demand("both ropes", not any(each is None for each in ropes), [type(each) for each in ropes])
    assert value is not None and query_rope is not None and key_rope is not None
    requests.check(pre_tokens, next_tokens)
    _check_planes(requests, value, query_rope, key_rope)
    _check_choice(requests, sparse_indices, sparse_block_size)
    demand("softmax_lse", not (return_softmax_lse and requests.is_paged), return_softmax_lse)
    # Side by side, rows past a length are cleared
    rest = float("nan") if requests.is_packed else 0.0
    output = torch.full(query.shape, rest, dtype=query.dtype)
    is_older = profiles.current().release == "8.5"
    statistics = torch.full((2, *query.shape[:-1]), float("nan") if is_older else rest)
    queries = torch.cat((query, faults.apply("query_rope", query_rope)), -1).float()
    for request, (tokens, num_tokens, num_keys) in enumerate(requests.each()):
        output[tokens] = 0
        if not is_older:
            statistics[:, *_as_tuple(tokens)] = 0
        if not num_keys:
            continue
        limits = requests.limits(num_tokens, num_keys)
        step = max(1, ROWS_AT_ONCE // (sparse_indices.shape[-1] * sparse_block_size * LATENT))
        for start in range(0, num_tokens, step):
            part = slice(start, min(start + step, num_tokens))
            entries = _entries(sparse_indices, tokens, part)
            positions, seen = _positions(
                requests.call, entries, limits[part], num_keys, sparse_block_size
            )
            rows = [requests.rows(plane, request, positions) for plane in (key, key_rope)]
            keys = torch.cat(rows, -1).float()  # [tokens, chosen, 576]
            scores = (queries[tokens][part] @ keys.transpose(1, 2)) * scale_value
            scores = scores.masked_fill(~seen[:, None], float("-inf"))
            some = seen.any(1)  # a token that sees nothing keeps zeros
            largest = scores.amax(-1)
            shares = (scores - largest[..., None]).exp()
            sums = shares.sum(-1)
            mixed = (shares / sums[..., None]) @ keys[..., :LATENT]
            output[tokens][part][some] = mixed[some].to(output.dtype)
            for index, found in enumerate((largest, sums)):
                statistics[index][tokens][part][some] = found[some]
    if not return_softmax_lse:
        return output, torch.empty(0), torch.empty(0)
    statistics = statistics.unsqueeze(1) if requests.is_packed else statistics.unsqueeze(2)
    return output, statistics[0].contiguous(), statistics[1].contiguous()


def _as_tuple(tokens: Any) -> tuple[Any, ...]:
    return tokens if isinstance(tokens, tuple) else (tokens,)


def _entries(sparse_indices: torch.Tensor, tokens: Any, part: slice) -> torch.Tensor:
    """Return what some tokens of a request have chosen, ``[tokens, sparse_size]``."""
    *leading, rows = _as_tuple(tokens)
    wanted = rows.start + torch.arange(part.start, part.stop)
    wanted = faults.apply("rows of a choice", wanted, first=rows.start)
    return sparse_indices[(*leading, wanted)][:, 0]


def _positions(
    call: Call, entries: torch.Tensor, limits: torch.Tensor, num_keys: int, block: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return positions ``[tokens, sparse_size * block]`` and which of them are attended to.

    A kernel reads as many entries as could hold all keys that the token may see, and leaves out
    those behind them.
    """
    read = torch.arange(entries.shape[1]) < -(-limits[:, None] // block)
    entries, read = faults.apply("choice", Choice(entries, read))
    width = max(1, int(read.sum(1).max()))  # no column behind it is read for any of the tokens
    entries, read = entries[:, :width], read[:, :width]
    given = entries[read].long()
    inside = (given >= -1) & (given * block < num_keys)
    call.demand("chosen positions", inside.all(), f"{given[~inside].tolist()} of {num_keys} keys")
    is_one = read & (entries >= 0)
    late = is_one[:, 1:] & read[:, :-1] & (entries[:, :-1] < 0)
    call.demand("order of a choice", not late.any(), "-1 before a position")
    positions = entries.clamp(min=0).long()[..., None] * block + torch.arange(block)
    seen = is_one[..., None] & (positions < limits[:, None, None])
    positions = positions.masked_fill(~seen, 0)
    return positions.flatten(1), seen.flatten(1)


def _check_planes(
    requests: Requests, value: torch.Tensor, query_rope: torch.Tensor, key_rope: torch.Tensor
) -> None:
    demand, query, key = requests.call.demand, requests.query, requests.key
    demand("heads", query.shape[-2] in HEADS, query.shape[-2])
    sizes = [each.shape[-1] for each in (query, key, query_rope, key_rope)]
    demand("head sizes", sizes == [LATENT, LATENT, ROPE, ROPE], sizes)
    alike = shape_of(query_rope)[:-1] == shape_of(query)[:-1]
    alike = alike and shape_of(key_rope)[:-1] == shape_of(key)[:-1] and value.shape == key.shape
    given = [shape_of(each) for each in (query, key, value, query_rope, key_rope)]
    demand("shapes", alike, given)
    named = {"value": value, "query_rope": query_rope, "key_rope": key_rope}
    for argument, each in named.items():
        demand("dtype", each.dtype == query.dtype, each.dtype, argument)
    for argument in ("value", "key_rope"):
        strides = named[argument].stride()
        demand("contiguous keys", named[argument].is_contiguous(), f"strides {strides}", argument)
    same = value.data_ptr() == key.data_ptr() or torch.equal(value, key)
    demand("values are keys", same, "other rows than those of key")
    for argument, each in (("query", query), ("query_rope", query_rope)):
        fits = each.is_contiguous() or not profiles.current().documentation
        demand("contiguous", fits, f"strides {each.stride()}", argument)


def _check_choice(requests: Requests, sparse_indices: torch.Tensor, block: int) -> None:
    demand = requests.call.demand
    wanted = (*shape_of(requests.query)[:-2], 1)
    fits = sparse_indices.dtype == torch.int32 and shape_of(sparse_indices)[:-1] == wanted
    given = f"{shape_of(sparse_indices)} {sparse_indices.dtype}"
    demand("choice", fits and sparse_indices.numel(), given)
    demand("block of a choice", 1 <= block <= 128 and block & (block - 1) == 0, block)
    if requests.is_paged:
        size = requests.key.shape[1]
        demand("blocks of both", size % block == 0, f"{block} in {size}")
