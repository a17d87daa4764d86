"""Makes processes end when their parent is gone, survive SIGUSR1, and be known to have ended.

A process that is killed by SIGKILL can't tell its children. They would run for ever, and keep their
memory and the card.
"""

import logging
import multiprocessing
import multiprocessing.util
import os
import re
import signal
import sys
import threading
import time
from multiprocessing.process import BaseProcess
from typing import Any

import psutil

logger = logging.getLogger(f"vllm.{__name__}")  # vLLM configures loggers below its own only

SERVERS = {"vllm.entrypoints.cli.main", "vllm.entrypoints.launchers.api_server.entry"}
"""Modules that a process of ``vllm serve`` has imported, and a user's own program has not."""
STARTED_BY_VLLM = re.compile(
    r"EngineCore(_DP\d+)?|VllmWorker-\d+|ApiServer_\d+|APIServer_DPRank_\d+|VLLM_DP_Coordinator"
)
"""Names that vLLM gives the processes that it starts by `multiprocessing`."""
POLL_SECONDS = 0.5
"""The interval between two looks at the parent. A look costs microseconds. The alternatives are
worse: a pidfd needs Linux 5.3, and ``prctl`` signals the end of the parent's thread, which may
come long before the parent's.
"""
END_SECONDS = 5.0
"""The time between SIGTERM and the exit by force."""
THREAD = "npu_prep watches its parent"


def look_after_processes() -> None:
    """Watch the parent of this process, if it is vLLM's own, and of processes forked from it.

    This has to be called when vLLM looks for its platform: not all of its processes load general
    plugins, and forked processes load nothing again.
    """
    if SERVERS & sys.modules.keys():
        ignore_sigusr1()
    _look_after_child()
    multiprocessing.util.register_after_fork(watch_parent, lambda _: _look_after_child())


def _look_after_child() -> None:
    """Watch the parent if vLLM started this process; we must not end a user's own process."""
    if STARTED_BY_VLLM.fullmatch(multiprocessing.current_process().name):
        ignore_sigusr1()
        watch_parent()


def ignore_sigusr1() -> None:
    """Keep SIGUSR1 from ending this process: old scripts may send it to ask for records."""
    in_main_thread = threading.current_thread() is threading.main_thread()
    if in_main_thread and signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL:
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)


def watch_parent() -> None:
    """End this process when its parent is gone: as by SIGTERM, and by force after `END_SECONDS`.

    A thread watches. Calls after the first do nothing.
    """
    if any(each.name == THREAD for each in threading.enumerate()):
        return
    parent = os.getppid()
    threading.Thread(target=_watch, args=(parent,), daemon=True, name=THREAD).start()


def _watch(parent: int) -> None:
    name = multiprocessing.current_process().name
    started_by = multiprocessing.parent_process()
    if started_by is None or started_by.is_alive():
        while os.getppid() == parent:
            time.sleep(POLL_SECONDS)
    logger.warning("%s stops: the process that started it (pid %d) is gone.", name, parent)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(END_SECONDS)
    logger.warning("%s did not stop within %.0f s: it exits now.", name, END_SECONDS)
    os._exit(1)


class Child:
    """A process of an engine that one thread stops while another thread waits for its end, too.

    Both threads ask the system how it ended, and one of them is told. Until that one has noted it,
    `multiprocessing` tells the other that the process still runs; vLLM then logs that it kills it.
    Therefore `is_alive` also asks the system whether the process exists.
    """

    def __init__(self, process: BaseProcess) -> None:
        self._process = process

    def is_alive(self) -> bool:
        pid = self._process.pid
        return self._process.is_alive() and pid is not None and psutil.pid_exists(pid)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._process, name)
