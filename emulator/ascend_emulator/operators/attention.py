"""Attention as the kernels define it, one request at a time, in float32."""

import torch

from ascend_emulator import faults
from ascend_emulator.api import touch

COMPRESSED_SIZE = 2048
"""Rows and columns of the constant mask of sparse modes 2, 3 and 4."""
MASK_TILE = COMPRESSED_SIZE // 2
"""Size of a tile that a constant of this size can serve at any distance from the diagonal."""
SCORES_AT_ONCE = 1 << 24
"""How many scores are held at once at most, which bounds the memory of long prompts."""


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
    keys = key.float().permute(1, 2, 0)  # [Nkv, D, S]
    values = value.float().transpose(0, 1)  # [Nkv, S, Dv]
    step = max(1, SCORES_AT_ONCE // (num_heads * num_columns))
    for start in range(0, num_rows, step):
        rows = slice(start, min(start + step, num_rows))
        part = query[rows].float()
        # Query heads that share a K/V head become additional rows.
        part = part.unflatten(1, (num_kv_heads, group)).permute(1, 2, 0, 3).flatten(1, 2)
        scores = (part @ keys * scale).unflatten(1, (group, -1))  # [Nkv, group, rows, S]
        if bias is not None:
            scores = scores + bias[rows]
        if masked is not None:
            scores = scores.masked_fill(masked[rows], float("-inf"))
        part_lse = scores.logsumexp(-1)
        weights = (scores - part_lse.unsqueeze(-1)).exp()
        part_output = weights.flatten(1, 2) @ values
        output[rows] = part_output.unflatten(1, (group, -1)).permute(2, 0, 1, 3).flatten(1, 2)
        lse[rows] = part_lse.permute(2, 0, 1).flatten(1, 2)
    lse = lse.masked_fill(lse == float("-inf"), float("inf"))
    return output, faults.apply("lse", lse)


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
