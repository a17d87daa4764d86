"""Says what is waited for, on every wait that takes longer than two seconds."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

from vllm_npu_prep.wording import counted

FIRST_SECONDS = 2.0
"""Shorter waits are not worth a line."""
LARGEST_PAUSE = 30.0
"""Time between two lines at most; before, each comes after twice the time of the last."""


@contextlib.contextmanager
def waiting(
    what: str, say: Callable[[str], object], status: Callable[[], str] | None = None
) -> Iterator[None]:
    """Say that `what` takes time while it does: after 2, 4, 8, ... seconds, and at its end.

    Parameters
    ----------
    what
        What is waited for, to begin a line with.
    say
        Takes the lines, in a thread of its own; a logger's `info`, for example.
    status
        How far it has come, asked for each line.
    """
    start, done = time.monotonic(), threading.Event()

    def tell() -> None:
        pause = FIRST_SECONDS
        while not done.wait(pause):
            seconds = time.monotonic() - start
            say(f"{what}: {seconds:.0f} s" + (f", {status()}" if status else "") + " ...")
            pause = min(seconds, LARGEST_PAUSE)

    teller = threading.Thread(target=tell, daemon=True, name="npu_prep waiting")
    teller.start()
    try:
        yield
    finally:
        done.set()
        teller.join()  # no line of it comes after its end
        seconds = time.monotonic() - start
        if seconds > FIRST_SECONDS:
            say(f"{what}: {seconds:.0f} s in all")


@contextlib.contextmanager
def waiting_for_compiled_code(say: Callable[[str], object]) -> Iterator[None]:
    """`waiting` while numba loads code from its cache, and compiles what it does not find there."""
    from numba.core import event  # a process that prepares no step does without

    with (
        event.install_recorder("numba:compile") as compiled,
        waiting(
            "Compiling code of the host",
            say,
            lambda: (
                counted(sum(each.is_end for _, each in compiled.buffer), "function") + " so far"
            ),
        ),
    ):
        yield
