"""The ``vllm-npu-prep`` command."""

import argparse
import json
import os
import sys
from pathlib import Path

from vllm_npu_prep import __version__
from vllm_npu_prep.emulator.run import add_parser as add_emulate_parser
from vllm_npu_prep.errors import PrepError


def main(argv: list[str] | None = None) -> int:
    """Run a command; 0 on success, 2 for bad input, which gets one line and no traceback."""
    args = _parser().parse_args(argv)
    try:
        code = args.run(args)
        sys.stdout.flush()
    except PrepError as error:
        print(f"vllm-npu-prep: error: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader, `head` say, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return code or 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="vllm-npu-prep", description="Look at how vllm_npu_prep prepares a step."
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    explain = commands.add_parser(
        "explain", help="prepare a scenario's step and show every variable by level"
    )
    explain.add_argument("file", type=Path, metavar="FILE", help="a scenario, as JSON")
    explain.add_argument("--json", action="store_true", help="print JSON instead of tables")
    explain.add_argument("--request", metavar="ID", help="show one request only")
    explain.add_argument(
        "--tokens", metavar="A:B", type=_tokens, help="show tokens A to B - 1 only"
    )
    explain.set_defaults(run=_explain)
    add_emulate_parser(commands)
    return parser


def _explain(args: argparse.Namespace) -> None:
    from rich.console import Console

    from vllm_npu_prep.inspect.explain import explain_json, explain_text
    from vllm_npu_prep.inspect.scenario import read_scenario
    from vllm_npu_prep.inspect.view import StepView

    view = StepView.of_scenario(read_scenario(args.file))
    if args.json:
        print(json.dumps(explain_json(view)))
    else:
        explain_text(view, Console(), args.request, args.tokens)


def _tokens(text: str) -> tuple[int, int]:
    """Argument ``A:B``."""
    first, colon, end = text.partition(":")
    if not (colon and first.isdecimal() and end.isdecimal()):
        raise argparse.ArgumentTypeError(f"{text!r} is not A:B, two numbers")
    return int(first), int(end)


if __name__ == "__main__":
    sys.exit(main())
