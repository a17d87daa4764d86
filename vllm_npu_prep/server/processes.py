"""Processes of an engine end when the one that started them is gone, and survive SIGUSR1.

A process that is killed by SIGKILL can tell nobody. Its children would live on for ever, and keep
their memory and the card.
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

from vllm_npu_prep.server.record_signal import survive_signals

logger = logging.getLogger(f"vllm.{__name__}")  # vLLM configures loggers below its own only

SERVERS = {"vllm.entrypoints.cli.main", "vllm.entrypoints.launchers.api_server.entry"}
"""Modules that a process of ``vllm serve`` has, and a program that only computes has not."""
STARTED_BY_VLLM = re.compile(
    r"EngineCore(_DP\d+)?|VllmWorker-\d+|ApiServer_\d+|APIServer_DPRank_\d+|VLLM_DP_Coordinator"
)
"""Names that vLLM gives the processes that it starts by `multiprocessing`."""
POLL_SECONDS = 0.5
"""How often to look. Asking the system costs microseconds; a pidfd needs Linux 5.3, and the death
signal of ``prctl`` comes when the parent's thread ends, which may be long before the parent does.
"""
END_SECONDS = 5.0
"""Time that an orderly end gets."""
THREAD = "npu_prep watches its parent"


def look_after_processes() -> None:
    """Look after this process, if it is vLLM's own, and after those that are forked from it.

    To be called where vLLM looks for its platform: not all of its processes ask for general
    plugins, and those that are forked ask for nothing again.
    """
    if SERVERS & sys.modules.keys():
        survive_signals()
    _look_after_child()
    multiprocessing.util.register_after_fork(watch_parent, lambda _: _look_after_child())


def _look_after_child() -> None:
    """Do so in a process that vLLM has started; a user's own is not ours to end."""
    if STARTED_BY_VLLM.fullmatch(multiprocessing.current_process().name):
        survive_signals()
        watch_parent()


def watch_parent() -> None:
    """End this process once its parent is gone: as on SIGTERM, and after `END_SECONDS` at once.

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
    logger.warning("The process that started it (pid %d) is gone: %s ends.", parent, name)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(END_SECONDS)
    logger.warning("%s did not end within %.0f s: it exits now.", name, END_SECONDS)
    os._exit(1)
