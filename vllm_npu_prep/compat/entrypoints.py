"""Patches of vLLM's API server: it drains when stopped, and fails if its engine fails."""

import logging
import sys
from typing import Any

from vllm_npu_prep.compat.lora import once
from vllm_npu_prep.compat.patches import instead_of


def let_servers_drain_and_stop_quietly() -> None:
    """Let a server that was told to stop finish its requests, log no crash, and really stop.

    Upstream accepts new requests while it drains, then fails them; it shows no progress; it kills
    an engine whose requests are done but whose processes still run when time is up; and with
    several API servers it cuts requests at once. Here `Drain` waits for the requests first, and the
    engine then has its own time to end.

    The task that reads the engine's outputs ends when the engine does. With one order of events
    upstream logs that as ``EngineDeadError`` with a traceback, although shutdown was asked for.
    With another it cancels the task, and requests that ran out of time get no answer: their
    connections stay open, and the server waits for ever. Here they get the error in either case,
    and it isn't logged.
    """
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.core_client import AsyncMPClient
    from vllm.v1.engine.exceptions import EngineDeadError

    from vllm_npu_prep.server.draining import drain_and_shut_down

    class EngineStoppedError(EngineDeadError):
        """Says that the engine was told to stop, so that no log tells of its end."""

        def __init__(self) -> None:
            super().__init__(suppress_context=True)
            for handler in logging.getLogger("vllm").handlers:  # vLLM may have replaced them
                handler.addFilter(is_news)

    @instead_of(AsyncMPClient, "get_output_async")
    async def get_output_async(upstream: Any, self: AsyncMPClient) -> Any:
        try:
            return await upstream(self)
        except EngineDeadError:
            if not self._finalizer.alive:  # detached by `shutdown`
                raise EngineStoppedError from None
            raise

    @instead_of(AsyncLLM, "shutdown")
    def shutdown(upstream: Any, self: AsyncLLM, timeout: float | None = None) -> None:
        drain_and_shut_down(self, timeout, upstream, EngineStoppedError, _log)

    def is_news(record: logging.LogRecord) -> bool:
        return not (record.exc_info and isinstance(record.exc_info[1], EngineStoppedError))


def let_servers_drain_and_fail_with_their_engine() -> None:
    """Let a server count requests for `Drain`, write records on request, and fail with its engine.

    A server whose engine died says so and exits with code 1. Upstream's watchdog exits with code 0,
    as after a normal stop, so no supervisor would restart it. With several API servers their parent
    notices on its own.
    """
    from vllm_npu_prep.server.draining import END_SECONDS, Drain, DrainMiddleware, cause_of_death
    from vllm_npu_prep.server.record_server import answering

    entry = sys.modules.get("vllm.entrypoints.launchers.api_server.entry")
    if entry is None:
        return

    @instead_of(entry, "serve_http")
    async def serve_http(upstream: Any, app: Any, *args: Any, **kwargs: Any) -> Any:
        engine = app.state.engine_client
        engine.drain = Drain()
        # vLLM has built the app's middleware by now, so `add_middleware` would refuse.
        served = app.middleware_stack or app.build_middleware_stack()
        app.middleware_stack = DrainMiddleware(served, engine.drain)
        # A client that doesn't read its answer would keep the server running for ever.
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


def read_adapters_once_they_are_loaded() -> None:
    """Let a server that was told to load an adapter in place do so once.

    Upstream keeps the request to load, so that each later request of a client reads the folder
    again. It also warns that cached blocks of the old weights are found, which they are not
    (`compat.lora`).
    """
    from vllm.entrypoints.openai.models import serving

    @instead_of(serving.OpenAIServingModels, "load_lora_adapter")
    async def load_lora_adapter(
        upstream: Any, self: Any, request: Any, *args: Any, **kwargs: Any
    ) -> Any:
        answer = await upstream(self, request, *args, **kwargs)
        if (adapter := self.lora_requests.get(request.lora_name)) is not None:
            self.lora_requests[request.lora_name] = once(adapter)
        return answer

    serving.logger.addFilter(lambda record: not str(record.msg).startswith("Reloaded LoRA"))


def _log(line: str) -> None:
    logging.getLogger(f"vllm.{__name__}").info("%s", line)
