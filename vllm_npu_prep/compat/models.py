"""Patches of how vLLM finds, makes and reloads models."""

import functools
import importlib.util
import logging
from collections.abc import Callable
from typing import Any

from torch import nn

from vllm_npu_prep.compat.patches import instead_of
from vllm_npu_prep.errors import PrepError
from vllm_npu_prep.server.one_line import why_not_made

logger = logging.getLogger("vllm." + __name__)

TORCHVISION = "torchvision==0.28.0"  # the one that belongs to torch 2.13.0


def refuse_vision_without_torchvision() -> None:
    """Say which package a vision model lacks; upstream would fail without saying why."""
    from vllm.model_executor.models.registry import _ModelRegistry

    if importlib.util.find_spec("torchvision"):
        return

    @instead_of(_ModelRegistry, "inspect_model_cls")
    def inspect_model_cls(
        upstream: Any, self: _ModelRegistry, architectures: Any, model_config: Any
    ) -> Any:
        if hasattr(model_config.hf_config, "vision_config"):
            raise PrepError(
                f"{model_config.model} reads images or videos: that needs torchvision, which is "
                f"not installed; pip install --no-deps {TORCHVISION}"
            )
        return upstream(self, architectures, model_config)


def name_weight_loaders(model: nn.Module) -> None:
    """Give loaders of weights that are partial functions a name, which upstream's reload reads.

    The norm of MiniMax-M2's queries and keys has such loaders, and a reload of its weights would
    end in an ``AttributeError``.
    """
    for parameter in model.parameters():
        loader = getattr(parameter, "weight_loader", None)
        if isinstance(loader, functools.partial) and not hasattr(loader, "__name__"):
            loader.__name__ = loader.func.__name__  # type: ignore[attr-defined]


def take_no_mtp_layers_for_none() -> None:
    """Read a config with zero MTP layers like one that names none, which start-up refuses.

    Upstream divides by their number while it checks the flags.
    """
    from vllm.config import SpeculativeConfig

    @instead_of(SpeculativeConfig, "hf_config_override")
    def hf_config_override(upstream: Any, hf_config: Any, *args: Any, **kwargs: Any) -> Any:
        changed = upstream(hf_config, *args, **kwargs)  # 0.33.0 has one argument more
        if getattr(changed, "n_predict", None) == 0:
            changed.n_predict = None
        return changed


def look_at_models_before_weights(check: Callable[[nn.Module, Any], None]) -> None:
    """Look at each model between its making and its weights, and say in one line why none is made.

    vLLM's code of a model may refuse a config, a runner or a platform, in the midst of a traceback.
    `check` takes the model and its engine's `VllmConfig`. It is put there once in a process, so it
    holds nothing of an engine.
    """
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader

    @instead_of(BaseModelLoader, "create_model")
    def create_model(
        upstream: Any, self: Any, vllm_config: Any, model_config: Any, prefix: str = ""
    ) -> nn.Module:
        try:
            model = upstream(self, vllm_config, model_config, prefix=prefix)
        except Exception as error:
            why = why_not_made(error)
            if why is None:
                raise
            logger.debug("Where vLLM refused the model:", exc_info=True)
            raise PrepError(
                f"{model_config.architecture} ({model_config.model}) is refused by vLLM's own code "
                f"of it: {why}; use a config.json that this release reads, or another model "
                "(VLLM_LOGGING_LEVEL=DEBUG shows where)"
            ) from None
        check(model, vllm_config)
        return model


def make_indexers_of(indexer: Any) -> None:
    """Let vLLM's models with sparse attention make indexers of this class."""
    from vllm.model_executor.models import deepseek_v2

    deepseek_v2.Indexer = indexer  # type: ignore[misc]


def split_models_at(operator: str) -> None:
    """Let torch.compile split models at an operator of this plugin, as at vLLM's attention."""
    from vllm.config import CompilationConfig

    if operator not in CompilationConfig._attention_ops:
        CompilationConfig._attention_ops.append(operator)
