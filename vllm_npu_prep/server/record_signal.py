"""SIGUSR1 to a process of a server that is no API server: it is passed on to one.

Where there is none, as in an engine without a server or on another host than the server's, it goes
on to the processes that this one has started, down to those that record.
"""

import _thread
import contextlib
import logging
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vllm_npu_prep.errors import PrepError
from vllm_npu_prep.server.record_client import Address, ask, server_of

logger = logging.getLogger(f"vllm.{__name__}")  # vLLM configures loggers below its own only

ANSWER_SECONDS = 60
"""Time that an API server gets to have records written."""


def survive_signals() -> None:
    """Handle SIGUSR1, which would end this process, from now on; a handler that is there stays."""
    in_main_thread = threading.current_thread() is threading.main_thread()
    if in_main_thread and signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL:
        signal.signal(signal.SIGUSR1, pass_on)


def pass_on(*_: Any) -> None:
    """Handle SIGUSR1 in a process that records nothing itself.

    A handler runs between any two lines, which may hold any lock: a thread does the rest, and is
    begun without `threading`, which has locks, too.
    """
    _thread.start_new_thread(_pass_on, ())


def _pass_on() -> None:
    server = server_of(os.getpid())
    if server is not None:
        try:
            ask(server, "record", ANSWER_SECONDS, reason="SIGUSR1")  # its log says what comes of it
        except PrepError as error:
            logger.warning("SIGUSR1: %s.", error)
        return
    children = [each.pid for each in multiprocessing.active_children() if each.pid]
    listening = [pid for pid in children if _listens(pid)]
    for pid in listening:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGUSR1)
    if not listening:
        logger.warning("SIGUSR1: no steps are recorded yet; they are once the server answers.")


def _listens(pid: int) -> bool:
    """Whether a process handles SIGUSR1, which would end it otherwise."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    caught = next(line for line in status.splitlines() if line.startswith("SigCgt:"))
    return bool(int(caught.split()[1], 16) >> (signal.SIGUSR1 - 1) & 1)


def ask_in_background(server: Address, otherwise: Callable[[], None]) -> None:
    """Ask an API server for records without waiting, and call `otherwise` if it gives none."""

    def wait() -> None:
        try:
            answer = ask(server, "record", ANSWER_SECONDS, reason="SIGUSR1")
        except PrepError:
            answer = {"error": ""}
        if "error" in answer:
            otherwise()

    _thread.start_new_thread(wait, ())
