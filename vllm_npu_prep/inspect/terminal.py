"""Prints what `explain` says of a step, in the width of the terminal."""

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from vllm_npu_prep.inspect.explain import (
    StepTable,
    block_table,
    local_table,
    request_tables,
    select,
    summary,
    token_table,
)
from vllm_npu_prep.inspect.view import StepView
from vllm_npu_prep.wording import counted, wrapped

LIST_WIDTH = 24
"""The least width of texts with spaces, such as lists of blocks."""


def explain_text(
    view: StepView,
    console: Console,
    req_id: str | None = None,
    tokens: tuple[int, int] | None = None,
) -> None:
    """Print the step: state, masks, graph and padding with their reasons, then requests and tokens.

    `select` chooses what is shown, and raises the errors. Long tables are folded.
    """
    selection = select(view, req_id, tokens)
    console.print(view.name, style="bold", markup=False, highlight=False, soft_wrap=True)
    for name, text in summary(view):
        print_line(console, f"{name:<8}", text)
    for table in request_tables(view, selection):
        print_folded(console, table)
    print_folded(console, token_table(view, range(selection.first, selection.end)))
    for index in view.tables:
        group = view.groups[index]
        print_folded(console, block_table(view, selection, index))
        if group.attention_chunk_size is not None and req_id is None:
            print_folded(console, local_table(view, index))


def print_line(console: Console, name: str, text: str) -> None:
    """Print a text after a name; its further lines are indented as far. Words are never broken."""
    width = max(console.width, len(name) + 20)
    lines = wrapped(text, width - len(name))
    for place, line in enumerate(lines):
        head = name if place == 0 else " " * len(name)
        console.print(head + line, markup=False, highlight=False, soft_wrap=True)


def print_folded(console: Console, table: StepTable) -> None:
    """Print a table; long tables lose their middle, wide ones are split into several."""
    rows, folded = table.rows, len(table.rows) - table.most
    if folded > 0:
        rows = rows[: table.most // 2] + rows[-(table.most - table.most // 2) :]
    cells = [[str(cell) for cell in row] for row in rows]
    console.print(f"\n{table.title}", style="bold", markup=False, highlight=False)
    needs = [_need(name, [row[i] for row in cells]) for i, name in enumerate(table.columns)]
    parts = _parts(console.width, needs)
    fits = needs[0] + max(needs[1:]) < console.width
    if not fits or (needs[0] > console.width // 2 and 2 * len(parts) >= len(needs)):
        _print_stacked(console, table.columns, cells)  # there is no room beside the names
    else:
        for part in parts:
            columns = [table.columns[i] for i in part]
            _print_columns(console, columns, [[row[i] for i in part] for row in cells])
    if folded > 0:
        verb = "is" if folded == 1 else "are"
        text = f"{counted(folded, 'line')} in the middle {verb} folded; --json has them all"
        console.print(text, highlight=False, soft_wrap=True)


def _need(name: str, cells: list[str]) -> int:
    """Return the terminal columns that a table's column needs at least, so that no word is broken.

    A name, a number or an identifier is one word. Only texts with spaces, such as lists and
    reasons, may stand on several lines, and not on very short ones.
    """
    longest = cell_len(name)
    for text in cells:
        words = max(map(cell_len, text.split()), default=0)
        longest = max(longest, words, min(cell_len(text), LIST_WIDTH))
    return 1 + longest


def _parts(width: int, needs: list[int]) -> list[list[int]]:
    """Return the columns of each of the tables that a wide table becomes.

    The first column names the line and stands in all of them.
    """
    parts: list[list[int]] = []
    left = -1
    for place in range(1, len(needs)):
        if needs[place] > left:
            parts.append([0])
            left = width - needs[0] - 1
        parts[-1].append(place)
        left -= needs[place]
    return parts


def _print_columns(console: Console, columns: list[str], cells: list[list[str]]) -> None:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=0)
    for name in columns:
        table.add_column(name, justify="right", overflow="fold", min_width=cell_len(name))
    for row in cells:
        table.add_row(*map(Text, row))
    console.print(table)


def _print_stacked(console: Console, columns: list[str], cells: list[list[str]]) -> None:
    """Print a table of which no two columns have place beside each other in the terminal."""
    console.print()
    for row in cells:
        for place, (name, text) in enumerate(zip(columns, row)):
            indent = "" if place == 0 else "  "
            for number, line in enumerate(wrapped(f"{name} {text}", console.width - 4)):
                line = f"{indent}{'  ' * (number > 0)}{line}"
                console.print(line, markup=False, highlight=False, soft_wrap=True)
