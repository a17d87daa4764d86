"""docs/reference/matrix.md from the results: how many models ran with each feature.

The site has every cell below that, with why it doesn't run (`whole`).
"""

from pathlib import Path

from tests.matrix.cells import FEATURES
from tests.matrix.collect import ROOT
from tests.matrix.plan import no_use
from tests.matrix.results import Matrix, Table

PAGE = ROOT / "docs" / "reference" / "matrix.md"
HEAD = Path(__file__).with_name("head.md").read_text()
"""What comes before the tables."""
RAN, FAILED, EMPTY = "✓", "!", "-"
SCHEDULING = ("synchronous scheduling", "asynchronous scheduling")
"""Features of which each engine has one: what is refused with both is refused anyway."""


def told_of(matrix: Matrix) -> dict[tuple[Table, str, str], str]:
    """What there is to say of each cell: that it ran, failed or is empty, or why it doesn't run."""
    filled, told = matrix.filled(), {}
    for table, models in matrix.tables().items():
        for model in models:
            answers = matrix.answers.get((table, model), {})
            anyway = set.intersection(
                *(set(answers.get(each, {}).get("refused", ())) for each in SCHEDULING)
            )
            for feature in FEATURES:
                cell, answer = (table, model, feature.name), answers.get(feature.name, {})
                refused = answer.get("refused", ())
                if cell in filled:
                    told[cell] = RAN if filled[cell] == "passed" else FAILED
                elif refused:
                    names = [name for name in refused if name in anyway] or refused
                    told[cell] = f"start-up refuses it: {', '.join(f'`{name}`' for name in names)}"
                elif "error" in answer:
                    told[cell] = f"vLLM itself refuses it: {quoted(answer['error'])}"
                elif reason := no_use(model, feature.name):
                    told[cell] = f"no use: {reason}"
                elif cell in matrix.tried:
                    told[cell] = f"tried alone, and failed: {quoted(matrix.tried[cell]['tried'])}"
                else:
                    told[cell] = EMPTY
    return told


def quoted(message: str) -> str:
    """A message in quotes of code: what Markdown would read as markup stays as it is."""
    return f"`{message.replace('`', chr(39))}`"


def counted(marks: list[str]) -> list[int]:
    """How many cells ran, failed, are empty, and don't run."""
    ran, failed, empty = map(marks.count, (RAN, FAILED, EMPTY))
    return [ran, failed, empty, len(marks) - ran - failed - empty]


def head_of(table: Table) -> str:
    return f"{table[1]}, {table[2]}, vLLM {table[0]}"


def render(matrix: Matrix) -> str:
    """Return the page: counts of tables, and of features in each of them."""
    told, tables = told_of(matrix), matrix.tables()
    lines = ["| table | ran | failed | empty | don't run |", "| --- | --- | --- | --- | --- |"]
    for table in tables:
        counts = counted([mark for cell, mark in told.items() if cell[0] == table])
        lines.append(f"| {' | '.join([head_of(table), *map(str, counts)])} |")
    heads = ["models that ran with", *(f"{t[1].split()[0]} {t[2]}, {t[0][2:4]}" for t in tables)]
    lines += ["", f"| {' | '.join(heads)} |", "| --- " * len(heads) + "|"]
    for feature in FEATURES:
        row = [feature.name]
        for table in tables:
            marks = [
                mark for (t, _, name), mark in told.items() if (t, name) == (table, feature.name)
            ]
            ran, failed, empty, _ = counted(marks)
            row.append(f"{ran} of {ran + failed + empty}")
        lines.append(f"| {' | '.join(row)} |")
    return "\n".join([HEAD, *lines, ""])


def whole(matrix: Matrix) -> str:
    """Return every cell, and why those that don't run don't."""
    told, marks = told_of(matrix), (RAN, FAILED, EMPTY)
    reasons = sorted(set(told.values()) - set(marks))
    heads = ["model", *(feature.short for feature in FEATURES)]
    legend = "; ".join(f"*{f.short}* {f.name}" for f in FEATURES if f.short != f.name)
    parts = [f"Columns: {legend}.\n"]
    for table, models in matrix.tables().items():
        parts.append(f"## {head_of(table)}\n")
        parts += [f"| {' | '.join(heads)} |", "| --- " * len(heads) + "|"]
        for model in models:
            cells = (told[table, model, feature.name] for feature in FEATURES)
            row = (mark if mark in marks else str(reasons.index(mark) + 1) for mark in cells)
            parts.append(f"| {' | '.join([f'`{model}`', *row])} |")
        parts.append("")
    parts += ["## Why not\n", *(f"{n}. {text}" for n, text in enumerate(reasons, 1)), ""]
    failed = sorted({line["test"] for line in matrix.engines if line["outcome"] != "passed"})
    parts += ["## Failed\n", *(f"- `{test}`" for test in failed), ""] if failed else []
    return "\n".join(parts)


def write(matrix: Matrix) -> None:
    PAGE.write_text(render(matrix))
