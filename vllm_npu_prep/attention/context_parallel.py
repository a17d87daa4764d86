"""Decode context parallelism: attention over contexts that several ranks share.

Each rank keeps a part of every request's K and V (`vllm_npu_prep.prep.dcp`). The ranks
exchange their queries, and each attends with all of them over the part that it keeps. Then each
rank gets, for its own heads, the results of all ranks, weighted by their log-sum-exp (LSE). The
tokens of the step itself are on every rank: a prompt attends over its own tokens separately, and
the result is merged in the same way; a decode's only token is in the cache already. vLLM's
``FlashAttentionImpl._forward_with_dcp`` and ``cp_lse_ag_out_rs`` do the same.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from vllm_npu_prep.attention.kernels import Attended, AttentionKernels, KeyValue, LayerShape
from vllm_npu_prep.attention.metadata import AscendMetadata
from vllm_npu_prep.prep.dcp import NO_DCP, DCPRank
from vllm_npu_prep.prep.state import AttentionState

if TYPE_CHECKING:
    from vllm.config import ParallelConfig


@dataclass(frozen=True)
class DCPStep:
    """How a step attends under decode context parallelism.

    Attributes
    ----------
    rows
        Metadata of what this rank keeps, which every query sees in full. A request of which this
        rank keeps nothing has one row, because kernels need one; `has_rows` leaves its result out.
    own
        Metadata of the step's own K and V; None if `rows` has them.
    has_rows
        bool ``[T]``: tokens of requests of which this rank keeps something; None if these are all.
    """

    rows: AscendMetadata
    own: AscendMetadata | None = None
    has_rows: torch.Tensor | None = None


def find_dcp(parallel_config: "ParallelConfig") -> DCPRank:
    """Return the part of each context that this rank keeps."""
    if parallel_config.decode_context_parallel_size == 1:
        return NO_DCP
    from vllm.distributed import get_dcp_group  # merging needs no vLLM: `verify-device` does it

    group = get_dcp_group()
    size = parallel_config.cp_kv_cache_interleave_size
    return DCPRank(group.world_size, group.rank_in_group, size)


# ----------------------------------------------------------------- merging


def weights_of(lses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return how much each share counts, and the log-sum-exp over all keys.

    `lses` are float32 ``[shares, T, H]``. So are the weights, whose sum over the shares is 1, or 0
    where no share has a key. The log-sum-exp is ``[T, H]``.
    """
    lse = torch.logsumexp(lses, 0)
    weights = (lses - lse).exp()
    return torch.where(lses == float("-inf"), 0.0, weights), lse


def merge_partials(shares: Sequence[Attended]) -> Attended:
    """Return the attention over the keys of all shares, which have no key in common."""
    weights, lse = weights_of(torch.stack([share.lse for share in shares]))
    parts = [share.output.float() * w.unsqueeze(-1) for share, w in zip(shares, weights)]
    return Attended(sum(parts[1:], parts[0]).to(shares[0].output.dtype), lse)


def merge_over_ranks(mine: Attended, group: Any) -> Attended:
    """Return the attention over the keys of all ranks, for this rank's heads.

    Parameters
    ----------
    mine
        Attention over this rank's keys, for the heads of all ranks in the order of ranks.
    """
    lses = group.all_gather(mine.lse.unsqueeze(0).contiguous(), dim=0)
    weights, lse = weights_of(lses)
    rank = group.rank_in_group
    weighted = mine.output.float() * weights[rank].unsqueeze(-1)
    output = group.reduce_scatter(weighted.to(mine.output.dtype), dim=1)
    heads = output.shape[1]
    return Attended(output, lse[:, rank * heads : (rank + 1) * heads])


# ----------------------------------------------------------------- a step


def rows_of(
    metadata: AscendMetadata,
    lens: torch.Tensor,  # [R] int32
    lens_np: np.ndarray,  # [R] int32
) -> DCPStep:
    """Return how a step, or its decodes, attends over what this rank keeps.

    `lens` and `lens_np` are the numbers of rows of each request that this rank keeps, on the device
    and on the host.
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
        return DCPStep(rows)
    has_rows = lens > 0
    if metadata.max_query_len > 1:
        tokens = torch.arange(metadata.num_actual_tokens, device=lens.device, dtype=torch.int32)
        requests = torch.searchsorted(metadata.query_start_loc[1:], tokens, right=True)
        has_rows = has_rows.index_select(0, requests)
    return DCPStep(rows, None, has_rows)


def own_of(metadata: AscendMetadata, mask: torch.Tensor | None) -> AscendMetadata:
    """Return the metadata of a step over its own K and V, as if nothing had been computed before.

    `mask` is the mask of prompts of these lengths.
    """
    return replace(
        metadata,
        attn_state=AttentionState.PrefillNoCache,
        attn_mask=mask,
        seq_lens_np=metadata.query_lens,
        max_seq_len=metadata.max_query_len,
        kernel_plan=None,
    )


def attend_dcp(
    kernels: AttentionKernels,
    query: torch.Tensor,  # [T, num_heads, head_size]
    own: KeyValue,  # each [T, num_kv_heads, head_size]
    kv_cache: torch.Tensor,  # [2, num_blocks, block_size, num_kv_heads, head_size]
    shared: DCPStep,
    layer: LayerShape,
    output: torch.Tensor,  # [T, num_heads, head_size], written
    group: Any,
) -> None:
    """Attend over a context that several ranks share; the step's K and V are in the cache already.

    The tensors are those of `AttentionKernels.attend`. All ranks of `group` have the same K/V head.
    """
    queries = group.all_gather(query, dim=1).contiguous()
    of_all = replace(layer, num_heads=queries.shape[1])
    mine = _empty_share(queries, queries.shape[-1])
    kernels.attend(queries, None, kv_cache, shared.rows, of_all, mine.output, lse=mine.lse)
    context = merge_over_ranks(only_rows(mine, shared.has_rows), group)
    if shared.own is None:
        output.copy_(context.output)
        return
    new = _empty_share(query, query.shape[-1])
    kernels.attend(query, own, kv_cache, shared.own, layer, new.output, lse=new.lse)
    output.copy_(merge_partials([context, new]).output)


def _empty_share(queries: torch.Tensor, size: int) -> Attended:
    """Allocate a result for `queries` ``[T, H, ...]``, with heads of this size."""
    lse = torch.empty(queries.shape[:2], dtype=torch.float32, device=queries.device)
    return Attended(queries.new_empty(*queries.shape[:2], size), lse)


def only_rows(share: Attended, has_rows: torch.Tensor | None) -> Attended:
    """Return `share` without a key for tokens whose request has no row on this rank.

    The row that kernels read for such a request is not its own.
    """
    if has_rows is None:
        return share
    output = torch.where(has_rows[:, None, None], share.output, 0.0)
    return Attended(output, torch.where(has_rows[:, None], share.lse, float("-inf")))
