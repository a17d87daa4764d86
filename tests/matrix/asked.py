"""The engine that a cell of the matrix stands for, and what start-up says to it.

The check itself is asked, with the configuration that vLLM makes; only devices that aren't here are
stood in for, as in `tests/startup`.
"""

import contextlib
import re
from pathlib import Path
from typing import Any
from unittest import mock

from tests.helpers.engine import engine_config
from tests.helpers.models import (
    CHUNKS,
    ENDS_A_STEP,
    HYBRID,
    LATENT,
    POOLS,
    REWARDS,
    SEES,
    folder_of,
    int8_of,
    is_a,
    is_long,
)
from tests.helpers.v2 import asked_for
from tests.matrix.cells import EMULATED, FEATURES, RANKS, W8A8
from tests.startup.npus import NPUS
from vllm_npu_prep import device, platform
from vllm_npu_prep.attention.families import KERNEL_FAMILIES
from vllm_npu_prep.startup.refusals import refusals_that_apply

OTHERS = {
    **NPUS,
    "vllm_npu_prep.startup.subjects.ranks.visible_devices": {"npu": 8, "cpu": 8}.get,
}
"""A host with more NPUs than any feature asks for."""


class _Told(Exception):  # noqa: N818
    """Ends start-up where it has refused what it refuses."""


def engine_for(model: str, device_name: str, wanted: set[str]) -> tuple[Path, dict[str, Any]]:
    """Folder of a model of `MODELS`, and settings of its engine with these features."""
    max_model_len = 384 if is_a(CHUNKS, model) else 320 if is_a(HYBRID, model) else 128
    if is_a(SEES, model):
        max_model_len = max(256, max_model_len)
    settings: dict[str, Any] = {
        "dtype": "bfloat16" if device_name == EMULATED else "float32",
        "max_model_len": max_model_len,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 48,
        "block_size": 128 if is_long(model) else 16,
        "skip_tokenizer_init": False,
        "enforce_eager": True,
        "structured_outputs_config": {"backend": "xgrammar", "disable_any_whitespace": True},
        "additional_config": {"npu_prep": {"check": "full"}},
    }
    if is_a(HYBRID, model):
        settings["num_gpu_blocks_override"] = 36
    if is_a(POOLS, model):
        settings["runner"] = "pooling"
    if model == REWARDS:
        settings["pooler_config"] = {"step_tag_id": ENDS_A_STEP}
    for feature in FEATURES:
        settings |= feature.settings(model) if feature.name in wanted else {}
    if {"piecewise graphs", "full graphs"} <= wanted:
        config = settings["compilation_config"]
        settings["compilation_config"] = {**config, "cudagraph_mode": "FULL_AND_PIECEWISE"}
    if "KV connector" in wanted or (is_a(POOLS, model) and "chunked prefill" not in wanted):
        settings["max_num_batched_tokens"] = 2 * max_model_len
    if wanted & {"KV connector", "KV offloading"}:  # of states, vLLM has no prefixes in files
        settings["enable_prefix_caching"] = "KV offloading" in wanted or not is_a(HYBRID, model)
    in_parts = wanted & {"expert parallelism", "decode context parallelism"}
    if in_parts and "data parallelism" not in wanted:
        settings["tensor_parallel_size"] = 2
    if "decode context parallelism" in wanted and is_a(SEES, model):  # it has two heads of K and V
        settings["tensor_parallel_size"] = 4
    if wanted & RANKS:
        settings["distributed_executor_backend"] = "mp"
    one_head = "decode context parallelism" in wanted and not is_a(LATENT, model)
    return int8_of(model) if W8A8 in wanted else folder_of(model, one_head), settings


def answer(model: str, feature: str, device_name: str, runner: str) -> dict[str, Any]:
    """Ask start-up for an engine of a model of `MODELS` with a feature.

    Returns ids of the refusals, or the first line of vLLM's own error, or nothing, if both would
    start it.
    """
    on_npu, found = device_name == EMULATED, list[str]()

    def refuse(vllm_config: Any, family: Any, kind: Any) -> None:
        if on_npu:
            family, kind = KERNEL_FAMILIES["fia"], device.NPU_KIND
        found.extend(refusals_that_apply(vllm_config, family, kind))
        raise _Told

    folder, settings = engine_for(model, device_name, {feature})
    with contextlib.ExitStack() as patches:
        for target, value in OTHERS.items() if on_npu else ():
            patches.enter_context(mock.patch(target, value))
        patches.enter_context(mock.patch.object(platform, "refuse_unsupported", refuse))
        patches.enter_context(asked_for(runner))
        try:
            engine_config(folder, **settings)
        except Exception as error:
            if isinstance(error, _Told) or "_Told" in f"{error!r}{error.__context__!r}":
                return {"refused": found} if found else {}  # pydantic wraps what a validator raises
            return {"error": _line_of(error).replace(str(folder), "")}
    raise AssertionError("start-up did not ask what to refuse")


def _line_of(error: Exception) -> str:
    """The line of an error that says what is wrong."""
    text = str(error)
    value = re.search(r"(?:Value error|Assertion failed), (.*?)(?:\[type=|\n|$)", text)
    line = value.group(1) if value else (text.strip().splitlines() or [""])[0]
    return " ".join(line.split()) or type(error).__name__
