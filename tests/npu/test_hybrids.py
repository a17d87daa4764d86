"""Gated delta nets beside attention on npu:0: tokens are the CPU fallback's, in every graph mode.

What only hardware can show (numerics, speed, layout limits of real kernels) is not shown here.
"""

from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.helpers.emulator import why_no_emulator
from tests.helpers.engine import make_model
from tests.helpers.hybrids import EXPERTS, ON_NPUS
from tests.helpers.mtp import make_mtp_model
from tests.npu import generate
from tests.npu.close_calls import same_but_close_calls
from tests.npu.only_some import HEAD_SIZE

pytestmark = pytest.mark.skipif(bool(why_no_emulator()), reason=why_no_emulator())


class Model(NamedTuple):
    """A small model, and what its engine does."""

    family: str
    config: dict[str, Any]
    how: str


MODELS = {
    # A state fills the K of 128 tokens
    "Qwen3-Next": Model(
        "Qwen3Next",
        {**ON_NPUS, **EXPERTS, "head_dim": 256, "embedding_scale": 10},
        "async/FULL_AND_PIECEWISE",
    ),
    # A state fills the K of 512 tokens, which attention sees as four blocks
    "Qwen3.5": Model("Qwen3_5", {**ON_NPUS, "head_dim": HEAD_SIZE}, "sync/FULL_AND_PIECEWISE"),
    "Qwen3.5, eager": Model("Qwen3_5", {**ON_NPUS, "head_dim": HEAD_SIZE}, "async/eager"),
    "Qwen3.5 MTP": Model(
        "Qwen3_5", {**ON_NPUS, "head_dim": HEAD_SIZE}, "async/FULL_AND_PIECEWISE/mtp"
    ),
    "Qwen3.5 MoE": Model(
        "Qwen3_5Moe", {**ON_NPUS, **EXPERTS, "head_dim": HEAD_SIZE}, "async/PIECEWISE"
    ),
}
CASES = [("9.1", name) for name in MODELS] + [("8.5", "Qwen3.5"), ("docs", "Qwen3.5")]


@pytest.fixture(scope="module")
def model_of(tmp_path_factory):
    """Folder of a model."""
    folder = tmp_path_factory.mktemp("models")

    @cache
    def make(name: str) -> Path:
        config = {"spread": 0.1, "embedding_scale": 20, **MODELS[name].config}
        if MODELS[name].how.endswith("mtp"):
            return make_mtp_model(folder / name.replace(" ", "-"), MODELS[name].family, **config)[0]
        return make_model(folder / name.replace(" ", "-"), MODELS[name].family, **config)

    return make


@pytest.fixture(scope="module")
def case_of(model_of):
    """A model as `tests.npu.generate` takes it."""
    return lambda name: f"{model_of(name)}:fia:bfloat16/{MODELS[name].how}"


@pytest.mark.parametrize(("profile", "name"), CASES)
def test_tokens_equal_those_of_the_fallback(profile, name, model_of, on_card):
    """Prompts in chunks, decodes in full graphs, states in bfloat16."""
    got, how = on_card(profile, name), MODELS[name].how
    assert "error" not in got, got["error"]
    assert got["device"] == "npu:0"
    decodes = "SpecDecoding" if how.endswith("mtp") else "DecodeOnly"
    assert set(got["states"]) >= {"PrefillNoCache", "ChunkedPrefill", decodes}
    assert not how.endswith("mtp") or got["verified"]["accepted"] > 0
    kinds = {"piecewise graphs"} if "PIECEWISE" in how else {"eager: no graphs"}
    assert kinds | ({"full graph"} if "FULL" in how else set()) <= set(got["steps"])
    expected = generate.run(model_of(name), "reference", "bfloat16", "async", "eager")
    same_but_close_calls(model_of(name), "async", got, expected)
