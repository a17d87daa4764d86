"""Damaged checkpoints: one line that names module and file, before a weight is loaded."""

import contextlib
import json
import re
import shutil
from types import SimpleNamespace

import pytest
import safetensors
import torch
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import (
    CompressedTensorsConfig,
)

from examples.four_bits import config_of
from examples.quantize import compressed_tensors_config, end_of, quantize_weight
from tests.helpers.drafters import make_eagle_head
from tests.helpers.engine import engine, engine_config, make_model
from tests.helpers.latent import V32
from tests.helpers.quantized import QUANTIZE, change_tensors, tensors_in
from vllm_npu_prep.errors import PrepError
from vllm_npu_prep.quantization.checkpoint import (
    DESCRIPTION,
    Entry,
    check_awq_gptq,
    check_compressed,
    float_modules_that_draft,
    read_headers,
)
from vllm_npu_prep.quantization.formats import fault
from vllm_npu_prep.quantization.modules import KnowsModules, refuse_unknown

Q, DOWN = "model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj"
INDEXER = "model.layers.0.self_attn.indexer"
FLOAT_ONLY = ["model.embed_tokens", "lm_head", f"{INDEXER}.wk", f"{INDEXER}.weights_proj"]
FORMS = {
    "compressed": {"form": "compressed-tensors"},
    "dynamic": {"form": "modelslim"},
    "static": {"form": "modelslim", "static": True},
    "int4": {"form": "compressed-tensors", "scheme": "W4A16_ASYM", "group": 32},
    "pairs": {"form": "modelslim", "scheme": "W4A8", "group": 32},
    "rows": {"form": "modelslim", "scheme": "W4A8", "group": 0},
    "awq": {"form": "awq", "scheme": "W4A16_ASYM", "group": 32},
    "gptq": {"form": "gptq", "scheme": "W4A16", "group": 32},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("float"))


def without(*names):
    return lambda tensors: [tensors.pop(name) for name in names]


def changed(name, function):
    def change(tensors):
        tensors[name] = function(tensors[name])

    return change


def more(name, tensor):
    return lambda tensors: tensors.update({name: tensor})


