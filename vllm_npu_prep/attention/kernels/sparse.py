"""The kernels of sparse attention: one interface, and what the CPU families have of it.

An *indexer* scores every position that a token may see, and the token attends to the best
``index_topk`` of them (DeepSeek V3.2, GLM-5).
"""

import importlib
from dataclasses import replace
from typing import NamedTuple, Protocol

import numpy as np
import torch

from vllm_npu_prep.attention.kernels.latent import (
    LatentKernels,
    LatentShape,
    Planes,
    make_latent_kernels,
)
from vllm_npu_prep.attention.metadata import AscendMetadata
from vllm_npu_prep.prep.state import AttentionState

PIECE_BYTES = 4 << 20
"""The bytes of the scores of all index heads that are computed at once, unless one token needs
more. They fit into a processor's cache: 32 MiB took twice as long."""


class IndexShape(NamedTuple):
    """The constants of an indexer."""

    num_heads: int
    head_dim: int
    topk: int  # the most positions that a token chooses
    itemsize: int  # bytes of a number of a key


class SparseKernels(Protocol):
    """The interface of a family with sparse attention.

    There are ``T`` tokens, ``H`` index heads of ``D`` numbers over one key, and ``K`` positions
    that a token chooses at most.
    """

    def write_keys(
        self,
        keys: torch.Tensor,  # [T, D]
        plane: torch.Tensor,  # [num_blocks, block_size, 1, D], written
        metadata: AscendMetadata,
    ) -> None:
        """Write the step's index keys to their slots. Padding is written nowhere, or to the null
        block."""

    def choose(
        self,
        query: torch.Tensor,  # [T, H, D]
        weights: torch.Tensor,  # [T, H]
        plane: torch.Tensor,  # [num_blocks, block_size, 1, D], with the step's own keys
        metadata: AscendMetadata,
        chosen: torch.Tensor,  # [T, K] int32, written
    ) -> None:
        """Write the positions to which each token attends.

        The score of a position is the sum over index heads of ``weights * relu(query @ key)``. A
        token chooses among positions up to its own, and chooses all of them if there are at most
        ``K``. -1 follows behind the chosen positions. Rows of padding hold -1, or positions of the
        null block.
        """

    def attend_chosen(
        self,
        query: torch.Tensor,  # [T, N, kv_lora_rank]
        query_rope: torch.Tensor,  # [T, N, qk_rope_head_dim]
        planes: Planes,
        chosen: torch.Tensor,  # [T, K] int32
        metadata: AscendMetadata,
        shape: LatentShape,
    ) -> torch.Tensor:
        """Attend over the latent rows of the chosen positions; return ``[T, N, kv_lora_rank]``."""

    def choosing_bytes(self, shape: IndexShape, max_seq_len: int, num_tokens: int) -> int:
        """Return the most bytes that choosing takes, and with it finding what was chosen.

        `num_tokens` is the most of a step.
        """


