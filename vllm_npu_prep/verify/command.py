"""``vllm-npu-prep verify-device``: does this device compute what the plugin takes it to compute?

This process imports neither torch nor vllm: what may kill a process runs in other ones.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from vllm_npu_prep.errors import PrepError
from vllm_npu_prep.progress import log_while_waiting
from vllm_npu_prep.wording import seconds

WIDTH = 180
"""Characters of a line of the table in a file or a pipe."""


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "verify-device",
        help="compare what this NPU computes with float64 formulas, operator by operator",
        description="Run every operator in every form that the plugin uses on the first visible "
        "NPU, compare each result with a float64 formula, then compare the tokens of a tiny engine "
        "with those of the CPU fallback. The exit code is 1 if anything differs, 2 without an NPU.",
    )
    parser.add_argument(
        "--only",
        action="append",
        metavar="NAME",
        help="run this row, or the rows whose names begin so; may be given again",
    )
    parser.add_argument("--no-engine", action="store_true", help="leave the tiny engine out")
    parser.add_argument(
        "--row-seconds",
        type=seconds,
        metavar="SECONDS",
        help="time limit of each row (default: 120, engines 900)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument(
        "--markdown", type=Path, metavar="FILE", help="also write a page to send back"
    )
    parser.set_defaults(run=verify_device)


def verify_device(args: argparse.Namespace) -> int:
    from vllm_npu_prep.files import write_whole
    from vllm_npu_prep.verify.children import Runner
    from vllm_npu_prep.verify.outcome import Result
    from vllm_npu_prep.verify.report import (
        report_json,
        report_markdown,
        report_text,
        versions_of,
    )

    if args.markdown and not args.markdown.absolute().parent.is_dir():  # rows take minutes
        raise PrepError(f"--markdown {args.markdown}: there is no folder {args.markdown.parent}")
    done: list[Result] = []

    def log(line: str) -> None:
        print(f"verify-device: {line}", file=sys.stderr, flush=True)

    def status() -> str:
        bad = sum(result.verdict.is_bad for result in done)
        last = f", last {done[-1].name}" if done else ""
        return f"{len(done)} rows{last}, {bad} bad"

    selection = ["--no-engine"] * args.no_engine
    for name in args.only or ():
        selection += ["--only", name]
    with (
        tempfile.TemporaryDirectory(prefix="verify-device-") as folder,
        log_while_waiting("running rows on this device", log, status),
    ):
        runner = Runner(Path(folder), log=done.append, row_seconds=args.row_seconds)
        found = runner.run(selection)
    versions = versions_of(found)
    if args.json:
        print(json.dumps(report_json(found, versions)))
    else:
        from rich.console import Console

        console = Console()
        if not console.is_terminal:
            console.width = WIDTH
        report_text(found, versions, console)
    if args.markdown:  # last: what can't be written here was printed
        write_whole(args.markdown, report_markdown(found, versions).encode())
    return int(any(result.verdict.is_bad for result in found.results))
