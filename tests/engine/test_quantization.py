"""Int8 models through vLLM's engine: tokens are those of transformers with rounded inputs."""

import json
import shutil
from dataclasses import replace
from functools import partial

import pytest
import torch

from tests.engine.test_speculation import named
from tests.helpers.drafters import disturb_model, make_eagle_head
from tests.helpers.engine import engine, engine_config, generate, graphs, greedy, make_model
from tests.helpers.huggingface import check_varied, greedy_tokens
from tests.helpers.hybrids import EXPERTS, GATED_DELTA, QWEN3_NEXT
from tests.helpers.latent import LATENT, V3_EXPERTS
from tests.helpers.mixtures import MIXTURES
from tests.helpers.mtp import check_accepted, make_mtp_model, record_verified
from tests.helpers.prompts import prompts_of
from tests.helpers.quantized import (
    QUANTIZE,
    change_tensors,
    draw_biases,
    make_static,
    rounded_drafter,
    rounded_model,
    tensors_in,
)
from tests.helpers.ranks import serve_on_ranks
from tests.helpers.v2 import asked_for, engine_of, on_both
from tests.helpers.watch import count_verified
from vllm_npu_prep.quantization import experts
from vllm_npu_prep.quantization import int8 as int8_code
from vllm_npu_prep.quantization.checkpoint import DESCRIPTION

FORMATS = {
    "compressed-tensors": ("compressed-tensors", False),
    "ModelSlim, dynamic": ("modelslim", False),
    "ModelSlim, static": ("modelslim", True),
}
MOE = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("qwen3"))


@pytest.fixture(scope="module")
def int8(qwen3, tmp_path_factory):
    """Folders of the copies, by format."""
    made = {}
    for name, (form, static) in FORMATS.items():
        made[name] = tmp_path_factory.mktemp("int8")
        keep = ("layers.0.mlp.down_proj",) if static else ()
        QUANTIZE(qwen3, made[name], form, static, keep)
    return made


def with_new_weights(llm, folder, prompts, count):
    """Tokens by weights that come when the old ones are lost, and bytes that were given back."""
    memory = llm.llm_engine.model_executor.driver_worker.worker.sleep_mode_backend
    weights = sum(region.data.numel() for region in memory._regions["weights"])
    llm.sleep(level=2)
    assert not any(region.is_mapped for regions in memory._regions.values() for region in regions)
    llm.wake_up(tags=["weights"])
    llm.collective_rpc("reload_weights", kwargs={"weights_path": str(folder)})
    llm.wake_up(tags=["kv_cache"])
    return generate(llm, prompts, greedy(count)), weights


def nbytes_of(folder):
    """Of a model's weights, as the file has them."""
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


@pytest.mark.parametrize("name", FORMATS)
def test_tokens_are_those_of_rounded_weights_and_inputs(qwen3, int8, tmp_path, seed, name):
    """Prompts in chunks, decodes in graphs; one projection of the static model is float.

    New weights, read while it sleeps, are where graphs read them.
    """
    prompts = prompts_of(seed, [3, 1, 90, 40, 17])
    settings = graphs("FULL_AND_PIECEWISE", 1, 4, 8) if "compressed" in name else {}
    other = make_model(tmp_path / "float", seed=1)
    keep = ("layers.0.mlp.down_proj",) if FORMATS[name][1] else ()
    QUANTIZE(other, tmp_path / "int8", *FORMATS[name], keep)
    settings |= {"max_num_batched_tokens": 48, "enable_sleep_mode": True}
    with engine(int8[name], **settings) as llm:
        got = generate(llm, prompts, greedy(12))
        new, weights = with_new_weights(llm, tmp_path / "int8", prompts, 12)
    expected = greedy_tokens(rounded_model(qwen3, int8[name]), prompts, 12)
    assert got == expected
    check_varied(expected)
    assert new == greedy_tokens(rounded_model(other, tmp_path / "int8"), prompts, 12)
    assert weights > 0.9 * nbytes_of(int8[name]), "bytes that sleep"


