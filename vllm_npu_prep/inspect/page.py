"""A step as one HTML page that needs nothing else: tables, masks as pictures, KV blocks as a grid.

The page loads nothing (its content security policy forbids it) and runs one script, known by its
hash: names in it can be whatever they like, they stay text.
"""

import base64
import hashlib
from collections.abc import Iterable, Iterator
from html import escape
from importlib.resources import files

from vllm_npu_prep.inspect.explain import (
    Selection,
    StepTable,
    group_title,
    item_table,
    local_table,
    request_table,
    select,
    summary,
    token_table,
)
from vllm_npu_prep.inspect.pictures import (
    Block,
    BlockRow,
    MaskPicture,
    axis_ticks,
    block_rows,
    data_url,
    distinct_masks,
    request_hue,
    row_names,
)
from vllm_npu_prep.inspect.view import StepView
from vllm_npu_prep.wording import counted

MAX_REQUESTS = 512
MAX_TOKENS = 4096
"""Lines of a page; in the middle of what is longer, some are left out, and a note says so."""

OPEN_REQUESTS = 64
OPEN_TOKENS = 512
"""Longer tables are folded."""

TOGETHER = 128
"""Tokens of short requests that one fold has."""

MASK_PIXELS = 368
"""Width of a mask on a wide screen."""

NAME_PIXELS = 16
"""Height of a request's name or of a number beside a mask."""

NAME_CHARACTERS = 20
"""Longer names beside a mask are cut; pointing at one shows it whole."""

MAX_COLUMN_TICKS = 12
"""Numbers below a mask."""

MAX_TICKS = 32
"""Slots of a block, cells of a mask's side that are told apart by lines."""


def explain_html(
    view: StepView, req_id: str | None = None, tokens: tuple[int, int] | None = None
) -> str:
    """The page.

    Parameters
    ----------
    view
        The step.
    req_id, tokens
        What is shown (`vllm_npu_prep.inspect.explain.select`).

    Raises
    ------
    PrepError
        If there is no such request, or no such token.
    """
    selection = select(view, req_id, tokens)
    own = files(__package__)
    style = (own / "page.css").read_text(encoding="utf-8")
    script = (own / "page.js").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = (
        "default-src 'none'; style-src 'unsafe-inline'; img-src data:; "
        f"script-src 'sha256-{digest}'"
    )
    lines = "".join(f"<dt>{name}</dt><dd>{shown(text)}</dd>" for name, text in summary(view))
    return "\n".join(
        [
            "<!DOCTYPE html>",
            '<html lang="en"><head><meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{shown(view.name)}</title>",
            f"<style>\n{style}</style></head><body>",
            f'<h1><span class="name">{shown(view.name)}</span></h1>',
            f"<dl>{lines}</dl>",
            '<div class="columns"><div class="tables">',
            *_tables(view, selection),
            '</div><div class="pictures">',
            *_masks(view, selection),
            *_block_maps(view, selection),
            "</div></div>",
            '<div id="trace" aria-live="polite">Point at a token: its request, its row of the '
            "mask, its block and slot are marked. A click keeps it, arrow keys go on.</div>",
            f"<script>{script}</script></body></html>\n",
        ]
    )


def shown(text: object) -> str:
    """A text as markup that shows it; what can't be seen is written as its escape."""
    own = str(text)
    if not own.isprintable():
        own = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in own)
    return escape(own, quote=True)


# ----------------------------------------------------------------- tables


def _tables(view: StepView, selection: Selection) -> Iterator[str]:
    """What a terminal shows as tables."""
    requests = request_table(view, selection)
    yield from _table(
        requests,
        [_request_line(row, cells) for row, cells in zip(selection.requests, requests.rows)],
        MAX_REQUESTS,
        OPEN_REQUESTS,
    )
    items = item_table(view, selection)
    if items.rows:
        yield from _table(items, [_line(row) for row in items.rows], MAX_REQUESTS, OPEN_REQUESTS)
    yield from _tokens(view, selection)
    for index in view.tables:
        group = view.groups[index]
        if group.attention_chunk_size is not None and len(selection.requests) == len(view.requests):
            local = local_table(view, index)
            rows = [_line(row) for row in local.rows]
            yield from _table(local, rows, MAX_REQUESTS, OPEN_REQUESTS)


