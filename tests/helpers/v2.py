"""Engines of vLLM's Model Runner V2 in this process."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.helpers.engine import engine
from vllm_npu_prep.compat.v2 import RUNNER_ENV_VAR

RUNNERS = ("V2", "V1")
"""vLLM's model runners, by which tests of an engine are parametrised."""
ALSO_V2 = ("V2", pytest.param("V1", id=pytest.HIDDEN_PARAM))
"""The same, without V1 in ids; above other parameters, -V2 comes last."""


def on_both(cases: dict[str, Any]) -> list[Any]:
    """Parameters by id, or tuples of several, each with "V2" and with "V1" after it.

    Ids of the former end in -V2.
    """
    return [
        pytest.param(
            *(values if isinstance(values, tuple) else (values,)),
            runner,
            id=name if runner == "V1" else f"{name}-{runner}",
        )
        for runner in RUNNERS
        for name, values in cases.items()
    ]


@contextlib.contextmanager
def asked_for(runner: str) -> Iterator[None]:
    """Engines that begin here, and their processes, have the runner "V1" or "V2"."""
    asked = {RUNNER_ENV_VAR: str(int(runner == "V2"))}
    import vllm.platforms
    from vllm import envs

    _ = vllm.platforms.current_platform  # whose choice of a device sets variables for good
    envs.disable_envs_cache()  # which an engine that is still alive has begun
    with mock.patch.dict("os.environ", asked):
        yield


@contextlib.contextmanager
def engine_of(runner: str, model: Path, /, **settings: Any) -> Iterator[Any]:
    """An engine whose runner is "V1" or "V2"; see `tests.helpers.engine.engine`."""
    with asked_for(runner), engine(model, **settings) as llm:
        try:
            yield llm
        finally:
            del llm  # an import that fails later keeps this frame, for good
