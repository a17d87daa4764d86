"""The command ``vllm-npu-prep record``: a running server writes its last steps, and says where."""

import argparse
import json
import sys
from typing import Any

from vllm_npu_prep.errors import PrepError
from vllm_npu_prep.server.record_client import Address, addresses, ask, server_of
from vllm_npu_prep.wording import seconds

DESCRIBE_SECONDS = 10
REASON = "vllm-npu-prep record"


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "record",
        help="ask a running server to write its last steps, and print where they are",
        description="Ask a running server to write its last steps, and print where they are. The "
        "server goes on. The exit code is 0 if steps were written, 1 if no step is new or the "
        "engine does not answer, 2 if there is no such server or it was started without "
        '"record".',
    )
    parser.add_argument(
        "server",
        type=int,
        nargs="?",
        metavar="SERVER",
        help="its port, or the process id of any of its processes; needed if several servers run",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of lines")
    parser.add_argument(
        "--timeout",
        type=seconds,
        default=60.0,
        metavar="SECONDS",
        help="how long to wait for the engine (default 60)",
    )
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    server = _server(args.server)
    try:
        answer = ask(server, "record", args.timeout, reason=REASON)
    except PrepError as error:
        print(f"vllm-npu-prep: error: {error}", file=sys.stderr)
        return 1
    if "error" in answer:
        raise PrepError(f"the server (pid {server.root}): {answer['error']}")
    ranks = answer.get("ranks")
    if ranks is None:
        raise PrepError(
            f"the server (pid {server.root}) gave an answer without ranks: {answer}; run the "
            "command of its environment"
        )
    if args.json:
        print(json.dumps({"pid": server.root, "ranks": ranks}))
    else:
        for rank in ranks:
            print(rank["answer"])
    return 0 if any(rank["steps"] for rank in ranks) else 1


def _server(number: int | None) -> Address:
    """Return the server that was asked for by port or process id, or the only one there is."""
    found = {address.root: address for address in reversed(addresses())}
    if not found:
        raise PrepError(
            "no server with this plugin runs on this host, or in this container; a server that "
            "is still starting can't be found yet"
        )
    if number is None and len(found) == 1:
        return next(iter(found.values()))
    known = {root: _describe(address) for root, address in sorted(found.items())}
    if number is not None:
        for root, description in known.items():
            if description.get("port") == number:
                return found[root]
        if (address := server_of(number)) is not None:
            return address
    lines = [_line(root, description) for root, description in known.items()]
    if number is None:
        raise PrepError(f"{len(known)} servers run here; name one: {'; '.join(lines)}")
    raise PrepError(f"no server has port or process {number}; servers here: {'; '.join(lines)}")


def _describe(address: Address) -> dict[str, Any]:
    try:
        return ask(address, "describe", DESCRIBE_SECONDS)
    except PrepError:
        return {}


def _line(root: int, description: dict[str, Any]) -> str:
    port, model = description.get("port", "?"), description.get("model", "does not answer")
    return f"pid {root}, port {port}: {model}"
