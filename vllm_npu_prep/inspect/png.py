"""Masks, KV blocks and recurrent states of a step as one picture: ``vllm-npu-prep explain --png``.

It renders `vllm_npu_prep.inspect.drawings` with Pillow and the font that Pillow contains, so that
pictures are the same on every machine.
"""

import textwrap
from collections.abc import Iterable

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from vllm_npu_prep.inspect.drawings import (
    BlockDrawing,
    BlockFold,
    BlockMap,
    MaskDrawing,
    MaskScale,
    block_maps,
    mask_drawings,
    visible,
)
from vllm_npu_prep.inspect.explain import select, summary
from vllm_npu_prep.inspect.pictures import ITEM_COLOUR, Colour, png_bytes, request_colour
from vllm_npu_prep.inspect.view import StepView

WIDTH = 1200
MARGIN = 24
MAX_HEIGHT = 6000
"""The most pixels of a PNG file's height; a line says if something didn't fit."""

LABEL_WIDTH, LABEL_HEIGHT = 190, 16
BLOCK_WIDTH, SLOTS_HEIGHT, BLOCK_HEIGHT = 60, 18, 40
MASKS = MaskScale(
    width=760,
    height=480,
    cell_width=40,
    name_height=LABEL_HEIGHT,
    row_pitch=14,
    column_pitch=24,
    min_cell=14,
)

INK, FAINT, LINE, EMPTY = (28, 33, 39), (102, 112, 128), (200, 206, 214), (238, 240, 243)
WHITE = (255, 255, 255)


