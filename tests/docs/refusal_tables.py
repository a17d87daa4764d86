"""Writes the tables of refusals in ``docs/reference/errors.md`` from the list.

``python -m tests.docs.refusal_tables docs/reference/errors.md`` writes them; a test fails
while they are out of date. Each table stands between ``<!-- refusals: NAME -->``, the name of a
`Subject`, and ``<!-- refusals: end -->``.
"""

import re
import string
import sys
from pathlib import Path

from vllm_npu_prep.startup.refusal import Subject
from vllm_npu_prep.startup.refusals import SUBJECTS

TABLE = re.compile(r"(<!-- refusals: (?P<name>[\w-]+) -->\n).*?(<!-- refusals: end -->)", re.DOTALL)

CODE = re.compile(
    r"""--[a-z][\w-]*(?:\ '\{.*?\}')?  # a flag, with its value
    | \{.*\}                           # JSON
    | "[\w.]+"(?::\ \{.*?\})?          # a key of it
    | \b[a-zA-Z]\w*_\w+                # a name
    """,
    re.VERBOSE,
)


def shown(template: str) -> str:
    """Return a template of `str.format` with its holes as words in capital letters."""
    parts = string.Formatter().parse(template)
    return "".join(text + (name or "").upper() for text, name, *_ in parts)


def table_of(subject: Subject) -> str:
    lines = ["| what | because | what to do |", "| --- | --- | --- |"]
    for refusal in subject.refusals:
        texts = (CODE.sub(r"`\g<0>`", shown(text)) for text in (refusal.reason, refusal.remedy))
        lines.append(f"| `{shown(refusal.feature)}` | {' | '.join(texts)} |")
    return "\n".join(lines)


def render(page: str) -> str:
    """Return the page with its tables written anew.

    Raises
    ------
    ValueError
        If the page has not one table for each subject.
    """
    subjects = {subject.name: subject for subject in SUBJECTS}
    there = [match["name"] for match in TABLE.finditer(page)]
    if sorted(there) != sorted(subjects):
        raise ValueError(f"tables of {', '.join(there)}; subjects are {', '.join(subjects)}")
    return TABLE.sub(
        lambda match: f"{match[1]}\n{table_of(subjects[match['name']])}\n\n{match[3]}", page
    )


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(render(path.read_text()))
