"""The reference family: paged attention in plain torch, vectorised over requests, for the CPU.

It reads the mask of the metadata and nothing else to decide who sees whom, so a wrong mask gives
wrong tokens; and it asserts what the Ascend kernels demand, so that the fallback rejects what an
NPU would.

A step is cut into *tiles* of requests of similar lengths. Tiles depend on the step alone, so they
are planned once (`ReferenceKernels.plan`) and run once for each layer.
"""

from dataclasses import dataclass, field

import numpy as np
import torch

from vllm_npu_prep.attention.families import REFERENCE
from vllm_npu_prep.attention.kernels import LayerShape
from vllm_npu_prep.attention.metadata import AscendMetadata
from vllm_npu_prep.prep.mask import COMPRESSED_MASK_SIZE
from vllm_npu_prep.prep.state import AttentionState

TILE_ELEMENTS = 1 << 22
"""Most query-key pairs of one tile and head, which bounds the memory of its scores and its mask."""


@dataclass(frozen=True)
class Tile:
    """Requests that are computed together, padded to the longest of them.

    ``B`` requests, ``Q`` query tokens, ``S`` positions.
    """

    token_indices: torch.Tensor  # [B, Q] int64, a request's last token repeated in padding
    is_token: torch.Tensor  # [B, Q] bool, False in padding
    kv_indices: torch.Tensor  # [B * S] int64, rows of the K and V that are read
    visible: torch.Tensor  # [B, 1, Q or 1, S] bool


@dataclass
class TilePlan:
    """Tiles of one step: over the step's own K and V, or over the cache."""

    fresh: list[Tile] = field(default_factory=list)
    paged: list[Tile] = field(default_factory=list)


