"""Latent attention on npu:0: tokens are the CPU fallback's, in every state and in graphs.

What only hardware can show (numerics, speed, layout limits of real kernels) is not shown here.
"""

import shutil
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from transformers import DeepseekV3Config

from ascend_emulator import profiles
from tests.engine.test_record import DRAFT_ARRAYS, check, records_in
from tests.helpers.emulator import why_no_emulator
from tests.helpers.engine import make_model
from tests.helpers.latent import (
    GLM_FLASH_ON_NPUS,
    KIMI_K2,
    LATENT_ON_NPUS,
    V2,
    V2_LITE,
    V3_EXPERTS_ON_NPUS,
    as_kimi_k2,
)
from tests.npu import generate
from tests.npu.close_calls import same_but_close_calls
from tests.npu.only_some import refused_models
from vllm_npu_prep.cli import main

pytestmark = pytest.mark.skipif(bool(why_no_emulator()), reason=why_no_emulator())


class Model(NamedTuple):
    """A small model, and what its engine does."""

    family: str
    config: dict[str, Any]
    how: str
    is_kimi: bool = False


LOW_RANK = {**LATENT_ON_NPUS, "q_lora_rank": 96}
MODELS = {
    "DeepSeek V2 Lite": Model(
        "DeepseekV2",
        # Its fallback in bfloat16 then keeps most tokens of float32
        {**LATENT_ON_NPUS, **V2_LITE, "spread": 0.2, "embedding_scale": 10},
        "sync/FULL_AND_PIECEWISE",
    ),
    "dense layers": Model(
        "DeepseekV3",
        {**LOW_RANK, "first_k_dense_replace": 2, "n_routed_experts": 0},
        "sync/FULL_AND_PIECEWISE/ngram/recorded",
    ),
    "Kimi K2": Model("DeepseekV3", {**LOW_RANK, **KIMI_K2}, "async/FULL_AND_PIECEWISE", True),
    "DeepSeek V2": Model(
        "DeepseekV2", {**LOW_RANK, **V2, "n_routed_experts": 12}, "async/PIECEWISE"
    ),
    "DeepSeek V3": Model(
        "DeepseekV3", {**LOW_RANK, **V3_EXPERTS_ON_NPUS}, "async/FULL_AND_PIECEWISE"
    ),
    "DeepSeek V3 on V2": Model(
        "DeepseekV3", {**LOW_RANK, **V3_EXPERTS_ON_NPUS}, "async-v2/FULL_AND_PIECEWISE"
    ),
    "GLM-4.7-Flash": Model(
        "Glm4MoeLite",
        # As for V2 Lite: with the usual spread, bfloat16 parts from float32 more often
        {**LOW_RANK, **GLM_FLASH_ON_NPUS, "spread": 0.2, "embedding_scale": 10},
        "async/FULL_AND_PIECEWISE",
    ),
}
CASES = [(profile, name) for profile in profiles.PROFILES for name in MODELS]


@pytest.fixture(autouse=True)
def deepseek_keeps_its_name():
    """vLLM renames transformers' class for Kimi K2, for the whole process."""
    yield
    DeepseekV3Config.model_type = "deepseek_v3"


@pytest.fixture(scope="module")
def model_of(tmp_path_factory):
    """Folders of a model: as vLLM loads it, and as transformers does."""
    folder = tmp_path_factory.mktemp("models")

    @cache
    def make(name: str) -> tuple[Path, Path]:
        model = MODELS[name]
        how = {"spread": 0.1, "embedding_scale": 20, **model.config}
        made = make_model(folder / name.replace(" ", "-"), model.family, **how)
        return (as_kimi_k2(made) if model.is_kimi else made), made

    return make


@pytest.fixture(scope="module")
def on_fallback(model_of):
    """Function of a model: what the CPU fallback makes of it."""
    return cache(
        lambda name: generate.run(model_of(name)[0], "reference", "bfloat16", "async", "eager")
    )


@pytest.fixture(scope="module")
def case_of(model_of):
    """A model as `tests.npu.generate` takes it."""
    return lambda name: f"{model_of(name)[0]}:fia:bfloat16/{MODELS[name].how}"


@pytest.mark.parametrize(("profile", "name"), CASES)
def test_tokens_equal_those_of_the_fallback(profile, name, model_of, on_card, on_fallback, capsys):
    """Prompts in chunks with contexts, shared prefixes; decodes and drafts in full graphs."""
    got, how = on_card(profile, name), MODELS[name].how
    if refusal := refused_models(profile).get(name):
        assert refusal in got.get("error", ""), got
        return
    assert "error" not in got, got["error"]
    assert got["device"] == "npu:0"
    states = {"PrefillNoCache", "ChunkedPrefill"}
    assert states | {"SpecDecoding" if "ngram" in how else "DecodeOnly"} <= set(got["states"])
    kinds = {"piecewise graphs"} | ({"full graph"} if "FULL" in how else set())
    assert kinds <= set(got["steps"]), got["steps"]
    assert bool(got["verified"].get("accepted")) == ("ngram" in how)
    same_but_close_calls(model_of(name)[1], "async", got, on_fallback(name))
    if "recorded" in how:
        assert got["preempted"] > 0
        check_records(generate.records_of(model_of(name)[0]), capsys)


def check_records(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Core, oracle and upstream prepare each step again; `explain` shows both halves of one."""
    records = records_in(folder)
    check(records, *DRAFT_ARRAYS)
    sizes = "num_decodes", "num_prefills", "num_chunks"
    both = [
        record.number
        for record in records
        if all(int(record.prepared[f"latent.{size}"]) for size in sizes)
    ]
    assert both, "a step with decodes, and prefills that have contexts"
    capsys.readouterr()
    assert main(["explain", str(folder), "--step", str(both[0])]) == 0
    said = capsys.readouterr().out.splitlines()
    line = next(line for line in said if line.startswith("latent"))
    assert "over latent rows" in line and "over projected K and V" in line
    shutil.rmtree(folder)  # the next profile's engine begins anew