@pytest.mark.parametrize("family", ["Qwen3Moe", "MiniMaxM2"])
@pytest.mark.parametrize("form", ["compressed-tensors", "modelslim"])
def test_experts_are_those_of_rounded_weights_and_inputs(tmp_path, seed, form, family):
    """vLLM calls MiniMax-M2's mixtures otherwise than the files do."""
    config = MOE if family == "Qwen3Moe" else MIXTURES[family]
    model = make_model(tmp_path / "float", family, **config)
    other = make_model(tmp_path / "other", family, seed=1, **config)
    QUANTIZE(model, tmp_path / "int8", form)
    QUANTIZE(other, tmp_path / "other int8", form)
    prompts = prompts_of(seed, [3, 1, 60, 17])
    with engine(tmp_path / "int8", max_num_batched_tokens=48, enable_sleep_mode=True) as llm:
        llm.sleep(level=1)
        llm.wake_up()
        got = generate(llm, prompts, greedy(10))
        new, _ = with_new_weights(llm, tmp_path / "other int8", prompts, 10)
    expected = greedy_tokens(rounded_model(model, tmp_path / "int8"), prompts, 10)
    assert got == expected
    check_varied(expected)
    assert new == greedy_tokens(rounded_model(other, tmp_path / "other int8"), prompts, 10)


STATIC = {
    "compressed-tensors, symmetric": partial(make_static, symmetric=True),
    "compressed-tensors, zero points": partial(make_static, symmetric=False),
    "ModelSlim": lambda model, folder: QUANTIZE(model, folder, "modelslim", True),
}


@pytest.mark.parametrize("name", STATIC)
def test_static_scales_beside_biases(tmp_path, seed, name):
    """Of Qwen2's attention: float ones are added to products, ModelSlim's to integer sums."""
    model = make_model(tmp_path / "float", "Qwen2")
    change_tensors(model, draw_biases)
    STATIC[name](model, tmp_path / "int8")
    prompts = prompts_of(seed, [3, 1, 60, 17])
    with engine(tmp_path / "int8", max_num_batched_tokens=48) as llm:
        got = generate(llm, prompts, greedy(10))
    expected = greedy_tokens(rounded_model(model, tmp_path / "int8"), prompts, 10)
    assert got == expected
    check_varied(expected)


LATENT_FORMATS = {
    "compressed-tensors": ("compressed-tensors", False, ()),
    "ModelSlim, dynamic": ("modelslim", False, ("kv_b_proj",)),  # as vllm-ascend wants it
    "ModelSlim, static": ("modelslim", True, ()),
}


@pytest.mark.parametrize("name", LATENT_FORMATS)
def test_latent_attention_with_rounded_weights_and_inputs(tmp_path, seed, name):
    """Of DeepSeek V3, with experts; prompts in chunks over contexts, decodes in graphs.

    What projects latent rows to K and V is dequantised, so prefills and decodes agree.
    """
    config = {"q_lora_rank": 20, **LATENT, **V3_EXPERTS}
    model = make_model(tmp_path / "float", "DeepseekV3", **config)
    other = make_model(tmp_path / "other", "DeepseekV3", seed=2, **config)
    QUANTIZE(model, tmp_path / "int8", *LATENT_FORMATS[name])
    QUANTIZE(other, tmp_path / "other int8", *LATENT_FORMATS[name])
    prompts = prompts_of(seed, [3, 1, 90, 40, 17])
    settings = graphs("FULL_AND_PIECEWISE", 1, 4, 8, 48, max_num_batched_tokens=48, block_size=16)
    with engine(tmp_path / "int8", enable_sleep_mode=True, **settings) as llm:
        got = generate(llm, prompts, greedy(12))
        new, _ = with_new_weights(llm, tmp_path / "other int8", prompts, 12)
    expected = greedy_tokens(rounded_model(model, tmp_path / "int8"), prompts, 12)
    assert got == expected
    check_varied(expected)
    assert new == greedy_tokens(rounded_model(other, tmp_path / "other int8"), prompts, 12)


LINEAR = {  # family, its config, format, static, modules that stay float
    "Qwen3-Next": ("Qwen3Next", QWEN3_NEXT, "compressed-tensors", False, ()),
    "Qwen3.5": ("Qwen3_5", GATED_DELTA, "modelslim", True, (r"layers\.1\.linear_attn",)),
    "Qwen3.5 MoE": ("Qwen3_5Moe", {**GATED_DELTA, **EXPERTS}, "modelslim", False, ()),
}


