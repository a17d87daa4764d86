"""Layers whose attention is not this plugin's are refused, whatever their model is called."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.attention import Attention, MLAAttention
from vllm.model_executor.layers.attention.prefill_prefix_lm_attention import (
    PrefillPrefixLMAttention,
)
from vllm.model_executor.model_loader.base_loader import BaseModelLoader
from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend
from vllm.v1.attention.selector import AttentionSelectorConfig

from vllm_npu_prep.attention.backend import AscendAttentionBackend
from vllm_npu_prep.attention.layers import ASKED, refuse_other_layers
from vllm_npu_prep.compat import models
from vllm_npu_prep.errors import PrepError
from vllm_npu_prep.platform import NPUPlatform


def layer(kind: type, backend: type = AscendAttentionBackend) -> Any:
    """A layer that was not initialised, with a backend."""
    made: Any = object.__new__(kind)
    torch.nn.Module.__init__(made)
    made.get_attn_backend = lambda: backend
    return made


@pytest.mark.parametrize("name", ASKED)
def test_attention_that_no_kernel_has_is_refused(name):
    plain = AttentionSelectorConfig(64, torch.float32, None, None)
    assert NPUPlatform.get_attn_backend_cls(None, plain)
    with pytest.raises(PrepError, match=f"^layers with {ASKED[name][0][:10]}"):
        NPUPlatform.get_attn_backend_cls(None, plain._replace(**{name: True}))


def test_a_layer_is_made_without_a_model():
    """vLLM's own tests make layers so; no engine does."""
    with set_current_vllm_config(VllmConfig()):
        made = Attention(32, 64, 0.1, prefix="model.layers.0.attn")
    assert made.impl.kernels.family.device_type == "cpu"


def test_layers_of_other_classes_or_backends_are_refused():
    ours = {"a": layer(Attention), "b": layer(MLAAttention)}
    refuse_other_layers({**ours, "no layer": SimpleNamespace()})
    with pytest.raises(PrepError, match=r"PrefillPrefixLMAttention \(c\)"):
        refuse_other_layers({**ours, "c": layer(PrefillPrefixLMAttention)})
    with pytest.raises(PrepError, match=r"attention of d .* its model chose FlashAttentionBackend"):
        refuse_other_layers({**ours, "d": layer(Attention, FlashAttentionBackend)})


@pytest.fixture
def create(monkeypatch):
    """`BaseModelLoader.create_model` whose making of a model is given, and what it looked at."""

    def create(make: Any) -> list[Any]:
        looked: list[Any] = []
        monkeypatch.setattr(BaseModelLoader, "create_model", lambda *_, **__: make())
        models.look_at_models_before_weights(lambda *seen: looked.extend(seen))
        config: Any = "config"
        named: Any = SimpleNamespace(architecture="Arch", model="folder")
        loader: Any = object()
        BaseModelLoader.create_model(loader, config, named)
        return looked

    return create


def test_a_model_is_looked_at_before_its_weights(create):
    assert create(lambda: "model") == ["model", "config"]


def test_what_vllms_code_of_a_model_raises_is_one_line(create):
    from vllm.model_executor.layers.activation import get_act_fn

    with pytest.raises(PrepError) as error:
        create(lambda: get_act_fn("another"))
    said = str(error.value)
    assert said.startswith("Arch (folder) is refused by vLLM's own code of it: ")
    assert "'another' is not supported" in said and "layers/activation.py:" in said
    assert "\n" not in said


def test_what_this_plugins_code_raises_keeps_its_traceback(create):
    with pytest.raises(AttributeError):
        create(lambda: refuse_other_layers(None))  # type: ignore[arg-type]
    with pytest.raises(PrepError, match=r"^already one line$"):
        create(lambda: (_ for _ in ()).throw(PrepError("already one line")))
