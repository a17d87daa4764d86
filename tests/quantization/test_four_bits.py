"""Weights of four bits are those of an oracle that reads bytes, on each of two ranks."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from vllm.model_executor import parameter
from vllm.model_executor.layers.quantization.compressed_tensors.schemes import (
    CompressedTensorsWNA16,
)

from ascend_emulator.operators import int4_weights
from ascend_emulator.operators.matmul import int4_values
from examples import four_bits
from tests.helpers.engine import engine_config, make_model
from tests.helpers.four_bits import dequantised, numbers_in, weight_in
from tests.helpers.quantized import QUANTIZE
from vllm_npu_prep.errors import PrepError
from vllm_npu_prep.quantization import int4, register_kernels
from vllm_npu_prep.quantization.awq_gptq import (
    AWQLinearMethod,
    CheckedAWQConfig,
    CheckedGPTQConfig,
    GPTQLinearMethod,
)
from vllm_npu_prep.quantization.compressed import CheckedLinearMethod
from vllm_npu_prep.quantization.formats import describe, packed_operators
from vllm_npu_prep.quantization.int4 import refuse_cut_groups
from vllm_npu_prep.quantization.int8 import TorchInt8Linear

OUTPUTS, INPUTS = 48, 128


def make_layer(form, group, has_zeros, outputs, inputs):
    """A layer of one rank without weights, and vLLM's reader of them."""
    layer = torch.nn.Module()
    sizes = {
        "output_size": OUTPUTS,
        "input_size": INPUTS,
        "output_partition_sizes": [outputs // 3, 2 * outputs // 3],
        "input_size_per_partition": inputs,
        "params_dtype": torch.float32,
        "weight_loader": lambda *args: None,
    }
    if form == "compressed-tensors":
        strategy = "group" if group else "channel"
        reader = CompressedTensorsWNA16(strategy, 4, group or None, not has_zeros, "layer")
    else:
        config, method = WORDS[form]
        scheme = "W4A16_ASYM" if has_zeros else "W4A16"
        made = config.from_config(four_bits.config_of(form, scheme, group, {}))
        reader = method(made, made)
    reader.create_weights(layer=layer, **sizes)
    return layer, reader


def load_columns(parameter, tensor):
    """Two modules of 16 and 32 outputs, as gate and up are loaded."""
    if not hasattr(parameter, "output_dim"):
        return
    dim, start = parameter.output_dim, 0
    per_word = 8 if tensor.shape[dim] < OUTPUTS else 1
    for size in (OUTPUTS // 3, 2 * OUTPUTS // 3):
        part = tensor.narrow(dim, start // per_word, size // per_word)
        parameter.load_merged_column_weight(part, shard_offset=start // 2, shard_size=size // 2)
        start += size


def load_rows(parameter, tensor):
    if hasattr(parameter, "output_dim"):
        parameter.load_row_parallel_weight(tensor)


WORDS = {
    "awq": (CheckedAWQConfig, AWQLinearMethod),
    "gptq": (CheckedGPTQConfig, GPTQLinearMethod),
}
FILES = [  # who wrote it, inputs of a group, whether groups have zero points
    *(
        (f"compressed-{group}-{zeros}", "compressed-tensors", group, zeros)
        for group in (32, 64, 0)
        for zeros in (False, True)
    ),
    *((f"AWQ-{group}", "awq", group, True) for group in (32, 64)),
    *((f"GPTQ-{group}", "gptq", group, False) for group in (32, 64, 0)),
]


@pytest.mark.parametrize("cut", ["columns", "rows"])
@pytest.mark.parametrize(
    ("form", "group", "has_zeros"), [pytest.param(*file, id=name) for name, *file in FILES]
)
def test_weights_of_two_ranks_are_slices(monkeypatch, seed, form, group, has_zeros, cut):
    register_kernels()
    monkeypatch.setattr(int4, "PIECE", 1)  # of weights that are unpacked at once
    monkeypatch.setattr(parameter, "get_tensor_model_parallel_world_size", lambda: 2)
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(OUTPUTS, INPUTS, generator=generator)
    rounded = four_bits.round_groups(weight, group, has_zeros, "layer")
    tensors = four_bits.tensors(form, "layer", rounded, group)
    expected = weight_in(tensors, "layer")
    for rank in range(2):
        monkeypatch.setattr(parameter, "get_tensor_model_parallel_rank", lambda: rank)  # noqa: B023
        sizes = (OUTPUTS // 2, INPUTS) if cut == "columns" else (OUTPUTS, INPUTS // 2)
        layer, scheme = make_layer(form, group, has_zeros, *sizes)
        for name, made in layer.named_parameters():
            (load_columns if cut == "columns" else load_rows)(made, tensors[f"layer.{name}"])
        scheme.process_weights_after_loading(layer)
        if cut == "columns":
            parts = expected.split([OUTPUTS // 3, 2 * OUTPUTS // 3])
            part = torch.cat([each.chunk(2)[rank] for each in parts])
        else:
            part = expected.chunk(2, 1)[rank]
        torch.testing.assert_close(layer.weight.data, part, rtol=1e-6, atol=0)
        assert (part - weight[: len(part), : part.shape[1]]).abs().max() > 0


@pytest.mark.parametrize("file", [FILES[1], FILES[4], FILES[6], FILES[8]], ids=lambda file: file[0])
def test_words_of_npus_have_the_levels_of_files(monkeypatch, seed, file):
    """Made of some outputs after others; offsets are added to levels."""
    _, form, group, has_zeros = file
    register_kernels()
    for asked in ("get_tensor_model_parallel_rank", "get_tensor_model_parallel_world_size"):
        monkeypatch.setattr(parameter, asked, lambda asked=asked: int(asked.endswith("size")))
    monkeypatch.setattr(int4, "PIECE", 1)
    monkeypatch.setattr(int4, "multiplies_packed", lambda *args: True)
    weight = torch.randn(OUTPUTS, INPUTS, generator=torch.Generator().manual_seed(seed))
    rounded = four_bits.round_groups(weight, group, has_zeros, "layer")
    tensors = four_bits.tensors(form, "layer", rounded, group)
    layer, scheme = make_layer(form, group, has_zeros, OUTPUTS, INPUTS)
    for name, made in layer.named_parameters():
        if hasattr(made, "output_dim"):
            made.data.copy_(tensors[f"layer.{name}"])
    scheme.process_weights_after_loading(layer)
    levels = (numbers_in(layer.weight.data) + 8) % 16 - 8
    offset = getattr(layer, "group_offset", torch.zeros_like(layer.group_scale))
    found = dequantised(levels.T, layer.group_scale.data.t().numpy(), -offset.data.t().numpy())
    torch.testing.assert_close(found, weight_in(tensors, "layer"), rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("group", "inputs", "outputs", "part"),
    [
        (128, 192, [64], "192 of its inputs, which are not whole groups of 128"),
        (-1, 36, [64], "not whole groups of 8"),
        (32, 64, [64, 12], r"\[64, 12\] of its outputs"),
    ],
)
def test_borders_of_ranks_within_groups_are_refused(group, inputs, outputs, part):
    layer = torch.nn.Linear(2, 2)
    refuse_cut_groups(layer, 32, 64, [64, 16], True)
    with pytest.raises(PrepError, match=part):
        refuse_cut_groups(layer, group, inputs, outputs, True)


@pytest.mark.parametrize(
    ("device", "name", "is_refused"),
    [("meta", "q_proj", True), ("cpu", "q_proj", False), ("meta", "kv_b_proj", False)],
)
def test_devices_that_multiply_by_words_need_whole_ones(monkeypatch, device, name, is_refused):
    """Before weights are loaded; latent attention's weights are dequantised everywhere."""
    register_kernels()
    for asked in ("get_tensor_model_parallel_rank", "get_tensor_model_parallel_world_size"):
        monkeypatch.setattr(parameter, asked, lambda: 0)
    layer = torch.nn.Module()
    layer.prefix, layer.scheme = name, CompressedTensorsWNA16("group", 4, 32, True, name)
    config = SimpleNamespace(before_loading=lambda loader: loader)
    refused = pytest.raises(PrepError, match=r"\[12\] of its outputs, which are packed by 8")
    with torch.device(device), refused if is_refused else nullcontext():
        CheckedLinearMethod(config).create_weights(
            layer, 64, [12], 64, 12, torch.float16, weight_loader=lambda *args: None
        )


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("is_ordered", [False, True])
def test_levels_for_rounded_rows_give_the_products_of_exact_sums(
    monkeypatch, seed, groups, is_ordered
):
    """As the emulated kernel computes with them; some scales are negative, as tools write them.

    Words are made of some outputs after others. Latent attention orders outputs anew.
    """
    monkeypatch.setattr(int4, "PIECE", 8 * 768)
    draw = torch.Generator().manual_seed(seed)
    levels = torch.randint(-8, 8, (24, 768), generator=draw).to(torch.int8)
    scales = torch.randn(24, groups, generator=draw) / 50
    x = torch.randn(5, 768, generator=draw)
    packed = int4.words_of_levels(levels, scales)
    assert not (packed.scale >> 32).any(), "bits that kernels read for something else"
    layer = int4.NPUInt4Linear(packed.weight, packed.scale, correction=packed.correction)
    order = torch.randperm(24, generator=draw) if is_ordered else torch.arange(24)
    layer = layer.ordered(order) if is_ordered else layer
    scale = scales[:, 0] if groups == 1 else scales.t().contiguous()
    exact = TorchInt8Linear(levels.t(), scale)
    rows = exact.quantize(x)
    given = rows.values, int4_values(layer.weight), layer.weight_scale, layer.correction
    got = int4_weights.product(*given, rows.scale)
    expected = exact.multiply(rows, None)[:, order]
    bound = 2e-3 * expected.abs().max()
    torch.testing.assert_close(got, expected, rtol=2e-3, atol=float(bound))


def test_scales_are_the_nearest_that_kernels_read(seed):
    """They read the upper 19 bits; corrections are made with what they read."""
    draw = torch.Generator().manual_seed(seed)
    levels = torch.randint(-8, 8, (16, 512), generator=draw).to(torch.int8)
    scales = torch.randn(16, 2, generator=draw) / 50
    packed = int4.words_of_levels(levels, scales)
    assert not (packed.scale & 0x1FFF).any()
    read = packed.scale.to(torch.int32).view(torch.float32).t()
    assert ((read - scales).abs() <= scales.abs() * 2**-11).all()
    sums = levels.double().view(16, 2, -1).sum(2)
    expected = 8 * (sums * read.double()).sum(1)
    torch.testing.assert_close(packed.correction.double(), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("size", "inputs", "outputs", "is_refused"),
    [
        (256, 512, [24, 8], False),
        (256, 18432, [8], False),
        (256, 18688, [8], True),
        (256, 512, [12], True),
        (128, 512, [8], True),
        (256, 256, [8], False),
    ],
)
def test_groups_that_npus_do_not_multiply_are_refused(size, inputs, outputs, is_refused):
    layer = torch.nn.Module()
    layer.prefix = "layer"
    int4.refuse_unmultiplied(layer, size, inputs, outputs)  # on the CPU
    refused = pytest.raises(PrepError, match="NPUs take groups of 256 four-bit weights")
    with torch.device("meta"), refused if is_refused else nullcontext():
        int4.refuse_unmultiplied(layer, size, inputs, outputs)


@pytest.mark.parametrize("keep", [("self_attn",), ()])
def test_experts_alone_need_no_operator_of_packed_layers(tmp_path, keep):
    """Beside them, attention has such weights."""
    config = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    model = make_model(tmp_path / "float", "Qwen3Moe", **config)
    how = {"form": "compressed-tensors", "scheme": "W4A16", "group": 32, "keep": keep}
    QUANTIZE(model, tmp_path / "int4", **how)
    config = engine_config(tmp_path / "int4")
    expected = {"npu_grouped_matmul", *(() if keep else ["npu_weight_quant_batchmatmul"])}
    assert {*packed_operators(config)} == expected
    assert {name for name in describe(config, on_npu=True).split() if "matmul" in name} == expected