@pytest.mark.parametrize(("name", "runner"), on_both({name: name for name in LINEAR}))
def test_linear_attention_with_rounded_weights_and_inputs(tmp_path, seed, name, runner):
    """Beside attention, also int8, and experts; what makes rates and decays stays float.

    New weights, read while it sleeps, are where graphs read them.
    """
    family, config, *how = LINEAR[name]
    model = make_model(tmp_path / "float", family, **config)
    other = make_model(tmp_path / "other", family, seed=1, **config)
    QUANTIZE(model, tmp_path / "int8", *how)
    QUANTIZE(other, tmp_path / "other int8", *how)
    int8 = {name.split(".")[-2] for name in tensors_in(tmp_path / "int8") if "scale" in name}
    assert int8 >= {"out_proj", "o_proj", "q_proj"} and not int8 & {"in_proj_ba", "in_proj_a"}
    assert int8 & {"in_proj_qkvz", "in_proj_qkv"}
    prompts = prompts_of(seed, [3, 1, 90, 40, 17])
    settings = graphs("FULL_AND_PIECEWISE", 1, 4, 8, 48)
    settings |= {"max_num_batched_tokens": 48, "block_size": 16, "enable_sleep_mode": True}
    with engine_of(runner, tmp_path / "int8", **settings) as llm:
        got = generate(llm, prompts, greedy(12))
        new, _ = with_new_weights(llm, tmp_path / "other int8", prompts, 12)
    expected = greedy_tokens(rounded_model(model, tmp_path / "int8"), prompts, 12)
    assert got == expected
    check_varied(expected)
    assert new == greedy_tokens(rounded_model(other, tmp_path / "other int8"), prompts, 12)


MTP = {  # family, format, static, modules that stay float
    "int8 layers of DeepSeek": ("DeepseekV3", "modelslim", False, ()),
    "float layers of DeepSeek": ("DeepseekV3", "modelslim", True, ("layers.2",)),
    "int8 layers of GLM": ("Glm4Moe", "compressed-tensors", False, ()),
    "int8 layers of MiMo": ("MiMo", "modelslim", False, ()),
    "float layers of MiMo": ("MiMo", "compressed-tensors", False, ("mtp_layers",)),
    "int8 layers of Qwen3.5": ("Qwen3_5", "modelslim", False, ()),
    "float layers of Qwen3.5": ("Qwen3_5", "compressed-tensors", False, ("mtp",)),
    "int8 layers of Qwen3-Next": ("Qwen3Next", "compressed-tensors", False, ()),
    "float layers of Qwen3-Next": ("Qwen3Next", "modelslim", True, ("mtp",)),
    "float layers of Qwen3.5 MoE, experts in one": (
        "Qwen3_5Moe",
        "compressed-tensors",
        False,
        ("mtp",),
    ),
}


@pytest.mark.parametrize("name", MTP)
def test_mtp_layers_draft_for_an_int8_model(tmp_path, seed, name):
    """Every step's drafts are those of the rounded layers; float layers need not be named."""
    family, form, static, keep = MTP[name]
    model, drafter = make_mtp_model(tmp_path / "float", family)
    folder = tmp_path / "int8"
    QUANTIZE(model, folder, form, static, keep)
    for pattern in keep:
        forget(folder, pattern)
    if "experts in one" in name:
        change_tensors(folder, fuse_experts_that_draft)
    plain = rounded_drafter(model, folder, drafter)
    prompts = prompts_of(seed, [3, 1, 90, 40, 17])
    drafts = {"method": "mtp", "num_speculative_tokens": 3}
    settings = graphs("FULL_AND_PIECEWISE", 1, 4, 8, 20, 48, speculative_config=drafts)
    with engine(folder, max_num_batched_tokens=48, block_size=16, **settings) as llm:
        verified, records = count_verified(llm), record_verified(llm)
        got = generate(llm, prompts, greedy(12))
    expected = greedy_tokens(plain.target, prompts, 15)
    assert got == [row[:12] for row in expected]
    check_varied(expected)
    check_accepted(plain, records, [a + b for a, b in zip(prompts, expected)])
    assert verified["accepted"] and verified["rejected"]


def fuse_experts_that_draft(tensors):
    """As Qwen3.5's files have them: one tensor for what all experts project up, one for down."""
    experts = "mtp.layers.0.mlp.experts"
    parts = {
        part: torch.stack(
            [tensors.pop(f"{experts}.{i}.{part}.weight") for i in range(EXPERTS["num_experts"])]
        )
        for part in ("gate_proj", "up_proj", "down_proj")
    }
    tensors[f"{experts}.gate_up_proj"] = torch.cat([parts["gate_proj"], parts["up_proj"]], 1)
    tensors[f"{experts}.down_proj"] = parts["down_proj"]


