"""New weights in a running engine, at the addresses that graphs read."""

import contextlib
import itertools
from collections.abc import Iterator

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

from vllm_npu_prep.compat.models import name_weight_loaders
from vllm_npu_prep.errors import PrepError
from vllm_npu_prep.quantization.fused import laid_aside
from vllm_npu_prep.quantization.int8 import DequantizedLinear, Int8Linear


def refuse(vllm_config: VllmConfig) -> None:
    """Refuse new weights beside a KV connector that can't forget keys and values of the old ones.

    Raises
    ------
    PrepError
        If there is a connector without a ``reset_cache`` of its own, which vLLM calls when an
        engine sleeps or is asked to reset its prefix cache and its connector.
    """
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
def kept_addresses(model: nn.Module) -> Iterator[None]:
    """Context of a reload, after which all tensors of the model are where they were.

    vLLM's reload copies parameters and buffers to where they were. What layers derive of weights
    and keep as plain attributes, such as biases in float32 for a fused operator, they make anew;
    that is copied here. Layers that keep weights in another form are told, by their ``refresh``.

    Parameters
    ----------
    model
        Whose weights change.

    Raises
    ------
    PrepError
        If a tensor has another shape or dtype now: the engine has to be started again.
    """
    name_weight_loaders(model)
    before = {(module, name): tensors for module, name, tensors in _derived(model)}
    with laid_aside(model):
        yield
        _put_back(model, before)


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
        return [each for each in vars(tensors).values() if each is not None]
    return tensors if isinstance(tensors, list) else [tensors]


def _derived(model: nn.Module) -> Iterator[tuple[nn.Module, str, Tensors]]:
    """Plain attributes of modules that are tensors or consist of some, with module and name."""
    for module in model.modules():
        for name, value in vars(module).items():
            if isinstance(value, torch.Tensor | Int8Linear | DequantizedLinear) or (
                isinstance(value, list)
                and value
                and all(isinstance(each, torch.Tensor) for each in value)
            ):
                yield module, name, value
