"""Models that many files use."""

from pathlib import Path

import pytest

from tests.helpers.engine import make_model


@pytest.fixture(scope="session")
def qwen3(tmp_path_factory) -> Path:
    return make_model(tmp_path_factory.mktemp("qwen3"))
