"""Render ``emulator/operators.md`` from the table of constraints.

``python -m ascend_emulator.operators.document emulator/operators.md`` writes it; a test
fails while it is out of date.
"""

import sys
from pathlib import Path

from ascend_emulator.operators import REFERENCES
from ascend_emulator.operators.constraint import FAMILIES, Constraint, Enforced, constraints_of
from ascend_emulator.operators.schemas import schema_text

INTRODUCTION = """\
# Operators: what the emulated kernels demand

**To be confirmed on hardware.** Nothing here was run on an NPU. The references in
`ascend_emulator/operators/` are a reading of the docstrings and schemas of torch_npu 2.13.0,
of published sources and of issues. They compute in float32 and say nothing about the numerics,
speed or memory of the kernels.

A reference refuses a call that breaks a demand with a `RuntimeError` that names the operator, the
argument, what was given and what is demanded. Where the docstring and practice differ, both are
listed, and whose word is enforced. For fused attention `v1` and `v2` are the docstrings of its two
versions, and arguments are named as in v1. Numbers are issues or pull requests.

One of several kernels stands behind fused attention, depending on the call and on the release of
CANN. Each has a section; `--profile` chooses the release. Their demands were read in the published
tiling sources of CANN's ops-transformer. Tags stand for releases, and `branch 9.1.0` for 9.1.

Rendered by `python -m ascend_emulator.operators.document emulator/operators.md`.
"""

FIRST_ON_HARDWARE = """\
## What to try first on hardware

What is read between the lines, taken from practice, or documented nowhere. Real kernels could
refuse what the emulator accepts here, or give another result.

"""


def render() -> str:
    sections = [INTRODUCTION, _operators(), _first_on_hardware()]
    sections += [_family(family) for family in FAMILIES]
    return "\n".join(sections)


def _operators() -> str:
    lines = ["## Operators", "", "```text"]
    lines += [schema_text(reference.name, reference.overload) for reference in REFERENCES]
    return "\n".join([*lines, "```", ""])


def _first_on_hardware() -> str:
    lines = [
        f"- {family}, *{record.name}* (`{record.argument}`): {record.demand}."
        for family in FAMILIES
        for record in constraints_of(family).values()
        if not record.refused or record.enforced in (Enforced.PRACTICE, Enforced.READING)
    ]
    return FIRST_ON_HARDWARE + "\n".join(lines) + "\n"


def _family(family: str) -> str:
    records = constraints_of(family).values()
    text = f"## {family.capitalize()}\n\n"
    text += _table("Refused unless", [record for record in records if record.refused])
    readings = [record for record in records if not record.refused]
    if readings:
        text += "\nNot refused, but read as follows:\n\n" + _table("Read as", readings)
    return text


def _table(title: str, records: list[Constraint]) -> str:
    by_release = any(record.where for record in records)
    titles = ("what", "argument", title.lower(), *(("where",) if by_release else ()))
    titles += ("docstring", "practice", "source", "enforced")
    lines = ["| " + " | ".join(titles) + " |", "| --- " * len(titles) + "|"]
    for record in records:
        enforced = record.enforced + (f": {record.why}" if record.why else "")
        cells = (
            record.name,
            f"`{record.argument}`",
            record.demand,
            *((record.where or "everywhere",) if by_release else ()),
            record.docstring_says,
            record.practice,
            record.source,
            enforced,
        )
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(render())
