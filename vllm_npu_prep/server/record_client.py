"""Finds a server that runs on this host, and asks it to write its last steps.

Each API server listens on an abstract Unix socket (`vllm_npu_prep.server.record_server`), whose
name has two process ids: its own, and that of ``vllm serve``. Such a name needs no folder and
disappears with its process, however that ends.
"""

import json
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from vllm_npu_prep.errors import PrepError

NAME = "vllm-npu-prep/{root}/{pid}"
LISTED = re.compile(r"@vllm-npu-prep/(?P<root>\d+)/(?P<pid>\d+)")
LISTENS = "00010000"
"""The flags of a listening socket in ``/proc/net/unix``."""


class Address(NamedTuple):
    """Where an API server listens."""

    root: int  # process id of ``vllm serve``, which is the parent of several API servers
    pid: int  # of the API server

    @property
    def name(self) -> str:
        """The abstract name for `socket.socket.bind` and `connect`."""
        return "\0" + NAME.format(root=self.root, pid=self.pid)


def addresses() -> list[Address]:
    """Return the addresses of all API servers on this host, or in this container."""
    try:
        lines = Path("/proc/net/unix").read_text().splitlines()
    except OSError:
        return []
    found = set()
    for line in lines:
        fields = line.split()
        if len(fields) == 8 and fields[3] == LISTENS and (match := LISTED.fullmatch(fields[7])):
            found.add(Address(int(match["root"]), int(match["pid"])))
    return sorted(found)


def server_of(pid: int) -> Address | None:
    """Return an API server of the server that a process belongs to; its own, if it is one."""
    by_root: dict[int, Address] = {}
    for address in addresses():
        if address.pid == pid:
            return address
        by_root.setdefault(address.root, address)
    return next((by_root[each] for each in _and_ancestors(pid) if each in by_root), None)


def _and_ancestors(pid: int) -> Iterator[int]:
    while pid > 0:
        yield pid
        try:
            status = Path(f"/proc/{pid}/stat").read_text()
        except OSError:
            return
        pid = int(status.rpartition(")")[2].split()[1])  # names may hold spaces and brackets


def ask(address: Address, question: str, timeout: float, **more: Any) -> dict[str, Any]:
    """Ask an API server, and return its answer.

    Parameters
    ----------
    question
        ``describe`` or ``record``.
    timeout
        Seconds to wait for the answer.
    more
        Arguments of the question.

    Raises
    ------
    PrepError
        If it gives no answer, or none that is a JSON object.
    """
    answer, server = b"", f"the server (pid {address.root})"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(timeout)
        try:
            connection.connect(address.name)
            connection.sendall(json.dumps({"ask": question, **more}).encode() + b"\n")
            with connection.makefile("rb") as lines:
                answer = lines.readline()
        except TimeoutError:
            raise PrepError(
                f"{server} did not answer within {timeout:g} s: its engine is in a long step, "
                "or hangs; give a longer --timeout, or look at its log"
            ) from None
        except (BrokenPipeError, ConnectionResetError):
            pass
        except OSError as error:
            raise PrepError(f"{server}: {error.strerror}") from None
    if not answer:
        raise PrepError(
            f"{server} gave no answer: it is stopping, or belongs to another user; run the command "
            "as that user"
        )
    try:
        found = json.loads(answer)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise PrepError(
            f"{server} gave an answer that is no JSON object: {answer[:80]!r}; run the command of "
            "its environment"
        )
    return found
