"""New weights in a running engine, at the addresses that graphs read."""

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from vllm.config import ModelConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.logger import init_logger
from vllm.lora.layers import BaseLayerWithLoRA
from vllm.model_executor.model_loader import get_model_loader
from vllm.model_executor.model_loader.reload.inplace import reload_weights
from vllm.model_executor.model_loader.reload.layerwise import (
    finalize_layerwise_reload,
    get_layerwise_info,
)
from vllm.model_executor.model_loader.utils import get_draft_load_config

from vllm_npu_prep.compat.models import name_weight_loaders
from vllm_npu_prep.errors import PrepError
from vllm_npu_prep.ops.cpu.linear import unpacked
from vllm_npu_prep.quantization.int8 import DequantizedLinear, Int8Linear
from vllm_npu_prep.quantization.rounding import laid_aside

logger = init_logger(f"vllm.{__name__}")  # vLLM configures loggers below its own only


def refuse(vllm_config: VllmConfig) -> None:
    """Refuse new weights beside a KV connector that can't forget keys and values of the old ones.

    It forgets by its own ``reset_cache``, which vLLM calls when an engine sleeps, or is asked to
    reset its prefix cache and its connector. Experts that have moved would get the weights of
    others: vLLM loads each where it was at the start.
    """
    if vllm_config.parallel_config.enable_eplb:
        raise PrepError(
            "new weights are not supported with --enable-eplb: vLLM would load experts where they "
            "were before they moved; start another engine"
        )
    transfer = vllm_config.kv_transfer_config
    if transfer is None:
        return
    connector = KVConnectorFactory.get_connector_class(transfer)
    if connector.reset_cache is KVConnectorBase_V1.reset_cache:
        raise PrepError(
            f"new weights are not supported with KV connector {transfer.kv_connector}, which has "
            "no reset_cache and would still load keys and values of the old weights: start another "
            "engine with an empty store"
        )


@contextlib.contextmanager
def kept_addresses(model: nn.Module, model_config: ModelConfig) -> Iterator[None]:
    """Return a context for a reload, after which all tensors of the model are where they were.

    vLLM's reload copies parameters and buffers to where they were. What layers derive from weights
    and keep as plain attributes, such as biases in float32 for a fused operator, they make anew;
    this is copied here. Layers that keep weights in another form are told by a call of their
    ``refresh``. After a reload that fails, each layer has all its new weights or all its old ones,
    at the same addresses, and the engine can go on.

    Raises
    ------
    PrepError
        If a tensor has another shape or dtype now: the engine has to be started again.
    """
    name_weight_loaders(model)
    before = {(module, name): tensors for module, name, tensors in _derived(model)}
    with unpacked(model), laid_aside(model), _without_adapters(model):
        try:
            yield
        except BaseException:
            _keep_old_weights(model, model_config)
            raise
        finally:
            _put_back(model, before)


def _keep_old_weights(model: nn.Module, model_config: ModelConfig) -> None:
    """End a reload that failed: layers that got only a part of their new weights keep the old."""
    for module in model.modules():
        get_layerwise_info(module).load_numel = 0
    finalize_layerwise_reload(model, model_config)


@contextlib.contextmanager
def _without_adapters(model: nn.Module) -> Iterator[None]:
    """Return a context in which layers have the names of files, without adapters' wrappers.

    Wrappers lengthen these names. Most models' code finds the layers nevertheless; that of Llama 4
    doesn't.
    """
    wrapped = [
        (owner, name, child)
        for owner in model.modules()
        for name, child in owner.named_children()
        if isinstance(child, BaseLayerWithLoRA)
    ]
    for owner, name, child in wrapped:
        setattr(owner, name, child.base_layer)
    try:
        yield
    finally:
        for owner, name, child in wrapped:
            setattr(owner, name, child)


@contextlib.contextmanager
def followed_by_drafter(
    vllm_config: VllmConfig,
    drafter: nn.Module | None,  # the drafter, if it is a model; else None
) -> Iterator[None]:
    """Return a context for a reload from a folder, after which MTP layers are those of this folder.

    Upstream reloads the model alone. A drafter with a checkpoint of its own stays as it is, and so
    does a drafter whose new weights can't be loaded, with a warning.
    """
    speculation, of_model = vllm_config.speculative_config, vllm_config.model_config
    of_drafter = None if speculation is None else speculation.draft_model_config
    follows = of_drafter is not None and of_drafter.model == of_model.model
    yield
    if drafter is None or of_drafter is None or not follows:
        return
    for name in ("model", "model_weights", "revision"):
        setattr(of_drafter, name, getattr(of_model, name))
    loader: Any = get_model_loader(get_draft_load_config(vllm_config))
    each, every = (
        {name for name, _ in drafter.named_parameters(remove_duplicate=once)}
        for once in (True, False)
    )
    with kept_addresses(drafter, of_drafter):
        try:
            # A head that layers share has one name in a model, but one for each layer in files
            weights = loader.get_all_weights(of_drafter, drafter)
            weights = (named for named in weights if named[0] not in every - each)
            reload_weights(vllm_config, drafter, weights, None, is_checkpoint_format=True)
        except Exception as error:
            _keep_old_weights(drafter, of_drafter)
            logger.warning(
                "New weights: the drafter keeps its old ones, as those of %s can't be loaded (%s); "
                "fewer drafts may be accepted.",
                of_model.model,
                " ".join(str(error).split()) or type(error).__name__,
            )


def _put_back(model: nn.Module, before: "dict[tuple[nn.Module, str], Tensors]") -> None:
    """Copy what was made anew to where it was."""
    for module in model.modules():
        refresh = getattr(module, "refresh", None)
        if callable(refresh):
            refresh()
    for module, name, new in list(_derived(model)):
        old = before.get((module, name), new)
        if old is new:
            continue
        for had, has in itertools.zip_longest(_each(old), _each(new)):
            if had is None or has is None or _form(had) != _form(has):
                raise PrepError(
                    f"new weights: {name} of {type(module).__name__} was {_form(had)} and is "
                    f"{_form(has)}, where graphs can't read it: start the engine again with the "
                    "new checkpoint"
                )
            if had.data_ptr() != has.data_ptr():
                had.copy_(has)
        setattr(module, name, old)


Tensors = torch.Tensor | list[torch.Tensor] | Int8Linear | DequantizedLinear


def _form(tensor: torch.Tensor | None) -> str:
    if tensor is None:
        return "nothing"
    strides = "" if tensor.is_contiguous() else f" of strides {tensor.stride()}"
    return f"{tuple(tensor.shape)} {tensor.dtype}{strides}"


def _each(tensors: Tensors) -> list[torch.Tensor]:
    if isinstance(tensors, Int8Linear | DequantizedLinear):
        return [each for each in vars(tensors).values() if isinstance(each, torch.Tensor)]
    return tensors if isinstance(tensors, list) else [tensors]


def _derived(model: nn.Module) -> Iterator[tuple[nn.Module, str, Tensors]]:
    """Yield plain attributes of modules that are or hold tensors, with module and name."""
    for module in model.modules():
        for name, value in vars(module).items():
            if isinstance(value, torch.Tensor | Int8Linear | DequantizedLinear) or (
                isinstance(value, list)
                and value
                and all(isinstance(each, torch.Tensor) for each in value)
            ):
                yield module, name, value
