"""Fused operators as far as a machine without them can tell: switches, and what is left to vLLM."""

from types import SimpleNamespace

import pytest
import torch
from vllm.model_executor.layers.rotary_embedding.mrope import apply_interleaved_rope

from vllm_npu_prep.config import FUSED_OPERATORS, fused_operators, parse_config
from vllm_npu_prep.errors import PrepError
from vllm_npu_prep.ops import register_fused
from vllm_npu_prep.ops.npu import switches
from vllm_npu_prep.ops.npu.norms import MAX_TOKENS_OF_WHOLE_ROWS, first_head_of_rows
from vllm_npu_prep.ops.npu.projection import ProjectedQKV
from vllm_npu_prep.ops.npu.rotary import columns_of_sections

ALL = frozenset(FUSED_OPERATORS)


def config(device_type="npu", **options):
    return SimpleNamespace(
        device_config=SimpleNamespace(device_type=device_type),
        model_config=SimpleNamespace(quantization="compressed-tensors"),
        additional_config={"npu_prep": options, "other": 1},
    )


@pytest.mark.parametrize(
    ("given", "names"),
    [
        ({}, ALL),
        ({"fused": True}, ALL),
        ({"fused": False}, frozenset()),
        ({"fused": {"off": ["rms_norm", "qkv"]}}, ALL - {"rms_norm", "qkv"}),
    ],
)
def test_switches(given, names):
    assert fused_operators(config(**given)) == names
    assert fused_operators(config("cpu", **given)) == frozenset()


def test_a_switch_for_each_operator_is_read_with_a_warning():
    with pytest.warns(FutureWarning, match=r'write \{"fused": \{"off": \["rms_norm"\]\}\}'):
        assert fused_operators(config(fused={"rms_norm": False, "qkv": True})) == ALL - {"rms_norm"}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"off": ["rmsnorm"]}, r'no fused operator is called "rmsnorm" \(did you mean "rms_norm"'),
        ({"rmsnorm": False}, r'"npu_prep.fused" has no key "rmsnorm"; allowed: off'),
        ({"off": "qkv"}, r'"npu_prep.fused.off" = "qkv": '),
        ({"qkv": 3}, r'"npu_prep.fused" has no key "qkv"'),
    ],
)
def test_a_mistyped_switch_is_one_line(given, message):
    with pytest.raises(PrepError, match=message):
        parse_config({"npu_prep": {"fused": given}})


def test_an_operator_that_torch_npu_lacks_is_left_out(monkeypatch):
    present = {name: None for name in FUSED_OPERATORS.values() if name != "npu_mrope"}
    monkeypatch.setattr(switches.torch.ops, "npu", SimpleNamespace(**present), raising=False)
    registered = []
    monkeypatch.setattr("vllm_npu_prep.ops._prefer_in_ir", registered.append)
    monkeypatch.setattr("vllm_npu_prep.ops._register_layers", lambda: None)
    lines, made = [], config(fused={"off": ["gelu"]}, check="off")
    register_fused(made, lines.append)
    assert len(lines) == 2
    assert all("npu_mrope" in line and "off" in line for line in lines)
    assert fused_operators(made) == registered[0] == ALL - {"rotary", "mrope", "gelu"}
    assert made.additional_config["other"] == 1
    assert parse_config(made.additional_config).check == "off"


def parts(widths=(6, 4, 4)):
    return [torch.randn(3, width) for width in widths]


def test_a_model_that_splits_gets_q_k_and_v_as_they_are():
    given, asked = parts(), []
    projected = ProjectedQKV(given, lambda: asked.append(1))
    assert all(got is part for got, part in zip(projected.split([6, 4, 4], dim=-1), given))
    equal = parts((4, 4, 4))
    chunks = ProjectedQKV(equal, lambda: asked.append(1)).chunk(3, dim=-1)
    assert all(got is part for got, part in zip(chunks, equal))
    assert not asked


@pytest.mark.parametrize(
    "use",
    [
        lambda x: x.view(3, 7, 2),
        lambda x: x[:, 2:5],
        lambda x: x.split([7, 7], dim=-1)[1],
        lambda x: torch.split(x, 7, dim=-1)[0],
        lambda x: torch.cat([x, x]),
        lambda x: x.chunk(2, -1)[1],
    ],
)
def test_any_other_use_sees_one_tensor(use):
    given, asked = parts(), []
    projected = ProjectedQKV(given, lambda: asked.append(1))
    assert torch.equal(use(projected), use(torch.cat(given, -1)))
    assert asked == [1]


def test_what_a_model_writes_to_the_whole_is_in_its_parts():
    projected = ProjectedQKV(parts(), lambda: None)
    projected.clamp_(min=-0.1, max=0.1)
    assert max(float(part.abs().max()) for part in projected.split([6, 4, 4], -1)) < 0.11


@pytest.mark.parametrize("sections", [[16, 24, 24], [4, 2, 2], [6, 1, 1]])
def test_columns_follow_their_sections(sections):
    half = sum(sections)
    of_rows = torch.arange(3)[:, None, None].expand(3, 1, half)
    chunked = torch.cat([row[i] for i, row in enumerate(of_rows.split(sections, -1))], -1)[0]
    columns = columns_of_sections(tuple(sections), interleaved=False)
    assert torch.equal(columns, torch.cat((chunked, chunked)))
    mixed = apply_interleaved_rope(of_rows, sections)[0]
    columns = columns_of_sections(tuple(sections), interleaved=True)
    assert torch.equal(columns, torch.cat((mixed, mixed)))


def test_heads_of_whole_rows_are_found():
    rows = torch.randn(5, 64)
    query, key, value = (part.view(5, -1, 8) for part in rows.split([32, 16, 16], -1))
    assert [first_head_of_rows(part) for part in (query, key, value)] == [0, 4, 6]


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.randn(5, 4, 8),  # contiguous: nothing would copy it
        lambda: torch.randn(5, 64)[:, 8:40],  # no heads
        lambda: torch.randn(5, 60)[:, 8:40].view(5, 4, 8),  # a row is no whole number of heads
        lambda: torch.randn(5, 64)[:, 4:36].view(5, 4, 8),  # between heads
        lambda: torch.randn(6, 64)[1:, 8:40].view(5, 4, 8),  # other rows around it
        lambda: torch.randn(MAX_TOKENS_OF_WHOLE_ROWS + 1, 64)[:, 8:40].view(-1, 4, 8),
    ],
)
def test_other_slices_are_normalised_as_they_are(make):
    assert first_head_of_rows(make()) is None
