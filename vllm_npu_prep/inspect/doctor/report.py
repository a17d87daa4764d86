"""The doctor's report, as a table and as JSON."""

from collections import Counter
from typing import Any

from rich.console import Console
from rich.text import Text

from vllm_npu_prep.inspect.doctor.finding import Finding, Status
from vllm_npu_prep.wording import wrapped

STYLES = {Status.OK: "green", Status.WARNING: "yellow", Status.FAILURE: "bold red"}
LEAST_WIDTH = 30
"""The least columns for findings; if names leave fewer, findings go below the names."""


def report_json(findings: list[Finding]) -> dict[str, Any]:
    counts = Counter(finding.status for finding in findings)
    return {
        "findings": [
            {"name": f.name, "status": f.status.value, "found": f.found, "do": f.do}
            for f in findings
        ],
        **{status.value: counts[status] for status in Status},
    }


def report_text(findings: list[Finding], console: Console) -> None:
    """Print the report: a row for each finding, with the advice below it.

    Lines are broken at spaces only: names, paths and commands can be copied whole.
    """
    statuses = max((len(finding.status.value) for finding in findings), default=0) + 2
    names = max((len(finding.name) for finding in findings), default=0) + 2
    indent = statuses + names
    is_table = console.width - indent >= LEAST_WIDTH
    if not is_table:
        indent = 4

    def show(line: Text) -> None:
        console.print(line, soft_wrap=True)

    heading = " " * statuses + f"{'what':<{names}}found, and what to do"
    show(Text(f"\n{heading}" if is_table else "", style="bold"))
    for finding in findings:
        style = STYLES[finding.status]
        head = Text(f"{finding.status.value:<{statuses}}", style=style)
        head.append(f"{finding.name:<{names}}", style="default")
        lines = [Text(line) for line in wrapped(finding.found, console.width - indent)]
        if finding.do:
            lines += [
                Text(line, style=style)
                for line in wrapped(f"-> {finding.do}", console.width - indent)
            ]
        if is_table:
            show(head + lines.pop(0))
        else:
            head.rstrip()
            show(head)
        for line in lines:
            show(Text(" " * indent) + line)
    counts = Counter(finding.status for finding in findings)
    said = [f"{counts[status]} {status.value}" for status in Status]
    show(Text("\n" + ", ".join(said)))
