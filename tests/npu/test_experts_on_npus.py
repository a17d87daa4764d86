"""Mixtures of experts on npu:0 of the emulated runtime: tokens are those of the CPU fallback.

The fallback's tokens are transformers' in float32 (`tests/engine/test_experts.py`). Here both
compute in float16. Rows that no expert computes hold NaN on the device.
"""

import json
from functools import cache
from itertools import product
from pathlib import Path

import pytest

from tests.helpers.emulator import emulate, selected, why_no_emulator
from tests.helpers.engine import REPLAYED, make_model
from tests.helpers.mixtures import MIXTURES
from tests.matrix.collect import add
from tests.npu import generate
from tests.npu.close_calls import same_but_close_calls

pytestmark = pytest.mark.skipif(bool(why_no_emulator()), reason=why_no_emulator())

MODES = ("eager", "PIECEWISE", "FULL_AND_PIECEWISE")
CASES = [
    *product(MIXTURES, ("fia", "atb"), MODES),
    ("Qwen3Moe", "fia", "FULL"),  # mixed steps replay full graphs, too
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("mixtures")


@pytest.fixture(scope="module")
def model(folder):
    """Function of a family: the folder of its model."""
    return cache(lambda family: make_model(folder / family, family, **MIXTURES[family]))


@pytest.fixture(scope="module")
def reference(model):
    """Function of a family: tokens of the CPU fallback, eagerly, in this process."""
    return cache(
        lambda family: generate.run(model(family), "reference", "float16", "sync", "eager")
    )


@pytest.fixture(scope="module")
def on_npu(request, model, tmp_path_factory):
    """Function of a case: what its engine gave. All cases of this run share a process."""

    @cache
    def run_all() -> dict[str, dict]:
        chosen = selected(request, test_tokens_are_those_of_the_cpu_fallback)
        names = [name_of(model, **params) for params in chosen]
        out = tmp_path_factory.mktemp("on_npu") / "tokens.json"
        report = out.with_name("report.json")
        result = emulate(
            *("-m", "tests.npu.generate", str(out), *names),
            options=("--delay", "skewed", "--report", str(report)),
            timeout=120 + 120 * len(names),
        )
        assert result.returncode == 0, (result.stdout + result.stderr)[-4000:]
        assert json.loads(report.read_text())["hazards"] == []
        return json.loads(out.read_text())

    def of(**case: str) -> dict:
        got = run_all()[name_of(model, **case)]
        add(got["cells"])
        return got

    return of


def name_of(model, family: str, attention: str, mode: str) -> str:
    """Of a case, as `tests.npu.generate` takes it."""
    scheduling = "sync" if mode == "PIECEWISE" else "async"
    return f"{model(family)}:{attention}:float16/{scheduling}/{mode}"


@pytest.mark.parametrize(("family", "attention", "mode"), CASES)
def test_tokens_are_those_of_the_cpu_fallback(model, reference, on_npu, family, attention, mode):
    got = on_npu(family=family, attention=attention, mode=mode)
    assert "error" not in got, got["error"]
    assert got["device"] == "npu:0"
    assert REPLAYED.get(mode, set()) <= set(got["steps"])
    expected = reference(family)
    if got["tokens"] != expected["tokens"]:  # fused operators round elsewhere
        same_but_close_calls(Path(model(family)), "sync", got, expected)
