"""Nothing of a model stays in tables of vLLM once its engine has ended."""

import gc
import weakref

import pytest
import torch
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
