"""The cells of the matrix: what an engine is, read from its configuration.

A name of a test says what its writer had in mind; `VllmConfig` says what ran.
"""

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_npu_prep.compat.releases import installed_vllm

FALLBACK, EMULATED, NPU = "CPU fallback", "emulated NPU", "NPU"
EMULATOR = "NPU_EMULATOR_PROFILE"
"""Environment variable that every process on the emulated runtime has."""


@dataclass(frozen=True)
class Feature:
    """A column of the matrix: how to see it in a `VllmConfig`, and settings that ask for it.

    What comes with requests has no such settings, and is never refused.
    """

    name: str
    short: str
    has: Callable[[Any], object]
    asked: dict[str, Any] | None


def _graphs(*modes: str) -> Callable[[Any], bool]:
    return lambda config: config.compilation_config.cudagraph_mode.name in modes


def _method(name: str) -> Callable[[Any], bool]:
    return lambda config: (
        config.speculative_config is not None and config.speculative_config.method == name
    )


def _dtype(name: str) -> Callable[[Any], bool]:
    return lambda config: str(config.model_config.dtype) == f"torch.{name}"


def _connector(config: Any) -> str:
    transfer = config.kv_transfer_config
    return (transfer.kv_connector if transfer is not None else None) or ""


def _mode(name: str) -> dict[str, Any]:
    return {"enforce_eager": False, "compilation_config": {"cudagraph_mode": name}}


def _drafts(method: str, **more: Any) -> dict[str, Any]:
    return {"speculative_config": {"method": method, "num_speculative_tokens": 2, **more}}


DRAFTER = "a drafter of the model's size"
"""Stands for the folder of a drafter among settings."""
QUANTISED = "int8 weights and inputs"
"""Among settings: not an engine's own, but a model of this kind."""
STRUCTURED = "structured output"
IMAGES = "images and videos"
MTP = "MTP"

FEATURES = (
    Feature("without graphs", "eager", _graphs("NONE"), {"enforce_eager": True}),
    Feature(
        "piecewise graphs",
        "pieces",
        _graphs("PIECEWISE", "FULL_AND_PIECEWISE"),
        _mode("PIECEWISE"),
    ),
    Feature(
        "full graphs",
        "full",
        _graphs("FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE"),
        _mode("FULL_DECODE_ONLY"),
    ),
    Feature("float32", "fp32", _dtype("float32"), {"dtype": "float32"}),
    Feature("bfloat16", "bf16", _dtype("bfloat16"), {"dtype": "bfloat16"}),
    Feature("float16", "fp16", _dtype("float16"), {"dtype": "float16"}),
    Feature(
        "synchronous scheduling",
        "sync",
        lambda config: not config.scheduler_config.async_scheduling,
        {"async_scheduling": False},
    ),
    Feature(
        "asynchronous scheduling",
        "async",
        lambda config: config.scheduler_config.async_scheduling,
        {"async_scheduling": True},
    ),
    Feature(
        "chunked prefill",
        "chunks",
        lambda config: config.scheduler_config.enable_chunked_prefill,
        {"enable_chunked_prefill": True},
    ),
    Feature(
        "prefix caching",
        "prefix",
        lambda config: config.cache_config.enable_prefix_caching,
        {"enable_prefix_caching": True},
    ),
    Feature(
        "LoRA",
        "LoRA",
        lambda config: config.lora_config is not None,
        {"enable_lora": True, "max_lora_rank": 8},
    ),
    Feature("ngram", "ngram", _method("ngram"), _drafts("ngram", prompt_lookup_max=2)),
    Feature("draft model", "draft", _method("draft_model"), _drafts("draft_model", model=DRAFTER)),
    Feature("EAGLE", "EAGLE", _method("eagle"), _drafts("eagle", model=DRAFTER)),
    Feature("EAGLE-3", "EAGLE-3", _method("eagle3"), _drafts("eagle3", model=DRAFTER)),
    Feature(MTP, "MTP", _method("mtp"), _drafts("mtp")),
    Feature(
        "int8 weights and inputs (W8A8)",
        "W8A8",
        lambda config: config.model_config.quantization is not None,
        {QUANTISED: True},
    ),
    Feature(
        "tensor parallelism",
        "TP",
        lambda config: config.parallel_config.tensor_parallel_size > 1,
        {"tensor_parallel_size": 2},
    ),
    Feature(
        "pipeline parallelism",
        "PP",
        lambda config: config.parallel_config.pipeline_parallel_size > 1,
        {"pipeline_parallel_size": 2, "async_scheduling": False},
    ),
    Feature(
        "data parallelism",
        "DP",
        lambda config: config.parallel_config.data_parallel_size > 1,
        {"data_parallel_size": 2},
    ),
    Feature(
        "expert parallelism",
        "EP",
        lambda config: (
            config.parallel_config.enable_expert_parallel
            and config.parallel_config.world_size_across_dp > 1
        ),
        {"tensor_parallel_size": 2, "enable_expert_parallel": True},
    ),
    Feature(
        "decode context parallelism",
        "DCP",
        lambda config: config.parallel_config.decode_context_parallel_size > 1,
        {"tensor_parallel_size": 4, "decode_context_parallel_size": 2},
    ),
    Feature(
        "sleep mode",
        "sleep",
        lambda config: config.model_config.enable_sleep_mode,
        {"enable_sleep_mode": True},
    ),
    Feature(
        "KV connector",
        "KV",
        lambda config: _connector(config) not in ("", "OffloadingConnector"),
        {
            "kv_transfer_config": {
                "kv_connector": "ExampleConnector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": {"shared_storage_path": "kv"},
            },
            "enable_chunked_prefill": False,
        },
    ),
    Feature(
        "KV offloading",
        "offload",
        lambda config: _connector(config) == "OffloadingConnector",
        {"kv_offloading_size": 1},
    ),
    Feature(
        "prompt embeddings",
        "embeds",
        lambda config: config.model_config.enable_prompt_embeds,
        {"enable_prompt_embeds": True},
    ),
    Feature(
        "pooling",
        "pool",
        lambda config: config.model_config.runner_type == "pooling",
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
