"""Drawings of a step's masks and KV blocks: words, marks and bars, and their places.

Places are in cells of the mask and slots of the block. `vllm_npu_prep.inspect.page` (HTML) and
`vllm_npu_prep.inspect.png` (pixels) render the same drawing; they add style and nothing else.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np

from vllm_npu_prep.inspect.explain import Selection, group_title, ranges, states_of
from vllm_npu_prep.inspect.pictures import MaskPicture, mask_picture
from vllm_npu_prep.inspect.view import StepView
from vllm_npu_prep.wording import counted

FLATTEST = 0.12
"""The least height of a mask as a share of its width; wider masks are stretched to it."""

MIN_HEIGHT = 16
"""The least height of a mask, in pixels."""

MAX_SLOT_LINES = 16
"""The most slots of a block for which lines are drawn between slots."""

MAX_BLOCKS = 24
"""The most blocks of a request that are drawn; middle blocks are only named, as ranges."""

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
    """The largest size of a drawn mask, and the room that its labels need; all in pixels."""

    width: int  # the most that a mask may take
    height: int
    cell_width: int  # the most that a column may take
    name_height: int  # of a request's name beside the rows
    row_pitch: int  # least distance between the numbers of two rows
    column_pitch: int
    min_cell: float  # least side of a cell that gets borders


Marks: TypeAlias = list[tuple[float, int, str]]
"""Numbers beside a mask: where they stand as a share of its side, the token or position, and words
that are shown if there is room for them.
"""


@dataclass(frozen=True)
class MaskDrawing:
    """A mask with the labels around it."""

    picture: MaskPicture
    aspect: float  # height of the mask as a share of its width
    width: int  # in pixels of the scale
    height: int
    has_borders: bool  # whether lines part its cells
    labels: list[tuple[float, int, str]]  # pixels from the top, row of the batch, req_id
    rows: Marks
    columns: Marks
    caption: str


def mask_drawings(
    view: StepView, selection: Selection, scale: MaskScale
) -> Iterator[MaskDrawing | str]:
    """Yield a drawing of each KV-cache group's mask, or words where there is nothing to draw.

    Groups that see the same as an earlier one only name it.
    """
    seen: dict[object, str] = {}
    for index, group in enumerate(view.groups):
        title = f"group {index}: " if len(view.groups) > 1 else ""
        key = (view.plans[index], group.sliding_window, group.attention_chunk_size)
        if key in seen:
            yield f"{title}the same as {seen[key]}"
            continue
        seen[key] = f"group {index}"
        picture = mask_picture(view, index, selection)
        if picture is None:
            yield f"{title}no mask, nothing to draw"
        else:
            yield _mask_drawing(view, title, picture, scale)


def _mask_drawing(
    view: StepView, title: str, picture: MaskPicture, scale: MaskScale
) -> MaskDrawing:
    rows, columns = picture.num_rows, picture.num_columns
    aspect = min(max(rows / columns, FLATTEST), 1)
    width = min(scale.width, round(scale.height / aspect), max(scale.cell_width * columns, 60))
    height = max(round(width * aspect), MIN_HEIGHT)
    names = [] if picture.by_position else row_names(view, picture, height, scale.name_height)
    return MaskDrawing(
        picture=picture,
        aspect=aspect,
        width=width,
        height=height,
        has_borders=min(width / columns, height / rows) >= scale.min_cell,
        labels=[(y, row, view.requests[row].req_id) for y, row in names],
        rows=[
            ((row + 0.5) / rows, picture.first + row, _row_words(view, picture, row))
            for row in axis_ticks(rows, height // scale.row_pitch)
        ],
        columns=[
            ((column + 0.5) / columns, column, str(column))
            for column in axis_ticks(columns, width // scale.column_pitch)
        ],
        caption=f"{title}{picture.size}: {picture.caption}. Coloured: may attend.",
    )


def _row_words(view: StepView, picture: MaskPicture, row: int) -> str:
    if picture.by_position:
        return f"position {row}"
    token, positions = picture.first + row, view.step.positions
    return f"token {token}, position {positions[token]}" if token < len(positions) else "padding"


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


class Bar(NamedTuple):
    """Neighbouring slots of a block that hold the same kind of content, of `LEGEND`."""

    kind: str
    low: int
    high: int  # one past the last


@dataclass(frozen=True)
class BlockDrawing:
    """A block of a request."""

    number: int  # physical block; 0: the null block, in place of a freed one
    place: int  # its column of the block table
    bars: list[Bar]  # what its slots hold; later bars cover earlier ones
    shared: bool  # whether another request owns it as well
    words: str  # describes it in a sentence


@dataclass(frozen=True)
class BlockFold:
    """Blocks of a request that the drawing leaves out: their count, and their numbers as ranges."""

    count: int
    numbers: str


@dataclass(frozen=True)
class BlockLine:
    """The blocks of a request in a KV-cache group."""

    row: int  # of the batch
    req_id: str
    cells: list[BlockDrawing | BlockFold]  # in order
    strays: str = ""  # in words, which of its tokens write to foreign blocks


@dataclass(frozen=True)
class BlockMap:
    """The blocks of some requests in a KV-cache group.

    If a block holds a recurrent state in place of slots, its left half tells that the step reads
    it, and its right half that the step writes it.
    """

    title: str  # names the group
    num_slots: int  # of a block
    legend: list[tuple[str, str]]  # kinds of bars that the step can have, and what they mean
    lines: list[BlockLine]  # one for each request
    has_states: bool = False

    @property
    def has_lines(self) -> bool:
        """Whether lines part the slots of a block."""
        return self.num_slots <= MAX_SLOT_LINES


def block_maps(view: StepView, requests: list[int]) -> list[BlockMap]:
    """Draw the KV blocks or recurrent states of some requests, group by group."""
    maps = [block_map(view, index, requests) for index in view.tables]
    return maps + [state_map(view, group, requests) for group in view.state_groups]


def block_map(view: StepView, index: int, requests: list[int]) -> BlockMap:
    """Draw the blocks of some requests, given by their rows of the batch, in a KV-cache group.

    Of long requests it has the first, the written and the last blocks.
    """
    size = view.block_size(index)
    has_items = any(request.items for request in view.requests)
    owned = [view.blocks_owned(row, index) for row in range(len(view.requests))]
    numbers, counts = np.unique(np.concatenate([np.empty(0, np.int64), *owned]), return_counts=True)
    shared = set(numbers[counts > 1].tolist()) - {0}
    return BlockMap(
        title=f"KV blocks{group_title(view, index) or f', block size {size}'}",
        num_slots=size,
        legend=[(kind, text) for kind, text in LEGEND if kind != "picture" or has_items],
        lines=[_block_line(view, index, row, owned[row], shared) for row in requests],
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
            cells.append(BlockDrawing(number, place, bars, False, f"block {number}: {does}"))
        lines.append(BlockLine(row, view.requests[row].req_id, cells))
    legend = list(STATE_LEGEND.items())
    return BlockMap(f"States of group {group}", 2, legend, lines, has_states=True)


def _block_line(
    view: StepView, index: int, row: int, owned: np.ndarray, shared: set[int]
) -> BlockLine:
    step, size = view.step, view.block_size(index)
    start, end = step.query_start_loc[row : row + 2].tolist()
    slots = step.slot_mapping[view.tables[index]][start:end]
    touched, offsets = np.divmod(slots[slots >= 0], size)
    written: dict[int, Bar] = {}
    for block in np.unique(touched).tolist():
        inside = offsets[touched == block]
        written[block] = Bar("written", int(inside.min()), int(inside.max()) + 1)
    computed = step.dcp_local_context_lens if step.shape.dcp else step.num_computed_tokens
    items = [] if step.shape.dcp else view.requests[row].items
    # By position in the request, on this rank
    kept = [Bar("computed", 0, int(computed[row]))]
    kept += [Bar("picture", item.offset, item.end) for item in items]
    numbers, last = owned.tolist(), -1
    cells: list[BlockDrawing | BlockFold] = []
    for place in _drawn_places(numbers, written):
        if place > last + 1:
            left_out = numbers[last + 1 : place]
            cells.append(BlockFold(len(left_out), ranges(left_out)))
        last, number, words = place, numbers[place], f"block_table[{place}]: "
        if not number:
            cells.append(BlockDrawing(0, place, [], False, f"{words}the null block, freed"))
            continue
        low, first = place * size, number * size
        words += f"block {number}, slots {first} to {first + size - 1}"
        bars = [Bar(kind, max(b - low, 0), min(e - low, size)) for kind, b, e in kept]
        if number in written:
            bar = written[number]
            bars.insert(1, bar)
            words += f", writes {first + bar.low} to {first + bar.high - 1}"
        is_shared = number in shared
        words += ", shared" * is_shared
        bars = [bar for bar in bars if bar.low < bar.high]
        cells.append(BlockDrawing(number, place, bars, is_shared, words))
    strays, text = start + np.flatnonzero(~np.isin(touched, owned[owned > 0])), ""
    if len(strays):
        tokens = ", ".join(map(str, strays[:MAX_STRAYS].tolist()))
        write = "writes" if len(strays) == 1 else "write"
        text = f"{counted(len(strays), 'token')} {write} blocks that this request doesn't own: "
        text += tokens
    return BlockLine(row, view.requests[row].req_id, cells, text)


def _drawn_places(numbers: list[int], written: Collection[int]) -> list[int]:
    """Choose the columns of a request's block table that are drawn."""
    if len(numbers) <= MAX_BLOCKS:
        return list(range(len(numbers)))
    places = [place for place, number in enumerate(numbers) if number and number in written]
    if len(places) > MAX_BLOCKS - 2:
        places = places[: MAX_BLOCKS // 2 - 1] + places[1 - MAX_BLOCKS // 2 :]
    return sorted({0, len(numbers) - 1, *places})


def visible(text: str) -> str:
    """Return a text with invisible characters (controls, writing directions) escaped."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