def forget(folder, pattern):
    """Leave modules out of what says how they were quantised."""
    path = folder / DESCRIPTION
    if path.exists():
        described = json.loads(path.read_text()).items()
        kept = {name: kind for name, kind in described if pattern not in name}
        path.write_text(json.dumps(kept))
        return
    config = json.loads((folder / "config.json").read_text())
    quantization = config["quantization_config"]
    quantization["ignore"] = [each for each in quantization["ignore"] if pattern not in each]
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("method", ["eagle", "draft_model"])
def test_float_drafters_draft_for_an_int8_model(qwen3, int8, tmp_path, seed, method):
    """In ModelSlim's format, whose description says nothing of the drafter."""
    if method == "eagle":
        make_eagle_head(tmp_path, qwen3, method)
    else:
        disturb_model(tmp_path, qwen3, share=0.05)
    prompts = prompts_of(seed, [3, 40, 17])
    drafts = {"method": method, "model": str(tmp_path), "num_speculative_tokens": 3}
    with engine(int8["ModelSlim, static"], speculative_config=drafts) as llm:
        verified = count_verified(llm)
        got = generate(llm, prompts, greedy(12))
    rounded = rounded_model(qwen3, int8["ModelSlim, static"])
    assert got == greedy_tokens(rounded, prompts, 12)
    print(dict(verified))
    assert verified["accepted"] + verified["rejected"] > 0


def test_scales_kept_as_bits_are_those_kept_as_numbers(qwen3, int8, tmp_path, seed):
    """As ModelSlim writes them for float16 models: the bits of float32, in int64."""
    folder = shutil.copytree(int8["ModelSlim, static"], tmp_path / "int8")

    def pack(tensors):
        names = [name for name in tensors if name.endswith(".deq_scale")]
        assert names
        for name in names:
            assert tensors[name].dtype == torch.float32
            tensors[name] = tensors[name].view(torch.int32).to(torch.int64)

    change_tensors(folder, pack)
    prompts = prompts_of(seed, [3, 40, 17])
    with engine(folder) as llm:
        got = generate(llm, prompts, greedy(12))
    assert got == greedy_tokens(rounded_model(qwen3, folder), prompts, 12)


def test_the_description_is_found_without_a_flag(int8):
    config = engine_config(int8["ModelSlim, static"])
    assert config.model_config.quantization == "ascend"
    assert set(config.quant_config.modules.values()) == {"FLOAT", "W8A8"}
    named = engine_config(int8["ModelSlim, static"], quantization="ascend")
    assert named.quant_config.modules == config.quant_config.modules


async def all_at_once(ranks, prompts):
    return await ranks.generate(prompts, 10)


RANKS = {
    "static": ("Qwen3", "modelslim", True, {}),
    "dynamic, experts shared out": (
        "Qwen3Moe",
        "modelslim",
        False,
        {"enable_expert_parallel": True},
    ),
    "dynamic, experts cut": ("Qwen3Moe", "compressed-tensors", False, {}),
    "linear attention, dynamic": ("Qwen3_5", "compressed-tensors", False, {}),
    "linear attention, static": ("Qwen3_5", "modelslim", True, {}),
    "linear attention, experts shared out": (
        "Qwen3Next",
        "modelslim",
        False,
        {"enable_expert_parallel": True},
    ),
    "linear attention, experts cut": ("Qwen3Next", "compressed-tensors", False, {}),
}
OF_RANKS = {
    "Qwen3": {},
    "Qwen3Moe": {"mlp_only_layers": [0], **MOE},  # the first layer is dense
    "Qwen3_5": GATED_DELTA,
    # With the first seed and experts shared out, a level decides which expert a token takes.
    "Qwen3Next": {**QWEN3_NEXT, "seed": 1},
}
"""Config of a family."""
ON_V2 = ("linear attention, dynamic", "linear attention, experts shared out")
SPLITS = [(name, "V1") for name in RANKS] + [(name, "V2") for name in ON_V2]


@pytest.mark.parametrize(
    ("split", "runner"), SPLITS, ids=[f"{name}{named(runner)}" for name, runner in SPLITS]
)
def test_two_ranks_compute_with_their_slices(tmp_path, seed, split, runner):
    """Static scales are those of one rank; dynamic ones are of the slice that a rank has.

    That is how vllm-ascend and compressed-tensors' kernels round: no rank sees the whole row. So
    with dynamic scales, tokens are those of a model that rounds each half for itself, and not those
    of one rank.
    """
    family, form, static, more = RANKS[split]
    model = make_model(tmp_path / "float", family, **OF_RANKS[family])
    QUANTIZE(model, tmp_path / "int8", form, static)
    prompts = prompts_of(seed, [3, 1, 60, 17])
    settings = {"tensor_parallel_size": 2, **more}
    with asked_for(runner):
        got = serve_on_ranks(tmp_path / "int8", settings, partial(all_at_once, prompts=prompts))
    rounded = rounded_model(model, tmp_path / "int8", 2, cut_experts=not more)
    expected = greedy_tokens(rounded, prompts, 10)
    assert got == expected
    check_varied(expected)
    whole = greedy_tokens(rounded_model(model, tmp_path / "int8"), prompts, 10)
    assert (whole == expected) == static


