"""Patches of vLLM's model registry."""

import functools
import importlib.util
from typing import Any

from vllm_npu_prep.errors import PrepError

TORCHVISION = "torchvision==0.28.0"  # the one that belongs to torch 2.13.0


def refuse_vision_without_torchvision() -> None:
    """Say which package a vision model lacks; upstream would fail without saying why."""
    from vllm.model_executor.models.registry import _ModelRegistry

    upstream = _ModelRegistry.inspect_model_cls
    if importlib.util.find_spec("torchvision") or hasattr(upstream, "__wrapped__"):
        return

    @functools.wraps(upstream)
    def inspect_model_cls(self: _ModelRegistry, architectures: Any, model_config: Any) -> Any:
        if hasattr(model_config.hf_config, "vision_config"):
            raise PrepError(
                f"{model_config.model} reads images or videos: that needs torchvision, which is "
                f"not installed; pip install --no-deps {TORCHVISION}"
            )
        return upstream(self, architectures, model_config)

    _ModelRegistry.inspect_model_cls = inspect_model_cls  # type: ignore[method-assign]
