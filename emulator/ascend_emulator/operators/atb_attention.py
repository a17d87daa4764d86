"""References of the atb attention operators: prompts, decodes and mixed steps over dense masks."""

from itertools import pairwise

import torch

from ascend_emulator import faults
from ascend_emulator.operators import attention
from ascend_emulator.operators.constraint import Call, shape_of

FLASH_ATTENTION = "atb::_npu_flash_attention"
PAGED_ATTENTION = "atb::_npu_paged_attention"
PAGED_ATTENTION_WORKSPACE = "atb::_npu_paged_attention_get_workspace"
SPLITFUSE = "atb::_npu_paged_attention_splitfuse"
DTYPES = (torch.float16, torch.bfloat16)
FLAG_BIAS = -10000.0
"""What a flag of 1 in a bfloat16 mask adds to a score."""


def flash_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    seq_len: torch.Tensor,
    scale_value: float,
    num_heads: int,
    num_kv_heads: int,
    out: torch.Tensor,
) -> None:
    """Attend with prompts over their own K and V.

    Parameters
    ----------
    query, key, value
        ``[T, N, D]``, ``[T, Nkv, D]``, ``[T, Nkv, D]``.
    mask
        ``[max_seq, max_seq]``, one square for all requests; added in float16, flags in bfloat16.
    seq_len
        ``[B]`` int32 on the host, not cumulative.
    out
        ``[T, N, D]``, written.
    """
    call = Call("atb attention", FLASH_ATTENTION)
    _check_query(call, query, num_heads, num_kv_heads, out)
    _check_tensors(call, query, {"key": key, "value": value, "mask": mask})
    expected = query.shape[0], num_kv_heads, query.shape[2]
    for argument, tensor in {"key": key, "value": value}.items():
        ok = shape_of(tensor) == expected
        call.demand("key and value shapes", ok, shape_of(tensor), argument)
    lengths = _check_query_lens(call, seq_len, query)
    longest = max(lengths, default=0)
    ok = mask.dim() == 2 and mask.shape[0] == mask.shape[1] >= longest
    call.demand("square mask", ok, f"{shape_of(mask)} for a prompt of {longest}")
    flag_bias = 1.0 if query.dtype == torch.float16 else faults.apply("flag bias", FLAG_BIAS)
    bias = mask.float() * flag_bias
    for start, end in pairwise(_starts(lengths)):
        rows, length = slice(start, end), end - start
        square = bias[:length, :length]
        result, _ = attention.attend(query[rows], key[rows], value[rows], scale_value, bias=square)
        out[rows] = result.to(out.dtype)


def paged_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    num_kv_heads: int,
    num_heads: int,
    scale_value: float,
    block_table: torch.Tensor,
    context_lens: torch.Tensor,
    out: torch.Tensor,
    *,
    workspace: torch.Tensor | None = None,
) -> None:
    """Attend with one query token of each request over the whole of its context.

    Parameters
    ----------
    query, out
        ``[B, N, D]``.
    key_cache, value_cache
        ``[num_blocks, block_size, Nkv, D]``.
    block_table
        ``[B, max_blocks]`` int32.
    context_lens
        ``[B]`` int32 on the host, the query token included.
    workspace
        The result of `paged_attention_get_workspace`.
    """
    call = Call("atb attention", PAGED_ATTENTION)
    caches = key_cache, value_cache
    heads = num_heads, num_kv_heads
    lengths = _check_decode(call, query, caches, heads, block_table, context_lens, out)
    if workspace is not None:
        ok = workspace.dim() == 1 and workspace.numel() >= query.numel()
        given = f"{shape_of(workspace)}, needed {query.numel()} elements"
        call.demand("workspace", ok, given)
    for request, length in enumerate(lengths):
        keys, values = (
            attention.gather_request(cache, block_table, request, length) for cache in caches
        )
        result, _ = attention.attend(query[request : request + 1], keys, values, scale_value)
        out[request] = result[0].to(out.dtype)


def paged_attention_get_workspace(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    num_kv_heads: int,
    num_heads: int,
    scale_value: float,
    block_table: torch.Tensor,
    context_lens: torch.Tensor,
    out: torch.Tensor,
) -> torch.Tensor:
    """Return a workspace of `paged_attention` for these arguments, uint8."""
    call = Call("atb attention", PAGED_ATTENTION_WORKSPACE)
    caches, heads = (key_cache, value_cache), (num_heads, num_kv_heads)
    _check_decode(call, query, caches, heads, block_table, context_lens, out)
    return paged_attention_workspace(query).zero_()


def paged_attention_workspace(
    query: torch.Tensor, *others: object, **keywords: object
) -> torch.Tensor:
    """Return that workspace; the host allocates it without launching anything."""
    del others, keywords
    return query.new_empty(query.numel(), dtype=torch.uint8)


