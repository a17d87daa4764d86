"""Latent attention's half of the metadata: which requests are prefills, and how to read contexts.

`vllm_npu_prep.prep.latent` splits the step and plans its context chunks; here are the tensors that
kernels read, all of them views of the step's arrays and block tables.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch
from vllm.model_executor.layers.attention.mla_attention import MLACommonMetadataBuilder

from vllm_npu_prep.attention.metadata import AscendMetadata
from vllm_npu_prep.prep.latent import LatentSplit

if TYPE_CHECKING:
    from vllm.config import VllmConfig

T = TypeVar("T", np.ndarray, torch.Tensor)


class LatentArrays(NamedTuple, Generic[T]):
    """A step's arrays of latent attention, on the host or on the device."""

    prefill_query_start_loc: T  # [num_prefills + 1] int32
    context_piece_reqs: T  # [num_pieces] int32, as the next three
    context_piece_starts: T
    context_piece_lens: T
    context_piece_chunks: T


@dataclass(frozen=True)
class ContextChunk:
    """What is gathered of the cache at once: pieces of contexts of requests that are neighbours.

    Attributes
    ----------
    tokens
        Queries that attend over the chunk, among those of prefills.
    query_ends, kv_ends
        Cumulative lengths of each request's queries and of its piece, for kernels that take lists.
    starts, lens
        First position and length of each piece, int32 ``[n]`` on the device.
    block_tables
        Rows of the requests, int32 ``[n, max_num_blocks]``.
    ranks
        How the rows are gathered if several ranks share contexts.
    """

    tokens: slice
    query_ends: list[int]
    kv_ends: list[int]
    starts: torch.Tensor
    lens: torch.Tensor
    block_tables: torch.Tensor
    ranks: Any = None  # if ranks share contexts (`attention.latent_ranks.RankRows`)

    @property
    def num_rows(self) -> int:
        """Rows of the cache that the chunk reads."""
        return self.kv_ends[-1]


@dataclass(frozen=True)
class Prefills:
    """The prefills of a step.

    Attributes
    ----------
    first_token
        Of the step; the decodes' tokens come before it.
    num_tokens
        Of all prefills.
    query_ends
        Cumulative lengths of queries, counted from the first prefill's.
    query_start_loc
        The same on the device, int32 ``[num_prefills + 1]``.
    computed
        Positions of each request that are in the cache already: how far into its sequence its
        queries begin.
    chunks
        In which the contexts are read, in order.
    """

    first_token: int
    num_tokens: int
    query_ends: list[int]
    query_start_loc: torch.Tensor
    computed: list[int]
    chunks: tuple[ContextChunk, ...]


@dataclass(frozen=True)
class Halves:
    """A step's decodes, which attend over latent rows as they are, and its prefills."""

    decodes: AscendMetadata | None
    prefills: Prefills


def split_metadata(
    metadata: AscendMetadata,
    num_decodes: int,
    host: LatentArrays[np.ndarray],
    device: LatentArrays[torch.Tensor],
) -> Halves:
    """Split a step's metadata.

    Parameters
    ----------
    metadata
        Of the step, without padding requests, with at least one prefill.
    num_decodes
        Leading requests that are decodes.
    host, device
        The step's arrays, without padding.
    """
    starts, table = metadata.query_start_loc_np, metadata.block_tables
    assert table is not None
    first_token = int(starts[num_decodes])
    ends = np.asarray(host.prefill_query_start_loc)
    prefills = Prefills(
        first_token,
        metadata.num_actual_tokens - first_token,
        ends[1:].tolist(),
        device.prefill_query_start_loc,
        (metadata.seq_lens_np - metadata.query_lens)[num_decodes:].tolist(),
        tuple(_chunks(num_decodes, ends, host, device, table)),
    )
    if not num_decodes:
        return Halves(None, prefills)
    decodes = replace(
        metadata,
        block_tables=table[:num_decodes],
        query_start_loc=metadata.query_start_loc[: num_decodes + 1],
        query_start_loc_np=starts[: num_decodes + 1],
        seq_lens=metadata.seq_lens[:num_decodes],
        seq_lens_np=metadata.seq_lens_np[:num_decodes],
        num_computed_tokens=metadata.num_computed_tokens[:num_decodes],
        num_reqs=num_decodes,
        max_query_len=int(np.diff(starts[: num_decodes + 1]).max()),
        num_actual_tokens=first_token,
        num_input_tokens=first_token,
    )
    return Halves(decodes, prefills)


def _chunks(
    num_decodes: int,
    ends: np.ndarray,
    host: LatentArrays[np.ndarray],
    device: LatentArrays[torch.Tensor],
    table: torch.Tensor,
) -> list[ContextChunk]:
    borders = np.flatnonzero(np.diff(host.context_piece_chunks, prepend=-1)).tolist()
    chunks = []
    for first, last in zip(borders, [*borders[1:], len(host.context_piece_chunks)]):
        reqs, pieces = host.context_piece_reqs[first:last], slice(first, last)
        begin, end = int(reqs[0]), int(reqs[-1]) + 1
        query_ends = ends[begin - num_decodes : end - num_decodes + 1]
        chunks.append(
            ContextChunk(
                slice(int(query_ends[0]), int(query_ends[-1])),
                (query_ends[1:] - query_ends[0]).tolist(),
                np.cumsum(host.context_piece_lens[pieces]).tolist(),
                device.context_piece_starts[pieces],
                device.context_piece_lens[pieces],
                table[begin:end],
            )
        )
    return chunks


def make_latent_split(
    vllm_config: "VllmConfig", decode_threshold: int, block_size: int
) -> LatentSplit:
    """How an engine splits its steps for latent attention.

    Parameters
    ----------
    vllm_config
        The engine's config.
    decode_threshold
        Most tokens of a decode.
    block_size
        Of the cache, in tokens.
    """
    workspace = MLACommonMetadataBuilder.determine_chunked_prefill_workspace_size(vllm_config)
    max_model_len = vllm_config.model_config.max_model_len
    workspace = -(-workspace // block_size) * block_size
    return LatentSplit(decode_threshold, workspace, block_size, max_model_len)


def find_latent_split(builders: Iterable[tuple[int, Any, list[str]]]) -> LatentSplit | None:
    """How an engine with these metadata builders splits its steps; None for other models."""
    return next((each.latent for _, each, _ in builders if each.latent is not None), None)


def describe(split: LatentSplit, vllm_config: "VllmConfig", itemsize: int) -> str:
    """The line that tells at start-up what reading contexts may take.

    Parameters
    ----------
    split
        How steps are split.
    vllm_config
        The engine's config.
    itemsize
        Bytes of an element of the cache.
    """
    model = vllm_config.model_config
    text = model.hf_text_config
    heads = model.get_num_attention_heads(vllm_config.parallel_config)
    row = text.kv_lora_rank + text.qk_rope_head_dim
    projected = heads * (text.qk_nope_head_dim + text.v_head_dim)
    rows = split.workspace_tokens
    mebibytes = [rows * width * itemsize / (1 << 20) for width in (row, projected)]
    return (
        f"Latent attention: contexts of prefills are read in chunks of up to {rows:,} tokens "
        f"({mebibytes[0]:,.1f} MiB of latent rows, {mebibytes[1]:,.1f} MiB projected to K and V)."
    )
