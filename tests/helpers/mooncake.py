"""Mooncake's transfer engine, of this process: what moves is copied within it, and looked at."""

import ctypes
import itertools
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

PORTS = itertools.count(1)
ENGINES: dict[str, "TransferEngine"] = {}
"""All engines by the address under which others write to their memory."""


class TransferEngine:
    """The part of ``mooncake.engine.TransferEngine`` that vLLM's connector calls.

    `on_write` is called before each transfer, and returns what the transfer does.
    """

    on_write: Callable[[], int] = staticmethod(lambda: 0)

    def initialize(self, host: str, metadata: str, protocol: str, device: str) -> int:
        assert (metadata, protocol, device) == ("P2PHANDSHAKE", "tcp", "")
        self.port, self.memory = next(PORTS), []
        ENGINES[f"{host}:{self.port}"] = self
        return 0

    def get_rpc_port(self) -> int:
        return self.port

    def batch_register_memory(self, starts: list[int], sizes: list[int]) -> int:
        self.memory += zip(starts, sizes)
        return 0

    def has(self, start: int, size: int) -> bool:
        return any(first <= start and start + size <= first + n for first, n in self.memory)

    def batch_transfer_sync_write(
        self, session: str, sources: list[int], targets: list[int], sizes: list[int]
    ) -> int:
        result = self.on_write()
        for source, target, size in zip(sources, targets, sizes, strict=True):
            assert self.has(source, size) and ENGINES[session].has(target, size)
            if result == 0:
                ctypes.memmove(target, source, size)
        return result


def stand_in(monkeypatch: pytest.MonkeyPatch) -> type[TransferEngine]:
    """Put the stand-in where vLLM and start-up look for Mooncake, with addresses of this host."""
    module: Any = ModuleType("mooncake.engine")
    module.TransferEngine = TransferEngine
    monkeypatch.setitem(sys.modules, "mooncake", ModuleType("mooncake"))
    monkeypatch.setitem(sys.modules, "mooncake.engine", module)
    monkeypatch.setattr(
        "vllm.distributed.kv_transfer.kv_connector.v1.mooncake.mooncake_connector.TransferEngine",
        TransferEngine,
    )
    monkeypatch.setattr(TransferEngine, "on_write", staticmethod(lambda: 0))
    monkeypatch.setenv("VLLM_HOST_IP", "127.0.0.1")
    return TransferEngine
