"""Lets an API server write records when `vllm_npu_prep.server.record_client` asks.

The server asks the ranks of every engine core through vLLM, so ranks on other hosts write theirs,
too.
"""

import asyncio
import contextlib
import json
import logging
import multiprocessing
import os
import socket
import struct
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

from vllm_npu_prep.config import parse_config
from vllm_npu_prep.server.record_client import Address

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

logger = logging.getLogger(f"vllm.{__name__}")  # vLLM configures loggers below its own only

NOTHING_RECORDED = (
    "no steps are recorded: start with --additional-config "
    """'{"npu_prep": {"record": {"dir": ...}}}'"""
)
CREDENTIALS = struct.Struct("3i")  # pid, uid and gid of the connected process
ROOT = 0
LINE_SECONDS = 10
"""The longest wait for a question after a client has connected."""


@contextlib.asynccontextmanager
async def answering(
    engine: "AsyncLLM",
    port: int | None,  # port of the server's HTTP, by which users recognise it
) -> AsyncIterator[None]:
    """Accept requests for records while an API server runs."""
    records = _Records(engine, port)
    server = None
    # Several API servers have their parent in common; else this process is `vllm serve`.
    is_one_of_several = multiprocessing.current_process().name.startswith("ApiServer_")
    address = Address(os.getppid() if is_one_of_several else os.getpid(), os.getpid())
    with contextlib.ExitStack() as stack:
        try:
            sock = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            sock.bind(address.name)
            server = await asyncio.start_unix_server(records.answer, sock=sock)
        except OSError as error:  # no abstract names beyond Linux
            logger.info("`vllm-npu-prep record` will not find this server: %s.", error)
        try:
            yield
        finally:
            if server is not None:
                server.close()


class _Records:
    """The side of an API server that answers questions about its records."""

    def __init__(self, engine: "AsyncLLM", port: int | None) -> None:
        self.engine, self.port = engine, port
        self.config = parse_config(engine.vllm_config.additional_config).record

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with (
            contextlib.suppress(OSError, ValueError, LookupError, TypeError),
            contextlib.closing(writer),
        ):
            if not _is_trusted(writer.get_extra_info("socket")):
                return
            line = await asyncio.wait_for(reader.readline(), LINE_SECONDS)
            question = json.loads(line)
            if question["ask"] == "record":
                answer = await self.write(question["reason"])
            else:
                answer = self.describe()
            writer.write(json.dumps(answer).encode() + b"\n")
            await writer.drain()

    def describe(self) -> dict[str, Any]:
        return {
            "port": self.port,
            "model": self.engine.vllm_config.model_config.model,
            "record": None if self.config is None else self.config.dir,
        }

    async def write(
        self,
        reason: str,  # for the log, and for the manifest of a run whose folder this makes
    ) -> dict[str, Any]:
        """Have all ranks write their records.

        Returns
        -------
        dict
            ``ranks``: what `NPUWorker.record_steps` returns on each rank; or else ``error``.
        """
        if self.config is None:
            return {"error": NOTHING_RECORDED}
        try:
            engines = await self.engine.engine_core.call_utility_all_async(
                "collective_rpc", "record_steps", None, (reason,), None
            )
        except Exception as error:
            why = " ".join(f"{type(error).__name__}: {error}".split())
            logger.warning("Records were asked for (%s), but: %s", reason, why)
            return {"error": f"the engine could not be asked: {why}"}
        ranks = [rank for ranks in engines for rank in ranks]
        for rank in ranks:
            if not rank["steps"]:
                logger.info("Records were asked for (%s): %s.", reason, rank["answer"])
        return {"ranks": ranks}


def _is_trusted(connection: Any) -> bool:
    """Tell whether the client is this user or root; any user can connect to an abstract name."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
    return CREDENTIALS.unpack(raw)[1] in (ROOT, os.geteuid())
