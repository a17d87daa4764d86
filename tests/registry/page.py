"""Writes what came of each architecture into docs/reference/features.md."""

import re

from tests.resume.log import Log, Result
from tests.resume.tree import RESULTS, ROOT

RESULTS_FILE = RESULTS / "registry.jsonl"
PAGE = ROOT / "docs/reference/features.md"
MARKED = re.compile(r"(<!-- architectures -->\n).*(<!-- architectures: end -->)", re.DOTALL)


def latest() -> dict[str, Result]:
    """Last result of each architecture, of the run that was begun last."""
    return Log(RESULTS_FILE).latest


def group_of(result: Result) -> str:
    """What came of an architecture, as the page's table says it."""
    what, how, said = (str(result.more[each]) for each in ("what", "how", "where"))
    if what == "served" and how.startswith("pools"):
        return "served: finite values, twice the same"
    if what == "served":
        with_weights = how == "tokens of transformers"
        return "served: the tokens of transformers" if with_weights else MADE_UP
    if what == "refused" and how == "while layers are made":
        own = "is refused by vLLM's own code of it" in said
        why = (
            "vLLM's code of it does not take the tiny config"
            if own
            else "by what its layers ask for"
        )
        return f"refused before weights: {why}"
    if what == "refused":
        return f"refused at start-up: `{how.split()[-1]}`"
    if what == "refused by vLLM":
        return "refused at start-up by vLLM itself"
    if what == "not made":
        return "not tried: " + (
            "its config is remote code" if "remote" in how else how.split(":")[0]
        )
    return "**a fault**"


MADE_UP = "served: tokens twice the same, with made-up weights"
ORDER = ("served", "refused", "not", "**a")
"""First words of groups, as the table has them."""


def render(page: str) -> str:
    """The page with its table written anew."""
    groups: dict[str, list[str]] = {}
    for unit, result in sorted(latest().items()):
        groups.setdefault(group_of(result), []).append(f"`{unit}`")
    rows = ["| what came of it | number | architectures |", "| --- | --- | --- |"]
    for group in sorted(groups, key=lambda each: (ORDER.index(re.split("[: ]", each)[0]), each)):
        rows.append(f"| {group} | {len(groups[group])} | {', '.join(groups[group])} |")
    return MARKED.sub(lambda match: match[1] + "\n" + "\n".join(rows) + "\n\n" + match[2], page)


def write() -> None:
    PAGE.write_text(render(PAGE.read_text()))
