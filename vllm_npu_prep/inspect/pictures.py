"""A step's masks as pixels, the content of its KV blocks' slots, and the colours of both.

`vllm_npu_prep.inspect.drawing` places them in a page or a PNG file.
"""

import colorsys
import io
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from PIL import Image

from vllm_npu_prep.inspect.explain import Selection, ranges
from vllm_npu_prep.inspect.view import StepView
from vllm_npu_prep.prep.mask import MaskKind, MaskPlan, build_mask
from vllm_npu_prep.prep.state import AttentionState
from vllm_npu_prep.wording import counted

MAX_SIDE = 640
"""The most pixels of a mask's side; larger masks are shown by the mean of their cells."""

MAX_CELLS = 1 << 26
"""The most cells of a mask that are built for a picture; larger masks lose rows."""

MAX_BLOCKS = 24
"""The most blocks of a request that are drawn; middle blocks are only named, as ranges."""

ITEM_COLOUR = (214, 96, 160)
PADDING_COLOUR = (150, 150, 150)
MATRIX_COLOUR = (70, 130, 200)
Colour = tuple[int, int, int]


def request_hue(row: int) -> int:
    """Return the hue of a request in degrees; the golden angle keeps neighbours distinct."""
    return round(210 + row * 137.508) % 360


def request_colour(row: int) -> Colour:
    """Return the RGB colour of a request, legible on white and on black."""
    rgb = colorsys.hls_to_rgb(request_hue(row) / 360, 0.5, 0.6)
    return tuple(round(255 * part) for part in rgb)  # type: ignore[return-value]


# ----------------------------------------------------------------- mask


@dataclass(frozen=True)
class MaskPicture:
    """What tokens see, as a picture: a row for each token or position, a column for each position.

    Attributes
    ----------
    pixels
        uint8 ``[height, width, 4]``, RGBA: the colour of the token's request where it may attend,
        transparent where it is masked.
    num_rows, num_columns
        Size of the mask, which may be larger than the picture.
    first
        Token of the first row; 0 if rows are positions.
    by_position
        Whether a row is that of a position, for all requests.
    attention_chunk_size
        Positions count from the start of chunks of this size; None: of requests.
    caption
        What rows and columns are.
    """

    pixels: np.ndarray
    num_rows: int
    num_columns: int
    first: int
    by_position: bool
    attention_chunk_size: int | None
    caption: str

    @property
    def size(self) -> str:
        return f"{counted(self.num_rows, 'row')}, {counted(self.num_columns, 'column')}"

    @property
    def row_title(self) -> str:
        return "query positions" if self.by_position else "query tokens by request"

    @property
    def column_title(self) -> str:
        if self.attention_chunk_size is None:
            return "key positions"
        return "key positions in their chunk"


