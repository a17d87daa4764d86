"""Linear layers of the CPU fallback, whose weights are packed for oneDNN once they are loaded.

A packed weight is in the order in which oneDNN reads it. torch's own product puts a weight into
this order in every step.
"""

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
)

from vllm_npu_prep.compat.torch import PackedLinear, packed_linear

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class _Packed:
    """A layer's method that multiplies by a packed weight.

    Unless other layers read the weight, too, as an embedding does that is tied to the head, the
    layer's own ``weight`` has no elements meanwhile.
    """

    def __init__(self, layer: nn.Module, operators: PackedLinear, is_shared: bool) -> None:
        super().__init__()
        self.before, self.operators, self.is_shared = layer.quant_method, operators, is_shared
        self.pack(layer)

    def pack(self, layer: nn.Module) -> None:
        weight: Any = layer.weight
        self.packed = self.operators.pack(weight.data)  # [N, K], opaque
        if not self.is_shared:
            weight.data = weight.data.new_empty(0)
        method: Any = self
        layer.quant_method = method

    def unpack(self, layer: nn.Module) -> None:
        weight: Any = layer.weight
        if not self.is_shared:
            weight.data = self.packed.to_dense().to(weight.dtype)
        layer.quant_method = self.before
        del self.packed

    def apply(
        self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        del layer
        return self.operators.multiply(x, self.packed, bias, "none", [], "")


class PackedLinearMethod(_Packed, UnquantizedLinearMethod):
    """The method of linear layers."""


class PackedEmbeddingMethod(_Packed, UnquantizedEmbeddingMethod):
    """The method of heads, and of embeddings that are heads, too."""


def pack_weights(
    models: Iterable[nn.Module], vllm_config: "VllmConfig", log: Callable[[str], object]
) -> None:
    """Pack the weights of loaded models that are of the model's dtype and not quantised.

    Parameters
    ----------
    models
        The model and, if it has one, its drafter, which may share weights with it.
    log
        Is called with one line if torch can't pack weights of this dtype here. They are packed in
        float32 then, if it can do that: a product is 4 to 10 times quicker than one of torch's own
        in 16 bits (576 to 1,536, on a processor with AVX2).
    """
    config = vllm_config.model_config
    dtype, models = config.dtype, list(models)
    assert isinstance(dtype, torch.dtype)  # resolved by now
    operators = packed_linear()
    why = _fault(operators, dtype)
    if operators is not None and why and not _fault(wide := _in_float32(operators), dtype):
        log(f"Linear layers multiply in float32, by weights of twice their size: {why}.")
        operators = wide
    elif operators is None or why:
        log(f"Linear layers multiply by weights that are not packed, which takes longer: {why}.")
        return
    # Adapters' wrappers pass for layers by properties
    layers = {
        module: None
        for model in models
        for module in model.modules()
        if "weight" in module._parameters
    }
    readers = Counter(id(weight) for layer in layers for weight in layer.parameters(recurse=False))
    heads = _heads(models) if config.head_dtype == dtype else set()
    for layer in layers:
        method: type[_Packed]
        if type(getattr(layer, "quant_method", None)) is UnquantizedLinearMethod:
            # Layers of latent attention make other weights of this one
            suits, method = not hasattr(layer, "_cpu_skip_gemm_dispatch"), PackedLinearMethod
        else:
            suits, method = layer in heads, PackedEmbeddingMethod
        weight = getattr(layer, "weight", None)
        if suits and weight is not None and weight.dim() == 2 and weight.dtype == dtype:
            is_embedding = method is PackedEmbeddingMethod and not isinstance(layer, ParallelLMHead)
            method(layer, operators, is_shared=is_embedding or readers[id(weight)] > 1)


def _heads(models: Iterable[nn.Module]) -> set[nn.Module]:
    """Return layers that multiply by an embedding's weights."""
    return {
        module
        for model in models
        for name, module in model.named_modules(remove_duplicate=False)
        if type(getattr(module, "quant_method", None)) is UnquantizedEmbeddingMethod
        and (isinstance(module, ParallelLMHead) or name.rpartition(".")[2] == "lm_head")
    }


def _in_float32(operators: PackedLinear) -> PackedLinear:
    """Return operators that pack weights of 16 bits in float32, and round each product once."""

    def pack(weight: torch.Tensor) -> torch.Tensor:
        return operators.pack(weight.float())

    def multiply(
        x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None, *unused: Any
    ) -> torch.Tensor:
        wide_bias = None if bias is None else bias.float()
        return operators.multiply(x.float(), packed, wide_bias, *unused).to(x.dtype)

    return PackedLinear(pack, multiply)


def _fault(operators: PackedLinear | None, dtype: torch.dtype) -> str:
    """Return why torch's operators can't be used, by holding them against ``F.linear``.

    There are inputs enough to notice sums in float16, which oneDNN has on aarch64.
    """
    if operators is None:
        return "this torch has no operators for it"
    draws = torch.Generator().manual_seed(0)
    x, weight, bias = (torch.randn(*s, generator=draws) for s in ((9, 1024), (37, 1024), (37,)))
    x, weight, bias = x.to(dtype), weight.to(dtype), bias.to(dtype)
    try:
        packed = operators.pack(weight)
        product = operators.multiply(x, packed, bias, "none", [], "")
        back = packed.to_dense().to(dtype)
    except (RuntimeError, NotImplementedError) as error:
        return str(error).partition("\n")[0]
    expected = torch.nn.functional.linear(x.float(), weight.float(), bias.float())
    near = 1e-4 if dtype == torch.float32 else 2e-2
    is_near = torch.allclose(product.float(), expected, rtol=near, atol=near)
    return "" if is_near and torch.equal(back, weight) else "torch's operators compute it wrong"


@contextlib.contextmanager
def unpacked(model: nn.Module) -> Iterator[None]:
    """Return a context in which weights are as vLLM knows them, and after which they are packed."""
    packed = [
        (layer, method)
        for layer in model.modules()
        if isinstance(method := vars(layer).get("quant_method"), _Packed)
        and "weight" in layer._parameters
    ]
    for layer, method in packed:
        method.unpack(layer)
    try:
        yield
    finally:
        for layer, method in packed:
            method.pack(layer)
