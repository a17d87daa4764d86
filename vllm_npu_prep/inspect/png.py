"""``vllm-npu-prep explain --png``: masks and KV blocks of a step as one picture."""

import io
import textwrap
from collections.abc import Callable
from typing import Any

import numpy as np

from vllm_npu_prep.errors import PrepError
from vllm_npu_prep.inspect.explain import Selection, group_title, select, summary
from vllm_npu_prep.inspect.pictures import (
    ITEM_COLOUR,
    Block,
    Colour,
    MaskPicture,
    block_rows,
    distinct_masks,
    request_colour,
)
from vllm_npu_prep.inspect.view import StepView

WIDTH = 1200
MARGIN = 24
MAX_HEIGHT = 6000
"""Pixels of a PNG file; what doesn't fit is left out, and a line says so."""

MASK_WIDTH, MASK_HEIGHT = 760, 480
LABEL_WIDTH = 190
BLOCK_WIDTH, SLOTS_HEIGHT, BLOCK_HEIGHT = 60, 18, 40

INK, FAINT, LINE, EMPTY = (28, 33, 39), (102, 112, 128), (200, 206, 214), (238, 240, 243)
LEGEND = "pale: computed before, strong: written by the step, pink: image or video, 0: freed"


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
        self.fonts = {size: ImageFont.load_default(size) for size in (11, 13, 20)}
        self.calls: list[Callable[[Any], object]] = []  # each draws with what Pillow gives

    def text(self, x: float, y: float, text: str, size: int = 13, fill: Colour = INK) -> None:
        """Some words, at a place."""
        font = self.fonts[size]
        self.calls.append(lambda draw: draw.text((x, y), text, font=font, fill=fill))

    def label(self, y: float, name: str, fill: Colour) -> None:
        """A name left of what it names."""
        most = 40
        while self.fonts[13].getlength(_fitting(name, most)) > LABEL_WIDTH - 8:
            most -= 1
        self.text(MARGIN, y, _fitting(name, most), 13, fill)

    def lines(self, text: str, size: int = 13, fill: Colour = INK) -> None:
        """A paragraph, below what is there."""
        for line in textwrap.wrap(text, (WIDTH - 2 * MARGIN) // (size // 2)) or [""]:
            self.text(MARGIN, self.y, line, size, fill)
            self.y += round(size * 1.5)

    def box(
        self, box: tuple[float, float, float, float], fill: Colour | None, outline: Colour | None
    ) -> None:
        """A rectangle."""
        self.calls.append(lambda draw: draw.rectangle(box, fill=fill, outline=outline))

    def picture(self, x: int, y: int, pixels: np.ndarray, size: tuple[int, int]) -> None:
        """Pixels, as large as asked for."""
        from PIL import Image

        picture = Image.fromarray(pixels).resize(size, Image.Resampling.NEAREST)
        self.calls.append(lambda draw: draw._image.paste(picture, (x, y), picture))

    def png(self) -> bytes:
        """The file."""
        from PIL import Image, ImageDraw

        image = Image.new("RGB", (WIDTH, self.y + MARGIN), "white")
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
    sheet = _Sheet()
    sheet.lines(_fitting(view.name, 90), 20)
    for name, text in summary(view)[: 1 + len(view.groups)]:
        sheet.lines(f"{name}: {text}")
    for title, picture in distinct_masks(view, selection):
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
    rows, columns = picture.num_rows, picture.num_columns
    shape = min(max(rows / columns, 0.12), 1)  # as of the page: long sides are shortened
    width = min(MASK_WIDTH, round(MASK_HEIGHT / shape), max(40 * columns, 60))
    height = max(round(width * shape), 16)
    left, top = MARGIN + LABEL_WIDTH, sheet.y
    sheet.box((left - 1, top - 1, left + width, top + height), EMPTY, LINE)
    sheet.picture(left, top, picture.pixels, (width, height))
    for row, name, colour in _row_names(view, picture):
        sheet.label(top + height * row / rows, name, colour)
    sheet.y = top + height + 4
    sheet.text(left, sheet.y, "position 0", 11, FAINT)
    if columns > 1 and width > 160:
        sheet.text(left + width - 34, sheet.y, str(columns - 1), 11, FAINT)
    sheet.y += 20
    caption = f"{title}{rows} rows, {columns} columns: {picture.caption}. Coloured: may attend."
    sheet.lines(caption, fill=FAINT)
    return True


def _row_names(view: StepView, picture: MaskPicture) -> list[tuple[int, str, Colour]]:
    """Rows of a mask with the name that stands beside them: of requests, as far as there is place.

    Those with many rows come first.
    """
    if picture.by_position:
        return [(0, "position 0", FAINT)]
    starts = np.clip(view.step.query_start_loc - picture.first, 0, picture.num_rows)
    lengths, apart = np.diff(starts), picture.num_rows / 30
    names: list[tuple[int, str, Colour]] = []
    for row in np.argsort(-lengths, kind="stable").tolist():
        begin = int(starts[row])
        if lengths[row] and all(abs(begin - other) >= apart for other, _, _ in names):
            names.append((begin, view.requests[row].req_id, request_colour(row)))
    return names


def _draw_blocks(sheet: _Sheet, view: StepView, index: int, selection: Selection) -> bool:
    """The blocks of a KV-cache group, a line for each request; False if there was no place."""
    sheet.y += 14
    size = view.groups[index].block_size
    sheet.lines(f"KV blocks{group_title(view, index) or f', block size {size}'}")
    sheet.lines(LEGEND, 11, FAINT)
    per_line = (WIDTH - 2 * MARGIN - LABEL_WIDTH) // BLOCK_WIDTH
    for line in block_rows(view, index, selection.requests):
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
            return MARGIN + LABEL_WIDTH + (column - 1) * BLOCK_WIDTH, sheet.y

        for block in line.blocks:
            if block.place in line.folded:
                x, y = place()
                sheet.text(x + 4, y + 15, f"+{line.folded[block.place]:,}", 11, FAINT)
            _draw_block(sheet, *place(), block, size, request_colour(line.row))
        sheet.y += BLOCK_HEIGHT
    return True


def _draw_block(sheet: _Sheet, x: int, y: int, block: Block, size: int, colour: Colour) -> None:
    width, top = BLOCK_WIDTH - 6, y + 14
    sheet.text(x, y, str(block.number), 11, FAINT)
    sheet.box((x, top, x + width, top + SLOTS_HEIGHT), EMPTY, None)

    def part(low: int, high: int, fill: Colour, above: int = 0) -> None:
        left, right = x + width * low / size, x + width * high / size
        sheet.box((left, top + above, max(left, right), top + SLOTS_HEIGHT), fill, None)

    if block.computed:
        red, green, blue = ((part + 2 * 255) // 3 for part in colour)
        part(0, block.computed, (red, green, blue))
    if block.written is not None:
        part(*block.written, colour)
    for item in block.items:
        part(*item, ITEM_COLOUR, SLOTS_HEIGHT - 4)
    for slot in range(1, size) if size <= 16 else ():
        tick = x + width * slot / size
        sheet.box((tick, top, tick, top + SLOTS_HEIGHT), (255, 255, 255), None)
    sheet.box((x, top, x + width, top + SLOTS_HEIGHT), None, FAINT if block.shared else LINE)


def _fitting(name: str, most: int) -> str:
    """A name that fits its place."""
    name = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in name)
    return name if len(name) <= most else f"{name[: most - 1]}\u2026"
