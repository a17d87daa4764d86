"""A step's masks as pixels, and the colours of its requests.

`vllm_npu_prep.inspect.drawings` places them in a page or a PNG file.
"""

import colorsys
import io
from dataclasses import dataclass, replace

import numpy as np
from PIL import Image

from vllm_npu_prep.inspect.explain import Selection
from vllm_npu_prep.inspect.view import StepView
from vllm_npu_prep.prep.mask import MaskKind, MaskPlan, build_mask
from vllm_npu_prep.prep.state import AttentionState
from vllm_npu_prep.wording import counted

MAX_SIDE = 640
"""The most pixels of a mask's side; larger masks are shown by the mean of their cells."""

MAX_CELLS = 1 << 26
"""The most cells of a mask that are built for a picture; larger masks lose rows."""

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
    red, green, blue = (round(255 * part) for part in rgb)
    return red, green, blue


# ----------------------------------------------------------------- mask


@dataclass(frozen=True)
class MaskPicture:
    """What tokens see, as a picture: a row for each token or position, a column for each position.

    The colour of a cell is that of the token's request where it may attend; a masked one is
    transparent.
    """

    pixels: np.ndarray  # [height, width, 4] uint8, RGBA
    num_rows: int  # of the mask, which may be larger than the picture
    num_columns: int
    first: int  # token of the first row; 0 if rows are positions
    by_position: bool  # whether a row is that of a position, for all requests
    attention_chunk_size: int | None  # positions count from the start of such chunks; None: of all
    caption: str  # what rows and columns are

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
    by_position = plan.kind is MaskKind.MATRIX
    first = 0 if by_position else selection.first
    num_rows, num_columns = plan.shape or (0, 0)
    positions = np.arange(num_rows) if by_position else step.positions[first : selection.end]
    if by_position:
        caption = "a row for each position, the same for all requests"
    elif plan.kind is not MaskKind.ROWS:
        num_rows = len(positions)
        num_columns = step.max_seq_len if chunk_size is None else step.local.max_seq_len
        is_none = plan.kind is MaskKind.NONE
        plan = MaskPlan(MaskKind.ROWS, (num_rows, num_columns), group.sliding_window, chunk_size)
        what = "there is no mask" if is_none else "the mask is a constant"
        caption += f" ({what}, this is what they see)"
    elif not selection.whole:
        num_rows = len(positions)
    if num_rows <= 0 or num_columns <= 0:
        return None
    if chunk_size is not None:
        caption += f"; positions in chunks of {chunk_size}"
    if num_rows > len(positions):
        caption += "; grey: padding, masks nothing"

    rows = _spread(num_rows, min(2 * MAX_SIDE, max(16, MAX_CELLS // num_columns)))
    edges, columns = _edges(len(rows)), _edges(num_columns)
    chosen = replace(plan, kind=MaskKind.ROWS, shape=(len(rows), num_columns))
    mask = build_mask(chosen, positions[rows[rows < len(positions)]])  # True where masked
    assert mask is not None
    seen = np.add.reduceat(~mask, columns[:-1], axis=1, dtype=np.float32) / np.diff(columns)
    seen = np.add.reduceat(seen, edges[:-1], axis=0) / np.diff(edges)[:, None]
    shown = rows[edges[:-1]]  # the row that gives a line of pixels its colour

    pixels = np.zeros((*seen.shape, 4), np.uint8)
    if by_position:
        pixels[..., :3] = MATRIX_COLOUR
    else:
        pixels[..., :3] = PADDING_COLOUR
        real = shown < len(positions)
        owners = step.req_indices[first + shown[real]]
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
    return MaskPicture(pixels, num_rows, num_columns, first, by_position, chunk_size, caption)


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
