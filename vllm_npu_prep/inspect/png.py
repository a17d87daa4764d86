"""``vllm-npu-prep explain --png``: masks and KV blocks of a step as one picture."""

import io
import textwrap
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from vllm_npu_prep.errors import PrepError
from vllm_npu_prep.inspect.explain import Selection, group_title, select, summary
from vllm_npu_prep.inspect.pictures import (
    ITEM_COLOUR,
    Block,
    Colour,
    MaskPicture,
    axis_ticks,
    block_rows,
    distinct_masks,
    request_colour,
    row_names,
)
from vllm_npu_prep.inspect.view import StepView

WIDTH = 1200
MARGIN = 24
MAX_HEIGHT = 6000
"""Most pixels of a PNG file; what doesn't fit is left out, and a line says so."""

MASK_WIDTH, MASK_HEIGHT = 760, 480
LABEL_WIDTH, LABEL_HEIGHT = 190, 16
BLOCK_WIDTH, SLOTS_HEIGHT, BLOCK_HEIGHT = 60, 18, 40
MIN_CELL = 14
"""Cells of a mask that are smaller than this have no borders, and only some have numbers."""

TICK_WIDTH = 24
"""Width that the number of a column takes."""

INK, FAINT, LINE, EMPTY = (28, 33, 39), (102, 112, 128), (200, 206, 214), (238, 240, 243)