class ReferenceKernels:
    """`vllm_npu_prep.attention.kernels.AttentionKernels` in plain torch."""

    family = REFERENCE

    def write_kv(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Write K and V to their slots."""
        _check_cache(kv_cache, key)
        assert slot_mapping.dtype == torch.int32, f"slots are int32, not {slot_mapping.dtype}"
        assert len(key) == len(value) == len(slot_mapping), "one slot for each token"
        assert key.is_contiguous() and value.is_contiguous(), "K and V must be contiguous"
        slots = slot_mapping.long()
        for plane, rows in zip(kv_cache, (key, value)):
            plane.view(-1, *plane.shape[2:]).index_copy_(0, slots, rows)

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        kv_cache: torch.Tensor,
        metadata: AscendMetadata,
        layer: LayerShape,
        output: torch.Tensor,
    ) -> None:
        """Attend over the step's own K and V where nothing is cached, else over the cache."""
        assert query.is_contiguous() and query.shape[1:] == (layer.num_heads, layer.head_size)
        assert query.dtype in REFERENCE.dtypes, query.dtype
        plan = metadata.kernel_plan
        if plan is None:
            plan = metadata.kernel_plan = TilePlan()
        fresh = key is not None and (
            metadata.attn_state == AttentionState.PrefillNoCache or not metadata.causal
        )
        if fresh:
            assert key is not None and value is not None
            tiles = plan.fresh = plan.fresh or _plan_tiles(metadata, None)
            keys, values = key, value
        else:
            _check_cache(kv_cache, query)
            tiles = plan.paged = plan.paged or _plan_tiles(metadata, kv_cache.shape[2])
            keys, values = (plane.view(-1, *plane.shape[2:]) for plane in kv_cache)
        for tile in tiles:
            _attend_tile(tile, query, keys, values, layer, output)


def _check_cache(kv_cache: torch.Tensor, rows: torch.Tensor) -> None:
    assert kv_cache.dim() == 5 and kv_cache.shape[0] == 2, (
        f"the cache is (2, num_blocks, block_size, num_kv_heads, head_size), not {kv_cache.shape}"
    )
    assert kv_cache[0].is_contiguous() and kv_cache[1].is_contiguous(), "K and V are planes"
    assert kv_cache.dtype == rows.dtype, f"cache is {kv_cache.dtype}, tokens are {rows.dtype}"


def _check_metadata(metadata: AscendMetadata) -> None:
    """What the Ascend kernels demand of a step."""
    query_lens, seq_lens = metadata.query_lens, metadata.seq_lens_np
    assert metadata.block_tables.dtype == torch.int32 and metadata.block_tables.dim() == 2
    assert len(query_lens) == len(seq_lens) == len(metadata.block_tables), (
        f"{len(query_lens)} query lengths, {len(seq_lens)} sequence lengths and "
        f"{len(metadata.block_tables)} block-table rows disagree"
    )
    starts = metadata.query_start_loc_np
    assert starts[0] == 0 and (np.diff(starts) == query_lens).all(), "query_start_loc is wrong"
    real = slice(0, metadata.num_reqs)
    assert (query_lens[real] > 0).all() and (seq_lens[real] >= query_lens[real]).all()
    if metadata.attn_mask is not None and metadata.attn_mask.dtype == torch.bool:
        assert metadata.attn_mask.dim() == 2 and metadata.attn_mask.shape[1] >= metadata.max_seq_len
    elif metadata.attn_mask is not None:
        assert metadata.attn_mask.shape == (COMPRESSED_MASK_SIZE,) * 2
        assert metadata.attn_mask.dtype == torch.int8 and metadata.attn_mask.is_contiguous()


def _plan_tiles(metadata: AscendMetadata, block_size: int | None) -> list[Tile]:
    """Cut the step into tiles; with `block_size` over the cache, without over fresh K and V."""
    _check_metadata(metadata)
    # Padding requests attend to nothing: their output is never read.
    query_lens = metadata.query_lens[: metadata.num_reqs].astype(np.int64)
    seq_lens = metadata.seq_lens_np[: metadata.num_reqs].astype(np.int64)
    starts = metadata.query_start_loc_np[: metadata.num_reqs].astype(np.int64)

    # Lengths in one tile differ by less than a factor of two.
    size_class = np.ceil(np.log2(query_lens)) * 64 + np.ceil(np.log2(seq_lens))
    order = np.argsort(size_class, kind="stable")
    classes = np.split(order, np.flatnonzero(np.diff(size_class[order])) + 1)
    tiles = []
    for requests in classes:
        pairs = int(query_lens[requests].max() * seq_lens[requests].max())
        for part in np.array_split(requests, -(-len(requests) * pairs // TILE_ELEMENTS) or 1):
            if part.size:
                tiles.append(
                    _plan_tile(
                        metadata,
                        block_size,
                        torch.from_numpy(part),
                        torch.from_numpy(query_lens[part]),
                        torch.from_numpy(seq_lens[part]),
                        torch.from_numpy(starts[part]),
                    )
                )
    return tiles


def _plan_tile(
    metadata: AscendMetadata,
    block_size: int | None,
    requests: torch.Tensor,  # [B]
    query_lens: torch.Tensor,  # [B]
    seq_lens: torch.Tensor,  # [B]
    starts: torch.Tensor,  # [B]
) -> Tile:
    query_pos = torch.arange(int(query_lens.max()))[None, :]  # [1, Q]
    columns = torch.arange(int(seq_lens.max()))[None, :]  # [1, S]
    is_token = query_pos < query_lens[:, None]
    query_pos = query_pos.minimum(query_lens[:, None] - 1)  # [B, Q]
    token_indices = starts[:, None] + query_pos
    valid = columns < seq_lens[:, None]  # [B, S]
    cells = columns.minimum(seq_lens[:, None] - 1)

    if block_size is None:
        kv_indices = starts[:, None] + cells
    else:
        blocks = metadata.block_tables[requests].long().gather(1, cells // block_size)
        kv_indices = blocks * block_size + cells % block_size

    # How far a column lies ahead of the query token: 0 is the token itself.
    ahead = columns[:, None, :] - ((seq_lens - query_lens)[:, None] + query_pos)[:, :, None]
    mask = metadata.attn_mask
    if mask is None:
        masked = torch.zeros((), dtype=torch.bool)
        if metadata.sliding_window is not None:
            masked = ahead <= -metadata.sliding_window
    elif mask.dtype != torch.bool:
        masked = expand_compressed(mask, ahead, metadata.sliding_window)
    elif metadata.attn_state == AttentionState.PrefillNoCache:
        masked = mask[query_pos][:, :, : columns.shape[1]]
    else:
        masked = mask[token_indices][:, :, : columns.shape[1]]
    visible = valid[:, None, :] & ~masked
    return Tile(token_indices, is_token, kv_indices.flatten(), visible[:, None])


def expand_compressed(
    mask: torch.Tensor,  # [2048, 2048] int8, 1 above the diagonal
    ahead: torch.Tensor,  # [...] int64
    sliding_window: int | None,
) -> torch.Tensor:
    """Expand the constant mask as the fused Ascend kernel documents it.

    ``sparse_mode`` 3 (rightDownCausal): the constant's diagonal is laid on the lower right corner
    of the request's queries and keys, so a cell is looked up by how far its column lies ahead of
    the query token. ``sparse_mode`` 4 (band) adds the lower limit, ``pre_tokens``.

    Returns
    -------
    torch.Tensor
        Bool of the shape of `ahead`, True where masked.
    """
    last = mask.shape[0] - 1

    def lookup(distance: torch.Tensor) -> torch.Tensor:
        return mask[(-distance).clamp(0, last), distance.clamp(0, last)].bool()

    masked = lookup(ahead)
    if sliding_window is not None:
        masked |= lookup(1 - ahead - sliding_window)
    return masked


def _attend_tile(
    tile: Tile,
    query: torch.Tensor,  # [T, H, D]
    keys: torch.Tensor,  # [rows, Hkv, D]
    values: torch.Tensor,  # [rows, Hkv, D]
    layer: LayerShape,
    output: torch.Tensor,  # [T, H, D]
) -> None:
    num_reqs, query_len = tile.token_indices.shape
    q = query[tile.token_indices].transpose(1, 2)  # [B, H, Q, D]
    shape = (num_reqs, -1, layer.num_kv_heads, layer.head_size)
    k = keys.index_select(0, tile.kv_indices).view(shape).transpose(1, 2)  # [B, Hkv, S, D]
    v = values.index_select(0, tile.kv_indices).view(shape).transpose(1, 2)
    # Grouped queries: the heads of one K/V head stand behind each other as more query rows.
    group = layer.num_heads // layer.num_kv_heads
    q = q.reshape(num_reqs, layer.num_kv_heads, group * query_len, layer.head_size)
    visible = tile.visible
    if visible.shape[2] > 1:
        visible = visible.repeat(1, 1, group, 1)
    if layer.logits_soft_cap:
        scores = layer.logits_soft_cap * torch.tanh(
            (q @ k.transpose(2, 3)).float() * (layer.scale / layer.logits_soft_cap)
        )
        scores = scores.masked_fill(~visible, float("-inf"))
        out = scores.softmax(-1).to(v.dtype) @ v
    else:
        out = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=visible, scale=layer.scale
        )
    out = out.view(num_reqs, layer.num_heads, query_len, layer.head_size).transpose(1, 2)
    output[tile.token_indices[tile.is_token]] = out[tile.is_token]
