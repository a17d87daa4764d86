"""References of ``npu_fused_infer_attention_score``, v1 and v2: functional, ``.out``, workspace."""

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import torch

from ascend_emulator import faults
from ascend_emulator.operators import attention
from ascend_emulator.operators.fused_arguments import FusedAttention, bind
from ascend_emulator.operators.fused_checks import (
    check,
    check_out,
    workspace_elements,
)
from ascend_emulator.operators.fused_route import route, unwritten_requests

V1 = "npu::npu_fused_infer_attention_score"
V2 = "npu::npu_fused_infer_attention_score_v2"
V1_WORKSPACE = "npu::_npu_fused_infer_attention_score_get_max_workspace"
V2_WORKSPACE = "npu::_npu_fused_infer_attention_score_v2_get_max_workspace"


def compute(fused: FusedAttention) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute attention of a checked call.

    Returns
    -------
    torch.Tensor
        ``attention_out`` in the query's dtype and the layout's shape; zero where a request has
        query rows that its length excludes; NaN in rows that the kernel does not write.
    torch.Tensor
        ``softmax_lse`` float32, empty unless asked for.
    """
    output = torch.zeros(fused.output_shape, dtype=fused.query.dtype)
    lse = torch.full(fused.lse_shape, float("inf"))
    # The same rows as the query's, seen by request.
    if fused.input_layout == "BNSD_BSND":
        output_rows = output
    elif fused.input_layout == "BNSD_NBSD":
        output_rows = output.permute(1, 2, 0, 3)
    elif fused.input_layout == "TND_NTD":
        output_rows = output.transpose(0, 1)
    else:
        output_rows = fused.by_request(output, fused.num_heads)
    lse_rows = lse[..., 0] if fused.is_tnd else lse[..., 0].transpose(1, 2)
    queries = fused.by_request(fused.query, fused.num_heads)
    if fused.query_rope is not None:
        rope = faults.apply("query_rope", fused.query_rope)
        queries = torch.cat((queries, fused.by_request(rope, fused.num_heads)), -1)
    scale = fused.scale
    if fused.is_tnd and not fused.is_paged and fused.atten_mask is None:
        scale = faults.apply("scale of fresh keys without a mask", scale)
    for request, rows, key, value, length in _requests(fused):
        query = queries[rows]
        masked = _mask(fused, request, query.shape[0], length)
        masked = attention.extend(masked, key.shape[0])
        result, result_lse = attention.attend(query, key, value, scale, masked)
        if fused.inner_precise & 2:
            # Correction of invalid rows: rows that attend to nothing become zero.
            result = result.masked_fill(result_lse.isinf().unsqueeze(-1), 0.0)
        output_rows[rows] = result.to(output.dtype)
        lse_rows[rows] = result_lse
    for request in unwritten_requests(fused, route(fused)):
        output_rows[fused.starts[request] : fused.starts[request + 1]] = float("nan")
    return output, lse if fused.softmax_lse_flag else torch.empty(0)


def _requests(
    fused: FusedAttention,
) -> Iterator[tuple[int, Any, torch.Tensor, torch.Tensor, int]]:
    """Yield index, rows of the query, keys, values and number of keys of each request."""
    kv_lens = fused.actual_seq_lengths_kv
    if fused.is_paged:
        assert fused.block_table is not None and kv_lens is not None
        caches = [fused.cache_rows(plane) for plane in _planes(fused)]
        lengths = list(kv_lens) if fused.is_tnd else fused.kv_lengths(0)
        planes = (
            [
                attention.gather_request(cache, fused.block_table, request, length)
                for cache in caches
            ]
            for request, length in enumerate(lengths)
        )
    else:
        fresh = [fused.by_request(plane, fused.kv_heads) for plane in _planes(fused)]
        if fused.is_tnd:
            ends = [0, *(kv_lens or ())]
            lengths = fused.packed_kv_lengths
            planes = ([plane[a:b] for plane in fresh] for a, b in pairwise(ends))
        else:
            lengths = fused.kv_lengths(fresh[0].shape[1])
            planes = ([plane[i, :n] for plane in fresh] for i, n in enumerate(lengths))
    if fused.is_tnd:
        rows: list[Any] = [slice(a, b) for a, b in pairwise(fused.starts)]
    else:
        query_lens = fused.query_lengths()
        rows = [(request, slice(0, length)) for request, length in enumerate(query_lens)]
    for request, (keys, values, *ropes) in enumerate(planes):
        keys = torch.cat((keys, *ropes), -1)
        yield request, rows[request], keys, values, lengths[request]


def _planes(fused: FusedAttention) -> list[torch.Tensor]:
    planes = [fused.key, fused.value]
    return planes if fused.key_rope is None else [*planes, fused.key_rope]


def _mask(
    fused: FusedAttention, request: int, num_rows: int, num_columns: int
) -> torch.Tensor | None:
    """Return ``[num_rows, num_columns]`` bool, True where masked; None if nothing is masked."""
    if fused.atten_mask is None:
        return None
    mask = fused.atten_mask  # of any dtype; becomes bool where it is cut, as it is large
    if fused.sparse_mode == 2:
        return attention.expand_constant(_square(mask), num_rows, num_columns, 0)
    if fused.sparse_mode == 3:
        corner = faults.apply("corner", num_columns - num_rows)
        return attention.expand_constant(_square(mask), num_rows, num_columns, corner)
    if fused.sparse_mode == 4:
        pre_tokens = faults.apply("pre_tokens", fused.pre_tokens, num_rows=num_rows)
        band = pre_tokens, fused.next_tokens
        return attention.expand_band(_square(mask), num_rows, num_columns, *band)
    if mask.dim() == 2 and fused.query_width == 1:
        full = mask[request][None]  # (B, KV_S): one row for each request
    elif mask.dim() == 4:
        full = mask[min(request, mask.shape[0] - 1), 0]
    else:
        full = mask[0] if mask.dim() == 3 else mask
    full = full[:num_rows, :num_columns].bool()
    if fused.sparse_mode == 0 and fused.query_width > 1:
        # Unlike mode 4, the band of mode 0 starts in the upper left corner.
        ahead = torch.arange(num_columns)[None] - torch.arange(num_rows)[:, None]
        full = full | (ahead > fused.next_tokens) | (ahead < -fused.pre_tokens)
    return full


def _square(mask: torch.Tensor) -> torch.Tensor:
    return mask.view(mask.shape[-2:])


def functional(name: str) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """Make the reference of the functional form."""

    def reference(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        fused, _ = bind(name, "", args, kwargs)
        check(fused)
        return compute(fused)

    return reference


def out_variant(name: str) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """Make the reference of ``.out``, which writes into ``out`` and may be given its workspace."""

    def reference(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        fused, arguments = bind(name, "out", args, kwargs)
        check(fused)
        check_out(fused, arguments["workspace"], arguments["out"])
        output, lse = compute(fused)
        out = arguments["out"]
        out[0].copy_(output)
        if fused.softmax_lse_flag:
            out[1].copy_(lse)
        return out[0], out[1]

    return reference


def max_workspace(name: str) -> Callable[..., torch.Tensor]:
    """Make the reference of the function that sizes a workspace once for all lengths."""

    def reference(*args: Any, **kwargs: Any) -> torch.Tensor:
        fused, _ = bind(name, "", args, kwargs)
        check(fused)
        return workspace(fused.query).zero_()

    return reference


def workspace(query: torch.Tensor, *others: Any, **keywords: Any) -> torch.Tensor:
    """Return a workspace, which the host sizes and allocates without launching anything."""
    del others, keywords
    return query.new_empty(workspace_elements(query))
