"""A part of what a recorded call has to give, and how it is compared with what the call gave."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

ROWS = 24
"""How many rows of a large result are compared: the first and last ones, and some between."""

HEADS = 4
"""How many heads are compared where a formula takes one token after the other."""

COLUMNS = 8192
"""How many columns of a weight are widened to float64 at once."""

WORDS = 128
"""How many int32 of a row of a packed weight are widened at once."""

LEVELS = 128
ONE_LEVEL = 1 / LEVELS
"""Results in int8 are compared as fractions: rounding may go to either side of a number between two
levels, and what is rounded has been rounded before."""

Arguments = Mapping[str, Any]
Formula = Callable[[Arguments], "list[Expected]"]


@dataclass(frozen=True)
class Expected:
    """What one result of a call has to hold, in all rows or in some.

    Attributes
    ----------
    result
        Which result of the call: those of the schema come first, then what it writes besides.
    rows, columns
        Int64: places in the first dimension and in the second one. None means all.
    places_in
        The result holds places in these rows, and what stands there has to equal `values`. Of equal
        numbers, an operator may choose any. A place of -1 is the last one.
    """

    result: int
    values: torch.Tensor
    rows: torch.Tensor | None = None
    tolerance: float | None = None
    places_in: torch.Tensor | None = None
    columns: torch.Tensor | None = None

    def of(self, got: torch.Tensor) -> torch.Tensor:
        """Return the part of a result that is compared."""
        part = got if self.rows is None else got[self.rows.to(got.device)]
        part = part if self.columns is None else part[:, self.columns.to(got.device)]
        if self.places_in is not None:
            places = part.cpu().long()
            places = places.where(places != -1, self.places_in.shape[-1] - 1)
            places = places if places.dim() > 1 else places[:, None]
            return self.places_in.gather(-1, places).view(part.shape)
        if part.dtype is torch.int8 and self.values.is_floating_point():
            return part.float() / LEVELS
        return part


def some_rows(count: int, most: int = ROWS) -> torch.Tensor:
    """Return up to `most` rows of `count`, the first and the last among them."""
    if count <= most:
        return torch.arange(count)
    return torch.linspace(0, count - 1, most).long().unique()


def product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Multiply by a weight ``[inputs, outputs]``, some columns at a time: a head has many."""
    parts = [x.double() @ part.double() for part in weight.split(COLUMNS, 1)]
    result = torch.cat(parts, -1)
    return result if bias is None else result + bias.double()


def packed_product(
    x: torch.Tensor,
    words: torch.Tensor,  # int32 [K, N / 8], eight outputs in each, the first in the lowest bits
    scale: torch.Tensor,  # [G, N] for G groups of inputs
    offset: torch.Tensor | None,  # [G, N], added to numbers from -8 to 7
) -> torch.Tensor:
    """Multiply by weights of four bits, some columns at a time: float64 ``[T, N]``."""
    parts = []
    for start in range(0, words.shape[1], WORDS):
        some = words[:, start : start + WORDS, None] >> torch.arange(0, 32, 4) & 15  # [K, W, 8]
        levels = torch.where(some > 7, some - 16, some).flatten(1).double()
        of = slice(8 * start, 8 * start + levels.shape[1])
        weight = levels.unflatten(0, (len(scale), -1))  # [G, K / G, 8 W]
        weight = weight if offset is None else weight + offset[:, None, of]
        parts.append(x.double() @ (weight * scale[:, None, of]).flatten(0, 1))
    return torch.cat(parts, -1)


def rounded(result: int, values: torch.Tensor, rows: torch.Tensor) -> Expected:
    """Expect int8 levels of numbers that are cut off at the ends of int8."""
    levels = values.clamp(-LEVELS, LEVELS - 1) / LEVELS
    return Expected(result, levels, rows, ONE_LEVEL)


def rounded_by_row(
    results: tuple[int, int], values: torch.Tensor, rows: torch.Tensor, tolerance: float | None
) -> list[Expected]:
    """Expect int8 levels of rows, and each row's scale: 1/127 of its largest magnitude."""
    scale = values.abs().amax(-1) / 127
    levels = values / scale.masked_fill(scale == 0, 1)[..., None]
    return [rounded(results[0], levels, rows), Expected(results[1], scale, rows, tolerance)]
