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
from vllm_npu_prep.verify.calls.lists import names, path_of
from vllm_npu_prep.wording import seconds

ENGINE_OPTIONS = (
    *("tensor_parallel_size", "data_parallel_size", "enable_expert_parallel", "max_model_len"),
    *("max_num_seqs", "max_num_batched_tokens", "quantization", "speculative_config"),
)
"""Options of the engine whose calls are recorded, as ``vllm.LLM`` names them."""

WIDTH = 180
"""Characters of a line of the table in a file or a pipe."""


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "verify-device",
        help="compare what this NPU computes with float64 formulas, operator by operator",
        description="Run every operator in every form that the plugin uses on the first visible "
        "NPU, compare each result with a float64 formula, then compare the tokens of two tiny "
        "engines with those of the CPU fallback. The exit code is 1 if anything differs, 2 without "
        "an NPU.",
    )
    parser.add_argument(
        "--only",
        action="append",
        metavar="NAME",
        help="run this row, or the rows whose names begin so; may be given again",
    )
    parser.add_argument("--no-engine", action="store_true", help="leave the tiny engines out")
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
    model = parser.add_argument_group(
        "the calls of one engine, in place of the rows that every engine needs"
    )
    model.add_argument(
        "--model",
        metavar="FOLDER|CONFIG|NAME",
        help="record the calls of an engine with this model, whose config.json is enough, and "
        "try each; no float is computed while they are recorded. A name stands for a list that "
        "comes with this package",
    )
    model.add_argument(
        "--record", type=Path, metavar="FILE", help="write the list of calls, and try none of them"
    )
    model.add_argument(
        "--calls",
        type=Path,
        metavar="FILE",
        help="try this list of calls, which may be of another machine",
    )
    model.add_argument(
        "--table",
        type=Path,
        metavar="FILE",
        help='write what was found of each call, for an engine with "verified": FILE',
    )
    model.add_argument(
        "--resume",
        action="store_true",
        help="try only the calls that --table FILE, of a run that was ended, does not have",
    )
    model.add_argument(
        "--tensor-parallel-size",
        "--tp",
        type=int,
        metavar="N",
        help="as of vllm serve: the calls of rank 0 of N, for which one device does",
    )
    model.add_argument(
        "--data-parallel-size",
        "--dp",
        type=int,
        metavar="N",
        help="as of vllm serve: the calls of a rank whose N - 1 others have as many tokens",
    )
    model.add_argument(
        "--enable-expert-parallel", action="store_true", default=None, help="as of vllm serve"
    )
    model.add_argument("--max-model-len", type=int, metavar="TOKENS", help="as of vllm serve")
    model.add_argument("--max-num-seqs", type=int, metavar="N", help="as of vllm serve")
    model.add_argument(
        "--max-num-batched-tokens", type=int, metavar="TOKENS", help="as of vllm serve"
    )
    model.add_argument("--quantization", metavar="METHOD", help="as of vllm serve")
    model.add_argument(
        "--speculative-config", type=_json_object, metavar="JSON", help="as of vllm serve"
    )
    parser.set_defaults(run=verify_device)


