"""Reference of ``npu_lightning_indexer``, which chooses the keys that each token attends to.

A key's score is the sum over heads of the head's weight times ReLU(query . key).
"""

from typing import Any

import torch

from ascend_emulator import faults, profiles
from ascend_emulator.operators.constraint import Call, shape_of
from ascend_emulator.operators.sparse_requests import NO_LIMIT, ROWS_AT_ONCE, Requests

LIGHTNING_INDEXER = "npu::npu_lightning_indexer"
HEAD_SIZE = 128
MOST_HEADS = 64
USUAL_COUNT, LARGEST_COUNT = 2048, 8192
NONE = -1
"""What stands behind the positions of a token that sees fewer keys than it may choose."""

UNWRITTEN = 2**31 - 1
"""Stands for what memory happened to hold where the kernel writes nothing; no position is so
large."""


def lightning_indexer(
    query: torch.Tensor,
    key: torch.Tensor,
    weights: torch.Tensor,
    *,
    actual_seq_lengths_query: torch.Tensor | None = None,
    actual_seq_lengths_key: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    layout_query: str = "BSND",
    layout_key: str = "BSND",
    sparse_count: int = 2048,
    sparse_mode: int = 3,
    pre_tokens: int = NO_LIMIT,
    next_tokens: int = NO_LIMIT,
    return_value: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return positions ``[..., 1, sparse_count]`` int32, best first, and their scores if asked."""
    requests = Requests(
        Call("npu_lightning_indexer", LIGHTNING_INDEXER),
        query,
        key,
        actual_seq_lengths_query,
        actual_seq_lengths_key,
        block_table,
        layout_query,
        layout_key,
        sparse_mode,
    )
    requests.check(pre_tokens, next_tokens)
    _check(requests, weights, sparse_count, return_value)
    shape = *query.shape[:-2], 1, sparse_count
    # Side by side, rows past a length are cleared, too
    indices = torch.full(shape, UNWRITTEN if requests.is_packed else NONE, dtype=torch.int32)
    rest = float("nan") if requests.is_packed else float("-inf")
    values = torch.full(shape, rest, dtype=query.dtype)
    each = requests.each()
    if not any(num_tokens and num_keys for _, num_tokens, num_keys in each):
        each = []  # nothing to compute: concatenated, nothing is written at all
    for request, (tokens, num_tokens, num_keys) in enumerate(each):
        best, scores = _choose(requests, weights, request, tokens, num_tokens, num_keys)
        count = min(best.shape[1], sparse_count)
        indices[tokens], values[tokens] = NONE, float("-inf")
        indices[tokens][:, 0, :count] = best[:, :count].int()
        values[tokens][:, 0, :count] = scores[:, :count].to(values.dtype)
    return indices, values if return_value else values.new_empty(0)


def _choose(
    requests: Requests,
    weights: torch.Tensor,
    request: int,
    tokens: Any,
    num_tokens: int,
    num_keys: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return positions ``[tokens, keys]`` by falling scores, -1 for keys not seen, and scores."""
    read = num_keys
    if requests.is_paged:
        read = faults.apply("read length", num_keys, block_size=requests.key.shape[1])
    positions = torch.arange(read)
    keys = requests.rows(requests.key, request, positions).float()
    limits = requests.limits(num_tokens, num_keys)
    limits = faults.apply("limits of a choice", limits, num_keys=num_keys)
    query, heads = requests.query[tokens], weights[tokens]
    step = max(1, ROWS_AT_ONCE // max(1, read * query.shape[1]))
    best, scores = [], []
    for start in range(0, num_tokens, step):
        part = slice(start, start + step)
        products = (query[part].float() @ keys.T).relu()
        sums = (products * heads[part].float().unsqueeze(-1)).sum(1)  # [tokens, keys]
        # Those past a request's length are seen: no correct kernel reads them; a fault does
        unseen = (positions >= limits[part, None]) & (positions < num_keys)
        sums = sums.masked_fill(unseen, float("-inf"))
        ordered, order = sums.sort(stable=True, descending=True)
        best.append(order.masked_fill(unseen.gather(1, order), NONE))
        scores.append(ordered)
    if not best:
        return torch.empty(0, 0), torch.empty(0, 0)
    return torch.cat(best), torch.cat(scores)


def _check(
    requests: Requests, weights: torch.Tensor, sparse_count: int, return_value: bool
) -> None:
    demand, query = requests.call.demand, requests.query
    profile = profiles.current()
    size = query.shape[-1], requests.key.shape[-1]
    demand("head size", size == (HEAD_SIZE, HEAD_SIZE), size)
    demand("heads", query.shape[-2] <= MOST_HEADS, query.shape[-2])
    demand("weights", shape_of(weights) == shape_of(query)[:-1], shape_of(weights))
    fits = weights.dtype in (query.dtype, torch.float32)
    demand("dtype of weights", fits, weights.dtype)
    is_older = profile.release == "8.5"
    demand("weights of 8.5", not is_older or weights.dtype == query.dtype, weights.dtype)
    for argument, each in (("query", query), ("weights", weights)):
        fits = each.is_contiguous() or not profile.documentation
        demand("contiguous", fits, f"strides {each.stride()}", argument)
    fits = 1 <= sparse_count <= USUAL_COUNT
    is_larger = sparse_count % 1024 == 0 and USUAL_COUNT < sparse_count <= LARGEST_COUNT
    demand("sparse_count", fits or is_larger, sparse_count)
    demand("sparse_count of 8.5", fits or not is_older, sparse_count)
    demand("return_value", not (return_value and requests.is_paged), return_value)
