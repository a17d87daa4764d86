"""What an API server does once it was told to stop: requests end, and none begin."""

import time
from collections.abc import Callable

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from vllm_npu_prep.progress import waiting

ALWAYS_ANSWERED = ("/metrics",)
"""Monitoring goes on while the last requests run."""
POLL_SECONDS = 0.02


class Drain:
    """Requests of one API server: how many run, and whether new ones may begin.

    The count is of HTTP requests, answers that are still being sent included: one that is being
    tokenized is not the engine's yet, and would be lost if only the engine were asked.
    """

    def __init__(self) -> None:
        self.num_running = 0
        self.is_stopping = False

    def wait(self, seconds: float, say: Callable[[str], object]) -> bool:
        """Refuse new requests from now on, and wait for those that run.

        To be called in a thread other than the one that serves them.

        Parameters
        ----------
        seconds
            How long at most.
        say
            Takes lines that tell how far it has come.

        Returns
        -------
        bool
            Whether all have ended.
        """
        deadline = time.monotonic() + seconds
        self.is_stopping = True
        if not self.num_running:
            return True
        say(f"Told to stop: up to {seconds:.0f} s for {_requests(self.num_running)} to end.")

        def status() -> str:
            left = max(0.0, deadline - time.monotonic())
            return f"{_requests(self.num_running)} left, {left:.0f} s left"

        with waiting("Draining", say, status):
            while self.num_running and time.monotonic() < deadline:
                time.sleep(POLL_SECONDS)
        if self.num_running:
            say(f"Not ended after {seconds:.0f} s, and cut: {_requests(self.num_running)}.")
        return not self.num_running


def _requests(number: int) -> str:
    return f"{number} request{'' if number == 1 else 's'}"


class DrainMiddleware:
    """Counts requests, and answers new ones with 503 once the server is stopping.

    That holds for the health check, too, so that who balances load looks elsewhere.
    """

    def __init__(self, app: ASGIApp, drain: Drain) -> None:
        self.app, self.drain = app, drain

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve or refuse one request, a websocket included (refusing it is HTTP)."""
        if scope["type"] == "lifespan" or scope["path"] in ALWAYS_ANSWERED:
            await self.app(scope, receive, send)
        elif self.drain.is_stopping:
            await _refuse(scope, receive, send)
        else:
            self.drain.num_running += 1
            try:
                await self.app(scope, receive, send)
            finally:
                self.drain.num_running -= 1


async def _refuse(scope: Scope, receive: Receive, send: Send) -> None:
    if scope["type"] == "websocket":
        await send({"type": "websocket.close", "code": 1012})  # "service restart"
        return
    error = {
        "message": "the server is stopping and takes no new requests",
        "type": "ServiceUnavailableError",
        "param": None,
        "code": 503,
    }
    # A client that keeps its connection would come back to this server.
    response = JSONResponse({"error": error}, 503, headers={"Connection": "close"})
    await response(scope, receive, send)
