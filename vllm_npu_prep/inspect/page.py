"""A step as one HTML page that needs nothing else: tables, masks as pictures, KV blocks as a grid.

This module collects the content; ``page.html``, a Jinja2 template, turns it into markup. The
template escapes every text, so any name stays text. The page loads nothing (its content security
policy forbids it) and runs one script, allowed by its hash.
"""

import base64
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import TypeVar

import jinja2
import numpy as np
from markupsafe import Markup

from vllm_npu_prep.inspect.drawings import MaskScale, block_maps, mask_drawings, visible
from vllm_npu_prep.inspect.explain import (
    Selection,
    StepTable,
    local_table,
    request_tables,
    select,
    summary,
    token_table,
)
from vllm_npu_prep.inspect.pictures import ITEM_COLOUR, png_bytes, request_hue
from vllm_npu_prep.inspect.view import StepView
from vllm_npu_prep.wording import counted

T = TypeVar("T")

MAX_REQUESTS = 512
MAX_TOKENS = 4096
"""The most lines of a page; longer tables lose lines in the middle, and a note says so."""

OPEN_REQUESTS = 64
OPEN_TOKENS = 512
"""Longer tables are folded."""

TOGETHER = 128
"""The number of tokens that one fold of short requests has."""

NAME_CHARACTERS = 20
"""Longer names beside a mask are cut; pointing at one shows it whole."""

MASKS = MaskScale(
    width=368,
    height=368,
    cell_width=368,
    name_height=16,
    row_pitch=16,
    column_pitch=30,
    min_cell=11.5,
)
"""The scale of masks on a wide screen."""


@dataclass(frozen=True)
class StepLinks:
    """Where a step's page leads to, if it is one of a run's."""

    run: str  # address of the run's page, at this step
    earlier: str  # pages of the steps beside it; empty at either end
    later: str


def explain_html(
    view: StepView,
    req_id: str | None = None,
    tokens: tuple[int, int] | None = None,
    links: StepLinks | None = None,
) -> str:
    """Return the HTML page of what `vllm_npu_prep.inspect.explain.select` chooses of a step.

    `links` lead to the run and to the steps beside this one. Errors are those of `select`.
    """
    selection = select(view, req_id, tokens)
    own = files(__package__)
    script = (own / "page.js").read_text(encoding="utf-8")
    tokens_left_out, token_tables = _token_tables(view, selection)
    requests_left_out, requests = _ends(selection.requests)
    return template("page.html").render(
        policy=content_policy(script),
        style=Markup((own / "page.css").read_text(encoding="utf-8")),
        script=Markup(script),
        item_colour="#{:02x}{:02x}{:02x}".format(*ITEM_COLOUR),
        view=view,
        links=links,
        summary=summary(view),
        tables=list(_tables(view, selection)),
        token_tables=token_tables,
        tokens_left_out=tokens_left_out,
        local_tables=list(_local_tables(view, selection)),
        masks=list(mask_drawings(view, selection, MASKS)),
        blocks=block_maps(view, requests),
        requests_left_out=requests_left_out,
    )


def content_policy(script: str) -> str:
    """Return a content security policy by which a page only shows itself and runs this script."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return (
        "default-src 'none'; style-src 'unsafe-inline'; img-src data:; "
        f"script-src 'sha256-{digest}'"
    )


@cache
def template(name: str) -> jinja2.Template:
    """Return a page's template; it escapes all but known markup, and refuses undefined names."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader(__package__, ""),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        finalize=_finalized,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters.update(hue=request_hue, counted=counted, are=_are)
    environment.filters.update(data_url=_data_url, percent=_percent)
    environment.tests["numbers"] = _is_numbers
    environment.globals.update(OPEN_REQUESTS=OPEN_REQUESTS, NAME_CHARACTERS=NAME_CHARACTERS)
    return environment.get_template(name)


def _finalized(value: object) -> object:
    return value if isinstance(value, int | Markup) else visible(str(value))


def _is_numbers(cell: object) -> bool:
    """Tell whether a cell is a list of numbers, which may be broken into lines."""
    if isinstance(cell, int):
        return False
    text = str(cell)
    return " " in text and not text.strip("0123456789 ,;-")


def _percent(share: float, digits: int) -> str:
    return f"{100 * share:.{digits}f}%"


def _data_url(pixels: np.ndarray) -> str:
    return "data:image/png;base64," + base64.b64encode(png_bytes(pixels)).decode()


def _are(number: int, noun: str) -> str:
    return f"{counted(number, noun)} {'is' if number == 1 else 'are'}"


# ----------------------------------------------------------------- tables


@dataclass(frozen=True)
class Token:
    """What the page's script knows about a token."""

    index: int  # its place in the step
    position: int  # in its request
    req_id: str
    slots: list[int]  # its slot in each table of the step
    item: str  # names the image or video that it belongs to; empty for none


@dataclass(frozen=True)
class Line:
    """A line of a table, which may be that of a request, or of a token."""

    cells: list[object]
    row: int | None = None  # the request's row in the batch
    token: Token | None = None