def paged_attention_splitfuse(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    context_lens: torch.Tensor,
    mask: torch.Tensor,
    seq_len: torch.Tensor,
    num_kv_heads: int,
    num_heads: int,
    scale_value: float,
    out: torch.Tensor,
) -> None:
    """Attend with prompts, chunks and decodes together, over the cache.

    Parameters
    ----------
    query, out
        ``[T, N, D]``.
    mask
        ``[>= T, >= longest context]``: the row of each query token, added to its scores.
    seq_len
        ``[B]`` int32 on the host: query tokens of each request.
    context_lens
        ``[B]`` int32 on the host: context of each request, its query tokens included.
    """
    call = Call("atb attention", SPLITFUSE)
    caches = key_cache, value_cache
    _check_query(call, query, num_heads, num_kv_heads, out)
    _check_tensors(call, query, {"mask": mask})
    _check_caches(call, query, caches, num_kv_heads)
    query_lens = _check_query_lens(call, seq_len, query)
    contexts = _check_contexts(call, caches[0], block_table, context_lens)
    rows, columns = query.shape[0], max(contexts, default=0)
    call.demand(
        "block table rows", len(contexts) == len(query_lens), f"{len(contexts)}, {len(query_lens)}"
    )
    lengths = list(zip(query_lens, contexts))
    ok = all(query_len <= context for query_len, context in lengths)
    call.demand("as many keys as queries", ok, f"{lengths} (query, context)")
    ok = mask.dim() == 2 and mask.shape[0] >= rows and mask.shape[1] >= columns
    call.demand("mask rows", ok, f"{shape_of(mask)} for {rows} tokens, {columns} columns")
    for request, (start, end) in enumerate(pairwise(_starts(query_lens))):
        context = contexts[request]
        keys, values = (
            attention.gather_request(cache, block_table, request, context) for cache in caches
        )
        part = slice(start, end)
        bias = mask[part, :context].float()
        bias = torch.nn.functional.pad(bias, (0, keys.shape[0] - context))
        result, _ = attention.attend(query[part], keys, values, scale_value, bias=bias)
        out[part] = result.to(out.dtype)


def _starts(lengths: list[int]) -> list[int]:
    return [0, *torch.tensor(lengths).cumsum(0).tolist()]


def _check_query(
    call: Call, query: torch.Tensor, num_heads: int, num_kv_heads: int, out: torch.Tensor
) -> None:
    demand = call.demand
    demand("dtype", query.dtype in DTYPES, query.dtype)
    demand("rank", query.dim() == 3, shape_of(query))
    demand("num_heads", num_heads == query.shape[1], f"{num_heads} for query {shape_of(query)}")
    ok = num_kv_heads > 0 and num_heads % num_kv_heads == 0
    demand("num_kv_heads", ok, f"{num_kv_heads} for {num_heads} heads")
    demand("head size", 0 < query.shape[2] <= 576, query.shape[2])
    _check_tensors(call, query, {"query": query, "out": out})
    demand("out", out.shape == query.shape, f"{shape_of(out)} for query {shape_of(query)}")


def _check_tensors(call: Call, query: torch.Tensor, tensors: dict[str, torch.Tensor]) -> None:
    for argument, tensor in tensors.items():
        rule = "mask dtype" if argument == "mask" else "same dtype"
        call.demand(rule, tensor.dtype == query.dtype, tensor.dtype, argument)
        given = f"strides {tensor.stride()}"
        call.demand("contiguous", tensor.is_contiguous(), given, argument)


def _check_caches(
    call: Call, query: torch.Tensor, caches: tuple[torch.Tensor, torch.Tensor], kv_heads: int
) -> None:
    demand = call.demand
    head_size = query.shape[2]
    demand("head size", head_size <= 256, head_size)
    named = dict(zip(("key_cache", "value_cache"), caches))
    _check_tensors(call, query, named)
    for argument, cache in named.items():
        ok = cache.dim() == 4 and shape_of(cache)[2:] == (kv_heads, head_size)
        demand("cache form", ok and cache.shape == caches[0].shape, shape_of(cache), argument)
    block_size = caches[0].shape[1]
    demand("block size", block_size % 16 == 0 and 0 < block_size <= 128, block_size)
    demand("block area", block_size * head_size <= 128 * 128, f"{block_size} * {head_size}")


def _check_lens(call: Call, argument: str, lengths: torch.Tensor) -> list[int]:
    ok = lengths.dtype == torch.int32 and lengths.dim() == 1
    call.demand("length dtype", ok, f"{shape_of(lengths)} {lengths.dtype}", argument)
    return lengths.tolist()


def _check_query_lens(call: Call, seq_len: torch.Tensor, query: torch.Tensor) -> list[int]:
    lengths = _check_lens(call, "seq_len", seq_len)
    ok = min(lengths, default=0) >= 0 and sum(lengths) == query.shape[0]
    call.demand("sum of lengths", ok, f"{lengths} for {query.shape[0]} tokens")
    return lengths


def _check_contexts(
    call: Call, cache: torch.Tensor, block_table: torch.Tensor, context_lens: torch.Tensor
) -> list[int]:
    demand = call.demand
    num_blocks, block_size = cache.shape[:2]
    ok = block_table.dtype == torch.int32 and block_table.dim() == 2
    demand("block table", ok, f"{shape_of(block_table)} {block_table.dtype}")
    given = f"strides {block_table.stride()}"
    demand("contiguous", block_table.is_contiguous(), given, "block_table")
    lengths = _check_lens(call, "context_lens", context_lens)
    rows = block_table.shape[0]
    demand("block table rows", rows == len(lengths), f"{rows} rows, {len(lengths)} lengths")
    room = block_table.shape[1] * block_size
    ok = all(0 <= length <= room for length in lengths)
    demand("context lengths in table", ok, f"{lengths}, a row holds {room} tokens")
    for row, length in zip(block_table, lengths):
        used = row[: -(-length // block_size)]
        ok = bool(((used >= 0) & (used < num_blocks)).all())
        demand("block ids", ok, f"{used.tolist()} of {num_blocks} blocks")
    return lengths


def _check_decode(
    call: Call,
    query: torch.Tensor,
    caches: tuple[torch.Tensor, torch.Tensor],
    heads: tuple[int, int],
    block_table: torch.Tensor,
    context_lens: torch.Tensor,
    out: torch.Tensor,
) -> list[int]:
    _check_query(call, query, *heads, out)
    _check_caches(call, query, caches, heads[1])
    tokens = query.shape[0]
    given = f"{tokens} tokens, {context_lens.numel()} lengths"
    call.demand("one token for each request", tokens == context_lens.numel(), given)
    return _check_contexts(call, caches[0], block_table, context_lens)
