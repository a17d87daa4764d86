"""Reference of ``npu_fusion_attention`` over packed requests (TND), which encoders use.

It is a training operator, served here for inference: no dropout, no position encoding. Whoever
calls it reads the first result alone, so the intermediate results of softmax are NaN. Its
documentation rules captured graphs out, which a reference can't see: the caller has to keep it out
of them.
"""

from itertools import pairwise

import torch

from ascend_emulator import faults
from ascend_emulator.operators import attention
from ascend_emulator.operators.constraint import Call, shape_of

FUSION_ATTENTION = "npu::npu_fusion_attention"
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
EVERYTHING = 2147483647


Results = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, int, int, int]


def fusion_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    head_num: int,
    input_layout: str,
    pse: torch.Tensor | None = None,
    padding_mask: torch.Tensor | None = None,
    atten_mask: torch.Tensor | None = None,
    scale: float = 1.0,
    keep_prob: float = 1.0,
    pre_tockens: int = EVERYTHING,
    next_tockens: int = EVERYTHING,
    inner_precise: int = 0,
    prefix: list[int] | None = None,
    actual_seq_qlen: list[int] | None = None,
    actual_seq_kvlen: list[int] | None = None,
    sparse_mode: int = 0,
    gen_mask_parallel: bool = True,
    sync: bool = False,
    softmax_layout: str = "",
    sink: torch.Tensor | None = None,
    dropout_mask: torch.Tensor | None = None,
    seed: int = 0,
    offset: int = 0,
) -> Results:
    """Attend with packed requests, each over its own keys.

    Parameters
    ----------
    query, key, value
        ``[T, N, D]``, ``[Tkv, Nkv, D]``, ``[Tkv, Nkv, D]``.
    atten_mask
        1 where masked: the constant ``[2048, 2048]`` in modes 3 and 4, one matrix for all requests
        in mode 0.
    actual_seq_qlen, actual_seq_kvlen
        Cumulative lengths.

    Returns
    -------
    tuple
        ``attention_out`` ``[T, N, D]`` in the query's dtype; two float32 ``[T, N, 8]`` and an empty
        one that only training reads; three numbers of a dropout that does not happen.
    """
    del inner_precise, gen_mask_parallel, sync, softmax_layout, seed, offset
    call = Call("npu_fusion_attention", FUSION_ATTENTION)
    call.demand("layout", input_layout == "TND", repr(input_layout))
    unsupported = {
        "pse": pse,
        "padding_mask": padding_mask,
        "prefix": prefix,
        "sink": sink,
        "dropout_mask": dropout_mask,
    }
    for argument, given in unsupported.items():
        call.demand("unsupported argument", given is None, type(given).__name__, argument)
    call.demand("keep_prob", keep_prob == 1, keep_prob)
    _check_tensors(call, query, key, value, head_num)
    starts, key_starts = _starts(call, query, key, actual_seq_qlen, actual_seq_kvlen)
    lengths = [b - a for a, b in pairwise(starts)], [b - a for a, b in pairwise(key_starts)]
    _check_mask(call, atten_mask, sparse_mode, lengths)
    if atten_mask is not None and sparse_mode == 4:
        limits = f"pre_tockens {pre_tockens}, next_tockens {next_tockens}"
        call.demand("band is not empty", pre_tockens + next_tockens >= 0, limits)
    output = torch.zeros_like(query)
    for request, (num_rows, num_columns) in enumerate(zip(*lengths)):
        rows = slice(starts[request], starts[request + 1])
        columns = slice(key_starts[request], key_starts[request + 1])
        band = pre_tockens, next_tockens
        masked = _mask(atten_mask, sparse_mode, band, num_rows, num_columns)
        hidden = masked is not None and bool(masked.all(1).any())
        call.demand("visible rows", not hidden, f"request {request} has a row that sees nothing")
        keys, values = key[columns], value[columns]
        result, _ = attention.attend(query[rows], keys, values, scale, masked)
        output[rows] = result.to(output.dtype)
    training = torch.full((query.shape[0], head_num, 8), float("nan"))
    return output, training, training.clone(), query.new_empty(0), 0, 0, 0


