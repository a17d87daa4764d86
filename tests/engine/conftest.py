"""Models that many files use, and a transfer engine of this process."""

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.helpers.engine import make_model
from tests.helpers.mooncake import TransferEngine


@pytest.fixture(scope="session")
def qwen3(tmp_path_factory) -> Path:
    return make_model(tmp_path_factory.mktemp("qwen3"))


@pytest.fixture
def mooncake(monkeypatch) -> type[TransferEngine]:
    """A stand-in where vLLM and start-up look for Mooncake; its addresses are of this host."""
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