class _Sheet:
    """What is drawn, from the top down; drawn at last, when the height is known."""

    def __init__(self) -> None:
        try:
            from PIL import ImageFont
        except ImportError:
            raise PrepError(
                "--png needs Pillow: pip install pillow; --html needs nothing"
            ) from None
        self.y = MARGIN
        self.right = 0.0  # of all that is drawn
        self.label_width = 0  # what names need, LABEL_WIDTH at most
        self._labels: dict[str, str] = {}
        self.fonts = {size: ImageFont.load_default(size) for size in (11, 13, 20)}
        self.calls: list[Callable[[Any], object]] = []  # each draws with what Pillow gives

    def text(self, x: float, y: float, text: str, size: int = 13, fill: Colour = INK) -> None:
        """Some words, at a place."""
        font = self.fonts[size]
        self.right = max(self.right, x + font.getlength(text))
        self.calls.append(lambda draw: draw.text((x, y), text, font=font, fill=fill))

    def label(self, y: float, name: str, fill: Colour) -> None:
        """A name left of what it names."""
        self.text(MARGIN, y, self._short(name), 13, fill)

    def make_place(self, names: Iterable[str]) -> None:
        """Place for names left of what they name."""
        widths = (self.fonts[13].getlength(self._short(name)) for name in names)
        self.label_width = round(max(widths, default=0)) + LABEL_HEIGHT

    def _short(self, name: str) -> str:
        if name not in self._labels:
            most = 40
            while self.fonts[13].getlength(_fitting(name, most)) > LABEL_WIDTH - LABEL_HEIGHT:
                most -= 1
            self._labels[name] = _fitting(name, most)
        return self._labels[name]

    def lines(self, text: str, size: int = 13, fill: Colour = INK) -> None:
        """A paragraph, below what is there."""
        for line in textwrap.wrap(text, (WIDTH - 2 * MARGIN) // (size // 2)) or [""]:
            self.text(MARGIN, self.y, line, size, fill)
            self.y += round(size * 1.5)

    def box(
        self, box: tuple[float, float, float, float], fill: Colour | None, outline: Colour | None
    ) -> None:
        """A rectangle."""
        self.right = max(self.right, box[2])
        self.calls.append(lambda draw: draw.rectangle(box, fill=fill, outline=outline))

    def picture(self, x: int, y: int, pixels: np.ndarray, size: tuple[int, int]) -> None:
        """Pixels, as large as asked for."""
        from PIL import Image

        picture = Image.fromarray(pixels).resize(size, Image.Resampling.NEAREST)
        self.calls.append(lambda draw: draw._image.paste(picture, (x, y), picture))

    def png(self) -> bytes:
        """The file."""
        from PIL import Image, ImageDraw

        width = min(round(self.right) + MARGIN, WIDTH)
        image = Image.new("RGB", (width, self.y + MARGIN), "white")
        draw = ImageDraw.Draw(image)
        for call in self.calls:
            call(draw)
        file = io.BytesIO()
        image.save(file, "PNG", optimize=True)
        return file.getvalue()


def explain_png(
    view: StepView, req_id: str | None = None, tokens: tuple[int, int] | None = None
) -> bytes:
    """Masks and block maps of a step as a PNG file.

    Parameters
    ----------
    view
        The step.
    req_id, tokens
        What is shown (`vllm_npu_prep.inspect.explain.select`).

    Raises
    ------
    PrepError
        If there is no such request, or no such token, or no Pillow.
    """
    selection = select(view, req_id, tokens)
    sheet, masks = _Sheet(), list(distinct_masks(view, selection))
    titles = (each.column_title for _, each in masks if isinstance(each, MaskPicture))
    sheet.make_place([*titles, *(view.requests[row].req_id for row in selection.requests)])
    sheet.lines(_fitting(view.name, 90), 20)
    for name, text in summary(view)[: 1 + len(view.groups)]:
        sheet.lines(f"{name}: {text}")
    for title, picture in masks:
        if not _draw_mask(sheet, view, title, picture):
            break
    for index in view.tables:
        if not _draw_blocks(sheet, view, index, selection):
            break
    return sheet.png()


def _full(sheet: _Sheet, height: int) -> bool:
    """Whether there is no place for more; the sheet says so then."""
    if sheet.y + height + 60 <= MAX_HEIGHT:
        return False
    sheet.lines("what comes next is left out: --request ID shows one request", fill=FAINT)
    return True


def _draw_mask(sheet: _Sheet, view: StepView, title: str, picture: MaskPicture | str) -> bool:
    """A mask and what its sides are; False if there was no place."""
    if isinstance(picture, str):
        sheet.lines(f"mask: {title}{picture}", fill=FAINT)
        return True
    if _full(sheet, MASK_HEIGHT + 90):
        return False
    sheet.y += 14
    sheet.text(MARGIN, sheet.y, picture.row_title, 11, FAINT)
    sheet.y += 18
    rows, columns = picture.num_rows, picture.num_columns
    shape = min(max(rows / columns, 0.12), 1)  # as of the page: long sides are shortened
    width = min(MASK_WIDTH, round(MASK_HEIGHT / shape), max(40 * columns, 60))
    height = max(round(width * shape), 16)
    left, top = MARGIN + sheet.label_width, sheet.y
    sheet.box((left - 1, top - 1, left + width, top + height), EMPTY, LINE)
    sheet.picture(left, top, picture.pixels, (width, height))
    for y, name, colour in _row_names(view, picture, height):
        sheet.label(top + y, name, colour)
    _number_rows(sheet, view, picture, (left, top, left + width, top + height))
    sheet.y = top + height + 4
    sheet.text(MARGIN, sheet.y, picture.column_title, 11, FAINT)
    for column in axis_ticks(columns, width // TICK_WIDTH):
        name = str(column)
        middle = left + width * (column + 0.5) / columns
        sheet.text(middle - sheet.fonts[11].getlength(name) / 2, sheet.y, name, 11, FAINT)
    sheet.y += 20
    caption = f"{title}{picture.size}: {picture.caption}. Coloured: may attend."
    sheet.lines(caption, fill=FAINT)
    return True


def _number_rows(
    sheet: _Sheet, view: StepView, picture: MaskPicture, box: tuple[int, int, int, int]
) -> None:
    """Borders of a mask's cells, where they fit, and which token or position a row is."""
    left, top, right, bottom = box
    rows, columns = picture.num_rows, picture.num_columns
    cell = (bottom - top) / rows
    whole = cell >= MIN_CELL and (right - left) / columns >= MIN_CELL
    for column in range(1, columns) if whole else ():
        x = left + (right - left) * column / columns
        sheet.box((x, top, x, bottom - 1), (255, 255, 255), None)
    positions = view.step.positions[picture.first :]
    for row in axis_ticks(rows, max(1, (bottom - top) // MIN_CELL)):
        y = top + cell * row
        if row and whole:
            sheet.box((left, y, right - 1, y), (255, 255, 255), None)
        name = f"position {row}"
        if not picture.by_position:
            name = "padding"
            if row < len(positions):
                name = f"token {picture.first + row}, position {positions[row]}"
        sheet.text(right + 8, y + cell / 2 - 7, name, 11, FAINT)


def _row_names(
    view: StepView, picture: MaskPicture, height: int
) -> list[tuple[float, str, Colour]]:
    """Names of requests that stand beside the rows of a mask, and how far down."""
    if picture.by_position:
        return []
    return [
        (y, view.requests[row].req_id, request_colour(row))
        for y, row in row_names(view, picture, height, LABEL_HEIGHT)
    ]


def _draw_blocks(sheet: _Sheet, view: StepView, index: int, selection: Selection) -> bool:
    """The blocks of a KV-cache group, a line for each request; False if there was no place."""
    sheet.y += 14
    size = view.groups[index].block_size
    sheet.lines(f"KV blocks{group_title(view, index) or f', block size {size}'}")
    lines = block_rows(view, index, selection.requests)
    last = max((block.number for line in lines for block in line.blocks), default=0)
    slot_width = (BLOCK_WIDTH - 6) / size
    numbered = sheet.fonts[11].getlength(str((last + 1) * size - 1)) + 4 <= slot_width
    _draw_legend(sheet, view, numbered)
    per_line = (WIDTH - 2 * MARGIN - sheet.label_width) // BLOCK_WIDTH
    for line in lines:
        places = len(line.blocks) + len(line.folded)
        if _full(sheet, BLOCK_HEIGHT * -(-places // per_line)):
            return False
        sheet.label(sheet.y + 14, view.requests[line.row].req_id, request_colour(line.row))
        column = 0

        def place() -> tuple[int, int]:
            nonlocal column
            if column == per_line:
                column = 0
                sheet.y += BLOCK_HEIGHT
            column += 1
            return MARGIN + sheet.label_width + (column - 1) * BLOCK_WIDTH, sheet.y

        for block in line.blocks:
            if block.place in line.folded:
                x, y = place()
                sheet.text(x + 4, y + 15, f"+{line.folded[block.place]:,}", 11, FAINT)
            _draw_block(sheet, *place(), block, size, request_colour(line.row), numbered)
        sheet.y += BLOCK_HEIGHT
    return True


def _draw_legend(sheet: _Sheet, view: StepView, numbered: bool) -> None:
    """What the colours of slots mean, of those that the step can have, and what the numbers do."""
    colour = request_colour(0)
    parts = [(_pale(colour), "computed before"), (colour, "written by the step"), (EMPTY, "empty")]
    if any(request.items for request in view.requests):
        parts.append((ITEM_COLOUR, "image or video"))
    x = float(MARGIN)
    for fill, text in parts:
        sheet.box((x, sheet.y + 2, x + 14, sheet.y + 11), fill, LINE)
        sheet.text(x + 20, sheet.y, text, 11, FAINT)
        x += 20 + sheet.fonts[11].getlength(text) + 16
    numbers = "numbers: the block above (0: freed)" + ", slots inside" * numbered
    sheet.text(x, sheet.y, numbers, 11, FAINT)
    sheet.y += 20


def _pale(colour: Colour) -> Colour:
    red, green, blue = ((part + 2 * 255) // 3 for part in colour)
    return red, green, blue


def _draw_block(
    sheet: _Sheet, x: int, y: int, block: Block, size: int, colour: Colour, numbered: bool
) -> None:
    """A block under its number, and what its slots hold; their numbers in them if asked for."""
    width, top = BLOCK_WIDTH - 6, y + 14
    sheet.text(x, y, str(block.number), 11, FAINT)
    sheet.box((x, top, x + width, top + SLOTS_HEIGHT), EMPTY, None)

    def part(low: int, high: int, fill: Colour, above: int = 0) -> None:
        left, right = x + width * low / size, x + width * high / size
        sheet.box((left, top + above, max(left, right), top + SLOTS_HEIGHT), fill, None)

    if block.computed:
        part(0, block.computed, _pale(colour))
    if block.written is not None:
        part(*block.written, colour)
    for item in block.items:
        part(*item, ITEM_COLOUR, SLOTS_HEIGHT - 4)
    for slot in range(1, size) if size <= 16 else ():
        tick = x + width * slot / size
        sheet.box((tick, top, tick, top + SLOTS_HEIGHT), (255, 255, 255), None)
    sheet.box((x, top, x + width, top + SLOTS_HEIGHT), None, FAINT if block.shared else LINE)
    font = sheet.fonts[11]
    low, high = block.written or (0, 0)
    for slot in range(size) if numbered and block.number else ():
        name = str(block.number * size + slot)
        middle = x + width * (slot + 0.5) / size
        fill: Colour = (255, 255, 255) if low <= slot < high else FAINT
        sheet.text(middle - font.getlength(name) / 2, top + 3, name, 11, fill)


def _fitting(name: str, most: int) -> str:
    """A name that fits its place."""
    name = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in name)
    return name if len(name) <= most else f"{name[: most - 1]}\u2026"