def transpose_scales(tensors):
    """Of the square projection, whose scales fit either way: those of its columns."""
    name = "model.layers.0.self_attn.o_proj"
    weight = tensors[f"{name}.weight"].float() * tensors[f"{name}.weight_scale"]
    tensors[f"{name}.weight_scale"] = weight.abs().amax(0)[:, None] / 127


def exchange_parts(tensors):
    """K's weights where Q's first rows are expected would not fit; gate and up do."""
    for kind in ("weight", "weight_scale"):
        gate, up = (f"model.layers.0.mlp.{part}_proj.{kind}" for part in ("gate", "up"))
        tensors[gate], tensors[up] = tensors[up], tensors[gate]


def take_the_neighbours(tensors):
    """As ranks of two would that have each other's scales of an output-parallel layer."""
    for layer in (0, 1):
        name = f"model.layers.{layer}.mlp.up_proj.weight_scale"
        tensors[name] = tensors[name].roll(len(tensors[name]) // 2, 0)


PLANTED_IN_FILES = {
    "scales of the columns": ("compressed-tensors", transpose_scales),
    "scales of the neighbour rank": ("compressed-tensors", take_the_neighbours),
    "parts of a fused module in the wrong order": ("compressed-tensors", exchange_parts),
}


def run(folder, seed):
    prompts = prompts_of(seed, [3, 1, 17])
    with engine(folder) as llm:
        return generate(llm, prompts, greedy(8)), prompts


@pytest.mark.parametrize("bug", PLANTED_IN_FILES)
def test_a_bug_planted_in_a_file_changes_tokens(qwen3, tmp_path, seed, bug):
    form, change = PLANTED_IN_FILES[bug]
    QUANTIZE(qwen3, tmp_path / "right", form)
    QUANTIZE(qwen3, tmp_path / "wrong", form)
    change_tensors(tmp_path / "wrong", change)
    got, prompts = run(tmp_path / "wrong", seed)
    assert got != greedy_tokens(rounded_model(qwen3, tmp_path / "right"), prompts, 8)


def drop_token_scales(patch):
    """Rows of the right shape, all with the first row's scale."""
    multiply = int8_code.TorchInt8Linear.multiply

    def planted(self, rows, bias):
        if rows.scale is not None:
            rows = replace(rows, scale=rows.scale[:1].expand_as(rows.scale))
        return multiply(self, rows, bias)

    patch(int8_code.TorchInt8Linear, "multiply", planted)


def ignore_offset(patch):
    """Inputs are shifted, and nothing takes the offset out again."""
    multiply = int8_code.TorchInt8Linear.multiply
    patch(
        int8_code.TorchInt8Linear,
        "multiply",
        lambda self, rows, bias: multiply(replace(self, sum_bias=None), rows, bias),
    )


def exchange_experts(patch):
    """Each expert gets the scales of the next."""
    apply = experts.apply_int8_experts
    patch(
        experts,
        "apply_int8_experts",
        lambda x, w13, w2, s13, s2, *args: apply(x, w13, w2, s13.roll(1, 0), s2, *args),
    )


PLANTED_IN_CODE = {
    "scales of tokens dropped": ("Qwen3", ("modelslim", False), drop_token_scales),
    "offset ignored": ("Qwen3", ("modelslim", True), ignore_offset),
    "scales of experts exchanged": ("Qwen3Moe", ("modelslim", False), exchange_experts),
}


@pytest.mark.parametrize("bug", PLANTED_IN_CODE)
def test_a_bug_planted_in_the_code_changes_tokens(tmp_path, seed, monkeypatch, bug):
    family, how, plant = PLANTED_IN_CODE[bug]
    model = make_model(tmp_path / "float", family, **(MOE if family == "Qwen3Moe" else {}))
    QUANTIZE(model, tmp_path / "int8", *how)
    plant(monkeypatch.setattr)
    got, prompts = run(tmp_path / "int8", seed)
    assert got != greedy_tokens(rounded_model(model, tmp_path / "int8"), prompts, 8)
