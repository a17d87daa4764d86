"""Patches of vLLM's API server: it drains when told to stop, and fails with its engine."""

import functools
import logging
import sys
from typing import Any


def let_servers_drain_and_stop_quietly() -> None:
    """A server that was told to stop lets its requests end, is no crash, and does stop.

    Upstream takes new requests while it drains, and fails them in one way or another; it tells no
    progress; an engine that has its requests done but not its processes ended when time is up is
    killed; and with several API servers requests are cut at once. Here `Drain` waits for the
    requests first, and the engine then has its own time to end.

    The task that reads the engine's outputs ends when the engine does. With one order of events
    upstream logs that as ``EngineDeadError`` with a traceback, although shutdown was asked for.
    With another it cancels the task, and requests whose time was up never hear of it: their
    connections stay open, and the server waits for them for ever. Here they get the error in either
    case, and nobody logs it.
    """
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.core_client import AsyncMPClient
    from vllm.v1.engine.exceptions import EngineDeadError

    from vllm_npu_prep.server.draining import drain_and_shut_down

    upstream, upstream_shutdown = AsyncMPClient.get_output_async, AsyncLLM.shutdown
    if getattr(upstream, "stops_quietly", False):
        return

    class EngineStoppedError(EngineDeadError):
        """The engine is gone because it was told to; who logs it as an error is not heard."""

        def __init__(self) -> None:
            super().__init__(suppress_context=True)
            for handler in logging.getLogger("vllm").handlers:  # vLLM may have renewed them
                handler.addFilter(is_news)

    @functools.wraps(upstream)
    async def get_output_async(self: AsyncMPClient) -> Any:
        try:
            return await upstream(self)
        except EngineDeadError:
            if not self._finalizer.alive:  # detached by `shutdown`
                raise EngineStoppedError from None
            raise

    @functools.wraps(upstream_shutdown)
    def shutdown(self: AsyncLLM, timeout: float | None = None) -> None:
        drain_and_shut_down(self, timeout, upstream_shutdown, EngineStoppedError, _say)

    def is_news(record: logging.LogRecord) -> bool:
        return not (record.exc_info and isinstance(record.exc_info[1], EngineStoppedError))

    get_output_async.stops_quietly = True  # type: ignore[attr-defined]
    AsyncMPClient.get_output_async = get_output_async
    AsyncLLM.shutdown = shutdown  # type: ignore[method-assign]


def let_servers_drain_and_fail_with_their_engine() -> None:
    """Requests are counted for `Drain`, and records written when asked for.

    A server whose engine died ends with code 1 and says so.

    Upstream's watchdog lets it end as if it had been told to, with code 0: whoever restarts what
    fails would not. With several API servers their parent notices on its own.
    """
    from vllm_npu_prep.server.draining import END_SECONDS, Drain, DrainMiddleware, cause_of_death
    from vllm_npu_prep.server.record_server import answering

    entry = sys.modules.get("vllm.entrypoints.launchers.api_server.entry")
    if entry is None or hasattr(entry.serve_http, "__wrapped__"):
        return
    upstream = entry.serve_http

    @functools.wraps(upstream)
    async def serve_http(app: Any, *args: Any, **kwargs: Any) -> Any:
        engine = app.state.engine_client
        engine.drain = Drain()
        # vLLM has had it built by now, after which `add_middleware` refuses.
        served = app.middleware_stack or app.build_middleware_stack()
        app.middleware_stack = DrainMiddleware(served, engine.drain)
        # A client that does not read its answer would keep the server for ever.
        kwargs.setdefault("timeout_graceful_shutdown", END_SECONDS)
        async with answering(engine, kwargs.get("port")):
            stopped = await upstream(app, *args, **kwargs)
        if not engine.errored or getattr(engine, "was_told_to_stop", False):
            return stopped

        async def fail() -> None:
            await stopped
            print(
                "vllm_npu_prep: error: the engine died, and the server ends with it; "
                + cause_of_death(engine),
                file=sys.stderr,
            )
            raise SystemExit(1)

        return fail()

    entry.serve_http = serve_http  # type: ignore[attr-defined]


def _say(line: str) -> None:
    """Log a line of progress."""
    logging.getLogger(f"vllm.{__name__}").info("%s", line)
