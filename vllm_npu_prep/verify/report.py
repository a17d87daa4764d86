"""The forms in which ``verify-device`` reports: a table, JSON, and a page in Markdown to send."""

import platform
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from vllm_npu_prep import __version__
from vllm_npu_prep.inspect.doctor.hardware import Hardware
from vllm_npu_prep.inspect.doctor.host import Host, installed_versions
from vllm_npu_prep.verify.outcome import Result, RunResults
from vllm_npu_prep.wording import counted

COLUMNS = ("row", "what", "given", "expected", "got", "verdict")
STYLES = {"same": "green", "left out": "dim", "ran": "dim", "slower": "yellow"}
FROM_DOCTOR = ("CANN", "driver", "firmware", "npu-smi")
"""Lines of ``doctor`` that are versions, or that name the chips."""


def versions_of(found: RunResults) -> dict[str, str]:
    """Return everything that a result depends on, by name; what isn't known is left out."""
    host = Host.here()
    looked_at = {
        finding.name: finding.found
        for finding in Hardware(host).findings()
        if finding.name in FROM_DOCTOR and finding.status.value == "ok"
    }
    return {
        "plugin": __version__,
        "device": found.device,
        **looked_at,
        **found.versions,  # what torch_npu is told counts more than files
        **installed_versions(),
        "python": platform.python_version(),
        "machine": platform.machine(),
    }


def summary(results: list[Result]) -> str:
    """Return a line that says how many rows have which verdict."""
    verdicts = [result.verdict for result in results]
    parts = [f"{verdicts.count(verdict)} {verdict}" for verdict in dict.fromkeys(verdicts)]
    return f"{counted(len(results), 'row')}: {', '.join(parts) or 'none'}"


def report_text(found: RunResults, versions: dict[str, str], console: Console) -> None:
    """Print the table without the column "what", which the rows' names tell, and the versions."""
    columns = [name for name in COLUMNS if name != "what"]
    table = Table(*columns, box=None, pad_edge=False, header_style="bold")
    for name in ("row", "verdict"):
        table.columns[columns.index(name)].no_wrap = True
    for result in found.results:
        cells = [Text(_cell(result, name)) for name in columns]
        cells[-1].style = STYLES.get(result.verdict, "bold red")
        table.add_row(*cells)
    console.print(table)
    console.print()
    for name, version in versions.items():
        console.print(Text(f"{name:<12} {version}"))
    console.print(Text(summary(found.results), style="bold"))


def report_json(found: RunResults, versions: dict[str, str]) -> dict[str, Any]:
    return {"versions": versions, "rows": [asdict(result) for result in found.results]}


def report_markdown(found: RunResults, versions: dict[str, str]) -> str:
    lines = ["# verify-device", "", summary(found.results) + ".", ""]
    lines += ["| what | version |", "| --- | --- |"]
    lines += [f"| {name} | {_escaped(version)} |" for name, version in versions.items()]
    lines += ["", f"| {' | '.join(COLUMNS)} |", "| --- " * len(COLUMNS) + "|"]
    for result in found.results:
        cells = [_escaped(_cell(result, name)) for name in COLUMNS]
        cells[-1] = f"**{cells[-1]}**" if result.verdict.is_bad else cells[-1]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _cell(result: Result, column: str) -> str:
    return result.name if column == "row" else getattr(result, column)


def _escaped(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
