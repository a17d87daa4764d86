"""Drawings of a step for pages and PNG files: words, marks and bars, and their places.

`vllm_npu_prep.inspect.pictures` finds what a step's masks and KV blocks hold. Here this becomes a
drawing, in cells of the mask and slots of the block. `vllm_npu_prep.inspect.page` (HTML) and
`vllm_npu_prep.inspect.png` (pixels) render the same drawing; they add style and nothing else.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from vllm_npu_prep.inspect.explain import Selection, group_title, states_of
from vllm_npu_prep.inspect.pictures import (
    Block,
    BlockRow,
    MaskPicture,
    block_rows,
    distinct_masks,
)
from vllm_npu_prep.inspect.view import StepView
from vllm_npu_prep.wording import counted

FLATTEST = 0.12
"""The least height of a mask as a share of its width; wider masks are stretched to it."""

MIN_HEIGHT = 16
"""The least height of a mask, in pixels."""

MAX_SLOT_LINES = 16
"""The most slots of a block for which lines are drawn between slots."""

MAX_STRAYS = 10
"""The most tokens that are named for having a slot in a foreign block."""

LEGEND = (
    ("computed", "computed before"),
    ("written", "written by the step"),
    ("picture", "image or video"),
    ("empty", "empty"),
)
"""What the slots of a block hold (`Bar.kind`), in words."""

STATE_LEGEND = {"computed": "state read", "written": "state written"}
"""What the halves of a block with a recurrent state tell, in words."""


# ----------------------------------------------------------------- masks


@dataclass(frozen=True)
class MaskScale:
    """The largest size of a drawn mask, and the room that its labels need; all in pixels.

    Attributes
    ----------
    width, height
        The most that a mask may take.
    cell_width
        The most that a column may take.
    name_height
        Height of a request's name beside the rows.
    row_pitch, column_pitch
        Least distance between the numbers of two rows, and of two columns.
    min_cell
        Least side of a cell that gets borders.
    """

    width: int
    height: int
    cell_width: int
    name_height: int
    row_pitch: int
    column_pitch: int
    min_cell: float


@dataclass(frozen=True)
class RequestLabel:
    """The name of a request beside the rows of a mask.

    Attributes
    ----------
    y
        Upper edge of the name, in pixels below the mask's upper edge.
    row
        The request's row of the batch, from which its colour follows.
    req_id
        The name.
    """

    y: float
    row: int
    req_id: str


@dataclass(frozen=True)
class AxisMark:
    """A number that stands at the middle of a row or column of a mask.

    Attributes
    ----------
    cell
        Row or column of the mask, from 0.
    number
        Number of the step's token, or the position.
    words
        Description of the number, shown if there is room for it.
    """

    cell: int
    number: int
    words: str

    def share(self, cells: int) -> float:
        return (self.cell + 0.5) / cells


@dataclass(frozen=True)
class MaskDrawing:
    """A mask with the labels around it.

    Attributes
    ----------
    aspect
        Height of the mask as a share of its width.
    width, height
        Size of the mask, in pixels of the scale.
    has_borders
        Whether lines part its cells.
    labels
        Requests beside its rows; empty if rows are positions.
    rows, columns
        Numbers beside its rows and below its columns.
    caption
        What the picture shows.
    """

    picture: MaskPicture
    aspect: float
    width: int
    height: int
    has_borders: bool
    labels: list[RequestLabel]
    rows: list[AxisMark]
    columns: list[AxisMark]
    caption: str


def mask_drawings(
    view: StepView, selection: Selection, scale: MaskScale
) -> Iterator[MaskDrawing | str]:
    """Yield a drawing of each KV-cache group's mask, or words where there is nothing to draw."""
    for title, picture in distinct_masks(view, selection):
        if isinstance(picture, str):
            yield f"{title}{picture}"
        else:
            yield mask_drawing(view, title, picture, scale)


