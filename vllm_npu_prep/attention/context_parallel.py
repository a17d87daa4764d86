"""Decode context parallelism: attention over contexts that several ranks share.

Each rank keeps a part of every request's K and V (`vllm_npu_prep.prep.context_shards`). The ranks
give each other their queries, and each attends with all of them over what it keeps. Then each rank
gets, for its own heads, the results of all ranks, weighted by their shares of the sum of
exponentials: by their log-sum-exp (LSE). What a step computes itself is on every rank. A prompt's
own tokens are attended to apart, and merged likewise; a decode's only token is in the cache
already. vLLM's ``FlashAttentionImpl._forward_with_dcp`` and ``cp_lse_ag_out_rs`` do the same.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from vllm_npu_prep.attention.kernels import AttentionKernels, LayerShape
from vllm_npu_prep.attention.metadata import AscendMetadata
from vllm_npu_prep.prep.context_shards import ContextShards
from vllm_npu_prep.prep.state import AttentionState

if TYPE_CHECKING:
    from vllm.config import ParallelConfig


class Share(NamedTuple):
    """Attention over some of the keys. ``T`` tokens, ``H`` heads, ``D`` their size."""

    output: torch.Tensor  # [T, H, D]
    lse: torch.Tensor  # [T, H] float32: log of the sum of exponentials, base e; -inf: of no key


@dataclass(frozen=True)
class SharedStep:
    """How a step attends over contexts that ranks share.

    Attributes
    ----------
    rows
        Metadata of what this rank keeps: every query sees all of it. A request of which it keeps
        nothing has one row, because kernels want one; `has_rows` leaves its result out.
    own
        Metadata of the step's own K and V; None if `rows` has them.
    has_rows
        bool ``[T]``, tokens of requests of which this rank keeps something; None: all.
    """

    rows: AscendMetadata
    own: AscendMetadata | None = None
    has_rows: torch.Tensor | None = None


def find_context_shards(parallel_config: "ParallelConfig") -> ContextShards | None:
    """The part of each context that this rank keeps; None without decode context parallelism."""
    if parallel_config.decode_context_parallel_size == 1:
        return None
    from vllm.distributed import get_dcp_group  # merging needs no vLLM: `verify-device` does it

    group = get_dcp_group()
    size = parallel_config.cp_kv_cache_interleave_size
    return ContextShards(group.world_size, group.rank_in_group, size)


# ----------------------------------------------------------------- merging


def weights_of(lses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """How much each share counts.

    Parameters
    ----------
    lses
        float32 ``[shares, T, H]``.

    Returns
    -------
    weights, lse
        float32 ``[shares, T, H]``, whose sum over the shares is 1, or 0 where none has a key; and
        the LSE over all keys, ``[T, H]``.
    """
    lse = torch.logsumexp(lses, 0)
    weights = (lses - lse).exp()
    return torch.where(lses == float("-inf"), 0.0, weights), lse


def merge_shares(shares: Sequence[Share]) -> Share:
    """Attention over the keys of all shares, of which no two have the same key.

    Parameters
    ----------
    shares
        Of the same queries.
    """
    weights, lse = weights_of(torch.stack([share.lse for share in shares]))
    parts = [share.output.float() * w.unsqueeze(-1) for share, w in zip(shares, weights)]
    return Share(sum(parts[1:], parts[0]).to(shares[0].output.dtype), lse)


def merge_over_ranks(mine: Share, group: Any) -> Share:
    """Attention over the keys of all ranks, for this rank's heads.

    Parameters
    ----------
    mine
        Over this rank's keys, for the heads of all ranks, rank after rank.
    group
        vLLM's group of the ranks.
    """
    lses = group.all_gather(mine.lse.unsqueeze(0).contiguous(), dim=0)
    weights, lse = weights_of(lses)
    rank = group.rank_in_group
    weighted = mine.output.float() * weights[rank].unsqueeze(-1)
    output = group.reduce_scatter(weighted.to(mine.output.dtype), dim=1)
    heads = output.shape[1]
    return Share(output, lse[:, rank * heads : (rank + 1) * heads])


# ----------------------------------------------------------------- a step


def rows_of(
    metadata: AscendMetadata,
    lens: torch.Tensor,  # [R] int32
    lens_np: np.ndarray,  # [R] int32
) -> SharedStep:
    """A step, or its decodes, over what this rank keeps.

    Parameters
    ----------
    metadata
        Of the requests.
    lens, lens_np
        How many rows of each request this rank keeps, on the device and on the host.
    """
    at_least_one = np.maximum(lens_np, 1)
    rows = replace(
        metadata,
        attn_state=AttentionState.ChunkedPrefill,
        attn_mask=None,
        seq_lens=lens,
        seq_lens_np=at_least_one,
        max_seq_len=int(at_least_one.max(initial=1)),  # a dummy run may have no decodes
        causal=False,
        kernel_plan=None,
        halves=None,
    )
    if lens_np.all():
        return SharedStep(rows)
    has_rows = lens > 0
    if metadata.max_query_len > 1:
        tokens = torch.arange(metadata.num_actual_tokens, device=lens.device, dtype=torch.int32)
        requests = torch.searchsorted(metadata.query_start_loc[1:], tokens, right=True)
        has_rows = has_rows.index_select(0, requests)
    return SharedStep(rows, None, has_rows)


def own_of(metadata: AscendMetadata, mask: torch.Tensor | None) -> AscendMetadata:
    """A step over its own K and V, as if nothing had been computed before.

    Parameters
    ----------
    metadata
        Of the step.
    mask
        That of prompts of such lengths.
    """
    return replace(
        metadata,
        attn_state=AttentionState.PrefillNoCache,
        attn_mask=mask,
        seq_lens_np=metadata.query_lens,
        max_seq_len=metadata.max_query_len,
        kernel_plan=None,
    )


def attend_shared(
    kernels: AttentionKernels,
    query: torch.Tensor,  # [T, num_heads, head_size]
    key: torch.Tensor,  # [T, num_kv_heads, head_size]
    value: torch.Tensor,  # [T, num_kv_heads, head_size]
    kv_cache: torch.Tensor,  # [2, num_blocks, block_size, num_kv_heads, head_size]
    shared: SharedStep,
    layer: LayerShape,
    output: torch.Tensor,  # [T, num_heads, head_size], written
    group: Any,
) -> None:
    """One layer's attention, whose K and V are in the cache already.

    Parameters
    ----------
    kernels, query, key, value, kv_cache, layer, output
        As `AttentionKernels.attend` has them. All ranks that share contexts have the same K/V head.
    shared
        The step.
    group
        vLLM's group of the ranks.
    """
    queries = group.all_gather(query, dim=1).contiguous()
    of_all = replace(layer, num_heads=queries.shape[1])
    mine = _empty_share(queries, queries.shape[-1])
    kernels.attend(queries, None, None, kv_cache, shared.rows, of_all, mine.output, lse=mine.lse)
    context = merge_over_ranks(only_rows(mine, shared.has_rows), group)
    if shared.own is None:
        output.copy_(context.output)
        return
    own = _empty_share(query, query.shape[-1])
    kernels.attend(query, key, value, kv_cache, shared.own, layer, own.output, lse=own.lse)
    output.copy_(merge_shares([context, own]).output)


def _empty_share(queries: torch.Tensor, size: int) -> Share:
    """Memory for a result: of `queries` ``[T, H, ...]``, with heads of `size`."""
    lse = torch.empty(queries.shape[:2], dtype=torch.float32, device=queries.device)
    return Share(queries.new_empty(*queries.shape[:2], size), lse)


def only_rows(share: Share, has_rows: torch.Tensor | None) -> Share:
    """The same without what tokens saw whose request has no row here: that was no key of theirs."""
    if has_rows is None:
        return share
    output = torch.where(has_rows[:, None, None], share.output, 0.0)
    return Share(output, torch.where(has_rows[:, None], share.lse, float("-inf")))
