"""The cells of the matrix: what an engine is, read from its configuration.

A name of a test says what its writer had in mind; `VllmConfig` says what ran.
"""

import os
from collections.abc import Callable
from operator import attrgetter
from typing import Any, NamedTuple

from vllm_npu_prep.compat.releases import installed_vllm

FALLBACK, EMULATED, NPU = "CPU fallback", "emulated NPU", "NPU"
EMULATOR = "NPU_EMULATOR_PROFILE"
"""Environment variable that every process on the emulated runtime has."""
W8A8, STRUCTURED, IMAGES = (
    "int8 weights and inputs (W8A8)",
    "structured output",
    "images and videos",
)


class Feature(NamedTuple):
    """A column of the matrix: how to see it in a `VllmConfig`, and settings that ask for it.

    What comes with requests, or with a model, has no settings.
    """

    name: str
    short: str
    has: Callable[[Any], object]
    asked: dict[str, Any] = {}  # noqa: RUF012 - nobody changes it

    def settings(self, model: str) -> dict[str, Any]:
        """Settings of an engine of a model of `MODELS`, which may need a folder."""
        from tests.helpers.demo import new_folder
        from tests.helpers.models import drafts_by, files_in

        if "speculative_config" in self.asked:
            return {"speculative_config": drafts_by(model, self.asked["speculative_config"])}
        if "kv_transfer_config" in self.asked:
            return {**self.asked, "kv_transfer_config": files_in(str(new_folder("kv")))}
        return self.asked


def _graphs(*modes: str) -> Callable[[Any], bool]:
    return lambda config: config.compilation_config.cudagraph_mode.name in modes


def _mode(name: str) -> dict[str, Any]:
    sizes = [1, 2, 4, 8, 16]
    config = {"cudagraph_mode": name, "cudagraph_capture_sizes": sizes}
    return {"enforce_eager": False, "compilation_config": config}


def _switch(name: str, short: str, path: str) -> Feature:
    """A setting that is on or off, by its place in the configuration."""
    return Feature(name, short, attrgetter(path), {path.rpartition(".")[2]: True})


def _dtype(name: str, short: str) -> Feature:
    return Feature(
        name, short, lambda c: str(c.model_config.dtype) == f"torch.{name}", {"dtype": name}
    )


def _drafts(name: str, short: str, method: str) -> Feature:
    has = lambda c: c.speculative_config is not None and c.speculative_config.method == method  # noqa: E731
    return Feature(name, short, has, {"speculative_config": method})


def _ranks(name: str, short: str, size: str, **more: Any) -> Feature:
    return Feature(name, short, lambda c: getattr(c.parallel_config, size) > 1, {size: 2, **more})


def _connector(config: Any) -> str:
    transfer = config.kv_transfer_config
    return (transfer.kv_connector if transfer is not None else None) or ""


def _splits_experts(config: Any) -> bool:
    parallel = config.parallel_config
    return parallel.enable_expert_parallel and parallel.world_size_across_dp > 1


LORA = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}
KV = {"kv_transfer_config": "files", "enable_chunked_prefill": False}
HOST = "OffloadingConnector"
FEATURES = (
    Feature("without graphs", "eager", _graphs("NONE"), {"enforce_eager": True}),
    Feature(
        *("piecewise graphs", "pieces", _graphs("PIECEWISE", "FULL_AND_PIECEWISE")),
        _mode("PIECEWISE"),
    ),
    Feature(
        *("full graphs", "full", _graphs("FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE")),
        _mode("FULL_DECODE_ONLY"),
    ),
    _dtype("float32", "fp32"),
    _dtype("bfloat16", "bf16"),
    _dtype("float16", "fp16"),
    Feature(
        *("synchronous scheduling", "sync", lambda c: not c.scheduler_config.async_scheduling),
        {"async_scheduling": False},
    ),
    _switch("asynchronous scheduling", "async", "scheduler_config.async_scheduling"),
    _switch("chunked prefill", "chunks", "scheduler_config.enable_chunked_prefill"),
    _switch("prefix caching", "prefix", "cache_config.enable_prefix_caching"),
    Feature("LoRA", "LoRA", attrgetter("lora_config"), LORA),
    _drafts("ngram", "ngram", "ngram"),
    _drafts("draft model", "draft", "draft_model"),
    _drafts("EAGLE", "EAGLE", "eagle"),
    _drafts("EAGLE-3", "EAGLE-3", "eagle3"),
    _drafts("MTP", "MTP", "mtp"),
    Feature(W8A8, "W8A8", attrgetter("model_config.quantization")),
    _ranks("tensor parallelism", "TP", "tensor_parallel_size"),
    _ranks("pipeline parallelism", "PP", "pipeline_parallel_size", async_scheduling=False),
    _ranks("data parallelism", "DP", "data_parallel_size"),
    Feature("expert parallelism", "EP", _splits_experts, {"enable_expert_parallel": True}),
    _ranks("decode context parallelism", "DCP", "decode_context_parallel_size"),
    _switch("sleep mode", "sleep", "model_config.enable_sleep_mode"),
    Feature("KV connector", "KV", lambda config: _connector(config) not in ("", HOST), KV),
    Feature(
        *("KV offloading", "offload", lambda config: _connector(config) == HOST),
        {"kv_offloading_size": 0.01},
    ),
    _switch("prompt embeddings", "embeds", "model_config.enable_prompt_embeds"),
    Feature(
        *("pooling", "pool", lambda config: config.model_config.runner_type == "pooling"),
        {"runner": "pooling"},
    ),
    Feature(STRUCTURED, "JSON", lambda config: False),
    Feature(IMAGES, "images", lambda config: False),
)
"""The columns, in their order."""
RANKS = {each.name for each in FEATURES if each.name.endswith("parallelism")}
"""Features of engines of several ranks, which take long to start and are tried last."""


def came_with_requests(scheduler: Any) -> list[str]:
    """Features that no configuration tells: requests of an engine had them."""
    found = []
    if scheduler.structured_output_manager.backend is not None:
        found.append(STRUCTURED)
    if scheduler.encoder_cache_manager.num_embeds_by_hash:
        found.append(IMAGES)
    return found


def cell_of(config: Any) -> dict[str, Any]:
    """What an engine is: model, features, device, runner and release."""
    kind = config.device_config.device_type
    return {
        "release": installed_vllm(),
        "device": FALLBACK if kind == "cpu" else EMULATED if EMULATOR in os.environ else NPU,
        "runner": "V2" if config.use_v2_model_runner else "V1",
        "model": config.model_config.architecture,
        "features": [each.name for each in FEATURES if each.has(config)],
    }
