"""Waiting for what another process, thread or coroutine does."""

import asyncio
import os
import time
from collections.abc import Callable

LIMIT = max(600, int(os.environ.get("NPU_PREP_TEST_SECONDS", "0")))
"""Seconds after which a test gives up on what it waits for: an engine's start or answer, a child's
end. It decides nothing else: on a machine that has much other work everything comes later."""
PAUSE = 0.02


def wait_until(is_so: Callable[[], object], seconds: float = LIMIT) -> None:
    """Look until it is so, where nobody tells: at a file, a log or a server.

    Raises
    ------
    AssertionError
        If it is not so after the limit.
    """
    asyncio.run(until(is_so, seconds))


async def until(is_so: Callable[[], object], seconds: float = LIMIT) -> None:
    """The same, beside other coroutines."""
    deadline = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < deadline, f"not so after {seconds} s"
        await asyncio.sleep(PAUSE)
