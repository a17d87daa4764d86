"""The doctor's report, as a table and as JSON."""

from collections import Counter
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from vllm_npu_prep.inspect.doctor.finding import Finding, Status

STYLES = {Status.OK: "green", Status.WARNING: "yellow", Status.FAILURE: "bold red"}


def report_json(findings: list[Finding]) -> dict[str, Any]:
    """The report for programs."""
    counts = Counter(finding.status for finding in findings)
    return {
        "findings": [
            {"name": f.name, "status": f.status.value, "found": f.found, "do": f.do}
            for f in findings
        ],
        **{status.value: counts[status] for status in Status},
    }


def report_text(findings: list[Finding], console: Console) -> None:
    """Print the report: a row for each finding, what to do below what was found."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    table.add_column("", no_wrap=True)
    table.add_column("what", overflow="fold")
    table.add_column("found, and what to do", overflow="fold", ratio=1)
    for finding in findings:
        found = Text(finding.found)
        if finding.do:
            found.append(f"\n-> {finding.do}", style=STYLES[finding.status])
        status = Text(finding.status.value, style=STYLES[finding.status])
        table.add_row(status, Text(finding.name), found)
    console.print(table)
    counts = Counter(finding.status for finding in findings)
    said = [f"{counts[status]} {status.value}" for status in Status]
    console.print(", ".join(said), highlight=False)
