"""Layers of two ranks: each loads its part of the files, and together they are the whole layer."""

import pytest
import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor import parameter
from vllm.model_executor.layers import linear
from vllm.model_executor.layers.linear import ColumnParallelLinear, RowParallelLinear

from vllm_npu_prep.quantization.modelslim import METHODS, ModelSlimConfig

INPUTS, OUTPUTS, STEP, OFFSET = 12, 8, 0.02, 3


def tensors_of(kind: str, seed: int) -> dict[str, torch.Tensor]:
    """What ModelSlim's files have of a layer with a bias."""
    draw = torch.Generator().manual_seed(seed)
    weight = torch.randint(-127, 128, (OUTPUTS, INPUTS), generator=draw, dtype=torch.int8)
    scale = torch.rand(OUTPUTS, 1, generator=draw) / 100 + 0.001
    made = {"weight": weight, "weight_scale": scale, "weight_offset": torch.zeros(OUTPUTS, 1)}
    if kind == "W4A8_DYNAMIC":  # two outputs in a byte
        made |= {"weight": weight[: OUTPUTS // 2], "scale_bias": torch.zeros(OUTPUTS, 1)}
    if kind == "W8A8":
        bias = torch.randint(-999, 999, (OUTPUTS,), generator=draw)
        made["input_scale"] = torch.tensor([STEP])
        made["input_offset"] = torch.tensor([float(OFFSET)])
        made["deq_scale"] = scale.flatten() * STEP
        made["quant_bias"] = (bias - OFFSET * weight.sum(1)).to(torch.int32)
    return made


def layer_of(
    monkeypatch, kind: str, made: type, rank: int, ranks: int, tensors
) -> linear.LinearBase:
    for module in (parameter, linear):
        monkeypatch.setattr(module, "get_tensor_model_parallel_rank", lambda: rank)
        monkeypatch.setattr(module, "get_tensor_model_parallel_world_size", lambda: ranks)
    config = ModelSlimConfig()
    config.modules, config.scales_as_int64 = {"a": kind}, False
    config.expect({"a": "a file"})
    with set_current_vllm_config(VllmConfig()):
        layer = made(
            *(INPUTS, OUTPUTS, False),
            quant_config=config,
            params_dtype=torch.float32,
            prefix="a",
        )
    for name, each in layer.named_parameters():
        each.weight_loader(each, tensors[name])
    layer.quant_method.process_weights_after_loading(layer)
    return layer


@pytest.mark.parametrize("kind", METHODS)
def test_columns_of_two_ranks_are_those_of_one(monkeypatch, kind, seed):
    tensors = tensors_of(kind, seed)
    x = torch.randn(5, INPUTS, generator=torch.Generator().manual_seed(seed))
    whole, *parts = (
        layer_of(monkeypatch, kind, ColumnParallelLinear, rank, ranks, tensors).int8(x)
        for rank, ranks in ((0, 1), (0, 2), (1, 2))
    )
    assert torch.equal(torch.cat(parts, 1), whole)


def test_one_of_two_ranks_that_sum_takes_the_offset_out(monkeypatch, seed):
    tensors = tensors_of("W8A8", seed)
    x = torch.randn(5, INPUTS, generator=torch.Generator().manual_seed(seed))
    whole = layer_of(monkeypatch, "W8A8", RowParallelLinear, 0, 1, tensors).int8(x)
    parts = [
        layer_of(monkeypatch, "W8A8", RowParallelLinear, rank, 2, tensors).int8(half)
        for rank, half in enumerate(x.chunk(2, dim=1))
    ]
    torch.testing.assert_close(sum(parts), whole)