FILES = {
    "no scales": ("compressed", without(f"{Q}.weight_scale"), (f"{Q} has no weight_scale",)),
    "no weight": ("compressed", without(f"{Q}.weight"), (f"{Q} has a weight_scale but no weight",)),
    "too few scales": (
        "compressed",
        changed(f"{Q}.weight_scale", lambda s: s[:-1]),
        (f"weight_scale of {Q} is [63, 1], its weight [64, 64]", "[64, 1]"),
    ),
    "transposed scales": (
        "compressed",
        changed(f"{Q}.weight_scale", lambda s: s.t()),
        (f"weight_scale of {Q} is [1, 64]",),
    ),
    "a float weight among int8 ones": (
        "compressed",
        changed(f"{Q}.weight", torch.Tensor.float),
        (f"the weight of {Q} is F32, a quantised one is expected", "ignore"),
    ),
    "a layer too many": (
        "compressed",
        lambda tensors: tensors.update(
            {
                f"model.layers.2.mlp.up_proj.{kind}": tensors[
                    f"model.layers.0.mlp.up_proj.{kind}"
                ].clone()
                for kind in ("weight", "weight_scale")
            }
        ),
        ("names model.layers.2.mlp.up_proj, but the model has 2 layers",),
    ),
    "no offset of inputs": (
        "static",
        without(f"{DOWN}.input_offset"),
        (f"{DOWN} has no input_offset, which W8A8 needs",),
    ),
    "an int8 weight that is not described": (
        "dynamic",
        more("model.layers.0.mlp.other_proj.weight", torch.ones(4, 4, dtype=torch.int8)),
        (f"model.layers.0.mlp.other_proj is int8, but {DESCRIPTION} lacks it",),
    ),
    "a described weight that is float": (
        "dynamic",
        changed(f"{Q}.weight", torch.Tensor.float),
        (f"calls {Q} W8A8_DYNAMIC", "is F32"),
    ),
    "a bias of another size": (
        "static",
        changed(f"{DOWN}.quant_bias", lambda b: b[:9]),
        (f"quant_bias of {DOWN} is [9]",),
    ),
    "int4: no scales": (
        "int4",
        without(f"{Q}.weight_scale"),
        (f"weight_packed of {Q} is [64, 8]", "weight_scale [64, 2] and", "no weight_scale and"),
    ),
    "int4: no zero points": (
        "int4",
        without(f"{Q}.weight_zero_point"),
        (
            f"weight_packed of {Q}",
            "weight_zero_point [8, 2] is expected",
            "no weight_zero_point is",
        ),
    ),
    "int4: scales of other groups": (
        "int4",
        changed(f"{DOWN}.weight_scale", lambda s: s[:, :1]),
        (f"weight_packed of {DOWN} is [64, 16]", "groups of 32", "weight_scale [64, 4] and"),
    ),
    "int4: a packed width that does not fit": (
        "int4",
        changed(f"{Q}.weight_packed", lambda w: w[:, :-1]),
        (f"weight_packed of {Q} is [64, 7]", "weight_shape [64, 64]: [64, 8] is expected"),
    ),
    "int4: a shape of one number": (
        "int4",
        changed(f"{Q}.weight_shape", lambda s: s[:1]),
        (f"weight_packed of {Q} is [64, 8], its weight_shape [64]: [64, 64] is expected",),
    ),
    "int4: not packed": (
        "int4",
        changed(f"{Q}.weight_packed", torch.Tensor.char),
        (f"weight_packed of {Q} is [64, 8] I8; int32",),
    ),
    "W4A8: no second scales": (
        "pairs",
        without(f"{Q}.weight_scale_second"),
        (f"{Q} has no weight_scale_second, which W4A8_DYNAMIC needs",),
    ),
    "W4A8: second scales of other groups": (
        "pairs",
        changed(f"{DOWN}.weight_scale_second", lambda s: s[:, :2]),
        (f"weight_scale_second of {DOWN} is [64, 2], its weight [32, 128]: [64, 4] is expected",),
    ),
    "W4A8: not in pairs": (
        "pairs",
        changed(f"{Q}.weight", lambda w: w.repeat(2, 1)),
        (f"weight_scale of {Q} is [64, 1], its weight [64, 64]:", "[128, 1] is expected"),
    ),
    "AWQ: no zero points": ("awq", without(f"{Q}.qzeros"), (f"{Q} has no qzeros, which auto_awq",)),
    "AWQ: scales of other groups": (
        "awq",
        changed(f"{DOWN}.scales", lambda s: s[:1]),
        (f"scales of {DOWN} is [1, 64], its weight [128, 8]: [4, 64] is expected",),
    ),
    "GPTQ: a packed width that does not fit": (
        "gptq",
        changed(f"{Q}.qweight", lambda w: w[:4]),
        (f"scales of {Q} is [2, 64], its weight [4, 64]: [1, 64] is expected",),
    ),
    "GPTQ: act-order": (
        "gptq",
        changed(f"{Q}.g_idx", lambda order: order.flip(0)),
        (f"g_idx of {Q} is not one group of 32 after another (act-order)",),
    ),
    "int4: act-order": (
        "int4",
        more(f"{Q}.weight_g_idx", torch.zeros(64, dtype=torch.int32)),
        (f"{Q} has a weight_g_idx", "act-order"),
    ),
}


@pytest.mark.parametrize("case", FILES)
def test_files_that_do_not_fit(model, tmp_path, case):
    form, change, parts = FILES[case]
    QUANTIZE(model, tmp_path / "int8", **FORMS[form])
    change_tensors(tmp_path / "int8", change)
    check_refused(tmp_path / "int8", parts)


NEEDLESS = ("weight_offset", "weight_offset_second", "scale_bias", "weight_shape", "g_idx")
"""Ends of the names of tensors that a file may lack: they are 0, or follow from the others."""


