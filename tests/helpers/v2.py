"""Engines of vLLM's Model Runner V2 in this process."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from tests.helpers.engine import engine
from vllm_npu_prep.compat import v2


@contextlib.contextmanager
def engine_of(runner: str, model: Path, **settings: Any) -> Iterator[Any]:
    """An engine whose runner is "V1" or "V2"; see `tests.helpers.engine.engine`."""
    asked = {v2.RUNNER_ENV_VAR: str(int(runner == "V2"))}
    with mock.patch.dict("os.environ", asked):
        if runner == "V2":  # a process does it when it starts
            v2.let_it_run_without_triton()
        with engine(model, **settings) as llm:
            yield llm
