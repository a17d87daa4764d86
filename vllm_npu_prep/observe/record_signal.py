"""Forwards SIGUSR1 from any process of a server to its API server.

If there is none, because the engine has no server or the server is on another host, the signal is
passed on to the processes that this process has started, down to those that record.
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
from vllm_npu_prep.observe.record_client import Address, ask, server_of

logger = logging.getLogger(f"vllm.{__name__}")  # vLLM configures loggers below its own only

ANSWER_SECONDS = 60
"""The longest wait for an API server to have records written."""


def survive_signals() -> None:
    """Handle SIGUSR1, which would otherwise end this process; an existing handler is kept."""
    in_main_thread = threading.current_thread() is threading.main_thread()
    if in_main_thread and signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL:
        signal.signal(signal.SIGUSR1, pass_on)


def pass_on(*_: Any) -> None:
    """Handle SIGUSR1 in a process that records nothing itself.

    A handler can interrupt code that holds any lock, so a thread does the work. It is started
    without `threading`, which has locks, too.
    """
    _thread.start_new_thread(_pass_on, ())


def _pass_on() -> None:
    server = server_of(os.getpid())
    if server is not None:
        try:
            ask(server, "record", ANSWER_SECONDS, reason="SIGUSR1")  # its log has the result
        except PrepError as error:
            logger.warning("SIGUSR1: %s.", error)
        return
    children = [each.pid for each in multiprocessing.active_children() if each.pid]
    listening = [pid for pid in children if _listens(pid)]
    for pid in listening:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGUSR1)
    if not listening:
        logger.warning(
            "SIGUSR1: no steps are recorded yet. Recording begins when the server is ready."
        )


def _listens(pid: int) -> bool:
    """Tell whether a process handles SIGUSR1, which would otherwise end it."""
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
