"""The reference family: paged attention in plain torch, vectorised over requests, for the CPU.

Only the mask of the metadata decides which token sees which, so a wrong mask gives wrong tokens.
Assertions repeat what Ascend kernels demand, so that the CPU rejects what an NPU would reject.
Positions outside of a window are never read: their block may belong to another request.

A step is cut into *chunks* of queries, and chunks of similar lengths are computed together as a
*tile*. The cut depends on the step alone, so the first layer makes it for all layers.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from vllm_npu_prep.attention.families import REFERENCE
from vllm_npu_prep.attention.kernels import AttentionCall, KeyValue, LayerShape
from vllm_npu_prep.attention.metadata import AscendMetadata
from vllm_npu_prep.prep.mask import COMPRESSED_MASK_SIZE
from vllm_npu_prep.prep.state import AttentionState

TILE_PAIRS = 1 << 20
"""The most query-key pairs of one tile; limits its mask and the scores of each head."""

TILE_ROWS = 1 << 14
"""The most rows of K and of V that one tile gathers, unless a single request has more."""

KEPT_BYTES = 64 << 20
"""The bytes of a step's tiles that are kept for the next layer. Other tiles are made again by each
layer, so that memory grows with the length of a prompt and not with its square."""

FEWEST_CHUNK_TOKENS = 64
"""With a window, a chunk has as many tokens as the window, and at least this many."""


@dataclass(frozen=True)
class Chunk:
    """Consecutive queries of one request."""

    request: int
    start: int  # first query token in the batch
    query_len: int
    first_position: int  # of the first query token
    # Positions to read: those that at least one query token of the chunk may see
    first_column: int
    num_columns: int


@dataclass(frozen=True)
class Tile:
    """Chunks that are computed together, padded to the longest one.

    There are ``B`` chunks, ``Q`` query tokens, and ``S`` columns: positions from a chunk's first
    column on.
    """

    token_indices: torch.Tensor  # [B * Q] int64, a chunk's last token repeated in padding
    # Rows of the result that are not padding, [tokens] int64, and the tokens to which they belong
    result_rows: torch.Tensor
    result_tokens: torch.Tensor
    kv_indices: torch.Tensor  # [B * S] int64, rows of the K and V that are read
    visible: torch.Tensor  # [B, 1, Q or 1, S] bool

    @property
    def nbytes(self) -> int:
        parts = self.token_indices, self.result_rows, self.result_tokens, self.kv_indices
        return sum(part.nbytes for part in (*parts, self.visible))


@dataclass
class TilePlan:
    """How a step is cut, over its own K and V or over the cache.

    `chunks` are those of each tile; further tiles are kept if they take at most `room` bytes.
    """

    chunks: list[list[Chunk]]
    room: int
    tiles: dict[int, Tile] = field(default_factory=dict)

    def each(self, metadata: AscendMetadata, block_size: int | None) -> Iterator[Tile]:
        """Yield the tiles; those for which there is room are kept for the next layer."""
        for index, chunks in enumerate(self.chunks):
            tile = self.tiles.get(index)
            if tile is None:
                tile = make_tile(metadata, block_size, chunks)
                if tile.nbytes <= self.room:
                    self.room -= tile.nbytes
                    self.tiles[index] = tile
            yield tile


class ReferenceKernels:
    """`vllm_npu_prep.attention.kernels.AttentionKernels` in plain torch."""

    family = REFERENCE
    workspace_serves_all_lengths = True

    def write_kv(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        check_rows(key, value, kv_cache, slot_mapping)
        slots = slot_mapping.long()
        if len(slots) and slots.min() < 0:  # padding of a full graph
            real = slots >= 0
            slots, key, value = slots[real], key[real], value[real]
        for plane, rows in zip(kv_cache, (key, value)):
            plane.view(-1, *plane.shape[2:]).index_copy_(0, slots, rows)

    def attend(
        self,
        query: torch.Tensor,
        own: KeyValue | None,
        kv_cache: torch.Tensor,
        metadata: AscendMetadata,
        layer: LayerShape,
        output: torch.Tensor,
        workspace: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
    ) -> None:
        del workspace
        assert query.is_contiguous() and query.shape[1:] == (layer.num_heads, layer.head_size)
        assert query.dtype in REFERENCE.dtypes, query.dtype
        fresh = own is not None and (
            metadata.attn_state == AttentionState.PrefillNoCache or not metadata.causal
        )
        plans = metadata.kernel_plan = metadata.kernel_plan or {}
        if fresh not in plans:
            plans[fresh] = plan_tiles(metadata, len(query))
        plan: TilePlan = plans[fresh]
        if own is not None and fresh:
            block_size, (keys, values) = None, own
        else:
            check_cache(kv_cache, query)
            block_size = kv_cache.shape[2]
            planes = [plane.view(-1, *plane.shape[2:]) for plane in kv_cache]
            keys, values = planes
        for tile in plan.each(metadata, block_size):
            read_keys, read_values = (
                rows.index_select(0, tile.kv_indices) for rows in (keys, values)
            )
            soft_cap = layer.logits_soft_cap
            attend_tile(tile, query, read_keys, read_values, layer.scale, output, soft_cap, lse)
        output[metadata.num_actual_tokens :].zero_()  # padding attends to nothing

    def workspace(
        self, call: AttentionCall, metadata: AscendMetadata
    ) -> None: ...  # torch allocates what it needs

    def working_bytes(self, layer: LayerShape, itemsize: int, max_seq_len: int) -> int:
        size = layer.head_size
        return tile_bytes(layer.num_heads, layer.num_kv_heads, size, size, itemsize, max_seq_len)


def tile_bytes(
    num_heads: int,
    num_kv_heads: int,
    key_size: int,
    value_size: int,
    itemsize: int,
    max_seq_len: int,
) -> int:
    """Return the most memory that tiles take: those that are kept, and the one that is computed.

    A tile has at most `TILE_PAIRS` pairs, or those of one query with the longest sequence.
    `itemsize` is the bytes of an element of the cache, `max_seq_len` is in tokens.
    """
    pairs, rows = max(TILE_PAIRS, max_seq_len), max(TILE_ROWS, max_seq_len)
    mask = 3 * torch.int32.itemsize + 3  # distances from each query, and whether they are seen
    scores = 4 * torch.float32.itemsize * num_heads
    gathered = num_kv_heads * (key_size + value_size) * (itemsize + 2 * torch.float32.itemsize)
    indices = 6 * torch.int64.itemsize
    return KEPT_BYTES + pairs * (mask + scores) + rows * (gathered + indices)


def check_rows(
    key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    """Assert what the Ascend kernels demand of rows that are written to a cache."""
    check_cache(kv_cache, key)
    assert slot_mapping.dtype == torch.int32, f"slots are int32, not {slot_mapping.dtype}"
    assert len(key) == len(value) == len(slot_mapping), "one slot for each token"
    assert key.is_contiguous() and value.is_contiguous(), "K and V must be contiguous"


def check_cache(kv_cache: torch.Tensor, rows: torch.Tensor) -> None:
    assert kv_cache.dim() == 5 and kv_cache.shape[0] == 2, (
        f"the cache is (2, num_blocks, block_size, num_kv_heads, head_size), not {kv_cache.shape}"
    )
    assert kv_cache[0].is_contiguous(), "K and V are planes"
    assert kv_cache.dtype == rows.dtype, f"cache is {kv_cache.dtype}, tokens are {rows.dtype}"


def check_metadata(metadata: AscendMetadata, num_tokens: int) -> None:
    """Assert what the Ascend kernels demand of a step."""
    query_lens, seq_lens = metadata.query_lens, metadata.seq_lens_np
    assert len(query_lens) == len(seq_lens), (
        f"{len(query_lens)} query lengths and {len(seq_lens)} sequence lengths disagree"
    )
    if metadata.block_tables is not None:
        assert metadata.block_tables.dtype == torch.int32 and metadata.block_tables.dim() == 2
        assert len(query_lens) == len(metadata.block_tables), (
            f"{len(query_lens)} query lengths and {len(metadata.block_tables)} block-table rows "
            "disagree"
        )
    starts = metadata.query_start_loc_np
    assert starts[0] == 0 and starts[metadata.num_reqs] == metadata.num_actual_tokens, (
        f"query_start_loc runs from {starts[0]} to {starts[metadata.num_reqs]} over "
        f"{metadata.num_actual_tokens} tokens"
    )
    assert (query_lens >= 0).all() and starts[-1] == num_tokens, (
        f"query_start_loc ends at {starts[-1]} for {num_tokens} tokens (error 561002 on a device)"
    )
    real = slice(0, metadata.num_reqs)
    assert (query_lens[real] > 0).all() and (seq_lens[real] > 0).all()
    assert not metadata.causal or (seq_lens[real] >= query_lens[real]).all()
    if metadata.attn_mask is not None and metadata.attn_mask.dtype == torch.bool:
        assert metadata.attn_mask.dim() == 2 and metadata.attn_mask.shape[1] >= metadata.max_seq_len
    elif metadata.attn_mask is not None:
        assert metadata.attn_mask.shape == (COMPRESSED_MASK_SIZE,) * 2
        assert metadata.attn_mask.dtype == torch.int8 and metadata.attn_mask.is_contiguous()


def plan_tiles(metadata: AscendMetadata, num_tokens: int) -> TilePlan:
    """Cut the step into chunks, and group chunks whose lengths differ by less than a factor of two.

    Padding requests are left out: they attend to nothing.
    """
    check_metadata(metadata, num_tokens)
    real = slice(0, metadata.num_reqs)
    starts = metadata.query_start_loc_np[real].tolist()
    query_lens = metadata.query_lens[real].tolist()
    seq_lens = metadata.seq_lens_np[real].tolist()
    window = metadata.sliding_window
    by_class: dict[tuple[int, int], list[Chunk]] = {}
    for request, (start, query_len, seq_len) in enumerate(zip(starts, query_lens, seq_lens)):
        longest = max(1, TILE_PAIRS // seq_len)
        if window is not None:
            longest = min(longest, max(window, FEWEST_CHUNK_TOKENS))
        for done in range(0, query_len, longest):
            length = min(longest, query_len - done)
            first = seq_len - query_len + done
            begin, end = _columns(first, length, seq_len, window, metadata.causal)
            chunk = Chunk(request, start + done, length, first, begin, end - begin)
            size_class = (length.bit_length(), chunk.num_columns.bit_length())
            by_class.setdefault(size_class, []).append(chunk)
    groups: list[list[Chunk]] = []
    for chunks in by_class.values():
        longest_query = max(chunk.query_len for chunk in chunks)
        most_columns = max(chunk.num_columns for chunk in chunks)
        together = min(TILE_PAIRS // (longest_query * most_columns), TILE_ROWS // most_columns)
        together = max(1, together)
        groups += [chunks[i : i + together] for i in range(0, len(chunks), together)]
    return TilePlan(groups, KEPT_BYTES)


def _columns(
    first_position: int, query_len: int, seq_len: int, window: int | None, causal: bool
) -> tuple[int, int]:
    """Return the first position that one of these query tokens may see, and the last plus one."""
    behind = first_position + query_len
    if window is None:
        return 0, behind if causal else seq_len
    end = behind if causal else min(behind + window - 1, seq_len)
    return max(0, first_position - window + 1), end


def make_tile(metadata: AscendMetadata, block_size: int | None, chunks: list[Chunk]) -> Tile:
    """Make the indices and the mask of some chunks.

    Rows are those of the cache, or those of the step's own K and V if `block_size` is None.
    """
    numbers = [
        (c.request, c.start, c.query_len, c.first_position, c.first_column, c.num_columns)
        for c in chunks
    ]
    requests, starts, query_lens, first, begins, lengths = torch.tensor(numbers).unbind(1)
    query_pos = torch.arange(int(query_lens.max()))[None, :]  # [1, Q]
    offsets = torch.arange(int(lengths.max()))[None, :]  # [1, S]
    is_token = query_pos < query_lens[:, None]
    query_pos = query_pos.minimum(query_lens[:, None] - 1)  # [B, Q]
    token_indices = starts[:, None] + query_pos
    positions = first[:, None] + query_pos
    cells = begins[:, None] + offsets.minimum(lengths[:, None] - 1)  # [B, S], padding repeats

    if block_size is None:
        kv_indices = torch.from_numpy(metadata.query_start_loc_np).long()[requests][:, None] + cells
    else:
        assert metadata.block_tables is not None
        blocks = metadata.block_tables[requests].long().gather(1, cells // block_size)
        kv_indices = blocks * block_size + cells % block_size

    visible = (offsets < lengths[:, None])[:, None, :]  # [B, 1, S]
    masked = masked_pairs(metadata, token_indices, positions, cells)
    if masked is not None:
        visible = visible & ~masked
    return Tile(
        token_indices.flatten(),
        is_token.flatten().nonzero().flatten(),
        token_indices[is_token],
        kv_indices.flatten(),
        visible[:, None],
    )


def masked_pairs(
    metadata: AscendMetadata,
    token_indices: torch.Tensor,  # [B, Q]
    positions: torch.Tensor,  # [B, Q]
    columns: torch.Tensor,  # [B, S]
    begins_at_zero: bool = True,
) -> torch.Tensor | None:
    """Return where the metadata's mask hides a column, bool ``[B, Q, S]``; None if nowhere.

    With `begins_at_zero`, the columns are the positions from 0 on, unless there is a window.
    """
    mask, window = metadata.attn_mask, metadata.sliding_window
    if mask is not None and mask.dtype == torch.bool:
        matrix = metadata.attn_state == AttentionState.PrefillNoCache
        rows = positions if matrix else token_indices
        if window is None and begins_at_zero:  # slicing is much faster
            return mask[rows, : columns.shape[1]]
        return mask[rows[:, :, None], columns[:, None, :]]
    if mask is None and window is None:
        return None
    # How far each column is ahead of the query token; 0 is the token itself.
    ahead = columns.int()[:, None, :] - positions.int()[:, :, None]
    if mask is None:
        assert window is not None and not metadata.causal
        return (ahead <= -window) | (ahead >= window)
    if window is None:
        return expand_compressed(mask, ahead)
    return expand_compressed(mask, ahead, window - 1, 0 if metadata.causal else window - 1)


def expand_compressed(
    mask: torch.Tensor,  # [2048, 2048] int8, 1 above the diagonal
    ahead: torch.Tensor,  # [...] int32
    pre_tokens: int | None = None,
    next_tokens: int = 0,
) -> torch.Tensor:
    """Expand the constant mask as the fused Ascend kernel documents it.

    ``sparse_mode`` 3 (rightDownCausal): the constant's diagonal is laid on the lower right corner
    of the request's queries and keys, so a cell is looked up by how far its column lies ahead of
    the query token. ``sparse_mode`` 4 (band) adds the lower limit, ``pre_tokens``, and moves the
    upper one to ``next_tokens``; both are inclusive.

    Returns
    -------
    torch.Tensor
        bool, with the shape of `ahead`, True where masked.
    """
    last = mask.shape[0] - 1
    # The cells that can be looked up lie on the first column and the first row.
    edge = torch.cat([mask[:, 0].flip(0), mask[0, 1:]]).bool()  # distance -last to last

    def lookup(distance: torch.Tensor) -> torch.Tensor:
        return edge.index_select(0, (distance + last).clamp_(0, 2 * last).flatten()).view(
            distance.shape
        )

    masked = lookup(ahead - next_tokens)
    if pre_tokens is not None:
        masked |= lookup(-ahead - pre_tokens)
    return masked


def attend_tile(
    tile: Tile,
    query: torch.Tensor,  # [T, H, D]
    keys: torch.Tensor,  # [B * S, Hkv, D], the tile's
    values: torch.Tensor,  # [B * S, Hkv, Dv], the tile's
    scale: float,
    output: torch.Tensor,  # [T, H, Dv]
    logits_soft_cap: float | None = None,
    lse: torch.Tensor | None = None,  # [T, H] float32
) -> None:
    """Compute attention of a tile's queries into their places in `output` and `lse`."""
    num_reqs, num_heads = tile.visible.shape[0], query.shape[1]
    query_len = len(tile.token_indices) // num_reqs
    q = query.index_select(0, tile.token_indices)
    q = q.view(num_reqs, query_len, num_heads, -1).transpose(1, 2)
    num_kv_heads = keys.shape[1]
    k, v = (
        rows.view(num_reqs, -1, num_kv_heads, rows.shape[-1]).transpose(1, 2)
        for rows in (keys, values)
    )  # [B, Hkv, S, D]
    # Half precision is for storage: as on a device, sums are kept in float32 and rounded once.
    q, k, v = q.float(), k.float(), v.float()
    # Grouped queries: the heads that share a K/V head become additional query rows.
    group = num_heads // num_kv_heads
    q = q.reshape(num_reqs, num_kv_heads, group * query_len, q.shape[-1])
    visible = tile.visible
    if visible.shape[2] > 1:
        visible = visible.repeat(1, 1, group, 1)
    if logits_soft_cap or lse is not None:
        scores = (q @ k.transpose(2, 3)).mul_(scale)
        if logits_soft_cap:
            scores = scores.div_(logits_soft_cap).tanh_().mul_(logits_soft_cap)
        scores.masked_fill_(~visible, float("-inf"))
        out = scores.softmax(-1) @ v
        if lse is not None:
            sums = scores.logsumexp(-1).view(num_reqs, num_heads, query_len).transpose(1, 2)
            rows = sums.reshape(-1, num_heads).index_select(0, tile.result_rows)
            lse.index_copy_(0, tile.result_tokens, rows)
    else:
        out = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=visible, scale=scale
        )
    out = out.view(num_reqs, num_heads, query_len, values.shape[-1]).transpose(1, 2)
    rows = out.reshape(-1, num_heads, values.shape[-1])
    if len(rows) != len(tile.result_rows):
        rows = rows.index_select(0, tile.result_rows)
    output.index_copy_(0, tile.result_tokens, rows.to(output.dtype))
