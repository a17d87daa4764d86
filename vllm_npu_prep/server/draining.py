"""Stopping an API server: running requests finish, and new ones are refused.

`DrainMiddleware` counts the server's HTTP requests in a `Drain`, and `drain_and_shut_down` waits
for them before it stops the engine.
"""

import asyncio
import signal
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from vllm_npu_prep.progress import log_while_waiting
from vllm_npu_prep.server import one_line

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.core_client import AsyncMPClient

ALWAYS_ANSWERED = ("/metrics",)
"""Paths that are still served while the last requests run, for monitoring."""
POLL_SECONDS = 0.02
END_SECONDS = 10
"""Time after the last request for the engine's process to end, beside what its workers get."""
CUT_SECONDS = 1
"""Time to tell requests that their time is up."""


class Drain:
    """The requests of one API server: how many run, and whether new ones may begin.

    The count is of HTTP requests, answers that are still being sent included: a request that is
    being tokenized hasn't reached the engine, whose count would miss it.
    """

    def __init__(self) -> None:
        self.num_running = 0
        self.is_stopping = False

    def wait(
        self,
        seconds: float,  # longest wait
        log: Callable[[str], object],  # takes lines that tell how far it has come
    ) -> bool:
        """Refuse new requests from now on, and wait for those that run.

        This has to be called in a thread other than the one that serves them.

        Returns
        -------
        bool
            Whether all have ended.
        """
        deadline = time.monotonic() + seconds
        self.is_stopping = True
        if not self.num_running:
            return True
        log(f"Stopping: waiting up to {seconds:.0f} s for {_requests(self.num_running)} to finish.")

        def status() -> str:
            left = max(0.0, deadline - time.monotonic())
            return f"{_requests(self.num_running)} left, {left:.0f} s left"

        with log_while_waiting("Draining", log, status):
            while self.num_running and time.monotonic() < deadline:
                time.sleep(POLL_SECONDS)
        if self.num_running:
            log(
                f"Aborting {_requests(self.num_running)} that did not finish within "
                f"{seconds:.0f} s."
            )
        return not self.num_running


def _requests(number: int) -> str:
    return f"{number} request{'' if number == 1 else 's'}"


class DrainMiddleware:
    """Middleware that counts requests, and answers new ones with 503 once the server is stopping.

    The health check gets 503, too, so that load balancers choose another server.
    """

    def __init__(self, app: ASGIApp, drain: Drain) -> None:
        self.app, self.drain = app, drain

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve or refuse one request, a websocket included, whose refusal is an HTTP answer."""
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
    # A client that keeps its connection would send its next request here.
    response = JSONResponse({"error": error}, 503, headers={"Connection": "close"})
    await response(scope, receive, send)


def drain_and_shut_down(
    engine: "AsyncLLM",
    timeout: float | None,
    shut_down: Callable[..., None],  # AsyncLLM.shutdown of upstream
    stopped_error: type[Exception],  # error for requests that have not ended
    log: Callable[[str], object],
) -> None:
    """End the requests of an API server, and then its engine.

    Parameters
    ----------
    engine
        vLLM's ``AsyncLLM``. Where the server counts its requests, `engine.drain` is a `Drain`.
    timeout
        Seconds that requests get; the engine then has `END_SECONDS` of its own, and what vLLM gives
        its workers (``VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS``). The engine waits for its workers
        that long, sends them a signal, and kills them after four more seconds. With less time the
        engine would be killed itself, and its workers with it, while they give their cards back.
    """
    drain, handler = getattr(engine, "drain", None), getattr(engine, "output_handler", None)
    if drain is not None and drain.is_stopping:
        # The server's second call, at its end, may overtake the one that waited for requests
        shut_down(engine, timeout=END_SECONDS + _seconds_of_workers())
        return
    if drain is None or _serves_in_this_thread():  # not a server, or it ends without a signal
        shut_down(engine, timeout=timeout)
        return
    if not _owns_engine(engine):
        # The parent that owns it gives this process the same time, then kills it.
        timeout = max(0.0, (timeout or 0) - CUT_SECONDS)
    has_ended = drain.wait(timeout or 0, log)
    engine.was_told_to_stop = not engine.errored  # type: ignore[attr-defined]
    loop = handler.get_loop() if handler is not None else None
    outputs = engine.output_processor
    if not has_ended and loop is not None and not loop.is_closed():

        async def cut() -> None:
            outputs.propagate_error(stopped_error())
            await _client_of(engine).abort_requests_async([*outputs.request_states])

        try:
            asyncio.run_coroutine_threadsafe(cut(), loop).result(CUT_SECONDS)
        except Exception as error:  # the engine is stopped all the same
            log(f"The engine could not be told to abort them: {error!r}")
    with log_while_waiting("Waiting for the engine to stop", log):
        shut_down(engine, timeout=END_SECONDS + _seconds_of_workers())
    if loop is not None and not loop.is_closed():
        loop.call_soon_threadsafe(outputs.propagate_error, stopped_error())


def _seconds_of_workers() -> float:
    """Return how long an engine waits for its workers before it signals them."""
    from vllm import envs

    return envs.VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS


def _owns_engine(engine: "AsyncLLM") -> bool:
    """Tell whether this process started the engine's; with several API servers their parent did."""
    return _client_of(engine).resources.engine_manager is not None


def _client_of(engine: "AsyncLLM") -> "AsyncMPClient":
    """Return the engine's client, whose type upstream's decorators hide."""
    return engine.engine_core


def _serves_in_this_thread() -> bool:
    """Tell whether this thread runs an event loop, whose requests could not end while it waits."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def cause_of_death(engine: "AsyncLLM") -> str:
    """Say how an engine's process ended: one that was killed could log nothing itself.

    A step that breaks a rule is told here, since vLLM logs a dump of the step before it.
    """
    manager = _client_of(engine).resources.engine_manager
    for process in getattr(manager, "processes", ()):
        assert manager is not None
        if process.name == manager.failed_proc_name and (process.exitcode or 0) < 0:
            return f"{process.name} was killed by {_name_of(-process.exitcode)}"
    text = one_line.left() or ""
    return text if text.startswith(one_line.STEP_CHECK) else "the first error above says why"


def _name_of(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # one of the real-time signals between the first and the last
        return f"signal {number}"
