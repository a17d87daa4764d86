"""The ``vllm-npu-prep`` command."""

import argparse
import contextlib
import importlib.util
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TextIO

from vllm_npu_prep import __version__
from vllm_npu_prep.errors import PrepError
from vllm_npu_prep.inspect.doctor import add_parser as add_doctor_parser
from vllm_npu_prep.inspect.replay import add_parser as add_replay_parser
from vllm_npu_prep.server.record_command import add_parser as add_record_parser
from vllm_npu_prep.verify.command import add_parser as add_verify_parser

if TYPE_CHECKING:
    from vllm_npu_prep.inspect.view import StepView

EMULATOR = "ascend_emulator"

FIRST_COMMANDS = """\
Will vLLM run with the plugin?  vllm-npu-prep doctor
Does this NPU compute right?    vllm-npu-prep verify-device --markdown verify-device.md
What did the last steps get?    vllm-npu-prep record; vllm-npu-prep explain steps --html run.html
Were these inputs right?        vllm-npu-prep replay steps
"steps" is the folder of the option "record"; vllm-npu-prep COMMAND --help has all options.
"""
"""What is printed when no command is given, and at the end of the help."""


class Output:
    """Standard output that remembers why it could not be written.

    Commands write by `print`, rich and argparse. argparse suppresses errors, and other errors don't
    say which file they are about.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.error: OSError | None = None

    def write(self, text: str) -> int:
        with self._remembering():
            return self._stream.write(text)

    def flush(self) -> None:
        with self._remembering():
            self._stream.flush()

    def finish(self) -> None:
        """Write buffered text now: at the interpreter's end it is too late to report an error."""
        self.flush()
        if self.error is not None:
            raise self.error

    def drop(self) -> None:
        """Discard text that can't be written, so that the interpreter's end doesn't try again."""
        try:
            self._stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())

    @contextlib.contextmanager
    def _remembering(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.error = error
            raise

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def main(argv: list[str] | None = None) -> int:
    """Run a command.

    Returns
    -------
    int
        0 on success, 1 if something differs, 2 for bad input, a device that is missing, or output
        that can't be written. These errors are one line without a traceback.
    """
    # sys.stdout is None if our parent has closed it; nobody reads it then.
    output = Output(sys.stdout or open(os.devnull, "w"))  # noqa: SIM115
    code = 2
    try:
        with contextlib.redirect_stdout(output):
            return _main(argv, output)
    except PrepError as error:
        _print_error(error)
    except BrokenPipeError:  # the reader, such as `head`, has ended
        code = 0
    except OSError as error:
        if error is output.error:
            _print_error(f"standard output can't be written: {error.strerror or error}")
        elif error.filename is not None:
            _print_error(f"{error.filename}: {error.strerror}")
        else:
            raise
    output.drop()
    return code


def _main(argv: list[str] | None, output: Output) -> int:
    arguments = sys.argv[1:] if argv is None else argv
    if not arguments:
        print(FIRST_COMMANDS, end="", file=sys.stderr)
        return 2
    if arguments[:1] == ["emulate"]:
        _emulate(arguments[1:])
    try:
        args = _parser().parse_args(arguments)
        code = args.run(args)
    except SystemExit:  # --help, or a mistake in the arguments
        output.finish()
        raise
    output.finish()
    return code or 0


def _print_error(error: object) -> None:
    with contextlib.suppress(OSError):  # the exit code remains
        print(f"vllm-npu-prep: error: {error}", file=sys.stderr)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="vllm-npu-prep",
        description="Look at the steps that vllm_npu_prep prepares, at this host and at its NPUs.",
        epilog=FIRST_COMMANDS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--version", action="version", version=__version__, help="print the plugin's version"
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    explain = commands.add_parser(
        "explain",
        help="show a step, of a scenario or of a record: state, masks, requests, tokens, blocks",
        description="Show a step: its state and the reason for it, masks, requests, tokens and KV "
        "blocks. The step of a scenario is prepared now; a record is shown as it was prepared. "
        "explain PREFILL DECODE --html FILE writes one page of two engines, of which one computes "
        "prompts and the other decodes them; each is named by its folder of records.",
    )
    explain.add_argument(
        "file",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="a scenario (JSON), a record (.npz), or a folder of records; with --html several "
        "folders, of engines that share requests",
    )
    explain.add_argument(
        "--step", type=int, metavar="N", help="number of the step, for a folder of records"
    )
    explain.add_argument("--json", action="store_true", help="print JSON instead of tables")
    explain.add_argument("--request", metavar="ID", help="show one request only")
    explain.add_argument(
        "--tokens", metavar="A:B", type=_tokens, help="show tokens A to B - 1 only"
    )
    explain.add_argument(
        "--html",
        type=Path,
        metavar="FILE",
        help="write an HTML page: a step with tables, masks and blocks, or the whole run of "
        "each folder",
    )
    explain.add_argument(
        "--step-pages",
        nargs="?",
        const=True,
        metavar="A:B",
        type=_tokens,
        help="with --html of a folder: also write a page for each step, or for steps A to B - 1, "
        "which the run's page opens; without this option, only for runs of up to 500 steps",
    )
    explain.add_argument(
        "--no-step-pages",
        action="store_const",
        const=False,
        dest="step_pages",
        help="with --html of a folder: write no page for any step",
    )
    explain.add_argument(
        "--png",
        type=Path,
        metavar="FILE",
        help="draw masks, blocks and recurrent states into a PNG file",
    )
    explain.set_defaults(run=_explain)
    add_doctor_parser(commands)
    add_record_parser(commands)
    add_replay_parser(commands)
    add_verify_parser(commands)
    commands.add_parser(  # `main` does not come here for it: its options are those of its command
        "emulate",
        help="run a command on emulated Ascend devices",
        description="Run ascend-emulator, and take its options.",
        add_help=False,
    )
    return parser


def _emulate(arguments: list[str]) -> NoReturn:
    """Become the emulator's command, which is a separate package that is never imported here."""
    if importlib.util.find_spec(EMULATOR) is None:
        raise PrepError(
            f"emulate needs the package {EMULATOR}, which is not installed: "
            "pip install ./emulator in a checkout of this project"
        )
    # -P: files in the current folder are not mistaken for modules.
    os.execv(sys.executable, [sys.executable, "-P", "-m", EMULATOR, *arguments])


def _explain_run(paths: list[Path], html: Path, steps: bool | tuple[int, int] | None) -> int:
    """Write the page of a whole run and, unless there are too many, the pages of its steps.

    `steps` is the value of ``--step-pages``: True for all steps, a span, False for none, and None
    if the option was not given.
    """
    from vllm_npu_prep.files import check_replaceable, write_whole
    from vllm_npu_prep.inspect.run import read_run
    from vllm_npu_prep.inspect.run_page import run_html
    from vllm_npu_prep.inspect.run_steps import MOST_UNASKED, StepPages
    from vllm_npu_prep.wording import counted

    check_replaceable(html)  # before pages of steps are written beside it
    run = read_run(*paths)
    number = sum(len(rank.index) for rank in run.ranks)
    too_many = steps is None and number > MOST_UNASKED
    pages = None
    if steps is not False and not too_many:
        pages = StepPages(html, steps if isinstance(steps, tuple) else None)
    written = 0 if pages is None else pages.write(run)
    page = run_html(run, pages).encode()
    write_whole(html, page)
    names = {name for ranks in run.engines.values() for name in ranks[0].requests}
    requests = counted(len(names), "request")
    print(
        f"{html}: {counted(len(run.numbers), 'step')} of {counted(len(run.ranks), 'rank')}, "
        f"{requests}; {len(page):,} bytes"
    )
    if pages is not None:
        print(f"{pages.folder}: {counted(written, 'page')} of steps")
    elif too_many:
        of_run = counted(number, "step")
        print(f"no pages of {of_run}: --step-pages writes them, --step-pages A:B some")
    for name in run.older:
        where = " or ".join(map(str, paths))
        print(f"not shown: {name}, an older run in {where}; give its folder to see it")
    return 0


def _explain(args: argparse.Namespace) -> int:
    from rich.console import Console

    from vllm_npu_prep.files import write_whole
    from vllm_npu_prep.inspect.explain import explain_json
    from vllm_npu_prep.inspect.terminal import explain_text

    if args.html and args.step is None and all(path.is_dir() for path in args.file):
        if args.json or args.png or args.request or args.tokens:
            raise PrepError(
                f"--html: {args.file[0]} is a folder, whose page shows a whole run and takes no "
                "other option; choose a step by --step N"
            )
        return _explain_run(args.file, args.html, args.step_pages)
    if len(args.file) > 1:
        raise PrepError(
            f"several files are given: {', '.join(map(str, args.file))}; give one, or, to see "
            "several engines on one page, the folder of each with --html FILE and without --step"
        )
    if args.step_pages is not None:
        raise PrepError("--step-pages goes with --html and a folder of records, without --step")
    if args.json and (args.request or args.tokens):
        raise PrepError("--json prints the whole step: leave out --request and --tokens")
    view = _view_of(args.file[0], args.step)
    console = Console()
    if args.html:
        from vllm_npu_prep.inspect.page import explain_html

        page = explain_html(view, args.request, args.tokens)
        write_whole(args.html, page.encode())
    if args.png:
        from vllm_npu_prep.inspect.png import explain_png

        write_whole(args.png, explain_png(view, args.request, args.tokens))
    if args.json:
        print(json.dumps(explain_json(view)))
    elif not (args.html or args.png):
        explain_text(view, console, args.request, args.tokens)
    return 0


def _is_recorded(path: Path) -> bool:
    from vllm_npu_prep.records.record_file import RECORD_SUFFIX

    return path.is_dir() or path.suffix == RECORD_SUFFIX


def _view_of(path: Path, step: int | None) -> "StepView":
    from vllm_npu_prep.inspect.view import StepView, view_of_record
    from vllm_npu_prep.records.record_file import record_of
    from vllm_npu_prep.records.scenario import read_scenario

    if not _is_recorded(path):
        if step is not None:
            raise PrepError(f"--step {step}: {path} is a scenario, which has one step")
        return StepView.of_scenario(read_scenario(path))
    return view_of_record(record_of(path, step))


def _tokens(text: str) -> tuple[int, int]:
    first, colon, end = text.partition(":")
    if not (colon and first.isdecimal() and end.isdecimal()):
        raise argparse.ArgumentTypeError(f"{text!r} is not A:B, two numbers")
    return int(first), int(end)


if __name__ == "__main__":
    sys.exit(main())
