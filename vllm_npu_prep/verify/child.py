"""Runs rows of ``verify-device``, in a process that may die of a row.

It is started by `vllm_npu_prep.verify.children`. It prints lines of JSON on the descriptor that was
its standard output; everything else that a library prints there goes to standard error.

======================  ===========================================================
line                    when
======================  ===========================================================
``{"device": ...}``     at the start: device, versions, and the chosen rows
``{"missing": ...}``    instead, if there is no NPU or no such row; then it ends
``{"begin": name}``     before a row
``{"form": ...}``       in a row of a recorded call, before and after torch's own form of it
``{"end": name, ...}``  after it, with its outcome
======================  ===========================================================
"""

import argparse
import contextlib
import difflib
import json
import os
import sys
import threading
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

from vllm_npu_prep.verify.calls.table import read_table
from vllm_npu_prep.verify.outcome import (
    NotHereError,
    Outcome,
    TorchOutcome,
    Verdict,
    first_line_of,
)

NO_ERROR = "no error"
"""What is expected in the outcome of a row that raised an error. The process ends after such a row,
because the device may be in a bad state."""

OUTCOME_CHARACTERS = 400
"""How many characters a field of an outcome has at most: errors of CANN fill pages."""


def main() -> None:
    parser = argparse.ArgumentParser(description="Runs rows of verify-device.")
    parser.add_argument("--only", action="append", help="rows, or beginnings of their names")
    parser.add_argument("--rows", nargs="*", help="exactly these rows, in this order")
    parser.add_argument("--calls", type=Path, help="the rows are these calls")
    parser.add_argument("--done", type=Path, help="leave out the calls that this table has")
    parser.add_argument("--no-engine", action="store_true", help="leave engines out")
    parser.add_argument("--folder", type=Path, required=True, help="folder of all processes")
    parser.add_argument("--rank", type=int, default=0, help="this process among its team")
    parser.add_argument("--ranks", type=int, default=1, help="processes of the team")
    args = parser.parse_args()
    threading.Thread(target=_end_with_parent, daemon=True).start()
    with os.fdopen(os.dup(1), "w") as lines:
        os.dup2(2, 1)
        _run(args, lines)


def _end_with_parent() -> None:
    """End this process, which may hang, when nobody is there who would end it."""
    sys.stdin.buffer.read()
    os._exit(1)


def _run(args: argparse.Namespace, lines: TextIO) -> None:
    def tell(**line: Any) -> None:
        print(json.dumps(line), file=lines, flush=True)

    from vllm_npu_prep.device.probe import probe_npu

    probe = probe_npu()
    if not probe.visible:
        tell(missing=probe.reason)
        return
    from vllm_npu_prep.device import make_device, visible_devices
    from vllm_npu_prep.verify.row import RowContext

    rows, engine = _rows(args.calls)
    by_name = {row.name: row for row in rows}
    if args.rows is not None:
        chosen = [by_name[name] for name in args.rows]
    else:
        chosen = [row for row in rows if not (args.no_engine and row.group == "engine")]
        for wanted in args.only or ():
            if not any(name.startswith(wanted) for name in by_name):
                near = difflib.get_close_matches(wanted, [*by_name, *_groups(by_name)], 1, 0.3)
                hint = f" (did you mean {near[0]}?)" if near else ""
                groups = ", ".join(_groups(by_name))
                tell(missing="", no_row=wanted, hint=hint, groups=groups)
                return
        if args.only:
            chosen = [row for row in chosen if row.name.startswith(tuple(args.only))]
        if args.done:
            done = read_table(args.done).results
            chosen = [row for row in chosen if row.key not in done]
    device = make_device("npu", args.rank)
    tell(
        device=device.name,
        visible=visible_devices("npu"),
        versions=_versions_of_cann(),
        rows=[
            {"name": row.name, "what": row.what, "ranks": row.ranks, "seconds": row.seconds}
            | ({"key": row.key} if row.key else {})
            for row in chosen
        ],
        engine=engine,
    )
    context = RowContext(device, args.folder, args.rank, args.ranks)
    for row in chosen:
        if row.ranks != args.ranks:
            continue
        tell(begin=row.name)
        if row.first is not None:
            tell(form=asdict(TorchOutcome("no answer")))  # until there is one
            tell(form=asdict(row.first(context)))
        outcome, goes_on = run_row(row, context)
        tell(end=row.name, outcome=outcome)
        if not goes_on:
            break
    lines.close()
    sys.stderr.flush()
    # Libraries of a device that a row has spoiled may hang at the end.
    os._exit(0)


def _rows(calls: Path | None) -> tuple[Sequence[Any], dict[str, Any]]:
    """Return all rows, and the engine that makes the calls."""
    if calls is None:
        from vllm_npu_prep.verify.rows import ROWS

        return ROWS, {}
    from vllm_npu_prep.verify.calls import host_rows
    from vllm_npu_prep.verify.calls.call import read_list
    from vllm_npu_prep.verify.calls.call_rows import rows_of

    engine, made = read_list(calls)
    return (*host_rows.rows_of({call.name for call in made}), *rows_of(made)), engine


def _groups(names: Any) -> list[str]:
    return list(dict.fromkeys(name.partition("-")[0] for name in names))


def run_row(row: Any, context: Any) -> tuple[dict[str, Any], bool]:
    """Run a row, and return its outcome and whether the device still works after it."""
    try:
        outcome = row.run(context)
    except NotHereError as reason:
        outcome = Outcome("", "", str(reason), Verdict.LEFT_OUT)
    except Exception as error:
        outcome = _failed(row, error)
    try:
        context.device.synchronize()
    except Exception as error:
        if not outcome.verdict.is_bad:
            outcome = _failed(row, error)
        return _short(outcome.as_json()), False
    return _short(outcome.as_json()), outcome.expected != NO_ERROR


def _failed(row: Any, error: Exception) -> Outcome:
    """Return the outcome of a row that raised an error: a failure, unless it has an `instead`."""
    got = first_line_of(error)
    if row.instead:
        return Outcome("", NO_ERROR, f"{row.instead}: {got}", Verdict.LEFT_OUT)
    return Outcome("", NO_ERROR, got, Verdict.FAILED)


def _short(outcome: dict[str, Any]) -> dict[str, Any]:
    return {
        name: f"{text[:OUTCOME_CHARACTERS]} ..."
        if isinstance(text, str) and len(text) > OUTCOME_CHARACTERS
        else text
        for name, text in outcome.items()
    }


def _versions_of_cann() -> dict[str, str]:
    found = {}
    with contextlib.suppress(Exception):
        from vllm_npu_prep.device.npu import versions

        found = versions()
    return found


if __name__ == "__main__":
    main()