@pytest.mark.parametrize("form", FORMS)
def test_a_module_without_one_of_its_tensors_is_named(model, tmp_path, form):
    """Whichever it is: what is missing would be zeros, or what memory held."""
    QUANTIZE(model, tmp_path / "whole", **FORMS[form])
    names = [name for name in tensors_in(tmp_path / "whole") if name.startswith(f"{DOWN}.")]
    names = [name for name in names if not name.endswith(NEEDLESS)]
    assert len(names) >= 2
    for name in names:
        folder = shutil.copytree(tmp_path / "whole", tmp_path / name)
        change_tensors(folder, without(name))
        check_refused(folder, (DOWN,))


def check_refused(folder, parts):
    with pytest.raises(PrepError) as refused:
        engine_config(folder)
    text = str(refused.value)
    assert "\n" not in text and str(folder) in text, text
    assert all(part in text for part in parts), text


DESCRIPTIONS = {
    "a layer that the model lacks": (
        {"model.layers.7.self_attn.q_proj.weight": "W8A8_DYNAMIC"},
        ("names model.layers.7.self_attn.q_proj", "2 layers"),
    ),
    "a module that no file has": (
        {"model.layers.0.mlp.other.weight": "FLOAT"},
        ("names model.layers.0.mlp.other, but no safetensors file has its weight",),
    ),
    "an int8 weight called float": ({f"{Q}.weight": "FLOAT"}, (f"calls {Q} FLOAT", "is I8")),
}


@pytest.mark.parametrize("case", DESCRIPTIONS)
def test_descriptions_that_do_not_fit(model, tmp_path, case):
    entries, parts = DESCRIPTIONS[case]
    QUANTIZE(model, tmp_path / "int8", "modelslim")
    path = tmp_path / "int8" / DESCRIPTION
    path.write_text(json.dumps(json.loads(path.read_text()) | entries))
    check_refused(tmp_path / "int8", parts)


@pytest.mark.parametrize("module", FLOAT_ONLY)
@pytest.mark.parametrize("form", ["compressed-tensors", "modelslim"])
def test_modules_that_vllm_makes_in_floats_are_refused_in_int8(model, tmp_path, form, module):
    folder = tmp_path / "int8"
    if INDEXER in module:
        model = make_model(tmp_path / "model", "DeepseekV32", **V32)
    QUANTIZE(model, folder, form)

    def round_all(tensors):
        weight, scale = quantize_weight(tensors[f"{module}.weight"])
        tensors |= {f"{module}.weight": weight, f"{module}.weight_scale": scale}
        if form == "modelslim":
            tensors[f"{module}.weight_offset"] = torch.zeros_like(scale)

    change_tensors(folder, round_all)
    path = folder / DESCRIPTION
    if path.exists():
        described = json.loads(path.read_text()) | {f"{module}.weight": "W8A8_DYNAMIC"}
        path.write_text(json.dumps(described))
    check_refused(folder, (f"{module} is quantised; embeddings, heads", "16 or 32 bits only"))


@pytest.mark.parametrize("form", ["compressed-tensors", "modelslim"])
@pytest.mark.parametrize("method", ["eagle3", "draft_model"])
def test_int8_drafters_are_refused(model, tmp_path, form, method):
    """Before anything is loaded, in one line; found by config.json or by ModelSlim's file."""
    drafter = model
    if method == "eagle3":
        drafter = make_eagle_head(tmp_path / "head", model, method)
    QUANTIZE(drafter, tmp_path / "int8", form)
    given = {"method": method, "model": str(tmp_path / "int8"), "num_speculative_tokens": 2}
    with pytest.raises(PrepError) as refused:
        engine_config(model, speculative_config=given)
    text = str(refused.value)
    assert "\n" not in text and "as a drafter" in text, text
    assert "its weights are quantised" in text and "its target can be quantised" in text, text


