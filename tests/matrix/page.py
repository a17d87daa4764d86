"""docs/reference/matrix.md from the results: tables of models and features, lists behind them."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tests.matrix.cells import FEATURES, IMAGES, STRUCTURED
from tests.matrix.collect import ROOT
from tests.matrix.plan import RANKS, without_sense
from tests.matrix.results import Matrix, Table
from vllm_npu_prep.wording import counted

PAGE = ROOT / "docs" / "reference" / "matrix.md"
EMPTY, FAILED, SENSELESS = "-", "!", "."
TRIED = "t"
HEAD = Path(__file__).with_name("head.md").read_text()
"""What comes before the tables."""


def numbered(texts: Iterable[str]) -> dict[str, int]:
    """Numbers from 1 on, in the order of the texts."""
    return {text: number for number, text in enumerate(sorted(set(texts)), 1)}


def render(matrix: Matrix) -> str:
    """The page."""
    filled = matrix.filled()
    passed = {cell: line for cell, line in filled.items() if line["outcome"] == "passed"}
    tests = numbered(told_of(line) for line in passed.values())
    tried = numbered(line["tried"] for line in matrix.tried.values())
    refusals: dict[str, int] = {}
    errors: dict[str, int] = {}
    for of_model in matrix.answers.values():
        for answer in of_model.values():
            if refused := answer.get("refused"):
                refusals.setdefault(names_of(refused, of_model), 0)
            elif "error" in answer:
                errors.setdefault(answer["error"], 0)
    tables = [(table, matrix.models(table)) for table in matrix.tables()]
    marks: dict[tuple[Table, str, str], str] = {}
    refusals, errors = numbered(refusals), numbered(errors)
    for table, models in tables:
        for model in models:
            answers = matrix.answers.get((table, model), {})
            for feature in FEATURES:
                cell = table, model, feature.name
                answer = answers.get(feature.name, {})
                if cell in passed:
                    marks[cell] = str(tests[told_of(passed[cell])])
                elif cell in filled:
                    marks[cell] = FAILED
                elif refused := answer.get("refused"):
                    marks[cell] = f"r{refusals[names_of(refused, answers)]}"
                elif "error" in answer:
                    marks[cell] = f"v{errors[answer['error']]}"
                elif without_sense(model, feature.name):
                    marks[cell] = SENSELESS
                elif cell in matrix.tried:
                    marks[cell] = f"{TRIED}{tried[matrix.tried[cell]['tried']]}"
                else:
                    marks[cell] = EMPTY
    parts = [HEAD.format(summary=summary(marks, tables), legend=legend())]
    for table, models in tables:
        parts.append(section(table, models, marks))
    parts.append(behind(tests, refusals, errors, tried, matrix, set(marks.values())))
    return "\n".join(parts)


def told_of(line: dict[str, Any]) -> str:
    """A test and the commit it ran at."""
    return f"`{line['test']}`, {line['commit']}".replace("|", "\\|")


def names_of(refused: list[str], answers: dict[str, dict[str, Any]]) -> str:
    """Refusals of a model with a feature; those that it meets without any stand alone."""
    anyway = [name for name in refused if all(name in a.get("refused", ()) for a in asked(answers))]
    return ", ".join(f"`{name}`" for name in anyway or refused)


def asked(answers: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Answers to features that engines run without others: either kind of scheduling."""
    return [answers.get(name, {}) for name in ("synchronous scheduling", "asynchronous scheduling")]


def legend() -> str:
    return "\n".join(f"| {each.short} | {each.name} |" for each in FEATURES)


def summary(marks: dict[tuple[Table, str, str], str], tables: list[tuple[Table, list[str]]]) -> str:
    """A table of how many cells ran, were refused and are empty."""
    heads = ("models", "ran", "refused", "by vLLM", "no use", "tried", "empty", "failed")
    lines = [f"| {' | '.join(('vLLM', 'device', 'runner', *heads))} |"]
    lines.append("| --- | --- | --- " + "| ---: " * len(heads) + "|")
    for table, models in tables:
        own = [mark for cell, mark in marks.items() if cell[0] == table]
        kinds = [
            sum(mark.isdigit() for mark in own),
            *(
                sum(mark.startswith(kind) for mark in own)
                for kind in ("r", "v", SENSELESS, TRIED, EMPTY, FAILED)
            ),
        ]
        lines.append(f"| {' | '.join([*table, *map(str, [len(models), *kinds])])} |")
    return "\n".join(lines)


