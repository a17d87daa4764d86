"""Logs the reason for every wait that takes longer than two seconds.

Loading, compiling and probing can take minutes, during which an engine would otherwise be silent.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

from vllm_npu_prep.wording import counted

FIRST_SECONDS = 2.0
"""Waits that are shorter are not worth a line."""
LARGEST_PAUSE = 30.0
"""The longest time between two lines in seconds; the pause doubles from line to line until then."""


@contextlib.contextmanager
def log_while_waiting(
    what: str,  # reason for the wait, which begins each line
    # Called with each line, in another thread; a logger's `info`, for example
    log: Callable[[str], object],
    status: Callable[[], str] | None = None,  # returns the progress so far; called for each line
) -> Iterator[None]:
    """Log that `what` takes time: after 2, 4, 8, ... seconds, and at its end."""
    start, done = time.monotonic(), threading.Event()

    def tell() -> None:
        pause = FIRST_SECONDS
        while not done.wait(pause):
            seconds = time.monotonic() - start
            log(f"{what}: {seconds:.0f} s" + (f", {status()}" if status else "") + " ...")
            pause = min(seconds, LARGEST_PAUSE)

    teller = threading.Thread(target=tell, daemon=True, name="npu_prep log_while_waiting")
    teller.start()
    try:
        yield
    finally:
        done.set()
        teller.join()  # so that none of its lines comes after the end
        seconds = time.monotonic() - start
        if seconds > FIRST_SECONDS:
            log(f"{what}: {seconds:.0f} s in all")


@contextlib.contextmanager
def log_while_compiling(log: Callable[[str], object]) -> Iterator[None]:
    """Log a wait while numba loads code from its cache, and compiles missing functions."""
    from numba.core import event  # slow; not needed by processes that prepare no steps

    with (
        event.install_recorder("numba:compile") as compiled,
        log_while_waiting(
            "Compiling host code",
            log,
            lambda: (
                counted(sum(each.is_end for _, each in compiled.buffer), "function") + " so far"
            ),
        ),
    ):
        yield