@pytest.mark.parametrize("form", ["compressed-tensors", "modelslim"])
def test_a_module_that_the_model_lacks_is_named_early(model, tmp_path, form):
    """Files and description agree, so it shows only when the model has been made."""
    QUANTIZE(model, tmp_path / "int8", form)
    other = "model.layers.1.mlp.other_proj"

    def add(tensors):
        source = DOWN + "."
        for name in [name for name in tensors if name.startswith(source)]:
            tensors[f"{other}.{name.removeprefix(source)}"] = tensors[name].clone()

    change_tensors(tmp_path / "int8", add)
    path = tmp_path / "int8" / DESCRIPTION
    if path.exists():
        described = json.loads(path.read_text()) | {f"{other}.weight": "W8A8_DYNAMIC"}
        path.write_text(json.dumps(described))
    with (
        pytest.raises(PrepError, match=f"names {re.escape(other)}, a module that the model does"),
        engine(tmp_path / "int8"),
    ):
        pass


def test_float_layers_that_draft_are_known_without_a_name():
    """Of files that count them behind the others, from 0, or beside them, with experts in one."""
    fused = "mtp.layers.0.mlp.experts.down_proj"
    headers = {
        "model.layers.1.mlp.up_proj.weight": Entry("BF16", (4, 4), "file"),
        "model.layers.2.mlp.up_proj.weight": Entry("BF16", (4, 4), "file"),
        "model.layers.3.mlp.up_proj.weight": Entry("I8", (4, 4), "file"),
        "model.mtp_layers.1.input_proj.weight": Entry("F32", (4, 4), "file"),
        "mtp.fc.weight": Entry("F32", (4, 4), "file"),
        fused: Entry("BF16", (2, 4, 4), "file"),
        fused.removeprefix("mtp."): Entry("BF16", (2, 4, 4), "file"),
    }
    assert float_modules_that_draft(headers, 2) == [
        "model.layers.2.mlp.up_proj",
        "model.layers.3.input_proj",
        "mtp.fc",
        "mtp.layers.0.mlp.experts.0.down_proj",
        "mtp.layers.0.mlp.experts.1.down_proj",
    ]


def test_a_model_and_its_drafter_name_their_fused_modules():
    config = KnowsModules()
    config.packed_modules_mapping = {"gate_up_proj": ["w1", "w3"]}
    config.packed_modules_mapping = {"in_proj": ["a", "b"]}
    assert config.packed_modules_mapping["gate_up_proj"] == ["w1", "w3"]
    assert config.packed_modules_mapping["in_proj"] == ["a", "b"]
    assert "fused_qkv_a_proj" in config.packed_modules_mapping, "before a model is made"


MADE = {"model.layers.0.mlp.down_proj", "model.layers.0.mlp.experts", "model.layers.1.a"}


@pytest.mark.parametrize(
    ("module", "is_known"),
    [
        ("model.layers.0.mlp.down_proj", True),
        ("model.layers.0.mlp.experts.7.up_proj", True),
        ("model.layers.0.mlp.up_proj", False),
        ("model.layers.1.mlp.experts.7.up_proj", False),
        ("model.layers.2.mlp.up_proj", True),  # of another rank, or it drafts
        ("visual.layers.0.mlp.up_proj", True),  # is not made where images are forbidden
        ("other", True),
    ],
)
def test_unknown_modules_are_those_of_layers_that_are_made(module, is_known):
    with contextlib.nullcontext() if is_known else pytest.raises(PrepError, match=module):
        refuse_unknown({module: "file"}, MADE)


def test_a_description_that_is_no_json(model, tmp_path):
    QUANTIZE(model, tmp_path / "int8", "modelslim")
    (tmp_path / "int8" / DESCRIPTION).write_text("{")
    check_refused(tmp_path / "int8", (DESCRIPTION, "not readable as JSON"))


def test_a_flag_without_a_description(model):
    with pytest.raises(PrepError, match=f"has no {DESCRIPTION}; leave the flag out"):
        engine_config(model, quantization="ascend")


def test_a_truncated_file(model, tmp_path):
    QUANTIZE(model, tmp_path / "int8", "modelslim")
    (path,) = (tmp_path / "int8").glob("*.safetensors")
    path.write_bytes(path.read_bytes()[:100])
    check_refused(tmp_path / "int8", (path.name, "no safetensors file"))


