"""Says whether the plugin will run on this host, and if not, what to do: ``vllm-npu-prep doctor``.

It imports neither vllm nor torch, so that it works where these are broken.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from vllm_npu_prep.inspect.doctor.environment import environment_findings
from vllm_npu_prep.inspect.doctor.finding import Finding, Status
from vllm_npu_prep.inspect.doctor.hardware import Hardware
from vllm_npu_prep.inspect.doctor.host import Host
from vllm_npu_prep.inspect.doctor.software import Software
from vllm_npu_prep.progress import log_while_waiting

LONGEST_TEXT = 600
"""The most characters of a finding, because files and commands may hold any text."""


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "doctor",
        help="check this host: driver, CANN, torch, vLLM, and what the plugin would do",
        description="Tell whether the plugin will run on this host, and what to do if it won't. "
        "The exit code is 1 if anything prevents it from running, else 0.",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.set_defaults(run=doctor)


def doctor(args: argparse.Namespace) -> int:
    """Examine this host and print the report; return 1 if something prevents the plugin's work."""
    from rich.console import Console

    from vllm_npu_prep.inspect.doctor.report import report_json, report_text

    def log(line: str) -> None:
        print(f"doctor: {line}", file=sys.stderr, flush=True)

    with log_while_waiting("checking this host", log):
        findings = examine(Host.here())
    if args.json:
        print(json.dumps(report_json(findings)))
    else:
        report_text(findings, Console())
    return int(any(finding.status is Status.FAILURE for finding in findings))


def examine(host: Host) -> list[Finding]:
    """Return all findings about a host, from the driver up to what vLLM would do."""

    def findings() -> Iterator[Finding]:
        hardware = Hardware(host)
        yield from hardware.findings()
        yield from Software(host, hardware).findings()
        yield from environment_findings(host, len(hardware.nodes), hardware.cann)

    return [
        replace(finding, found=_printable(finding.found), do=_printable(finding.do))
        for finding in findings()
    ]


def _printable(text: str) -> str:
    shown = "".join(c if c.isprintable() else " " for c in text)
    return shown if len(shown) <= LONGEST_TEXT else shown[:LONGEST_TEXT] + " ..."