def _check_tensors(
    call: Call, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, head_num: int
) -> None:
    demand = call.demand
    for argument, tensor in {"query": query, "key": key, "value": value}.items():
        fits = tensor.dtype in DTYPES and tensor.dtype == query.dtype
        demand("dtype", fits, tensor.dtype, argument)
        demand("contiguous", tensor.is_contiguous(), f"strides {tensor.stride()}", argument)
        demand("rank", tensor.dim() == 3, shape_of(tensor), argument)
    shapes = f"{shape_of(key)} and {shape_of(value)} for query {shape_of(query)}"
    fits = key.shape == value.shape and key.shape[2] == query.shape[2]
    demand("key and value shapes", fits, shapes)
    heads, kv_heads = query.shape[1], key.shape[1]
    fits = head_num == heads and 1 <= heads <= 256 and kv_heads > 0 and heads % kv_heads == 0
    demand("head_num", fits, f"{head_num} for {heads} and {kv_heads} heads")
    demand("head size", 1 <= query.shape[2] <= 768, query.shape[2])
    demand("tokens", 1 <= query.shape[0] <= 1 << 20, query.shape[0])


def _starts(
    call: Call,
    query: torch.Tensor,
    key: torch.Tensor,
    lengths: list[int] | None,
    kv_lengths: list[int] | None,
) -> tuple[list[int], list[int]]:
    """Return where each request's queries and keys start, and where the last one's end."""
    demand = call.demand
    found = []
    named = {"actual_seq_qlen": lengths, "actual_seq_kvlen": kv_lengths}
    for (argument, listed), tensor in zip(named.items(), (query, key)):
        # Behind torch's dispatcher an absent list of integers may also arrive empty.
        on_host = isinstance(listed, list | tuple) and len(listed) > 0
        demand("lengths required", on_host, type(listed).__name__, argument)
        ends = list(listed or ())
        demand("number of lengths", len(ends) <= 1024, f"{len(ends)} lengths", argument)
        taking_part = len(ends)
        while taking_part > 1 and ends[taking_part - 1] == 0 and any(ends):
            taking_part -= 1
        part = ends[:taking_part]
        rising = all(a <= b for a, b in zip([0, *part], part)) and part[-1] == tensor.shape[0]
        demand("cumulative lengths", rising, f"{ends} for T {tensor.shape[0]}", argument)
        found.append([0, *part, *[part[-1]] * (len(ends) - taking_part)])
    starts, key_starts = found
    counts = f"{len(starts) - 1} and {len(key_starts) - 1} lengths"
    demand("number of lengths", len(starts) == len(key_starts), counts)
    return starts, key_starts


def _check_mask(
    call: Call, mask: torch.Tensor | None, mode: int, lengths: tuple[list[int], list[int]]
) -> None:
    if mask is None:
        return
    call.demand("sparse_mode", mode in (0, 3, 4), mode)
    call.demand("mask dtype", mask.dtype in (torch.bool, torch.uint8), mask.dtype)
    wanted = (2048, 2048) if mode else tuple(max(side) for side in lengths)
    call.demand("mask shape", shape_of(mask) == wanted, f"{shape_of(mask)}, expected {wanted}")


def _mask(
    mask: torch.Tensor | None, mode: int, band: tuple[int, int], num_rows: int, num_columns: int
) -> torch.Tensor | None:
    """Return ``[num_rows, num_columns]`` bool, True where masked."""
    if mask is None:
        return None
    if mode == 3:
        corner = faults.apply("corner", num_columns - num_rows)
        return attention.expand_constant(mask, num_rows, num_columns, corner)
    if mode == 4:
        pre_tokens = faults.apply("pre_tokens", band[0], num_rows=num_rows)
        return attention.expand_band(mask, num_rows, num_columns, pre_tokens, band[1])
    return mask[:num_rows, :num_columns].bool()
