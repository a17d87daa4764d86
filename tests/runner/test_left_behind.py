"""Nothing of a model stays in tables of torch and of vLLM once its engine has ended."""

import gc
import weakref
from types import CodeType
from typing import Any

import pytest
import torch
from torch._dynamo.convert_frame import _bytecode_hooks, register_bytecode_hook
from torch._dynamo.eval_frame import remove_from_cache
from vllm.compilation.wrapper import TorchCompileWithNoGuardsWrapper
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from vllm_npu_prep.runner.left_behind import forget_models


class Layer(torch.nn.Linear):
    """Its weight knows its layer, as vLLM's do."""

    def load(self, weight: torch.Tensor) -> None:
        """Take a weight."""
        self.weight.data.copy_(weight)


@pytest.mark.parametrize("forgets", [True, False])
def test_layers_that_were_loaded_anew_are_let_go(forgets):
    """Without it they stay: a change of vLLM's that lets go of them would show here."""
    layer = Layer(2, 2)
    layer.weight.weight_loader = layer.load
    get_layerwise_info(layer).kernel_tensors = (dict(layer.named_parameters()), {})
    left = weakref.ref(layer)
    if forgets:
        forget_models(torch.nn.Sequential(layer), None)
    del layer
    gc.collect()
    assert (left() is None) == forgets
    forget_models(left())


class Compiled(TorchCompileWithNoGuardsWrapper, Layer):
    """What vLLM makes of a model's part that is compiled, without an engine's configuration."""

    def __init__(self) -> None:
        Layer.__init__(self, 2, 2)
        self.weight.weight_loader = self.load
        for _ in range(2):  # as its base class does, if it is compiled, too
            self._bytecode_hook_handle = register_bytecode_hook(self.bytecode_hook)

    def bytecode_hook(self, old: CodeType, new: CodeType) -> None:
        """Have the code that torch compiles."""
        self._compiled_bytecode = new

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        """One product."""
        return given @ self.weight


def with_examples(graph: torch.fx.GraphModule, examples: list[torch.Tensor]) -> Any:
    """Compile a graph, and keep examples of its inputs, as vLLM does."""
    return lambda *given: graph(*given) if examples else None


@pytest.mark.parametrize("forgets", [True, False])
def test_compiled_code_of_a_traceback_keeps_no_weights(forgets):
    """Without it they stay: a change of torch's that lets go of them would show here."""
    layer = Compiled()
    compiled = torch.compile(layer.forward, backend=with_examples, fullgraph=True)
    with torch.no_grad():
        assert compiled(torch.ones(1, 2)).shape == (1, 2)
    code, left = layer._compiled_bytecode, weakref.ref(layer)  # as a traceback has it
    if forgets:
        forget_models(layer)
    else:
        for number in [n for n, hook in _bytecode_hooks.items() if hook == layer.bytecode_hook]:
            del _bytecode_hooks[number]
        remove_from_cache(layer.original_code_object())
    del layer, compiled
    gc.collect()
    assert (left() is None) == forgets
    forget_models(left())
    gc.collect()
    assert left() is None
    (name,) = (each for each in code.co_names if "compiled_fn" in each)
    assert name in globals()
    del code
    assert name not in globals(), "torch removes what it has made global"