@dataclass(frozen=True)
class PageTable:
    """A table of a page; a text among its lines stands for lines that are left out.

    A table with the tokens of some requests names the first and the last of these, and which tokens
    they have.
    """

    title: str
    columns: list[str]
    lines: list[Line | str]
    requests: list[tuple[int, str]] = field(default_factory=list)  # row of the batch and name
    span: str = ""


def _tables(view: StepView, selection: Selection) -> Iterator[PageTable]:
    requests, *others = request_tables(view, selection)
    yield _table(
        requests, [Line(cells, row) for row, cells in zip(selection.requests, requests.rows)]
    )
    for table in others:
        if table.rows:
            yield _table(table, [Line(cells) for cells in table.rows])


def _local_tables(view: StepView, selection: Selection) -> Iterator[PageTable]:
    for index in view.tables:
        group = view.groups[index]
        if group.attention_chunk_size is not None and len(selection.requests) == len(view.requests):
            local = local_table(view, index)
            yield _table(local, [Line(cells) for cells in local.rows])


def _table(table: StepTable, lines: list[Line]) -> PageTable:
    shown: list[Line | str] = [*lines]
    left_out = len(lines) - MAX_REQUESTS
    if left_out > 0:
        middle = slice(MAX_REQUESTS // 2, MAX_REQUESTS // 2 + left_out)
        shown[middle] = [f"{_are(left_out, 'line')} left out"]
    return PageTable(table.title, table.columns, shown)


def _token_tables(view: StepView, selection: Selection) -> tuple[int, list[PageTable]]:
    """Return how many requests are left out, and the tokens: in one table, or many in folds."""
    starts = view.step.query_start_loc.tolist()
    of_rows = []  # the tokens of each request
    for row in selection.requests:
        low, high = max(starts[row], selection.first), min(starts[row + 1], selection.end)
        if low < high:
            of_rows.append((row, range(low, high)))
    total = sum(len(tokens) for _, tokens in of_rows)
    if total <= OPEN_TOKENS:
        table = token_table(view, [token for _, tokens in of_rows for token in tokens])
        return 0, [PageTable(table.title, table.columns, [*_token_lines(view, table)])]
    hidden, of_rows = _ends(of_rows)
    lengths = [len(tokens) for _, tokens in of_rows]
    most = _shown_of_each(lengths, MAX_TOKENS)
    return hidden, [_folded(view, of_rows[part], most) for part in _together(lengths)]


def _ends(of_requests: list[T]) -> tuple[int, list[T]]:
    """Return how many of a page's requests are left out, in the middle, and the others."""
    hidden = max(len(of_requests) - MAX_REQUESTS, 0)
    half = MAX_REQUESTS // 2
    return hidden, [*of_requests[:half], *of_requests[-half:]] if hidden else of_requests


def _folded(view: StepView, of_rows: list[tuple[int, range]], most: int) -> PageTable:
    """Return a table of the tokens of some requests, no more than `most` of each."""
    lines: list[Line | str] = []
    for _, tokens in of_rows:
        head, tail = tokens, range(0)
        if len(tokens) > most:
            head, tail = tokens[: most // 2], tokens[len(tokens) - most // 2 :]
        table = token_table(view, [*head, *tail])
        own: list[Line | str] = [*_token_lines(view, table)]
        if tail:
            left_out = f"{_are(tail.start - head.stop, 'token')} left out: "
            own.insert(len(head), f"{left_out}--tokens {head.stop}:{tail.start}")
        lines += own
    (first, tokens), (last, last_tokens) = of_rows[0], of_rows[-1]
    total = sum(len(tokens) for _, tokens in of_rows)
    return PageTable(
        table.title,
        table.columns,
        lines,
        requests=[(row, view.requests[row].req_id) for row in dict.fromkeys((first, last))],
        span=f"{counted(total, 'token')}, {tokens.start}:{last_tokens.stop}",
    )


def _shown_of_each(lengths: list[int], most: int) -> int:
    """Return how many tokens each request may show, so that all show no more than a page holds."""
    low, high = 2, max(lengths)
    while low < high:
        middle = (low + high + 1) // 2
        if sum(min(length, middle) for length in lengths) <= most:
            low = middle
        else:
            high = middle - 1
    return low


def _together(lengths: list[int]) -> Iterator[slice]:
    """Yield the requests whose tokens share a table: short requests join the ones before them."""
    first = 0
    for place in range(1, len(lengths) + 1):
        here = sum(lengths[first:place])
        if place == len(lengths) or here + lengths[place] > TOGETHER:
            yield slice(first, place)
            first = place


def _token_lines(view: StepView, table: StepTable) -> Iterator[Line]:
    step = view.step
    slots = [step.slot_mapping[table] for table in view.tables.values()]
    owners, positions = step.req_indices, step.positions
    for cells in table.rows:
        token = int(str(cells[0]))
        row, position = int(owners[token]), int(positions[token])
        request = view.requests[row]
        item = next(
            (
                f"{item.modality} {place} of its request"
                for place, item in enumerate(request.items)
                if item.offset <= position < item.end
            ),
            "",
        )
        of_groups = [int(of_group[token]) for of_group in slots]
        yield Line(cells, row, Token(token, position, request.req_id, of_groups, item))