class _Sheet:
    """What is drawn, from the top down, on a sheet that is cut to its size at last."""

    def __init__(self) -> None:
        self.y = MARGIN
        self.right = 0.0  # right edge of all that is drawn
        self.label_width = 0  # width of the names, at most LABEL_WIDTH
        self._labels: dict[str, str] = {}
        self.fonts = {size: ImageFont.load_default(size) for size in (11, 13, 20)}
        self._image = Image.new("RGB", (WIDTH, MAX_HEIGHT + 200), "white")
        self._draw = ImageDraw.Draw(self._image)

    def text(self, x: float, y: float, text: str, size: int = 13, fill: Colour = INK) -> None:
        font = self.fonts[size]
        self.right = max(self.right, x + font.getlength(text))
        self._draw.text((x, y), text, font=font, fill=fill)

    def centred(self, x: float, y: float, text: str, fill: Colour = FAINT) -> None:
        self.text(x - self.fonts[11].getlength(text) / 2, y, text, 11, fill)

    def label(self, y: float, name: str, fill: Colour) -> None:
        self.text(MARGIN, y, self._short(name), 13, fill)

    def make_place(self, names: Iterable[str]) -> None:
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
        for line in textwrap.wrap(text, (WIDTH - 2 * MARGIN) // (size // 2)) or [""]:
            self.text(MARGIN, self.y, line, size, fill)
            self.y += round(size * 1.5)

    def box(
        self, box: tuple[float, float, float, float], fill: Colour | None, outline: Colour | None
    ) -> None:
        self.right = max(self.right, box[2])
        self._draw.rectangle(box, fill=fill, outline=outline)

    def picture(self, x: int, y: int, pixels: np.ndarray, size: tuple[int, int]) -> None:
        picture = Image.fromarray(pixels).resize(size, Image.Resampling.NEAREST)
        self._image.paste(picture, (x, y), picture)

    def png(self) -> bytes:
        width = min(round(self.right) + MARGIN, WIDTH)
        return png_bytes(np.asarray(self._image.crop((0, 0, width, self.y + MARGIN))))


def explain_png(
    view: StepView, req_id: str | None = None, tokens: tuple[int, int] | None = None
) -> bytes:
    """Draw masks, KV blocks and recurrent states of a step as a PNG file.

    `vllm_npu_prep.inspect.explain.select` chooses what is shown, and raises the errors.
    """
    selection = select(view, req_id, tokens)
    sheet, masks = _Sheet(), list(mask_drawings(view, selection, MASKS))
    titles = (each.picture.column_title for each in masks if isinstance(each, MaskDrawing))
    sheet.make_place([*titles, *(view.requests[row].req_id for row in selection.requests)])
    sheet.lines(_fitting(view.name, 90), 20)
    for name, text in summary(view)[: 1 + len(view.groups)]:
        sheet.lines(f"{name}: {text}")
    for drawing in masks:
        if not _draw_mask(sheet, drawing):
            break
    for each in block_maps(view, selection.requests):
        if not _draw_blocks(sheet, each):
            break
    return sheet.png()


def _full(sheet: _Sheet, height: int) -> bool:
    """Tell whether the sheet is full; if so, a line on it says so."""
    if sheet.y + height + 60 <= MAX_HEIGHT:
        return False
    sheet.lines("what comes next is left out: --request ID shows one request", fill=FAINT)
    return True


def _draw_mask(sheet: _Sheet, drawing: MaskDrawing | str) -> bool:
    """Draw a mask with its labels; return False if it doesn't fit."""
    if isinstance(drawing, str):
        sheet.lines(f"mask: {drawing}", fill=FAINT)
        return True
    if _full(sheet, MASKS.height + 90):
        return False
    picture, width, height = drawing.picture, drawing.width, drawing.height
    sheet.y += 14
    sheet.text(MARGIN, sheet.y, picture.row_title, 11, FAINT)
    sheet.y += 18
    left, top = MARGIN + sheet.label_width, sheet.y
    sheet.box((left - 1, top - 1, left + width, top + height), EMPTY, LINE)
    sheet.picture(left, top, picture.pixels, (width, height))
    if drawing.has_borders:
        for column in range(1, picture.num_columns):
            x = left + width * column / picture.num_columns
            sheet.box((x, top, x, top + height - 1), WHITE, None)
        for row in range(1, picture.num_rows):
            y = top + height * row / picture.num_rows
            sheet.box((left, y, left + width - 1, y), WHITE, None)
    for y, row, req_id in drawing.labels:
        sheet.label(top + y, req_id, request_colour(row))
    for share, _, words in drawing.rows:
        sheet.text(left + width + 8, top + height * share - 7, words, 11, FAINT)
    sheet.y = top + height + 4
    sheet.text(MARGIN, sheet.y, picture.column_title, 11, FAINT)
    for share, _, words in drawing.columns:
        sheet.centred(left + width * share, sheet.y, words)
    sheet.y += 20
    sheet.lines(drawing.caption, fill=FAINT)
    return True


def _draw_blocks(sheet: _Sheet, blocks: BlockMap) -> bool:
    """Draw a KV-cache group's blocks, a line for each request; return False if they don't fit."""
    sheet.y += 14
    sheet.lines(blocks.title)
    numbers = [c.number for line in blocks.lines for c in line.cells if isinstance(c, BlockDrawing)]
    widest = str((max(numbers, default=0) + 1) * blocks.num_slots - 1)
    slot_width = (BLOCK_WIDTH - 6) / blocks.num_slots
    numbered = not blocks.has_states and sheet.fonts[11].getlength(widest) + 4 <= slot_width
    _draw_legend(sheet, blocks, numbered)
    per_line = (WIDTH - 2 * MARGIN - sheet.label_width) // BLOCK_WIDTH
    for line in blocks.lines:
        if _full(sheet, BLOCK_HEIGHT * -(-len(line.cells) // per_line)):
            return False
        colour = request_colour(line.row)
        sheet.label(sheet.y + 14, line.req_id, colour)
        for place, cell in enumerate(line.cells):
            column = place % per_line
            if place and not column:
                sheet.y += BLOCK_HEIGHT
            x = MARGIN + sheet.label_width + column * BLOCK_WIDTH
            if isinstance(cell, BlockFold):
                sheet.text(x + 4, sheet.y + 15, f"+{cell.count:,}", 11, FAINT)
            else:
                _draw_block(sheet, x, blocks, cell, colour, numbered)
        sheet.y += BLOCK_HEIGHT
        if line.strays:
            sheet.lines(line.strays, fill=colour)
    return True


def _draw_legend(sheet: _Sheet, blocks: BlockMap, numbered: bool) -> None:
    x = float(MARGIN)
    for kind, text in blocks.legend:
        sheet.box((x, sheet.y + 2, x + 14, sheet.y + 11), _fill(kind, request_colour(0)), LINE)
        sheet.text(x + 20, sheet.y, text, 11, FAINT)
        x += 20 + sheet.fonts[11].getlength(text) + 16
    numbers = "numbers: the block above (0: freed)" + ", slots inside" * numbered
    sheet.text(x, sheet.y, numbers, 11, FAINT)
    sheet.y += 20


def _fill(kind: str, colour: Colour) -> Colour:
    red, green, blue = ((part + 2 * 255) // 3 for part in colour)
    return {
        "computed": (red, green, blue),
        "written": colour,
        "picture": ITEM_COLOUR,
        "empty": EMPTY,
    }[kind]


def _draw_block(
    sheet: _Sheet, x: int, blocks: BlockMap, block: BlockDrawing, colour: Colour, numbered: bool
) -> None:
    y, size = sheet.y, blocks.num_slots
    width, top = BLOCK_WIDTH - 6, y + 14
    bottom = top + SLOTS_HEIGHT
    sheet.text(x, y, str(block.number), 11, FAINT)
    sheet.box((x, top, x + width, bottom), EMPTY, None)
    for bar in block.bars:
        left, right = x + width * bar.low / size, x + width * bar.high / size
        above = SLOTS_HEIGHT - 4 if bar.kind == "picture" else 0
        sheet.box((left, top + above, max(left, right), bottom), _fill(bar.kind, colour), None)
    for slot in range(1, size) if blocks.has_lines else ():
        line = x + width * slot / size
        sheet.box((line, top, line, bottom), WHITE, None)
    sheet.box((x, top, x + width, bottom), None, FAINT if block.shared else LINE)
    written = {slot for b in block.bars if b.kind == "written" for slot in range(b.low, b.high)}
    for slot in range(size) if numbered and block.number else ():
        fill = WHITE if slot in written else FAINT
        middle = x + width * (slot + 0.5) / size
        sheet.centred(middle, top + 3, str(block.number * size + slot), fill)


def _fitting(name: str, most: int) -> str:
    name = visible(name)
    return name if len(name) <= most else f"{name[: most - 1]}\u2026"