@pytest.mark.parametrize("form", ["int4", "gptq"])
def test_a_file_is_opened_once_for_all_its_small_tensors(model, tmp_path, monkeypatch, form):
    """A mixture of experts has tens of thousands, and each opening reads all names of a file."""
    QUANTIZE(model, tmp_path / "int4", **FORMS[form])
    headers, opened = read_headers(tmp_path / "int4"), []
    right = safetensors.safe_open

    def counted(path, *args):
        opened.append(path)
        return right(path, *args)

    monkeypatch.setattr(safetensors, "safe_open", counted)
    if form == "gptq":
        check_awq_gptq(tmp_path / "int4", headers, "auto_gptq", 32, 2)
    else:
        (group,) = config_of("", "W4A16_ASYM", 32, {})["config_groups"].values()
        scheme = SimpleNamespace(**group["weights"])
        check_compressed(tmp_path / "int4", headers, ["lm_head"], 2, schemes=[scheme])
    assert len(opened) == 1


def test_the_last_word_of_a_row_may_be_partly_filled(model, tmp_path):
    QUANTIZE(model, tmp_path / "int4", **FORMS["int4"])
    change_tensors(
        tmp_path / "int4", changed(f"{Q}.weight_shape", lambda s: s - s.new_tensor([0, 7]))
    )
    config = engine_config(tmp_path / "int4")
    assert config.quant_config is not None


def test_modules_are_left_out_by_name_and_pattern(model, tmp_path):
    QUANTIZE(model, tmp_path / "int8", "compressed-tensors", keep=("layers.0.mlp",))
    headers = read_headers(tmp_path / "int8")
    for ignored in (
        ["model.layers.0.mlp"],
        ["re:.*layers.0.mlp"],
        [f"model.layers.0.mlp.{part}_proj" for part in ("gate", "up", "down")],
    ):
        check_compressed(tmp_path / "int8", headers, ignored, 2)
    with pytest.raises(PrepError, match=re.escape("model.layers.0.mlp.")):
        check_compressed(tmp_path / "int8", headers, ["re:layers.0.mlp"], 2)


def test_modules_outside_of_layers_are_named_by_their_ends():
    """vLLM may have them in other modules; the end is one that no int8 module shares."""
    int8 = {"encoder.layer.0.output.dense", "encoder.layer.0.attention.self.query"}
    assert end_of("pooler.dense", int8) == r"re:(.*\.)?pooler\.dense$"
    assert end_of("model.altup_projections.0", int8) == r"re:(.*\.)?altup_projections\.0$"
    ignored = [end_of("model.language_model.per_layer_model_projection", int8)]
    config = CompressedTensorsConfig.from_config(compressed_tensors_config(ignored))
    layer = torch.nn.Linear(2, 2)
    names = ("model.self_decoder.per_layer_model_projection", "model.layers.0.per_layer_projection")
    assert [config.get_scheme_dict(layer, name) is None for name in names] == [True, False]


GROUPS = {
    "int4 weights, int4 inputs": (
        {"weights": {"num_bits": 4}, "input_activations": {"num_bits": 4}},
        "its inputs are int4 by token",
    ),
    "int4 weights with zero points, int8 inputs": (
        {"weights": {"num_bits": 4, "symmetric": False}},
        "int4 by channel, asymmetric; beside inputs of int8",
    ),
    "int4 by tensor": (
        {"weights": {"num_bits": 4, "strategy": "tensor"}},
        "int4 by tensor; groups",
    ),
    "small groups": (
        {"weights": {"num_bits": 4, "strategy": "group", "group_size": 16}},
        "int4 by group of 16; groups of 32",
    ),
    "act-order": ({"weights": {"num_bits": 4, "actorder": "group"}}, "order of activations"),
    "int4, not packed": (
        {"weights": {"num_bits": 4}, "input_activations": None},
        "int4 by channel in the format int-quantized",
    ),
    "groups": ({"weights": {"strategy": "group"}}, "int8 by group"),
    "asymmetric weights": ({"weights": {"symmetric": False}}, "asymmetric"),
    "float8": ({"weights": {"type": "float"}}, "float8"),
    "weights alone": ({"input_activations": None}, "its inputs are not quantised"),
    "asymmetric tokens": ({"input_activations": {"symmetric": False}}, "asymmetric"),
    "int4 inputs": ({"input_activations": {"num_bits": 4}}, "int4 by token"),
    "quantised cache": ({"kv_cache_scheme": {"num_bits": 8}}, "KV cache"),
}