def _line(cells: Iterable[object], attributes: str = "", first: str = "") -> str:
    """A line of a table."""
    texts = []
    for cell in cells:
        text = shown(cell)
        is_list = " " in text and not text.strip("0123456789 ,;-")
        texts.append(f'<td class="list">{text}</td>' if is_list else f"<td>{text}</td>")
    texts[0] = texts[0].replace("<td>", f"<td>{first}", 1)
    return f"<tr{attributes}>{''.join(texts)}</tr>"


def _request_line(row: int, cells: list[object]) -> str:
    name, *values = cells
    own = f"<td>{_chip(row)}{_name(str(name))}</td>"
    return _line(values, f' data-request="{row}"').replace("<td", own + "<td", 1)


def _chip(row: int) -> str:
    return f'<span class="chip" style="--h:{request_hue(row)}"></span>'


def _table(table: StepTable, lines: list[str], most: int, open_lines: int) -> Iterator[str]:
    """A table whose middle is left out where it is long."""
    left_out = len(lines) - most
    if left_out > 0:
        note = _left_out(len(table.columns), f"{_are(left_out, 'line')} left out")
        lines = [*lines[: most // 2], note, *lines[-(most - most // 2) :]]
    yield f"<h2>{shown(table.title)}</h2>"
    body = _body(table.columns, lines)
    if len(lines) > open_lines:
        yield f"<details><summary>{counted(len(lines), 'line')}</summary>{body}</details>"
    else:
        yield body


def _body(columns: list[str], lines: Iterable[str]) -> str:
    heads = "".join(f"<th>{shown(name).replace('_', '_<wbr>')}</th>" for name in columns)
    return (
        f'<div class="scroll"><table><thead><tr>{heads}</tr></thead><tbody>'
        f"{''.join(lines)}</tbody></table></div>"
    )


def _are(number: int, noun: str) -> str:
    return f"{counted(number, noun)} {'is' if number == 1 else 'are'}"


def _left_out(columns: int, text: str) -> str:
    return f'<tr class="out"><td colspan="{columns}">{text}</td></tr>'


def _tokens(view: StepView, selection: Selection) -> Iterator[str]:
    """The tokens: in one table, or for large batches in one for each request."""
    starts = view.step.query_start_loc.tolist()
    of_rows = []  # the tokens of each request
    for row in selection.requests:
        low, high = max(starts[row], selection.first), min(starts[row + 1], selection.end)
        if low < high:
            of_rows.append((row, range(low, high)))
    yield "<h2>token level</h2>"
    total = sum(len(tokens) for _, tokens in of_rows)
    if total <= OPEN_TOKENS:
        every = [token for _, tokens in of_rows for token in tokens]
        table = token_table(view, every)
        yield _body(table.columns, _token_lines(view, table))
        return
    hidden = len(of_rows) - MAX_REQUESTS
    if hidden > 0:
        of_rows = [*of_rows[: MAX_REQUESTS // 2], *of_rows[-MAX_REQUESTS // 2 :]]
        yield (
            f'<p class="note">the tokens of {_are(hidden, "request")} left out: --request ID</p>'
        )
    lengths = [len(tokens) for _, tokens in of_rows]
    most = _shown_of_each(lengths, MAX_TOKENS)
    for part in _together(lengths):
        tables, lines = [], []
        for _, tokens in of_rows[part]:
            head, tail = tokens, range(0)
            if len(tokens) > most:
                head, tail = tokens[: most // 2], tokens[len(tokens) - most // 2 :]
            tables.append(token_table(view, [*head, *tail]))
            own = _token_lines(view, tables[-1])
            if tail:
                left_out = f"{_are(tail.start - head.stop, 'token')} left out: "
                left_out += f"--tokens {head.stop}:{tail.start}"
                own.insert(len(head), _left_out(len(tables[-1].columns), left_out))
            lines += own
        (first, tokens), (last, last_tokens) = of_rows[part][0], of_rows[part][-1]
        names = dict.fromkeys((first, last))
        chips = " to ".join(f"{_chip(row)}{_name(view.requests[row].req_id)}" for row in names)
        span = f"{counted(sum(lengths[part]), 'token')}, {tokens.start}:{last_tokens.stop}"
        body = _body(tables[0].columns, lines)
        yield f"<details><summary>{chips}: {span}</summary>{body}</details>"


def _shown_of_each(lengths: list[int], most: int) -> int:
    """How many tokens each request may show, so that all show no more than a page holds."""
    low, high = 2, max(lengths)
    while low < high:
        middle = (low + high + 1) // 2
        if sum(min(length, middle) for length in lengths) <= most:
            low = middle
        else:
            high = middle - 1
    return low


def _together(lengths: list[int]) -> Iterator[slice]:
    """Requests whose tokens stand in one table: short ones join those before them."""
    first = 0
    for place in range(1, len(lengths) + 1):
        here = sum(lengths[first:place])
        if place == len(lengths) or here + lengths[place] > TOGETHER:
            yield slice(first, place)
            first = place


def _name(req_id: str) -> str:
    return f'<span class="name">{shown(req_id)}</span>'


def _token_lines(view: StepView, table: StepTable) -> list[str]:
    step, lines = view.step, []
    slots = [step.slot_mapping[table] for table in view.tables.values()]
    owners, positions = step.req_indices, step.positions
    for cells in table.rows:
        token = int(str(cells[0]))
        row, position = int(owners[token]), int(positions[token])
        request = view.requests[row]
        place = next(
            (i for i, item in enumerate(request.items) if item.offset <= position < item.end), None
        )
        attributes = (
            f' data-t="{token}" data-r="{row}" data-p="{position}"'
            f' data-name="{shown(request.req_id)}"'
            f' data-slots="{" ".join(str(of_group[token]) for of_group in slots)}"'
        )
        if place is not None:
            item = request.items[place]
            attributes += f' class="item" title="{shown(item.modality)} {place} of its request"'
        lines.append(_line(cells, attributes, _chip(row)))
    return lines


# ----------------------------------------------------------------- pictures


def _masks(view: StepView, selection: Selection) -> Iterator[str]:
    """What tokens see in each KV-cache group."""
    yield "<h2>mask</h2>"
    for title, picture in distinct_masks(view, selection):
        if isinstance(picture, str):
            yield f'<p class="note">{title}{picture}</p>'
            continue
        rows, columns = picture.num_rows, picture.num_columns
        shape = min(max(rows / columns, 0.12), 1)
        height = round(MASK_PIXELS * shape)
        grid = ""
        if max(rows, columns) <= MAX_TICKS:
            grid = (
                f'<div class="grid" style="background-size:{_step(columns)} {_step(rows)}"></div>'
            )
        yield (
            f'<figure><div class="axes"><div class="title rows">{picture.row_title}</div>'
            f"{_row_labels(view, picture, height)}"
            f'<div class="ticks">{_ticks("top", rows, height // NAME_PIXELS, picture.first)}</div>'
            f'<div class="mask" style="aspect-ratio:{1 / shape:.4f}" data-rows="{rows}" '
            f'data-columns="{columns}" data-first="{picture.first}" '
            f'data-by-position="{int(picture.by_position)}" '
            f'data-chunk="{picture.attention_chunk_size or 0}">'
            f'<img alt="mask" src="{data_url(picture.pixels)}">{grid}'
            '<div class="band"></div><div class="dot"></div></div>'
            f'<div class="title columns">{picture.column_title}</div>'
            f'<div class="ticks across">{_ticks("left", columns, MAX_COLUMN_TICKS)}</div></div>'
            f"<figcaption>{title}{shown(picture.size)}: {shown(picture.caption)}. "
            "Coloured: may attend.</figcaption></figure>"
        )


def _row_labels(view: StepView, picture: MaskPicture, height: int) -> str:
    """Requests beside the rows of a mask, and place for them."""
    if picture.by_position:
        return '<div class="names"></div>'
    parts, longest = [], 0
    for y, row in row_names(view, picture, height, NAME_PIXELS):
        name = shown(view.requests[row].req_id)
        longest = max(longest, len(view.requests[row].req_id))
        parts.append(
            f'<div style="top:{100 * y / height:.3f}%" title="{name}">{_chip(row)}'
            f"{_name(view.requests[row].req_id)}</div>"
        )
    width = min(longest, NAME_CHARACTERS) + 3  # with the chip
    return f'<div class="names" style="width:{width}ch">{"".join(parts)}</div>'


def _ticks(side: str, cells: int, most: int, first: int = 0) -> str:
    """Numbers beside the middle of rows (``top``) or below that of columns (``left``)."""
    return "".join(
        f'<span style="{side}:{100 * (cell + 0.5) / cells:.3f}%">{first + cell}</span>'
        for cell in axis_ticks(cells, max(most, 1))
    )


def _step(cells: int) -> str:
    return f"{100 / cells:.4f}%"


LEGEND = (
    ("had", "computed before"),
    ("new", "written by the step"),
    ("picture", "image or video"),
    ("", "empty"),
)


def _block_maps(view: StepView, selection: Selection) -> Iterator[str]:
    """The KV blocks of each group, a line for each request."""
    requests = selection.requests
    if len(requests) > MAX_REQUESTS:
        requests = [*requests[: MAX_REQUESTS // 2], *requests[-MAX_REQUESTS // 2 :]]
    for index in view.tables:
        yield f"<h2>KV blocks{group_title(view, index)}</h2>"
        if index == 0:
            parts = (
                f'<span class="note"><span class="slots" style="--h:210">'
                f'<i class="{name}" style="left:0;right:0"></i></span>{text}</span>'
                for name, text in LEGEND
                if name != "picture" or any(request.items for request in view.requests)
            )
            yield f'<div class="legend">{"".join(parts)}</div>'
        if len(requests) < len(selection.requests):
            hidden = len(selection.requests) - len(requests)
            yield f'<p class="note">{_are(hidden, "request")} left out: --request ID</p>'
        size = view.groups[index].block_size
        body = f'<div class="requests" data-block-size="{size}">'
        body += "".join(_block_line(view, index, row) for row in block_rows(view, index, requests))
        body += "</div>"
        if len(requests) > OPEN_REQUESTS:
            body = (
                f"<details><summary>{counted(len(requests), 'request')}</summary>{body}</details>"
            )
        yield body


def _block_line(view: StepView, index: int, line: BlockRow) -> str:
    """A request and its blocks."""
    size, row = view.groups[index].block_size, line.row
    name = shown(view.requests[row].req_id)
    parts = []
    for block in line.blocks:
        if block.place in line.folded:
            count = line.folded[block.place]
            parts.append(
                f"<details><summary>+{count:,}</summary>"
                f"{shown(line.folded_numbers[block.place])}</details>"
            )
        parts.append(_block(block, f"{index}-{row}-{block.number}", size))
    strays = ""
    if line.strays:
        tokens = ", ".join(map(str, line.strays[:10]))
        write = "writes" if len(line.strays) == 1 else "write"
        strays = (
            f'<div class="stray">{counted(len(line.strays), "token")} {write} blocks that this '
            f"request doesn't own: {tokens}</div>"
        )
    return (
        f'<div class="owner" data-request="{row}" title="{name}">{_chip(row)}'
        f"{_name(view.requests[row].req_id)}</div>"
        f'<div class="blocks" style="--h:{request_hue(row)}">{"".join(parts)}</div>{strays}'
    )


def _block(block: Block, at: str, size: int) -> str:
    """A block and what its slots hold."""

    def part(name: str, low: int, high: int) -> str:
        left, width = 100 * low / size, 100 * (high - low) / size
        return f'<i class="{name}" style="left:{left:.3f}%;width:{width:.3f}%"></i>'

    if not block.number:
        return (
            f'<div class="block null" title="block_table[{block.place}]: the null block, freed">'
            '<b>0</b><div class="slots"></div></div>'
        )
    first = block.number * size
    title = f"block_table[{block.place}]: block {block.number}, slots {first} to {first + size - 1}"
    bars = part("had", 0, block.computed) if block.computed else ""
    if block.written is not None:
        bars += part("new", *block.written)
        title += f", writes {first + block.written[0]} to {first + block.written[1] - 1}"
    if size <= MAX_TICKS:
        bars += f'<i class="tick" style="background-size:{_step(size)} 100%"></i>'
    bars += "".join(part("picture", *item) for item in block.items)
    kind = "block shared" if block.shared else "block"
    if block.shared:
        title += ", shared"
    return (
        f'<div class="{kind}" data-at="{at}" data-place="{block.place}" title="{title}">'
        f'<b>{block.number}</b><div class="slots">{bars}<i class="slot"></i></div></div>'
    )
