"""Mooncake's transfer engine and store, of this process: what moves is copied within it."""

import ctypes
import itertools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

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


class MooncakeDistributedStore:
    """The part of ``mooncake.store.MooncakeDistributedStore`` that vLLM's connector calls.

    `objects` has what all stores of the process keep. `read` and `write` move the bytes of a
    device; `on_load` is called before each load.
    """

    objects: ClassVar[dict[str, list[bytes]]] = {}
    read: Callable[[int, int], bytes] = staticmethod(ctypes.string_at)
    write: Callable[[int, bytes], Any] = staticmethod(
        lambda at, of: ctypes.memmove(at, of, len(of))
    )
    on_load: Callable[[], Any] = staticmethod(lambda: None)

    def setup(self, *_: Any) -> int:
        self.memory: list[tuple[int, int]] = []
        return 0

    def close(self) -> None:
        self.memory.clear()

    def register_buffer(self, start: int, size: int) -> int:
        self.memory.append((start, size))
        return 0

    def check(self, starts: list[int], sizes: list[int]) -> None:
        for start, size in zip(starts, sizes, strict=True):
            assert any(at <= start and start + size <= at + n for at, n in self.memory)

    def batch_is_exist(self, keys: list[str]) -> list[int]:
        return [int(key in self.objects) for key in keys]

    def batch_put_from_multi_buffers(
        self, keys: list[str], starts: list[list[int]], sizes: list[list[int]], config: Any
    ) -> list[int]:
        for key, at, of in zip(keys, starts, sizes, strict=True):
            self.check(at, of)
            self.objects[key] = [self.read(*each) for each in zip(at, of)]
        return [0] * len(keys)

    def batch_get_into_multi_buffers(
        self, keys: list[str], starts: list[list[int]], sizes: list[list[int]]
    ) -> list[int]:
        self.on_load()
        loaded = []
        for key, at, of in zip(keys, starts, sizes, strict=True):
            self.check(at, of)
            found = self.objects.get(key, [])
            if [*map(len, found)] == of:
                for start, part in zip(at, found):
                    self.write(start, part)
            loaded.append(sum(of) if found else -1)
        return loaded

    def remove_all(self, force: bool) -> int:
        self.objects.clear()
        return 0


class ReplicateConfig:
    """How many copies of an object there are, which the stand-in doesn't ask."""


def stand_in_for_store(
    monkeypatch: pytest.MonkeyPatch, folder: Path
) -> type[MooncakeDistributedStore]:
    """Put the stand-in where vLLM and start-up look for Mooncake's store, empty."""
    stand_in(monkeypatch)
    module: Any = ModuleType("mooncake.store")
    module.MooncakeDistributedStore = MooncakeDistributedStore
    module.ReplicateConfig = ReplicateConfig
    monkeypatch.setitem(sys.modules, "mooncake.store", module)
    for name, value in {"objects": {}, "on_load": staticmethod(lambda: None)}.items():
        monkeypatch.setattr(MooncakeDistributedStore, name, value)
    monkeypatch.setenv("MOONCAKE_CONFIG_PATH", str(described_store(folder)))
    return MooncakeDistributedStore


def described_store(folder: Path, port: int = 50051, **settings: Any) -> Path:
    """The file in which an engine finds the store whose master has this port."""
    file = folder / f"store-{port}.json"
    settings = {"protocol": "tcp", "metadata_server": "P2PHANDSHAKE"} | settings
    file.write_text(json.dumps(settings | {"master_server_address": f"127.0.0.1:{port}"}))
    return file


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
