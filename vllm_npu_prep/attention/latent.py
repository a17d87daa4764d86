"""Latent attention's part of the metadata: which requests are prefills, and how contexts are read.

`vllm_npu_prep.prep.latent_split` splits the step and plans its context chunks. Here are the tensors
that kernels read; all of them are views of the step's arrays and block tables.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch
from vllm.model_executor.layers.attention.mla_attention import MLACommonMetadataBuilder

from vllm_npu_prep.attention.metadata import AscendMetadata
from vllm_npu_prep.prep.latent_split import NO_LATENT_SPLIT, LatentSplit

if TYPE_CHECKING:
    from vllm.config import VllmConfig

T = TypeVar("T", np.ndarray, torch.Tensor)


class LatentArrays(NamedTuple, Generic[T]):
    """A step's arrays for latent attention, on the host or on the device."""

    prefill_query_start_loc: T  # [num_prefills + 1] int32
    context_piece_reqs: T  # [num_pieces] int32, like the next three
    context_piece_starts: T
    context_piece_lens: T
    context_piece_chunks: T


@dataclass(frozen=True)
class ContextChunk:
    """What is gathered from the cache at once: pieces of the contexts of consecutive requests.

    Attributes
    ----------
    query_ends, kv_ends
        Cumulative lengths of each request's queries and of its piece, for kernels that take lists.
    starts, lens
        The first position and the length of each piece, int32 ``[n]`` on the device.
    """

    tokens: slice  # the queries that attend over the chunk, among those of prefills
    query_ends: list[int]
    kv_ends: list[int]
    starts: torch.Tensor
    lens: torch.Tensor
    block_tables: torch.Tensor  # rows of the requests, int32 [n, max_num_blocks]
    # How rows are gathered under decode context parallelism (`attention.latent_dcp.RankRows`)
    ranks: Any = None

    @property
    def num_rows(self) -> int:
        return self.kv_ends[-1]


@dataclass(frozen=True)
class Prefills:
    """The prefills of a step."""

    # The place of their first token in the step; the tokens of decodes come before it
    first_token: int
    num_tokens: int  # the number of tokens of all prefills
    query_ends: list[int]  # cumulative lengths of queries, counted from the first prefill
    # The same on the device with a leading 0, int32 [num_prefills + 1]
    query_start_loc: torch.Tensor
    # The number of each request's positions that are in the cache already; its queries begin there
    computed: list[int]
    chunks: tuple[ContextChunk, ...]  # the chunks in which contexts are read, in order


@dataclass(frozen=True)
class Halves:
    """A step's decodes, which attend over latent rows directly (None without any), and its
    prefills."""

    decodes: AscendMetadata | None
    prefills: Prefills


def split_metadata(
    metadata: AscendMetadata,
    num_decodes: int,
    host: LatentArrays[np.ndarray],
    device: LatentArrays[torch.Tensor],
) -> Halves:
    """Split a step's metadata, which has at least one prefill, into decodes and prefills.

    Neither the metadata nor the arrays have padding; the first `num_decodes` requests are decodes.
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
    """Return how an engine splits its steps for latent attention.

    A decode has at most `decode_threshold` tokens; `block_size` is in tokens.
    """
    workspace = MLACommonMetadataBuilder.determine_chunked_prefill_workspace_size(vllm_config)
    max_model_len = vllm_config.model_config.max_model_len
    workspace = -(-workspace // block_size) * block_size
    return LatentSplit(decode_threshold, workspace, block_size, max_model_len)


def find_latent_split(builders: Iterable[tuple[int, Any, list[str]]]) -> LatentSplit:
    """Return how an engine with these builders splits its steps for latent attention."""
    return next((each.latent for _, each, _ in builders if each.latent), NO_LATENT_SPLIT)


def describe(split: LatentSplit, vllm_config: "VllmConfig", itemsize: int) -> str:
    """Return the line that tells at start-up how much memory reading contexts may take.

    `itemsize` is the bytes of an element of the cache.
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
