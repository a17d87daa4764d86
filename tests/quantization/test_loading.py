"""Weights of ModelSlim's layers are loaded after the modules were held against the files."""

from types import SimpleNamespace

import pytest
import torch
from vllm.model_executor import parameter

from vllm_npu_prep.quantization.checkpoint import Int4Form
from vllm_npu_prep.quantization.modelslim import METHODS


@pytest.mark.parametrize("kind", METHODS)
def test_every_parameter_waits_for_the_look_at_the_modules(monkeypatch, kind):
    """Any of them can be the first one in a file."""
    for name in ("get_tensor_model_parallel_rank", "get_tensor_model_parallel_world_size"):
        monkeypatch.setattr(parameter, name, lambda: 0)
    config = SimpleNamespace(
        before_loading=lambda loader: f"held, {loader}",
        scales_as_int64=False,
        int4=Int4Form(True, 8),
    )
    layer = torch.nn.Module()
    METHODS[kind](config).create_weights(
        layer, 8, [8, 8], 8, 16, torch.float16, weight_loader="loaded"
    )
    loaders = {name: made.weight_loader for name, made in layer.named_parameters()}
    assert all(str(loader).startswith("held, ") for loader in loaders.values()), loaders
    assert loaders["weight"] == loaders["weight_scale"] == "held, loaded"
