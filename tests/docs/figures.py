"""What `explain` prints and draws in the README and in docs/: ``python -m tests.docs.figures``.

A page says what it wants, and this writes it, anew whenever explain or a scenario changes:

    <!-- explain FILE ARGUMENTS -->                all that explain prints, in a code block
    <!-- explain FILE ARGUMENTS | PART -->         its summary, request level, token level, ...
    <!-- explain FILE ARGUMENTS --json | A B -->   those variables of the JSON
    <!-- explain FILE --png PICTURE -->            the picture, which the page shows itself

All but the last end at ``<!-- end -->``. Paths of pictures begin at the page's folder. What stands
in the prose as code with an equals sign, `positions[3] = 5 + 1 = 6`, speaks of the step of the
nearest one above.
"""

import json
import math
import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from tests.helpers.golden import explain_output
from vllm_npu_prep.inspect.explain import explain_json
from vllm_npu_prep.inspect.png import explain_png
from vllm_npu_prep.inspect.view import StepView
from vllm_npu_prep.records.scenario import read_scenario

ROOT = Path(__file__).parents[2]
WIDTH = 86
MARKER = re.compile(r"<!-- explain (?P<command>[^|\n]+?)(?: \| (?P<part>[^\n]+))? -->\n")
REGION = re.compile(MARKER.pattern + r"(?P<body>```text\n.*?```\n)?<!-- end -->\n", re.DOTALL)
FORMULA = re.compile(r"(?<!`)`([^`\n]+ = [^`\n]+)`(?!`)")
PICTURE = re.compile(r"!\[(?P<alt>[^\]]*)\]\((?P<path>[^)]+)\)")


def pages() -> list[Path]:
    """Those that show what explain says."""
    found = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [page for page in found if "<!-- explain " in page.read_text()]


@cache
def view_of(file: str) -> StepView:
    return StepView.of_scenario(read_scenario(ROOT / file))


@cache
def shown(command: str, part: str | None) -> str:
    file, *args = shlex.split(command)
    lines = explain_output(str(ROOT / file), *args, width=WIDTH).splitlines()
    if "--json" in args:
        variables, names = json.loads(lines[0]), (part or "").split()
        lines = [f'"{name}": {json.dumps(variables[name])}' for name in names]
    else:
        lines = [line.rstrip() for line in lines]
        lines = [line for i, line in enumerate(lines) if line or (i and lines[i - 1])]
    if part == "summary":
        lines = lines[: lines.index("")]
    elif part and "--json" not in args:
        first = lines.index(part)
        ends = re.compile(r".* level")
        heads = [i for i, line in enumerate(lines) if i > first and ends.match(line)]
        lines = lines[first : heads[0] if heads else len(lines)]
    while not lines[-1]:
        lines.pop()
    dots = ["..."] if part and part != "summary" else []
    return "\n".join(["```text", f"$ vllm-npu-prep explain {command}", *dots, *lines, "```", ""])


def written(text: str) -> str:
    """A page with its regions as explain prints them now."""

    def region(match: re.Match[str]) -> str:
        marker = MARKER.match(match[0])
        assert marker is not None
        return f"{marker[0]}{shown(match['command'], match['part'])}<!-- end -->\n"

    return REGION.sub(region, text)


@cache
def picture_of(file: str) -> bytes:
    return explain_png(view_of(file))


def pictures(page: Path) -> dict[Path, bytes]:
    """The pictures that a page asks for, as explain draws them now."""
    drawn = {}
    for marker in MARKER.finditer(page.read_text()):
        file, *args = shlex.split(marker["command"])
        if "--png" in args:
            _, name = args
            drawn[page.parent / name] = picture_of(file)
    return drawn


def values(formula: str, file: str) -> list[Any]:
    """Of all sides of what a page says of a step."""
    return [eval(side, variables(file)) for side in formula.split(" = ")]


def formulas(text: str) -> Iterator[tuple[str, str]]:
    """Everything that a page says with an equals sign, in order, and the file of the step."""
    file = ""
    for match in re.finditer(f"{MARKER.pattern}|{FORMULA.pattern}", text):
        if match["command"]:
            file = shlex.split(match["command"])[0]
        else:
            yield match[match.lastindex or 0], file


@cache
def variables(file: str) -> dict[str, Any]:
    """The JSON of a step and its scenario's settings, by name; lists as arrays."""
    view, scenario = view_of(file), read_scenario(ROOT / file)
    names = explain_json(view) | {
        "block_size": scenario.block_size,
        "max_model_len": scenario.max_model_len,
        "max_num_reqs": scenario.max_num_reqs,
        "capture_sizes": scenario.capture_sizes,
        "attention_chunk_size": scenario.attention_chunk_size,
        "num_scheduled_tokens": view.step.query_lens.tolist(),
        "num_draft_tokens": view.step.batch.num_draft_tokens.tolist(),
        "token_ids": view.step.batch.tables.token_ids.tolist(),
        "nbytes": view.step.nbytes,
        "mask_bytes": view.mask_bytes(0),
    }
    arrays = {k: np.array(v) if isinstance(v, list) else v for k, v in names.items()}
    places = {name: spec.offset for name, spec in view.step.layout.arrays.items()}
    functions = {"ceil": math.ceil, "min": min, "max": max, "sum": sum, "len": len}
    return {**arrays, **functions, "offset": places, "__builtins__": {}}


def main() -> None:
    for page in pages():
        page.write_text(written(page.read_text()))
        for path, picture in pictures(page).items():
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(picture)


if __name__ == "__main__":
    main()