def section(table: Table, models: list[str], marks: dict[tuple[Table, str, str], str]) -> str:
    """One table, and its empty cells."""
    release, device, runner = table
    lines = [f"## {device}, {runner}, vLLM {release}", ""]
    lines.append("| model | " + " | ".join(each.short for each in FEATURES) + " |")
    lines.append("| --- " * (len(FEATURES) + 1) + "|")
    for model in models:
        row = [marks[table, model, feature.name] for feature in FEATURES]
        lines.append(f"| `{model}` | " + " | ".join(row) + " |")
    lines += ["", "Empty cells, by feature:", ""]
    for feature in FEATURES:
        ran = sum(marks[table, model, feature.name].isdigit() for model in models)
        empty = [model for model in models if marks[table, model, feature.name] == EMPTY]
        if not empty:
            continue
        beside = f"; {counted(ran, 'other model')} ran" if ran else ""
        which = ", ".join(f"`{model}`" for model in empty)
        if len(empty) == len(models):
            which = "every model of this table"
        lines.append(f"- **{feature.name}**: {which}: {why_empty(feature.name)}{beside}")
    return "\n".join([*lines, ""])


def why_empty(feature: str) -> str:
    """Why cells of a feature are empty, by what it takes to fill them."""
    if feature in RANKS:
        return "not reached yet; engines of several ranks come last, and none that pools is tried"
    if feature in (STRUCTURED, IMAGES):
        return "not reached yet; it comes with requests, and start-up has no say"
    return "not reached yet"


def behind(
    tests: dict[str, int],
    refusals: dict[str, int],
    errors: dict[str, int],
    tried: dict[str, int],
    matrix: Matrix,
    used: set[str],
) -> str:
    """Lists of what the marks refer to."""
    lines = ["## Refusals", "", "[Errors](errors.md) has their messages.", ""]
    lines += [f"- r{n}: {text}" for text, n in refusals.items() if f"r{n}" in used]
    lines += ["", "## Errors of vLLM", ""]
    lines += [f"- v{n}: {plain(text)}" for text, n in errors.items() if f"v{n}" in used]
    lines += ["", "## Tried alone, and failed", ""]
    lines += ["An engine of the model with this one feature was started on purpose.", ""]
    lines += [f"- t{n}: {plain(text)}" for text, n in tried.items() if f"{TRIED}{n}" in used]
    lines += ["", "## No use", "", *(f"- {text}" for text in reasons(matrix))]
    lines += ["", "## Tests", "", "Each with the commit at which it ran last.", ""]
    lines += [f"{n}. {text}" for text, n in tests.items()]
    failed = sorted({told_of(line) for line in matrix.engines if line["outcome"] != "passed"})
    if failed:
        lines += ["", "## Failed", "", *(f"- {text}" for text in failed)]
    return "\n".join([*lines, ""])


def reasons(matrix: Matrix) -> list[str]:
    """Why models have no use for features: the features by model and reason."""
    models = {model for table in matrix.tables() for model in matrix.models(table)}
    of: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for model in sorted(models):
        by_reason: dict[str, list[str]] = {}
        for feature in FEATURES:
            if why := without_sense(model, feature.name):
                by_reason.setdefault(why, []).append(feature.name)
        for why, names in by_reason.items():
            of.setdefault((why, tuple(names)), []).append(model)
    return [
        f"{', '.join(names)}: {why}: {', '.join(f'`{model}`' for model in each)}"
        for (why, names), each in sorted(of.items())
    ]


def plain(text: str) -> str:
    """A message as text: what Markdown would read as markup stands in quotes of code."""
    return f"`{text.replace('`', chr(39))}`"


def write(matrix: Matrix) -> None:
    PAGE.write_text(render(matrix))