def mask_picture(view: StepView, index: int, selection: Selection) -> MaskPicture | None:
    """Draw what the tokens of a step see in a KV-cache group.

    If a kernel takes no mask or a constant one, the picture shows what the kernel applies: the row
    that each token would have. None if that isn't known (tokens that see both ways).
    """
    step, group = view.step, view.groups[index]
    plan = view.plans[index]
    if plan.kind is MaskKind.NONE and step.attn_state is not AttentionState.DecodeOnly:
        return None
    chunk_size, caption = group.attention_chunk_size, "a row for each token"
    if plan.kind is MaskKind.MATRIX:
        assert plan.shape is not None
        num_rows, num_columns = plan.shape
        positions = np.arange(num_rows)
        caption = "a row for each position, the same for all requests"
    elif plan.kind is MaskKind.ROWS:
        assert plan.shape is not None
        num_columns = plan.shape[1]
        positions = step.positions[selection.first : selection.end]
        num_rows = plan.shape[0] if selection.whole else len(positions)
    else:
        longest = step.max_seq_len
        if chunk_size is not None:
            longest = step.local.max_seq_len
        positions = step.positions[selection.first : selection.end]
        num_rows, num_columns = len(positions), longest
        plan = MaskPlan(MaskKind.ROWS, (num_rows, num_columns), group.sliding_window, chunk_size)
        is_none = view.plans[index].kind is MaskKind.NONE
        what = "there is no mask" if is_none else "the mask is a constant"
        caption += f" ({what}, this is what they see)"
    if num_rows <= 0 or num_columns <= 0:
        return None
    if chunk_size is not None:
        caption += f"; positions in chunks of {chunk_size}"
    if num_rows > len(positions):
        caption += "; grey: padding, masks nothing"

    rows = _spread(num_rows, min(2 * MAX_SIDE, max(16, MAX_CELLS // num_columns)))
    edges, columns = _edges(len(rows)), _edges(num_columns)
    seen = _visible(plan, positions, rows, num_columns)
    seen = np.add.reduceat(seen, columns[:-1], axis=1, dtype=np.float32) / np.diff(columns)
    seen = np.add.reduceat(seen, edges[:-1], axis=0) / np.diff(edges)[:, None]
    shown = rows[edges[:-1]]  # the row that gives a line of pixels its colour

    pixels = np.zeros((*seen.shape, 4), np.uint8)
    if plan.kind is MaskKind.MATRIX:
        pixels[..., :3] = MATRIX_COLOUR
    else:
        pixels[..., :3] = PADDING_COLOUR
        real = shown < len(positions)
        owners = step.req_indices[selection.first + shown[real]]
        colours = np.array([request_colour(row) for row in range(len(view.requests))], np.uint8)
        pixels[real, :, :3] = colours[owners][:, None]
        if chunk_size is None:
            for row, request in enumerate(view.requests):
                own = np.flatnonzero(real)[owners == row]
                for item in request.items if len(own) else ():
                    inside = (columns[:-1] < item.end) & (columns[1:] > item.offset)
                    pixels[own[:, None], np.flatnonzero(inside), :3] = ITEM_COLOUR
    # A visible cell always leaves a trace, however large the mask.
    opacity = np.where(shown < len(positions), 255, 110)[:, None]
    pixels[..., 3] = np.where(seen > 0, np.maximum(np.rint(seen * opacity), 24), 0)
    by_position = plan.kind is MaskKind.MATRIX
    first = 0 if by_position else selection.first
    return MaskPicture(pixels, num_rows, num_columns, first, by_position, chunk_size, caption)


def distinct_masks(view: StepView, selection: Selection) -> Iterator[tuple[str, MaskPicture | str]]:
    """Yield the mask of each KV-cache group with a title, or words where there is nothing to draw.

    Groups that see the same as an earlier one only name it.
    """
    seen: dict[object, str] = {}
    for index, group in enumerate(view.groups):
        title = f"group {index}: " if len(view.groups) > 1 else ""
        key = (view.plans[index], group.sliding_window, group.attention_chunk_size)
        if key in seen:
            yield title, f"the same as {seen[key]}"
            continue
        seen[key] = f"group {index}"
        yield title, mask_picture(view, index, selection) or "no mask, nothing to draw"


def _visible(plan: MaskPlan, positions: np.ndarray, rows: np.ndarray, width: int) -> np.ndarray:
    """Return some rows of a mask, True where the token may attend, ``[len(rows), width]``."""
    chosen = replace(plan, kind=MaskKind.ROWS, shape=(len(rows), width))
    mask = build_mask(chosen, positions[rows[rows < len(positions)]])
    assert mask is not None
    return ~mask


def _spread(number: int, most: int) -> np.ndarray:
    if number <= most:
        return np.arange(number)
    return np.linspace(0, number - 1, most).astype(np.int64)


def _edges(number: int) -> np.ndarray:
    """Return the first cell of each pixel, and the end of the last."""
    pixels = min(number, MAX_SIDE)
    return np.arange(pixels + 1, dtype=np.int64) * number // pixels


def png_bytes(pixels: np.ndarray) -> bytes:
    """Return a PNG file of uint8 ``[height, width, 3]`` (RGB) or ``[height, width, 4]`` (RGBA)."""
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG", optimize=True)
    return file.getvalue()


# ----------------------------------------------------------------- blocks


@dataclass(frozen=True)
class Block:
    """A block of a request, and what its slots hold.

    Attributes
    ----------
    place
        Its column of the block table.
    number
        Physical block; 0: the null block, in place of a freed one.
    computed
        Slots that held tokens before the step.
    written
        Slots that the step writes, from the first to one past the last; None if it writes none.
    shared
        Whether another request owns it too.
    items
        Slots of images and videos, from the first to one past the last of each.
    """

    place: int
    number: int
    computed: int
    written: tuple[int, int] | None
    shared: bool
    items: list[tuple[int, int]]


@dataclass(frozen=True)
class BlockRow:
    """The blocks of a request in a KV-cache group.

    Attributes
    ----------
    row
        The request's row of the batch.
    blocks
        Blocks that are drawn, in order.
    folded
        By a block's place, how many blocks are left out before it; only where some are.
    folded_numbers
        Physical blocks left out there, as ranges.
    strays
        Tokens whose slot lies in no block of their request.
    """

    row: int
    blocks: list[Block]
    folded: dict[int, int] = field(default_factory=dict)
    folded_numbers: dict[int, str] = field(default_factory=dict)
    strays: list[int] = field(default_factory=list)


def block_rows(view: StepView, index: int, requests: Sequence[int]) -> list[BlockRow]:
    """Return blocks of some requests; of long requests the first, the written and the last ones."""
    owned = [view.blocks_owned(row, index) for row in range(len(view.requests))]
    numbers, counts = np.unique(np.concatenate([np.empty(0, np.int64), *owned]), return_counts=True)
    shared = set(numbers[counts > 1].tolist()) - {0}
    return [_block_row(view, index, row, owned[row], shared) for row in requests]


def _block_row(
    view: StepView, index: int, row: int, owned: np.ndarray, shared: set[int]
) -> BlockRow:
    step, size = view.step, view.block_size(index)
    start, end = step.query_start_loc[row : row + 2].tolist()
    slots = step.slot_mapping[view.tables[index]][start:end]
    slots = slots[slots >= 0]
    touched, offsets = slots // size, slots % size
    strays = start + np.flatnonzero(~np.isin(touched, owned[owned > 0]))
    written = {}
    if len(slots):
        order = np.argsort(touched, kind="stable")
        blocks_of, firsts = np.unique(touched[order], return_index=True)
        lows = np.minimum.reduceat(offsets[order], firsts).tolist()
        highs = np.maximum.reduceat(offsets[order], firsts).tolist()
        written = {b: (low, high + 1) for b, low, high in zip(blocks_of.tolist(), lows, highs)}
    dcp = step.shape.dcp
    computed_here = step.dcp_local_context_lens if dcp else step.num_computed_tokens
    computed = int(computed_here[row])
    numbers = owned.tolist()
    blocks, folded, names, last = [], {}, {}, -1
    for place in _kept(numbers, written):
        if place > last + 1:
            folded[place] = place - last - 1
            names[place] = ranges(numbers[last + 1 : place])
        low, number = place * size, numbers[place]
        items = [
            (max(item.offset - low, 0), min(item.end - low, size))
            for item in view.requests[row].items
            if number and not dcp and item.offset < low + size and item.end > low
        ]
        blocks.append(
            Block(
                place,
                number,
                min(max(computed - low, 0), size) if number else 0,
                written.get(number) if number else None,
                number in shared,
                items,
            )
        )
        last = place
    return BlockRow(row, blocks, folded, names, strays.tolist())


def _kept(numbers: list[int], written: Iterable[int]) -> list[int]:
    if len(numbers) <= MAX_BLOCKS:
        return list(range(len(numbers)))
    touched = set(written)
    places = [place for place, number in enumerate(numbers) if number and number in touched]
    if len(places) > MAX_BLOCKS - 2:
        places = places[: MAX_BLOCKS // 2 - 1] + places[1 - MAX_BLOCKS // 2 :]
    return sorted({0, len(numbers) - 1, *places})
