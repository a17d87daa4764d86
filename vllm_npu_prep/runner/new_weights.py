"""New weights in a running engine, at the addresses that graphs read."""

import contextlib
from collections.abc import Iterator

import torch
from torch import nn
from vllm.config import VllmConfig

from vllm_npu_prep.errors import PrepError


def refuse(vllm_config: VllmConfig) -> None:
    """Refuse new weights beside a KV connector, and for quantised models.

    Raises
    ------
    PrepError
        If there is a connector, which has stored K and V of the old weights, or layers have
        derived factors of rounding from them.
    """
    if vllm_config.model_config.quantization is not None:
        raise PrepError(
            "new weights are not supported for quantised models, whose layers have derived "
            "factors of rounding from the old ones: start another engine"
        )
    if vllm_config.kv_transfer_config is not None:
        raise PrepError(
            "new weights are not supported with a KV connector, which would still load keys "
            "and values of the old weights: start another engine with an empty folder"
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
    before = {(module, name): tensors for module, name, tensors in _derived(model)}
    yield
    for module in model.modules():
        refresh = getattr(module, "refresh", None)
        if callable(refresh):
            refresh()
    for module, name, new in list(_derived(model)):
        old = before.get((module, name), new)
        if old is new:
            continue
        for had, has in zip(_each(old), _each(new), strict=True):
            if (had.shape, had.dtype, had.stride()) != (has.shape, has.dtype, has.stride()):
                raise PrepError(
                    f"new weights: {name} of {type(module).__name__} was {tuple(had.shape)} "
                    f"{had.dtype} and is {tuple(has.shape)} {has.dtype}, where graphs can't read "
                    "it: start the engine again with the new checkpoint"
                )
            if had.data_ptr() != has.data_ptr():
                had.copy_(has)
        setattr(module, name, old)


Tensors = torch.Tensor | list[torch.Tensor]


def _each(tensors: Tensors) -> list[torch.Tensor]:
    return tensors if isinstance(tensors, list) else [tensors]


def _derived(model: nn.Module) -> Iterator[tuple[nn.Module, str, Tensors]]:
    """Plain attributes of modules that are tensors or lists of tensors, with module and name."""
    for module in model.modules():
        for name, value in vars(module).items():
            if isinstance(value, torch.Tensor) or (
                isinstance(value, list)
                and value
                and all(isinstance(each, torch.Tensor) for each in value)
            ):
                yield module, name, value
