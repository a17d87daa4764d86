"""Gated delta nets beside attention on npu:0: tokens are the CPU fallback's, in every graph mode.

What only hardware can show (numerics, speed, layout limits of real kernels) is not shown here.
"""

from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.engine.test_record import check, records_in
from tests.helpers.emulator import emulate, why_no_emulator
from tests.helpers.engine import make_model
from tests.helpers.hybrids import EXPERTS, ON_NPUS
from tests.helpers.mtp import make_mtp_model
from tests.npu import generate
from tests.npu.close_calls import same_but_close_calls
from tests.npu.only_some import HEAD_SIZE
from vllm_npu_prep.inspect.replay import replay_core, replay_oracle

pytestmark = pytest.mark.skipif(bool(why_no_emulator()), reason=why_no_emulator())


class Model(NamedTuple):
    """A small model, and what its engine does."""

    family: str
    config: dict[str, Any]
    how: str
    one_of: int = 4  # prompts may part, at a close call


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
    "Qwen3.5, V2": Model(
        "Qwen3_5", {**ON_NPUS, "head_dim": HEAD_SIZE}, "async-v2/FULL_AND_PIECEWISE"
    ),
    "Qwen3.5 MTP, V2": Model(
        "Qwen3_5", {**ON_NPUS, "head_dim": HEAD_SIZE}, "async-v2/FULL_AND_PIECEWISE/mtp"
    ),
    "Qwen3.5 MoE": Model(
        "Qwen3_5Moe", {**ON_NPUS, **EXPERTS, "head_dim": HEAD_SIZE}, "async/PIECEWISE"
    ),
    "Qwen3-Next MTP": Model(
        "Qwen3Next",
        {**ON_NPUS, **EXPERTS, "head_dim": 256},
        "async/FULL_AND_PIECEWISE/mtp",
    ),
    # Blocks of 128 tokens, too few for four requests. The second model parts from the fallback in
    # three prompts of eight, also with as many blocks as it likes: tokens are the same there.
    "Qwen3.5, preempted": Model(
        "Qwen3_5",
        {**ON_NPUS, "head_dim": 256},
        "async/FULL_AND_PIECEWISE//recorded-15",
    ),
    "Qwen3.5 MTP, preempted": Model(
        "Qwen3_5",
        {**ON_NPUS, "head_dim": 256},
        "sync/FULL_AND_PIECEWISE/mtp/recorded-19",
        one_of=2,
    ),
}
CASES = [("9.1", name) for name in MODELS] + [("docs", "Qwen3.5")]


def drafts(name: str) -> bool:
    """Whether a model's MTP layer drafts."""
    return "mtp" in MODELS[name].how.split("/")


@pytest.fixture(scope="module")
def model_of(tmp_path_factory):
    """Folder of a model."""
    folder = tmp_path_factory.mktemp("models")

    @cache
    def make(name: str) -> Path:
        config = {"spread": 0.1, "embedding_scale": 20, **MODELS[name].config}
        model = folder / name.replace(" ", "-").replace(",", "")
        if drafts(name):
            return make_mtp_model(model, MODELS[name].family, **config)[0]
        return make_model(model, MODELS[name].family, **config)

    return make


@pytest.fixture(scope="module")
def case_of(model_of):
    """A model as `tests.npu.generate` takes it."""
    return lambda name: f"{model_of(name)}:fia:bfloat16/{MODELS[name].how}"


@pytest.mark.parametrize(("profile", "name"), CASES)
def test_tokens_equal_those_of_the_fallback(profile, name, model_of, on_card):
    """Prompts in chunks, decodes in full graphs, states in bfloat16; preempted, if recorded."""
    got, how = on_card(profile, name), MODELS[name].how
    assert "error" not in got, got["error"]
    assert got["device"] == "npu:0"
    decodes = "SpecDecoding" if drafts(name) else "DecodeOnly"
    assert set(got["states"]) >= {"PrefillNoCache", "ChunkedPrefill", decodes}
    assert not drafts(name) or got["verified"]["accepted"] > 0
    kinds = {"piecewise graphs"} if "PIECEWISE" in how else {"eager: no graphs"}
    assert kinds | ({"full graph"} if "FULL" in how else set()) <= set(got["steps"])
    assert (got["preempted"] > 0) == ("recorded" in how)
    expected = generate.run(model_of(name), "reference", "bfloat16", "async", "eager")
    one_of = MODELS[name].one_of
    same_but_close_calls(model_of(name), "async", got, expected, one_of=one_of)
    if "recorded" in how:
        check_records(generate.records_of(model_of(name)), with_upstream=not drafts(name))


def test_a_release_without_the_operators_is_refused_at_start_up(model_of):
    ask = "import sys; from tests.helpers.engine import engine_config as ask; "
    code, model = f"{ask}ask(sys.argv[1], dtype='bfloat16')", str(model_of("Qwen3.5"))
    result = emulate("-c", code, model, options=("--profile", "8.5"))
    said = result.stdout + result.stderr
    assert "error: CANN 8.5.0 for" in said and "no aclnnChunkGatedDeltaRule" in said, said
    assert "install CANN 9.1 or newer" in said


def check_records(folder: Path, with_upstream: bool) -> None:
    """Core and oracle prepare each step again, and upstream where it keeps states where we do."""
    records = records_in(folder)
    assert len(records) > 20 and all(record.settings.states for record in records)
    if with_upstream:
        check(records)
    for record in records:
        assert replay_core(record) is None and replay_oracle(record) is None