class SparseHostKernels:
    """`SparseKernels` for the CPU: plain torch, around the latent attention of a family.

    Attention over chosen rows is latent attention in which each token is a request of its own,
    whose blocks have one row each: the chosen one.
    """

    def __init__(self, latent: LatentKernels) -> None:
        self.latent = latent

    def write_keys(self, keys: torch.Tensor, plane: torch.Tensor, metadata: AscendMetadata) -> None:
        assert metadata.slot_mapping is not None
        slots = metadata.slot_mapping[: len(keys)].long()
        is_real = slots >= 0
        plane.view(-1, plane.shape[-1]).index_copy_(0, slots[is_real], keys[is_real])

    def choose(
        self,
        query: torch.Tensor,
        weights: torch.Tensor,
        plane: torch.Tensor,
        metadata: AscendMetadata,
        chosen: torch.Tensor,
    ) -> None:
        """Choose request by request; of equal scores, the earlier position is chosen."""
        num_heads, topk = query.shape[1], chosen.shape[1]
        rows, starts = plane.view(-1, plane.shape[-1]), metadata.query_start_loc_np
        chosen[metadata.num_actual_tokens :] = -1
        for request in range(metadata.num_reqs):
            begin, end = int(starts[request]), int(starts[request + 1])
            length = int(metadata.seq_lens_np[request])
            positions = torch.arange(length, dtype=torch.int32)
            if length <= topk:
                own = positions[length - (end - begin) :, None]
                chosen[begin:end] = -1
                chosen[begin:end, :length] = positions.where(positions <= own, -1)
                continue
            keys = rows[slots_of(metadata, request, positions, plane.shape[1])].float().T
            piece = max(1, PIECE_BYTES // (4 * num_heads * length))
            for first in range(begin, end, piece):
                last = min(first + piece, end)
                of_heads = (query[first:last].float().flatten(0, 1) @ keys).relu_()
                of_heads = of_heads.view(last - first, num_heads, length)
                scores = (weights[first:last].float().unsqueeze(1) @ of_heads).squeeze(1)
                scores.nan_to_num_(nan=0.0)
                own = torch.arange(first, last).unsqueeze(1) + (length - end)
                scores.masked_fill_(positions > own, float("-inf"))
                chosen[first:last] = best_positions(scores, topk)

    def attend_chosen(
        self,
        query: torch.Tensor,
        query_rope: torch.Tensor,
        planes: Planes,
        chosen: torch.Tensor,
        metadata: AscendMetadata,
        shape: LatentShape,
    ) -> torch.Tensor:
        output = torch.empty_like(query)
        if metadata.max_seq_len <= chosen.shape[1]:  # every token has chosen all that it may see
            self.latent.attend_latent(query, query_rope, planes, metadata, shape, output)
            return output
        num_tokens = metadata.num_actual_tokens
        rows = Planes(*(plane.view(-1, 1, 1, plane.shape[-1]) for plane in planes))
        tokens = by_token(metadata, chosen[:num_tokens], planes.latent.shape[1])
        given = query[:num_tokens], query_rope[:num_tokens], rows, tokens, shape
        self.latent.attend_latent(*given, output[:num_tokens])
        output[num_tokens:].zero_()
        return output

    def choosing_bytes(self, shape: IndexShape, max_seq_len: int, num_tokens: int) -> int:
        keys = max_seq_len * (shape.head_dim * (shape.itemsize + 4) + 4 * 8)  # and their slots
        of_heads = max(PIECE_BYTES, 4 * shape.num_heads * max_seq_len)
        scores = 2 * of_heads // shape.num_heads * 8  # as floats, and where they are counted
        slots = 4 * shape.topk * num_tokens
        return max(keys + of_heads + scores, slots + PIECE_BYTES) + slots


def best_positions(
    scores: torch.Tensor,  # [t, S] float32, -inf where a position may not be chosen
    topk: int,
) -> torch.Tensor:
    """Return the positions of the largest scores in ascending order, int32 ``[t, topk]``.

    Of equal scores, the earlier position is taken. -1 follows behind them, if fewer may be chosen.
    """
    place = scores.shape[1] - topk
    # torch.topk takes six times as long
    least = torch.from_numpy(np.partition(scores.numpy(), place, 1)[:, place, None])
    is_chosen, equal = scores > least, scores == least
    missing = topk - is_chosen.sum(1, keepdim=True)
    tied = (equal.sum(1, keepdim=True) > missing) | (least == float("-inf"))
    if tied.any():
        equal &= equal.cumsum(1, dtype=torch.int32) <= missing
        equal &= least > float("-inf")
    tokens, positions = (is_chosen | equal).nonzero(as_tuple=True)
    result = torch.full((len(scores), topk), -1, dtype=torch.int32)
    if len(positions) == result.numel():
        return positions.int().view(result.shape)
    counts = torch.bincount(tokens, minlength=len(scores))
    ranks = torch.arange(len(tokens)) - (counts.cumsum(0) - counts)[tokens]
    result[tokens, ranks] = positions.int()
    return result


def slots_of(
    metadata: AscendMetadata,
    request: int,
    positions: torch.Tensor,  # int32, at least 0
    block_size: int,
) -> torch.Tensor:
    """Return the slots of a request's positions, int64."""
    assert metadata.block_tables is not None
    blocks = metadata.block_tables[request].long()[positions.long() // block_size]
    return blocks * block_size + positions % block_size


def by_token(
    metadata: AscendMetadata,
    chosen: torch.Tensor,  # [num_actual_tokens, K] int32
    block_size: int,
) -> AscendMetadata:
    """Return the step as its tokens see it: each is a request, and its blocks are chosen rows."""
    num_tokens, topk = chosen.shape
    slots = torch.empty_like(chosen)
    starts = metadata.query_start_loc_np[: metadata.num_reqs + 1]
    piece = max(1, PIECE_BYTES // (4 * 8 * topk))
    for request, (begin, end) in enumerate(zip(starts[:-1].tolist(), starts[1:].tolist())):
        for first in range(begin, end, piece):
            rows = slice(first, min(first + piece, end))
            positions = chosen[rows].clamp_min(0)
            slots[rows] = slots_of(metadata, request, positions, block_size)
    lens = metadata.query_lens[: metadata.num_reqs]
    own = np.repeat(metadata.seq_lens_np[: metadata.num_reqs] - starts[1:], lens)
    seen = np.minimum(own + np.arange(num_tokens) + 1, topk).astype(np.int32)
    each = np.arange(num_tokens + 1, dtype=np.int32)
    return replace(
        metadata,
        attn_state=AttentionState.DecodeOnly,
        attn_mask=None,
        block_tables=slots,
        query_start_loc=torch.from_numpy(each),
        query_start_loc_np=each,
        seq_lens=torch.from_numpy(seen),
        seq_lens_np=seen,
        num_computed_tokens=torch.from_numpy(seen - 1),
        num_reqs=num_tokens,
        max_query_len=1,
        max_seq_len=int(seen.max()),
        num_input_tokens=num_tokens,
        in_full_graph=False,
        kernel_plan=None,
    )


def make_sparse_kernels(name: str) -> SparseKernels:
    """Make the kernels of a family that start-up accepted; no other family is imported."""
    if name != "fia":
        return SparseHostKernels(make_latent_kernels(name))
    package = __name__.rpartition(".")[0]
    made: SparseKernels = importlib.import_module(f"{package}.sparse_fia").SparseFiaKernels()
    return made
