"""Latent attention under decode context parallelism.

Decodes attend over the latent rows that each rank keeps (`context_parallel`). A prefill projects
latent rows to K and V of its own heads, so it needs the rows of all ranks. Each rank gathers what
it keeps of a chunk's pieces, padded to as many rows as the first rank keeps, and the ranks exchange
these rows. vLLM's ``_context_parallel_compute_prefill_context`` does the same.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from vllm.distributed import get_dcp_group

from vllm_npu_prep.attention.context_parallel import (
    DCPStep,
    merge_over_ranks,
    only_rows,
    rows_of,
)
from vllm_npu_prep.attention.kernels import Attended
from vllm_npu_prep.attention.kernels.latent import (
    LatentKernels,
    LatentShape,
    Planes,
    with_heads,
)
from vllm_npu_prep.attention.latent import ContextChunk, Prefills
from vllm_npu_prep.attention.metadata import AscendMetadata
from vllm_npu_prep.device.staging import StagedArrays
from vllm_npu_prep.prep.dcp import DCPRank


@dataclass(frozen=True)
class RankRows:
    """What a rank gathers for a chunk."""

    # The chunk's pieces in rows of this rank; their number is the same on every rank
    local: ContextChunk
    # The place of each row of the chunk among the rows of all ranks, int64 [num_rows]
    order: torch.Tensor


def share_halves(metadata: AscendMetadata, dcp: DCPRank, staged: StagedArrays) -> None:
    """Let decodes attend over what this rank keeps, and prefills over what all ranks keep.

    `metadata` is that of a prepared step, with its halves, and is changed.
    """
    decodes, halves = metadata, metadata.halves
    if halves is not None:
        prefills = share_prefills(halves.prefills, dcp)
        decodes, metadata.halves = halves.decodes, replace(halves, prefills=prefills)
    if decodes is not None:
        count = len(decodes.seq_lens_np)
        device, host = staged.device.dcp_local_seq_lens, staged.np.dcp_local_seq_lens
        metadata.shared = rows_of(decodes, device[:count], host[:count])


def attend_dcp_decodes(
    kernels: LatentKernels,
    shape: LatentShape,
    planes: Planes,
    queries: Sequence[torch.Tensor],  # [T, num_heads, kv_lora_rank] and rope
    shared: DCPStep,
    num_rows: int,
) -> torch.Tensor:
    """Attend with the decodes of a layer, whose latent rows are in the cache already.

    `queries` are those of this rank's heads. The result is ``[num_rows, num_heads, kv_lora_rank]``,
    and zero after the tokens of `queries`.
    """
    group = get_dcp_group()
    gathered = group.all_gather(torch.cat(tuple(queries), -1).contiguous(), dim=1)
    heads = gathered.shape[1]
    of_all = shape._replace(num_heads=kernels.decode_heads(heads))
    parts = gathered.split([shape.kv_lora_rank, shape.qk_rope_head_dim], -1)
    query, rope = (with_heads(part, of_all.num_heads) for part in parts)
    lse = torch.empty(query.shape[:2], dtype=torch.float32, device=query.device)
    mine = Attended(torch.empty_like(query), lse)
    kernels.attend_latent(query, rope, planes, shared.rows, of_all, mine.output, lse=lse)
    mine = only_rows(Attended(mine.output[:, :heads], lse[:, :heads]), shared.has_rows)
    merged = merge_over_ranks(mine, group).output
    output = merged.new_zeros(num_rows, *merged.shape[1:])
    output[: len(merged)] = merged
    return output


def share_prefills(prefills: Prefills, dcp: DCPRank) -> Prefills:
    chunks = (replace(chunk, ranks=_rank_rows(chunk, dcp)) for chunk in prefills.chunks)
    return replace(prefills, chunks=tuple(chunks))


def _rank_rows(chunk: ContextChunk, dcp: DCPRank) -> RankRows:
    """Return what this rank gathers for a chunk, computed without waiting for the device.

    A piece begins at a block, and so with the first row of the first rank.
    """
    size, num_ranks = dcp.interleave_size, dcp.world_size
    in_turn = size * num_ranks
    lens = np.diff(chunk.kv_ends, prepend=0)
    kept = -(-lens // in_turn) * size
    local = replace(
        chunk,
        kv_ends=np.cumsum(kept).tolist(),
        starts=_divided(chunk.starts, num_ranks),
        lens=_divided(chunk.lens + (in_turn - 1), in_turn) * size,
    )
    rows = torch.arange(chunk.num_rows, device=chunk.lens.device)
    ends = chunk.lens.cumsum(0)
    pieces = torch.searchsorted(ends, rows, right=True)
    positions = rows - (ends - chunk.lens).index_select(0, pieces)
    first_rows = (local.lens.cumsum(0) - local.lens).index_select(0, pieces)
    runs = _divided(positions, size)
    ranks = runs % num_ranks
    own = _divided(runs, num_ranks) * size + positions % size
    return RankRows(local, ranks * local.num_rows + first_rows + own)


def _divided(numbers: torch.Tensor, by: int) -> torch.Tensor:
    return torch.div(numbers, by, rounding_mode="floor")


def gather(
    kernels: LatentKernels, planes: Planes, chunk: ContextChunk
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rows of a chunk's pieces in order: latent and rotated, ``[S, 1, width]``.

    The chunk's `ranks` decide whether this rank's cache is read alone, or those of all ranks.
    """
    if chunk.ranks is None:
        return kernels.gather(planes, chunk)
    own = torch.cat(kernels.gather(planes, chunk.ranks.local), -1)
    rows = get_dcp_group().all_gather(own.contiguous(), dim=0).index_select(0, chunk.ranks.order)
    latent, rope = rows.split([plane.shape[-1] for plane in planes], -1)
    return latent.contiguous(), rope.contiguous()