def mask_drawing(view: StepView, title: str, picture: MaskPicture, scale: MaskScale) -> MaskDrawing:
    rows, columns = picture.num_rows, picture.num_columns
    aspect = min(max(rows / columns, FLATTEST), 1)
    width = min(scale.width, round(scale.height / aspect), max(scale.cell_width * columns, 60))
    height = max(round(width * aspect), MIN_HEIGHT)
    return MaskDrawing(
        picture=picture,
        aspect=aspect,
        width=width,
        height=height,
        has_borders=min(width / columns, height / rows) >= scale.min_cell,
        labels=_request_labels(view, picture, height, scale.name_height),
        rows=[_row_mark(view, picture, row) for row in axis_ticks(rows, height // scale.row_pitch)],
        columns=[
            AxisMark(column, column, str(column))
            for column in axis_ticks(columns, width // scale.column_pitch)
        ],
        caption=f"{title}{picture.size}: {picture.caption}. Coloured: may attend.",
    )


def _row_mark(view: StepView, picture: MaskPicture, row: int) -> AxisMark:
    if picture.by_position:
        return AxisMark(row, row, f"position {row}")
    token, positions = picture.first + row, view.step.positions
    words = f"token {token}, position {positions[token]}" if token < len(positions) else "padding"
    return AxisMark(row, token, words)


def _request_labels(
    view: StepView, picture: MaskPicture, height: int, name_height: int
) -> list[RequestLabel]:
    if picture.by_position:
        return []
    return [
        RequestLabel(y, row, view.requests[row].req_id)
        for y, row in row_names(view, picture, height, name_height)
    ]


def axis_ticks(number: int, most: int) -> list[int]:
    """Return the rows or columns that get a number: one in 1, 2, 5, 10, 20, 50, ..."""
    most = max(most, 1)
    step = next(
        step for n in range(20) for step in (10**n, 2 * 10**n, 5 * 10**n) if number <= most * step
    )
    return list(range(0, number, step))


def row_names(
    view: StepView, picture: MaskPicture, height: int, name_height: int
) -> list[tuple[float, int]]:
    """Choose the requests that are named beside the rows of a mask, and how far down.

    Parameters
    ----------
    view, picture
        The step and its mask, whose rows are tokens.
    height, name_height
        Heights of the mask and of a name, in pixels. If not all names fit, requests with many rows
        come first.

    Returns
    -------
    list of (float, int)
        Upper edge of a name in pixels, and the request's row of the batch.
    """
    rows = picture.num_rows
    starts = np.clip(view.step.query_start_loc - picture.first, 0, rows)
    present = np.flatnonzero(np.diff(starts))
    places = starts[present] * height / rows
    if len(present) * name_height <= height:  # close ones move down, the last up
        steps = np.arange(len(present)) * name_height
        places = np.maximum.accumulate(places - steps) + steps
        places = np.minimum(places, height - name_height - steps[::-1])
        return list(zip(places.tolist(), present.tolist()))
    chosen: list[int] = []
    for place in np.argsort(-np.diff(starts)[present], kind="stable").tolist():
        if all(abs(places[place] - places[other]) >= name_height for other in chosen):
            chosen.append(place)
    return [(float(places[place]), int(present[place])) for place in chosen]


# ----------------------------------------------------------------- blocks


@dataclass(frozen=True)
class Bar:
    """Neighbouring slots of a block that hold the same kind of content.

    Attributes
    ----------
    kind
        What they hold, of `LEGEND`.
    low, high
        The slots, from the first to one past the last.
    """

    kind: str
    low: int
    high: int


@dataclass(frozen=True)
class BlockDrawing:
    """A block of a request.

    Attributes
    ----------
    number
        Physical block; 0: the null block.
    place
        Its column of the block table.
    num_slots
        Slots of a block.
    bars
        What its slots hold; later bars cover earlier ones.
    has_lines
        Whether lines part its slots.
    shared
        Whether another request owns it as well.
    words
        Describes the block in a sentence.
    """

    number: int
    place: int
    num_slots: int
    bars: list[Bar]
    has_lines: bool
    shared: bool
    words: str


@dataclass(frozen=True)
class BlockFold:
    """Blocks of a request that the drawing leaves out.

    Attributes
    ----------
    count
        Number of blocks left out.
    numbers
        Their physical blocks, as ranges.
    """

    count: int
    numbers: str


@dataclass(frozen=True)
class BlockLine:
    """The blocks of a request in a KV-cache group.

    Attributes
    ----------
    row
        The request's row of the batch, from which its colour follows.
    cells
        Its blocks in order, with a fold wherever blocks are left out.
    strays
        In words, which of its tokens write to foreign blocks; empty if none does.
    """

    row: int
    req_id: str
    cells: list[BlockDrawing | BlockFold]
    strays: str


@dataclass(frozen=True)
class BlockMap:
    """The blocks of some requests in a KV-cache group.

    Attributes
    ----------
    title
        Names the group.
    num_slots
        Slots of a block.
    legend
        Kinds of bars that the step can have, and what they mean.
    lines
        One for each request.
    has_states
        Whether each block holds a recurrent state in place of slots: the left half of a block tells
        that the step reads it, the right half that the step writes it.
    """

    title: str
    num_slots: int
    legend: list[tuple[str, str]]
    lines: list[BlockLine]
    has_states: bool = False


def block_map(view: StepView, index: int, requests: list[int]) -> BlockMap:
    """Draw the blocks of some requests, given by their rows of the batch, in a KV-cache group."""
    size = view.block_size(index)
    has_items = any(request.items for request in view.requests)
    return BlockMap(
        title=f"KV blocks{group_title(view, index) or f', block size {size}'}",
        num_slots=size,
        legend=[(kind, text) for kind, text in LEGEND if kind != "picture" or has_items],
        lines=[_block_line(view, line, size) for line in block_rows(view, index, requests)],
    )


def state_map(view: StepView, group: int, requests: list[int]) -> BlockMap:
    """Draw the recurrent states that some requests read and write, in a group that holds them."""
    lines = []
    for row in requests:
        read, written = states_of(view, group, row)
        cells: list[BlockDrawing | BlockFold] = []
        for place, number in enumerate(dict.fromkeys([*read, *written])):
            bars = [Bar("computed", 0, 1)] if number in read else []
            bars += [Bar("written", 1, 2)] if number in written else []
            does = " and ".join(STATE_LEGEND[bar.kind] for bar in bars)
            words = f"block {number}: {does}"
            cells.append(BlockDrawing(number, place, 2, bars, True, False, words))
        lines.append(BlockLine(row, view.requests[row].req_id, cells, ""))
    legend = list(STATE_LEGEND.items())
    return BlockMap(f"States of group {group}", 2, legend, lines, has_states=True)


def _block_line(view: StepView, line: BlockRow, size: int) -> BlockLine:
    cells: list[BlockDrawing | BlockFold] = []
    for block in line.blocks:
        if block.place in line.folded:
            place = block.place
            cells.append(BlockFold(line.folded[place], line.folded_numbers[place]))
        cells.append(_block(block, size))
    strays = ""
    if line.strays:
        tokens = ", ".join(map(str, line.strays[:MAX_STRAYS]))
        write = "writes" if len(line.strays) == 1 else "write"
        strays = (
            f"{counted(len(line.strays), 'token')} {write} blocks that this request doesn't own: "
            f"{tokens}"
        )
    return BlockLine(line.row, view.requests[line.row].req_id, cells, strays)


def _block(block: Block, size: int) -> BlockDrawing:
    bars, first = [], block.number * size
    words = f"block {block.number}, slots {first} to {first + size - 1}"
    if not block.number:
        words = "the null block, freed"
    if block.computed:
        bars.append(Bar("computed", 0, block.computed))
    if block.written is not None:
        low, high = block.written
        bars.append(Bar("written", low, high))
        words += f", writes {first + low} to {first + high - 1}"
    bars += [Bar("picture", *item) for item in block.items]
    if block.shared:
        words += ", shared"
    words, has_lines = f"block_table[{block.place}]: {words}", size <= MAX_SLOT_LINES
    return BlockDrawing(block.number, block.place, size, bars, has_lines, block.shared, words)


def visible(text: str) -> str:
    """Return a text with invisible characters (controls, writing directions) escaped."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