WORDS = {
    "8 bits": ("gptq", {"bits": 8}, "8 bits; 4 are"),
    "asymmetric": ("gptq", {"sym": False}, "asymmetric (sym)"),
    "act-order": ("gptq", {"desc_act": True}, "order of activations (desc_act)"),
    "modules of their own": ("gptq", {"dynamic": {"-:lm_head": {}}}, "in different ways (dynamic)"),
    "a head": ("gptq", {"lm_head": True}, "head is quantised"),
    "no zero points": ("awq", {"zero_point": False}, "no zero points (zero_point)"),
    "small groups": ("awq", {"group_size": 16}, "groups are of 16; 32 or"),
    "one group": ("awq", {"group_size": -1}, "groups are of -1; 32 or"),
}


@pytest.mark.parametrize("case", WORDS)
def test_other_words_of_awq_and_gptq_are_named(model, tmp_path, case):
    form, change, part = WORDS[case]
    QUANTIZE(model, tmp_path / "int4", **FORMS[form])
    path = tmp_path / "int4/config.json"
    config = json.loads(path.read_text())
    config["quantization_config"] |= change
    path.write_text(json.dumps(config))
    with pytest.raises(PrepError, match=re.escape(part)) as refused:
        engine_config(tmp_path / "int4")
    assert "\n" not in str(refused.value) and f"--quantization {form}: " in str(refused.value)


@pytest.mark.parametrize("case", GROUPS)
def test_other_schemes_are_named(model, tmp_path, case):
    change, part = GROUPS[case]
    QUANTIZE(model, tmp_path / "int8", "compressed-tensors")
    config = engine_config(tmp_path / "int8").model_config
    scheme = config.hf_config.quantization_config
    group = scheme["config_groups"]["group_0"]
    for name, values in change.items():
        if name == "kv_cache_scheme":
            scheme[name] = values
        else:
            group[name] = values and {**group[name], **values}
    assert part in fault(config)


@pytest.mark.parametrize("form", ["compressed-tensors", "modelslim"])
def test_some_int4_groups_with_int8_inputs_are_refused_on_npus(tmp_path, form):
    sizes = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64}
    model = make_model(tmp_path / "float", "Qwen3", **sizes)
    for name, group, served in (("groups", 32, False), ("rows", 0, True), ("256", 256, True)):
        how = {**FORMS["rows"], "form": form, "group": group}
        QUANTIZE(model, tmp_path / name, **how)
        config = engine_config(tmp_path / name).model_config
        assert fault(config) is None
        found = fault(config, on_npu=True)
        assert found is None if served else "NPUs take groups of 256" in found


def test_int4_scales_that_are_not_finite(model, tmp_path):
    """Scales of groups may be 0 or negative."""
    QUANTIZE(model, tmp_path / "int4", **FORMS["int4"])

    def change(tensors):
        tensors[f"{Q}.weight_scale"][:2, 1] = torch.tensor([0.0, -1.0])
        tensors[f"{DOWN}.weight_scale"][5, 1] = torch.nan

    change_tensors(tmp_path / "int4", change)
    text = f"{re.escape(DOWN)}: weight_scale holds values that are not finite"
    with pytest.raises(PrepError, match=text), engine(tmp_path / "int4"):
        pass


@pytest.mark.parametrize(
    ("name", "kind"),
    [(f"{Q}.weight", "W4A4_DYNAMIC"), (f"{Q}.weight", "W8A8_MXFP8"), ("kv_cache_type", "C8")],
)
def test_other_types_of_modelslim_are_named(model, tmp_path, name, kind):
    QUANTIZE(model, tmp_path / "int8", "modelslim")
    config = engine_config(tmp_path / "int8").model_config
    path = tmp_path / "int8" / DESCRIPTION
    path.write_text(json.dumps(json.loads(path.read_text()) | {name: kind}))
    assert kind in fault(config)