def verify_device(args: argparse.Namespace) -> int:
    from vllm_npu_prep.files import write_whole
    from vllm_npu_prep.verify.calls.table import TableWriter, read_table
    from vllm_npu_prep.verify.children import CHILD, Runner, record_calls
    from vllm_npu_prep.verify.outcome import Result, RunResults
    from vllm_npu_prep.verify.report import (
        report_json,
        report_markdown,
        report_text,
        versions_of,
    )

    if args.model and Path(args.model).is_file() and Path(args.model).name == "config.json":
        args.model = str(Path(args.model).parent)
    _check_model_options(args)
    former = read_table(args.table) if args.resume and args.table.exists() else None
    if args.markdown and not args.markdown.absolute().parent.is_dir():  # rows take minutes
        raise PrepError(f"--markdown {args.markdown}: there is no folder {args.markdown.parent}")
    done: list[Result] = []
    writers: list[TableWriter] = []

    def log(line: str) -> None:
        print(f"verify-device: {line}", file=sys.stderr, flush=True)

    def status() -> str:
        bad = sum(result.verdict.is_bad for result in done)
        last = f", last {done[-1].name}" if done else ""
        return f"{len(done)} rows{last}, {bad} bad"

    def begun(found: RunResults) -> None:
        if args.table:
            writers.append(TableWriter(args.table, found, versions_of(found), former))

    def note(result: Result) -> None:
        done.append(result)
        for writer in writers:
            writer.add(result)

    selection = ["--no-engine"] * args.no_engine
    if former:
        selection += ["--done", str(args.table.absolute())]
    for name in args.only or ():
        selection += ["--only", name]
    with tempfile.TemporaryDirectory(prefix="verify-device-") as folder:
        calls = args.calls
        if args.model and not _is_folder(args.model):
            calls = path_of(args.model)
        elif args.model:
            calls = args.record or Path(folder, "calls.jsonl")
            with log_while_waiting("recording the calls of an engine", log):
                record_calls(_settings(args), calls.absolute(), Path(folder))
        if args.record:
            log(f"{args.record} has the list; --calls {args.record} tries it on a device")
            return 0
        command = (*CHILD, "--calls", str(calls.absolute())) if calls else CHILD
        with log_while_waiting("running rows on this device", log, status):
            runner = Runner(Path(folder), command, note, args.row_seconds, begun)
            found = runner.run(selection)
    if former:
        found.results = [*former.results.values(), *found.results]
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


def _json_object(text: str) -> dict[str, Any]:
    """Parse an option.

    Raises
    ------
    argparse.ArgumentTypeError
        If it is no JSON object.
    """
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is no JSON object, as vllm serve takes")
    return value


def _check_model_options(args: argparse.Namespace) -> None:
    """Refuse options of an engine that come without one, and lists that can't be written or read.

    Raises
    ------
    PrepError
        It says what was given, and what goes with it.
    """
    if args.model and args.calls:
        raise PrepError("--model and --calls are two lists of calls: give one of them")
    if args.table and (args.record or not (args.model or args.calls)):
        raise PrepError(
            "--table has what was found of calls: give --model or --calls, and no --record"
        )
    if args.resume and not args.table:
        raise PrepError("--resume goes on with --table FILE, which is not given")
    if args.record and not args.model:
        raise PrepError("--record needs --model, whose calls it writes")
    given = [name for name in ENGINE_OPTIONS if getattr(args, name) is not None]
    if given and not args.model:
        option = f"--{given[0].replace('_', '-')}"
        raise PrepError(f"{option} is about the engine of --model, which is not given")
    if args.model and not _is_folder(args.model):
        known = names()
        if args.model not in known:
            raise PrepError(
                f"--model {args.model}: neither a folder with a config.json nor a model whose list "
                f"comes with this package; there are {', '.join(known)}"
            )
        if given or args.record:
            raise PrepError(
                f"--model {args.model} names a list that is recorded already: give a folder with a "
                "config.json to record another one"
            )
    if (args.data_parallel_size or 1) > 1 < (args.tensor_parallel_size or 1):
        raise PrepError(
            f"--dp {args.data_parallel_size} --tp {args.tensor_parallel_size}: calls are recorded "
            "of data-parallel ranks of one device each; give one of the two"
        )
    if args.record and not args.record.absolute().parent.is_dir():
        raise PrepError(f"--record {args.record}: there is no folder {args.record.parent}")
    if args.table and not args.table.absolute().parent.is_dir():
        raise PrepError(f"--table {args.table}: there is no folder {args.table.parent}")


def _is_folder(model: str) -> bool:
    return Path(model, "config.json").is_file()


def _settings(args: argparse.Namespace) -> dict[str, Any]:
    """Return the settings of ``vllm.LLM`` for the engine whose calls are recorded."""
    options = {name: getattr(args, name) for name in ENGINE_OPTIONS}
    given = {name: value for name, value in options.items() if value is not None}
    return {"model": str(Path(args.model).absolute()), **given}
