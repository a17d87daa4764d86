"""`examples/quantize.py` smooths without a change of the model, leaves out what no scale suits."""

import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
import four_bits
import quantize

from tests.helpers.engine import make_model
from tests.helpers.huggingface import load


def test_smoothing_evens_inputs_and_keeps_the_models_outputs(tmp_path):
    model = make_model(tmp_path / "model", "Qwen2")
    folder = make_model(tmp_path / "smoothed", "Qwen2")
    modules = {n.removesuffix(".weight") for n, t in quantize.tensors_of(model) if "_proj.w" in n}
    before = quantize.input_ranges(model, modules)
    columns, norms = quantize.smoothing(model, before)
    assert len(columns) == 2 * 5 and len(norms) == 2 * 2
    tensors = dict(quantize.smoothed(model, columns, norms))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    ids = torch.arange(2, 90)[None]
    with torch.no_grad():
        old, new = (load(each)(ids).logits for each in (model, folder))
    torch.testing.assert_close(new, old, rtol=1e-4, atol=1e-4)
    after = quantize.input_ranges(folder, modules)
    ends = quantize.ends_of(before, columns)
    for name, (low, high, *_) in after.items():
        assert (low.min().item(), high.max().item()) == pytest.approx(ends[name], rel=1e-4)


@pytest.mark.parametrize("form", quantize.FORMATS)
def test_modules_with_outlying_tokens_keep_their_dtype(tmp_path, monkeypatch, form):
    """Gemma's layers are not smoothed; --plain leaves nothing out."""
    model = make_model(tmp_path / "model", "Gemma")
    modules = {n.removesuffix(".weight") for n, t in quantize.tensors_of(model) if "_proj.w" in n}
    sizes = {n: each.largest for n, each in quantize.input_ranges(model, modules).items()}
    ratios = sorted((float(each.max() / each.median()), name) for name, each in sizes.items())
    (bound, _), *above = ratios[-3:]
    monkeypatch.setattr(quantize, "OUTLYING", bound)
    left_out = sorted(name for _, name in above)
    for plain, expected in ((False, left_out), (True, [])):
        assert quantize.quantize(model, tmp_path / "out", form, plain=plain) == expected
        dtypes = {n: t.dtype for n, t in quantize.tensors_of(tmp_path / "out")}
        floats = [name for name in modules if dtypes[f"{name}.weight"] != torch.int8]
        assert sorted(floats) == expected
        assert all(f"{name}.weight_scale" not in dtypes for name in floats)


def test_scales_by_inputs_lose_less_of_outputs(seed):
    """Outputs lose a fifth less, at least, where some inputs are larger than others."""
    draw = torch.Generator().manual_seed(seed)
    weight, x = (torch.randn(size, 128, generator=draw) for size in (48, 256))
    x = x * torch.randn(128, generator=draw).exp()
    lost = []
    for squares, signed in ((None, False), (x.square().sum(0), True)):
        how = (weight, 32, False, "a module", squares, signed)
        numbers, scale, _ = four_bits.round_groups(*how)
        rounded = (numbers - 8) * scale.repeat_interleave(32, 1)
        lost.append((x @ (rounded - weight).T).square().mean())
    assert lost[1] < 0.8 * lost[0] and scale.min() < 0


MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
CANT = {
    "experts in static form": (
        {"static": True},
        {},
        r"model\.layers\.0\.mlp\.experts\.0\.down_proj \(of 24 such modules\).*--format modelslim",
    ),
    "a model that transformers doesn't know": (
        {},
        {"model_type": "qwen9"},
        "transformers can't run .*; --plain without --static needs no run",
    ),
}


def add_tokenizer(folder: Path, tokens: int) -> None:
    """A tokenizer whose tokens are words."""
    words = {f"w{number}": number for number in range(tokens)}
    made = {"type": "WordLevel", "vocab": words, "unk_token": "w0"}
    kept = {"version": "1.0", "pre_tokenizer": {"type": "Whitespace"}, "model": made}
    (folder / "tokenizer.json").write_text(json.dumps({**kept, "added_tokens": []}))
    config = {"tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("tokens", [0, 40, 4000])
def test_a_text_is_read_by_the_models_own_tokenizer(tmp_path, tokens):
    """Without one, or with one of a larger vocabulary, the run ends with a line."""
    model = make_model(tmp_path / "model")
    if tokens:
        add_tokenizer(model, tokens)
    modules, text = {"model.layers.0.self_attn.q_proj"}, f"w1 w2 w{max(tokens, 1) - 1}"
    if tokens == 40:
        assert len(quantize.input_ranges(model, modules, text).popitem()[1].largest) == 3
    else:
        told = "token 3999, its vocabulary has" if tokens else "it has no tokenizer"
        with pytest.raises(ValueError, match=rf"can't run .*\(.*{told}.*\); --plain"):
            quantize.input_ranges(model, modules, text)


@pytest.mark.parametrize("case", CANT)
def test_what_cannot_be_done_is_said_before_anything_is_written(tmp_path, case):
    how, change, message = CANT[case]
    model = make_model(tmp_path / "model", "Qwen3Moe", **MOE)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(ValueError, match=message):
        quantize.quantize(model, tmp_path / "out", "compressed-tensors", **how)
    assert not (tmp_path / "out").exists()
