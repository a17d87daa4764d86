"""The cells of the matrix: what an engine is, read from its configuration.

A name of a test says what its writer had in mind; `VllmConfig` says what ran.
"""

import json
import os
from collections.abc import Callable
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

from vllm_npu_prep.compat.releases import installed_vllm

FALLBACK, EMULATED, NPU = "CPU fallback", "emulated NPU", "NPU"
EMULATOR = "NPU_EMULATOR_PROFILE"
"""Environment variable that every process on the emulated runtime has."""


class Feature(NamedTuple):
    """A column of the matrix: how to see it in a `VllmConfig`, and settings that ask for it.

    What comes with requests has no such settings, and is never refused.
    """

    name: str
    short: str
    has: Callable[[Any], object]
    asked: dict[str, Any] | None


def _graphs(*modes: str) -> Callable[[Any], bool]:
    return lambda config: config.compilation_config.cudagraph_mode.name in modes


def _mode(name: str) -> dict[str, Any]:
    return {"enforce_eager": False, "compilation_config": {"cudagraph_mode": name}}


def _switch(name: str, short: str, path: str) -> Feature:
    """A setting that is on or off, by its place in the configuration."""
    return Feature(name, short, attrgetter(path), {path.rpartition(".")[2]: True})


def _dtype(name: str, short: str) -> Feature:
    return Feature(
        name, short, lambda c: str(c.model_config.dtype) == f"torch.{name}", {"dtype": name}
    )


def _drafts(name: str, short: str, method: str, **more: Any) -> Feature:
    def has(config: Any) -> bool:
        return config.speculative_config is not None and config.speculative_config.method == method

    asked = {"method": method, "num_speculative_tokens": 2, **more}
    return Feature(name, short, has, {"speculative_config": asked})


def _ranks(name: str, short: str, size: str, **more: Any) -> Feature:
    return Feature(name, short, lambda c: getattr(c.parallel_config, size) > 1, {size: 2, **more})


def _connector(config: Any) -> str:
    transfer = config.kv_transfer_config
    return (transfer.kv_connector if transfer is not None else None) or ""


DRAFTER = "a drafter of the model's size"
"""Stands for the folder of a drafter among settings."""
QUANTISED = "int8 weights and inputs"
"""Among settings: not an engine's own, but a model of this kind."""
STRUCTURED = "structured output"
IMAGES = "images and videos"
MTP = "MTP"
BOTH = "FULL_AND_PIECEWISE"
FILES = {
    "kv_connector": "ExampleConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {"shared_storage_path": "kv"},
}

FEATURES = (
    Feature("without graphs", "eager", _graphs("NONE"), {"enforce_eager": True}),
    Feature("piecewise graphs", "pieces", _graphs("PIECEWISE", BOTH), _mode("PIECEWISE")),
    Feature(
        *("full graphs", "full", _graphs("FULL", "FULL_DECODE_ONLY", BOTH)),
        _mode("FULL_DECODE_ONLY"),
    ),
    _dtype("float32", "fp32"),
    _dtype("bfloat16", "bf16"),
    _dtype("float16", "fp16"),
    Feature(
        *("synchronous scheduling", "sync"),
        lambda config: not config.scheduler_config.async_scheduling,
        {"async_scheduling": False},
    ),
    _switch("asynchronous scheduling", "async", "scheduler_config.async_scheduling"),
    _switch("chunked prefill", "chunks", "scheduler_config.enable_chunked_prefill"),
    _switch("prefix caching", "prefix", "cache_config.enable_prefix_caching"),
    Feature(
        *("LoRA", "LoRA", attrgetter("lora_config")),
        {"enable_lora": True, "max_lora_rank": 8},
    ),
    _drafts("ngram", "ngram", "ngram", prompt_lookup_max=2),
    _drafts("draft model", "draft", "draft_model", model=DRAFTER),
    _drafts("EAGLE", "EAGLE", "eagle", model=DRAFTER),
    _drafts("EAGLE-3", "EAGLE-3", "eagle3", model=DRAFTER),
    _drafts(MTP, "MTP", "mtp"),
    Feature(
        *("int8 weights and inputs (W8A8)", "W8A8", attrgetter("model_config.quantization")),
        {QUANTISED: True},
    ),
    _ranks("tensor parallelism", "TP", "tensor_parallel_size"),
    _ranks("pipeline parallelism", "PP", "pipeline_parallel_size", async_scheduling=False),
    _ranks("data parallelism", "DP", "data_parallel_size"),
    Feature(
        *("expert parallelism", "EP"),
        lambda config: (
            config.parallel_config.enable_expert_parallel
            and config.parallel_config.world_size_across_dp > 1
        ),
        {"tensor_parallel_size": 2, "enable_expert_parallel": True},
    ),
    _ranks(
        *("decode context parallelism", "DCP", "decode_context_parallel_size"),
        tensor_parallel_size=4,
    ),
    _switch("sleep mode", "sleep", "model_config.enable_sleep_mode"),
    Feature(
        *("KV connector", "KV"),
        lambda config: _connector(config) not in ("", "OffloadingConnector"),
        {"kv_transfer_config": FILES, "enable_chunked_prefill": False},
    ),
    Feature(
        *("KV offloading", "offload"),
        lambda config: _connector(config) == "OffloadingConnector",
        {"kv_offloading_size": 1},
    ),
    _switch("prompt embeddings", "embeds", "model_config.enable_prompt_embeds"),
    Feature(
        *("pooling", "pool", lambda config: config.model_config.runner_type == "pooling"),
        {"runner": "pooling"},
    ),
    Feature(STRUCTURED, "JSON", lambda config: False, None),
    Feature(IMAGES, "images", lambda config: False, None),
)
"""The columns, in their order."""


def came_with_requests(scheduler: Any) -> list[str]:
    """Features that no configuration tells: requests of an engine had them."""
    found = []
    if scheduler.structured_output_manager.backend is not None:
        found.append(STRUCTURED)
    if scheduler.encoder_cache_manager.num_embeds_by_hash:
        found.append(IMAGES)
    return found


def cell_of(config: Any) -> dict[str, Any]:
    """What an engine is: model, features, device, runner, release, and its model's config."""
    model = config.model_config
    kind = config.device_config.device_type
    device = FALLBACK if kind == "cpu" else EMULATED if EMULATOR in os.environ else NPU
    file = Path(model.model) / "config.json"
    return {
        "release": installed_vllm(),
        "device": device,
        "runner": "V2" if config.use_v2_model_runner else "V1",
        "model": model.architecture,
        "features": [each.name for each in FEATURES if each.has(config)],
        "config": json.loads(file.read_text()) if file.exists() else {},
    }
