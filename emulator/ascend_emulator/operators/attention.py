"""Attention as the kernels define it, one request at a time, in float32."""

import torch

from ascend_emulator import faults
from ascend_emulator.api import touch

COMPRESSED_SIZE = 2048
"""Rows and columns of the constant mask of sparse modes 2, 3 and 4."""
MASK_TILE = COMPRESSED_SIZE // 2
"""Size of a tile that a constant of this size can serve at any distance from the diagonal."""
SCORES_AT_ONCE = 1 << 21
"""About how many scores are computed at once: as many as caches of processors hold."""


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
    num_rows, num_heads, _ = query.shape
    scores_of = faults.Scores(key, value, scale, masked, bias)
    key, value, scale, masked, bias = faults.apply("scores", scores_of, num_heads=num_heads)
    num_columns, num_kv_heads = key.shape[:2]
    output = torch.zeros(num_rows, num_heads, value.shape[2])
    lse = torch.full((num_rows, num_heads), float("inf"))
    if not num_columns or not num_rows:
        return output, lse
    group = num_heads // num_kv_heads
    keys = key.float().permute(1, 2, 0).contiguous()  # [Nkv, D, S]
    values = value.float().transpose(0, 1).contiguous()  # [Nkv, S, Dv]
    # Query heads that share a K/V head become additional rows
    queries = query.unflatten(1, (num_kv_heads, group)).permute(1, 2, 0, 3)  # [Nkv, group, Q, D]
    outputs, sums = (each.unflatten(1, (num_kv_heads, group)) for each in (output, lse))
    num_rows_at_once = min(num_rows, max(1, SCORES_AT_ONCE // (group * num_columns)))
    num_heads_at_once = max(1, SCORES_AT_ONCE // (group * num_columns * num_rows_at_once))
    for start in range(0, num_rows, num_rows_at_once):
        rows = slice(start, start + num_rows_at_once)
        columns = slice(None) if masked is None else _seen(masked[rows])
        for first in range(0, num_kv_heads, num_heads_at_once):
            heads = slice(first, first + num_heads_at_once)
            part = queries[heads, :, rows].float().flatten(1, 2)
            scores = (part @ keys[heads, :, columns]).mul_(scale).unflatten(1, (group, -1))
            if bias is not None:
                scores += bias[rows, columns]
            if masked is not None:
                scores.masked_fill_(masked[rows, columns], float("-inf"))
            largest = scores.amax(-1, keepdim=True)
            weights = scores.sub_(largest).exp_()  # [heads, group, rows, columns]
            total = weights.sum(-1, keepdim=True)
            result = (weights.flatten(1, 2) @ values[heads, columns]).unflatten(1, (group, -1))
            outputs[rows, heads] = (result / total).permute(2, 0, 1, 3)
            part_lse = (largest + total.log()).masked_fill(largest.isneginf(), float("inf"))
            sums[rows, heads] = part_lse.squeeze(-1).permute(2, 0, 1)
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
