"""Models that many files use, and a transfer engine and a store of this process."""

from pathlib import Path

import pytest

from tests.helpers.engine import make_model
from tests.helpers.mooncake import (
    MooncakeDistributedStore,
    TransferEngine,
    stand_in,
    stand_in_for_store,
)


@pytest.fixture(scope="session")
def qwen3(tmp_path_factory) -> Path:
    return make_model(tmp_path_factory.mktemp("qwen3"))


@pytest.fixture
def mooncake(monkeypatch) -> type[TransferEngine]:
    """A stand-in where vLLM and start-up look for Mooncake; its addresses are of this host."""
    return stand_in(monkeypatch)


@pytest.fixture
def store(monkeypatch, tmp_path) -> type[MooncakeDistributedStore]:
    """A stand-in where vLLM and start-up look for Mooncake's store."""
    return stand_in_for_store(monkeypatch, tmp_path)
