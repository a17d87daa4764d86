"""Attention as the kernels define it, one request at a time, in float32."""

import torch

from ascend_emulator import faults
from ascend_emulator.api import touch

COMPRESSED_SIZE = 2048
"""Rows and columns of the constant mask of sparse modes 2, 3 and 4."""
MASK_TILE = COMPRESSED_SIZE // 2
"""Size of a tile that a constant of this size can serve at any distance from the diagonal."""
MASKED_AT_ONCE = 1 << 25
"""About how many elements of a mask are turned into float32 at once."""


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    masked: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute softmax attention of one request.

    Parameters
    ----------
    query
        ``[Q, N, D]``.
    key, value
        ``[S, Nkv, D]``; ``N / Nkv`` query heads share one K/V head.
    masked
        ``[Q, S]`` bool, True where a query must not attend; None if it attends everywhere.
    bias
        ``[Q, S]`` float, added to the scaled scores.

    Returns
    -------
    torch.Tensor
        ``[Q, N, Dv]`` float32. Zero without any key; NaN in rows where everything is masked, which
        no kernel defines.
    torch.Tensor
        ``[Q, N]`` float32, the log-sum-exp of the scores; +inf in rows without any key to attend
        to.
    """
    num_rows, num_heads, head_size = query.shape
    scores_of = faults.Scores(key, value, scale, masked, bias)
    key, value, scale, masked, bias = faults.apply("scores", scores_of, num_heads=num_heads)
    num_columns, num_kv_heads = key.shape[:2]
    output = torch.zeros(num_rows, num_heads, value.shape[2])
    lse = torch.full((num_rows, num_heads), float("inf"))
    if not num_columns or not num_rows:
        return output, lse
    group = num_heads // num_kv_heads
    # torch's kernel wants heads of one size, and as many of keys: those of a group share them
    size = max(head_size, value.shape[2])
    queries, keys, values = (
        torch.nn.functional.pad(each.float(), (0, size - each.shape[2])).transpose(0, 1)
        for each in (query, key, value)
    )
    queries = queries.unflatten(0, (num_kv_heads, group))  # [Nkv, group, Q, size]
    keys, values = (each.contiguous()[:, None].expand(-1, group, -1, -1) for each in (keys, values))
    outputs, sums = (each.unflatten(1, (num_kv_heads, group)) for each in (output, lse))
    num_rows_at_once = max(1, MASKED_AT_ONCE // num_columns)
    for start in range(0, num_rows, num_rows_at_once):
        rows = slice(start, start + num_rows_at_once)
        columns = slice(None) if masked is None else _seen(masked[rows])
        added = None if bias is None else bias[rows, columns].float()
        if masked is not None:
            hidden = torch.zeros(()) if added is None else added
            added = torch.where(masked[rows, columns], float("-inf"), hidden)
        result, part_lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            queries[:, :, rows],
            keys[:, :, columns],
            values[:, :, columns],
            attn_mask=added,
            scale=scale,
        )
        outputs[rows] = result[..., : value.shape[2]].permute(2, 0, 1, 3)
        sums[rows] = part_lse.permute(2, 0, 1)
    if masked is not None:
        nothing = masked.all(1)
        output[nothing], lse[nothing] = float("nan"), float("inf")
    return output, faults.apply("lse", lse)


def _seen(masked: torch.Tensor) -> slice:
    """Return the columns from the first to the last one that any row sees; all if none does."""
    columns = masked.logical_not().any(0).nonzero()
    return slice(int(columns[0]), int(columns[-1]) + 1) if len(columns) else slice(None)


def extend(masked: torch.Tensor | None, num_columns: int) -> torch.Tensor | None:
    """Widen a mask to as many columns as are read; those past a request's length are seen.

    No correct kernel reads them; a fault does.
    """
    if masked is None or masked.shape[1] == num_columns:
        return masked
    return torch.nn.functional.pad(masked, (0, num_columns - masked.shape[1]))


def expand_constant(
    constant: torch.Tensor, num_rows: int, num_columns: int, shift: int
) -> torch.Tensor:
    """Lay the diagonal of the constant mask on another diagonal of a larger matrix.

    The kernels read the constant by tiles: a tile takes the window of the constant that lies as far
    from its diagonal as the tile lies from the wanted one, clamped where the distance exceeds the
    tile. This function reads what the constant holds, too, so a wrong constant gives wrong results.

    Parameters
    ----------
    constant
        ``[2048, 2048]``, meant to be 1 or True above the diagonal, and 0 elsewhere.
    shift
        Column of the first row that the diagonal passes through; it may lie far outside.

    Returns
    -------
    torch.Tensor
        ``[num_rows, num_columns]`` bool; with the right constant, True where
        ``column > row + shift``.
    """
    expanded = torch.empty(num_rows, num_columns, dtype=torch.bool)
    for top in range(0, num_rows, MASK_TILE):
        for left in range(0, num_columns, MASK_TILE):
            tile = expanded[top : top + MASK_TILE, left : left + MASK_TILE]
            ahead = top + shift - left
            row = min(max(ahead, 0), MASK_TILE)
            column = min(max(-ahead, 0), MASK_TILE)
            tile.copy_(constant[row : row + tile.shape[0], column : column + tile.shape[1]])
    return expanded


def expand_band(
    constant: torch.Tensor, num_rows: int, num_columns: int, pre_tokens: int, next_tokens: int
) -> torch.Tensor:
    """Make the mask of mode 4: a band around the diagonal that ends in the lower right corner.

    Both limits are inclusive: a row at position ``p`` sees ``p - pre_tokens`` to
    ``p + next_tokens``. The lower limit reads the constant inverted, one diagonal further down.
    """
    corner = num_columns - num_rows
    after = expand_constant(constant, num_rows, num_columns, corner + next_tokens)
    before = ~expand_constant(constant, num_rows, num_columns, corner - pre_tokens - 1)
    return before | after


def gather_request(
    cache: torch.Tensor, block_table: torch.Tensor, request: int, length: int
) -> torch.Tensor:
    """Gather rows ``[length, Nkv, D]`` of one request, as faults may change them."""
    row = faults.apply("table row", request)
    length = faults.apply("read length", length, block_size=cache.shape[1])
    # A table may lack rows for requests without keys
    return gather_blocks(cache, block_table[row : row + 1].flatten(), length)


def gather_blocks(
    cache: torch.Tensor,
    block_ids: torch.Tensor,
    length: int,
) -> torch.Tensor:
    """Gather rows ``[length, Nkv, D]`` of one request from a paged cache.

    The cache is ``[num_blocks, block_size, Nkv, D]`` with any strides, and `block_ids`
    ``[max_blocks]`` the request's row of the block table. Blocks past `length` rows are not read.
    """
    block_size = cache.shape[1]
    wanted = block_ids[: -(-length // block_size)].long()
    touch(cache, wanted)
    return cache[wanted].flatten(0, 1)[:length]
