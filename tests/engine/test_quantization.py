"""Quantised models through vLLM's engine: tokens are those of transformers with rounded inputs."""

import json
import shutil
from functools import partial

import pytest
import torch

from tests.helpers.engine import engine, engine_config, generate, graphs, greedy, make_model
from tests.helpers.huggingface import greedy_tokens, is_varied
from tests.helpers.hybrids import EXPERTS, GATED_DELTA, QWEN3_NEXT
from tests.helpers.latent import GLM_DSA, LATENT, V3_EXPERTS, V32
from tests.helpers.mixtures import MIXTURES
from tests.helpers.mtp import make_mtp_model, record_verified, wrong_drafts
from tests.helpers.prompts import prompts_of
from tests.helpers.quantized import (
    QUANTIZE,
    change_tensors,
    draw_biases,
    quantize_to_bytes,
    quantize_with_signs,
    rounded_drafter,
    rounded_model,
    tensors_in,
)
from tests.helpers.ranks import serve_on_ranks
from tests.helpers.v2 import asked_for, engine_of, on_both
from tests.helpers.watch import count_verified
from vllm_npu_prep.errors import PrepError
from vllm_npu_prep.quantization.checkpoint import DESCRIPTION

MOE = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
DYNAMIC, STATIC = {"form": "modelslim"}, {"form": "modelslim", "static": True}
COMPRESSED = {"form": "compressed-tensors"}
INT4 = {**COMPRESSED, "scheme": "W4A16_ASYM", "group": 32}
W4A8 = {"form": "modelslim", "scheme": "W4A8", "group": 32}
AWQ = {"form": "awq", "scheme": "W4A16_ASYM", "group": 32}
GPTQ = {"form": "gptq", "scheme": "W4A16", "group": 32}
W4A16 = {**COMPRESSED, "scheme": "W4A16", "group": 32}
KIMI_K2 = ("self_attn", "shared_experts", r"layers\.0\.mlp")
"""What Kimi K2's int4 files leave float."""
INT4_ROWS = {**COMPRESSED, "scheme": "W4A16", "group": 0}
WIDE = {"hidden_size": 512, "intermediate_size": 768, "head_dim": 32}


@pytest.fixture(scope="module")
def static(qwen3, tmp_path_factory):
    """Folder of an int8 copy of `qwen3` in ModelSlim's format, with static scales."""
    folder = tmp_path_factory.mktemp("int8")
    QUANTIZE(qwen3, folder, **STATIC)
    return folder


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


QWEN2 = ("Qwen2", {})  # biases: float ones are added to products, ModelSlim's to integer sums
DEEPSEEK = ("DeepseekV3", {"q_lora_rank": 20, **LATENT, **V3_EXPERTS})
GRAPHS, TRACED = (graphs(mode, 1, 4, 8) for mode in ("FULL_DECODE_ONLY", "PIECEWISE"))
MODELS = {  # family, its config, how an int8 copy is made, settings
    "ModelSlim, static and smooth, a float layer": (
        "Qwen3",
        {},
        partial(QUANTIZE, **STATIC, keep=("layers.0.mlp.down_proj",), plain=False),
        {},
    ),
    "biases, zero points": (*QWEN2, partial(QUANTIZE, **COMPRESSED, static=True), TRACED),
    "biases, ModelSlim": (*QWEN2, partial(QUANTIZE, **STATIC), {}),
    "int4 groups with zero points": ("Qwen3", {}, partial(QUANTIZE, **INT4), GRAPHS),
    "int4 rows, biases": (*QWEN2, partial(QUANTIZE, **INT4_ROWS, keep=("layers.0.mlp",)), {}),
    "int4 groups of 128": (
        "Llama",
        WIDE,
        partial(QUANTIZE, **COMPRESSED, scheme="W4A16", group=128),
        {},
    ),
    "W4A8, ModelSlim, groups": ("Qwen3", {}, partial(QUANTIZE, **W4A8), GRAPHS),
    "W4A8, ModelSlim, rows, biases": (
        *QWEN2,
        partial(QUANTIZE, **{**W4A8, "group": 0}, keep=("layers.0.mlp",)),
        GRAPHS,
    ),
    "W4A8, groups": (
        "Qwen3",
        {},
        partial(quantize_with_signs, **{**W4A8, **COMPRESSED}),
        TRACED,
    ),
    "W4A8, groups of 256": (
        "Llama",
        {**WIDE, "head_dim": 64},
        partial(QUANTIZE, **{**W4A8, "group": 256}),
        {},
    ),
    "W4A8, latent": (*DEEPSEEK, partial(QUANTIZE, **{**W4A8, "group": 0}, keep=("experts",)), {}),
    "W4A8, ModelSlim, experts in groups": ("Qwen3Moe", MOE, partial(QUANTIZE, **W4A8), GRAPHS),
    "W4A8, latent, experts": (*DEEPSEEK, partial(QUANTIZE, **{**W4A8, "group": 0}), {}),
    "W4A16, experts in groups": (
        "Qwen3Moe",
        MOE,
        partial(quantize_with_signs, **W4A16),
        GRAPHS,
    ),
    # vLLM's reload counts numbers, and the last ones of a layer are few
    "W4A16, experts, zero points of rows": (
        "Qwen3Moe",
        MOE,
        partial(QUANTIZE, **{**INT4, "group": 0}),
        {},
    ),
    "W4A8, bytes, experts": ("Qwen3Moe", MOE, partial(quantize_to_bytes, group=0), GRAPHS),
    "W4A8, bytes, experts in groups": ("Qwen3Moe", MOE, partial(quantize_to_bytes, group=32), {}),
    "W4A8, words, experts": (
        "Qwen3Moe",
        MOE,
        partial(quantize_with_signs, **{**W4A8, **COMPRESSED}),
        {},
    ),
    "AWQ, experts": ("Qwen3Moe", MOE, partial(QUANTIZE, **AWQ), GRAPHS),
    "GPTQ, experts": ("Qwen3Moe", MOE, partial(QUANTIZE, **GPTQ), {}),
    "GPTQ, experts of rows, float attention": (
        "Qwen3Moe",
        MOE,
        partial(QUANTIZE, **{**GPTQ, "group": 0}, keep=("self_attn",)),
        {},
    ),
    "Kimi K2": (*DEEPSEEK, partial(QUANTIZE, **W4A16, keep=KIMI_K2), GRAPHS),
    "GLM-4.5, W4A16": ("Glm4Moe", MIXTURES["Glm4Moe"], partial(QUANTIZE, **W4A16), GRAPHS),
    "GLM-4.5, W4A8": ("Glm4Moe", MIXTURES["Glm4Moe"], partial(QUANTIZE, **W4A8), {}),
    "AWQ": ("Qwen3", {}, partial(QUANTIZE, **AWQ), TRACED),
    "GPTQ, biases, a float layer": (
        *QWEN2,
        partial(QUANTIZE, **GPTQ, keep=("layers.0.mlp.down_proj",)),
        GRAPHS,
    ),
    "Qwen3Moe": ("Qwen3Moe", MOE, partial(QUANTIZE, **DYNAMIC), {}),
    # vLLM calls MiniMax-M2's mixtures otherwise than the files do
    "MiniMaxM2": ("MiniMaxM2", MIXTURES["MiniMaxM2"], partial(QUANTIZE, **COMPRESSED), TRACED),
    "latent": (*DEEPSEEK, partial(QUANTIZE, **COMPRESSED), GRAPHS),
    # As vllm-ascend wants it
    "latent, ModelSlim": (*DEEPSEEK, partial(QUANTIZE, **DYNAMIC, keep=("kv_b_proj",)), GRAPHS),
    "sparse": ("DeepseekV32", V32, partial(QUANTIZE, **DYNAMIC), GRAPHS),
    "sparse, W4A8, layers that share an indexer": (
        "GlmMoeDsa",
        GLM_DSA,
        # Else a level would decide to which position one of its tokens attends
        partial(QUANTIZE, **{**W4A8, "group": 0}, keep=("wq_b",)),
        {},
    ),
    "Qwen3-Next": ("Qwen3Next", QWEN3_NEXT, partial(QUANTIZE, **COMPRESSED), GRAPHS),
    "Qwen3.5, static, a float layer": (
        "Qwen3_5",
        GATED_DELTA,
        partial(QUANTIZE, **STATIC, keep=(r"layers\.1\.linear_attn",)),
        GRAPHS,
    ),
}
ON_V2 = ("Qwen3-Next", "Kimi K2", "GLM-4.5, W4A16", "AWQ")


@pytest.mark.parametrize(
    ("family", "config", "quantized", "settings", "runner"),
    [
        *(pytest.param(*case, "V1", id=name) for name, case in MODELS.items()),
        *(pytest.param(*MODELS[name], "V2", id=f"{name}-V2") for name in ON_V2),
    ],
)
def test_tokens_are_those_of_rounded_weights_and_inputs(
    tmp_path, seed, family, config, quantized, settings, runner
):
    """Prompts in chunks, decodes in graphs; what projects latent rows to K and V is dequantised.

    New weights, read while it sleeps, are where graphs read them.
    """
    copies = {}
    # By the second seed a level would decide which expert a token takes
    for number, name in ((0, "old"), (2 if "kv_lora_rank" in config else 1, "new")):
        model = make_model(tmp_path / name, family, seed=number, **config)
        if family == "Qwen2":
            change_tensors(model, draw_biases)
        quantized(model, tmp_path / f"{name} int8")
        copies[name] = model, tmp_path / f"{name} int8"
    prompts = prompts_of(seed, [3, 1, 90, 40, 17])
    old, new = (greedy_tokens(rounded_model(*copy), prompts, 12) for copy in copies.values())
    settings = {"max_num_batched_tokens": 48, "block_size": 16, **settings}
    with engine_of(runner, copies["old"][1], enable_sleep_mode=True, **settings) as llm:
        assert generate(llm, prompts, greedy(12)) == old
        after, weights = with_new_weights(llm, copies["new"][1], prompts, 12)
    assert after == new
    assert is_varied(old)
    assert weights > 0.9 * nbytes_of(copies["old"][1]), "bytes that sleep"


MTP = {  # family, how it is quantised, modules that stay float
    "int8 layers of DeepSeek": ("DeepseekV3", DYNAMIC, ()),
    "float layers of DeepSeek": ("DeepseekV3", STATIC, ("layers.2",)),
    "int8 layers of GLM": ("Glm4Moe", COMPRESSED, ()),
    "int8 layers of MiMo": ("MiMo", DYNAMIC, ()),
    "float layers of MiMo": ("MiMo", COMPRESSED, ("mtp_layers",)),
    "int8 layers of Qwen3.5": ("Qwen3_5", DYNAMIC, ()),
    "float layers of Qwen3.5": ("Qwen3_5", COMPRESSED, ("mtp",)),
    "int8 layers of Qwen3-Next": ("Qwen3Next", COMPRESSED, ()),
    "float layers of Qwen3-Next": ("Qwen3Next", STATIC, ("mtp",)),
    "float layers of Qwen3.5 MoE, experts in one": ("Qwen3_5Moe", COMPRESSED, ("mtp",)),
    "W4A8 layers of DeepSeek": ("DeepseekV3", {**W4A8, "group": 0}, ()),
    "W4A16 layers of GLM": ("Glm4Moe", W4A16, ()),
    "W4A16 layers of MiMo": ("MiMo", W4A16, ()),
    "float layers of Qwen3-Next, W4A8": ("Qwen3Next", W4A8, ("mtp",)),
}


@pytest.mark.parametrize("name", MTP)
def test_mtp_layers_draft_for_an_int8_model(tmp_path, seed, name):
    """Every step's drafts are those of the rounded layers; float layers need not be named."""
    family, how, keep = MTP[name]
    model, drafter = make_mtp_model(tmp_path / "float", family)
    folder = tmp_path / "int8"
    QUANTIZE(model, folder, **how, keep=keep)
    for pattern in keep:
        forget(folder, pattern)
    if "experts in one" in name:
        change_tensors(folder, fuse_experts_that_draft)
    plain = rounded_drafter(model, folder, drafter)
    prompts = prompts_of(seed, [3, 1, 90, 40, 17])
    drafts = {"method": "mtp", "num_speculative_tokens": 3}
    settings = {"max_num_batched_tokens": 48, "block_size": 16, "speculative_config": drafts}
    with engine(folder, **settings) as llm:
        verified, records = count_verified(llm), record_verified(llm)
        got = generate(llm, prompts, greedy(12))
    expected = greedy_tokens(plain.target, prompts, 15)
    assert got == [row[:12] for row in expected]
    assert is_varied(expected)
    assert records and not wrong_drafts(plain, records, [a + b for a, b in zip(prompts, expected)])
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


def test_scales_kept_as_bits_are_those_kept_as_numbers(qwen3, static, tmp_path, seed):
    """As ModelSlim writes them for float16 models: the bits of float32, in int64."""
    folder = shutil.copytree(static, tmp_path / "int8")

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


def test_the_description_is_found_without_a_flag(static):
    config = engine_config(static)
    assert config.model_config.quantization == "ascend"
    assert set(config.quant_config.modules.values()) == {"FLOAT", "W8A8"}
    named = engine_config(static, quantization="ascend")
    assert named.quant_config.modules == config.quant_config.modules


def test_types_of_modelslim_side_by_side(qwen3, tmp_path, seed):
    """As it writes large models: attention in W8A8, MLPs in W4A8, the first layer float."""
    keep = ("layers.0.",)
    folder, int4 = tmp_path / "mixed", tmp_path / "int4"
    QUANTIZE(qwen3, folder, **STATIC, keep=keep)
    QUANTIZE(qwen3, int4, **W4A8, keep=keep)
    described = [json.loads((each / DESCRIPTION).read_text()) for each in (folder, int4)]
    of_int4 = tensors_in(int4)

    def mix(tensors):
        for name in [name for name in tensors if ".mlp." in name and "layers.0." not in name]:
            del tensors[name], described[0][name]
        chosen = [name for name in of_int4 if ".mlp." in name and "layers.0." not in name]
        tensors.update({name: of_int4[name] for name in chosen})
        described[0].update({name: described[1][name] for name in (*chosen, "group_size")})

    change_tensors(folder, mix)
    (folder / DESCRIPTION).write_text(json.dumps(described[0]))
    prompts = prompts_of(seed, [3, 40, 17])
    with engine(folder) as llm:
        kinds = set(llm.llm_engine.vllm_config.quant_config.modules.values())
        got = generate(llm, prompts, greedy(12))
    assert kinds == {"FLOAT", "W8A8", "W4A8_DYNAMIC"}
    assert got == greedy_tokens(rounded_model(qwen3, folder), prompts, 12)


MISSING = {  # family, its config, how it is quantised, what no file has
    "a part of a fused layer": ("Qwen3", {}, INT4, "layers.1.self_attn.k_proj."),
    "an expert, W4A16": ("Qwen3Moe", MOE, {**INT4, "scheme": "W4A16"}, "layers.1.mlp.experts.3."),
    "an expert, W4A8": ("Qwen3Moe", MOE, W4A8, "layers.1.mlp.experts.3.up_proj."),
    "a part, AWQ": ("Qwen3", {}, AWQ, "layers.1.mlp.up_proj."),
}


@pytest.mark.parametrize("name", MISSING)
def test_weights_that_no_file_has_end_the_start(tmp_path, name):
    """Other parts of the layer are there; groups of zeros may have a scale of 0."""
    family, config, how, missing = MISSING[name]
    folder = tmp_path / "int4"
    QUANTIZE(make_model(tmp_path / "float", family, **config), folder, **how)

    def leave_out(tensors):
        for each in [each for each in tensors if missing in each]:
            del tensors[each]

    change_tensors(folder, leave_out)
    if (description := folder / DESCRIPTION).exists():
        told = json.loads(description.read_text())
        description.write_text(json.dumps({n: t for n, t in told.items() if missing not in n}))
    with pytest.raises(PrepError, match="no file gives some of them"), engine(folder):
        pass


async def all_at_once(ranks, prompts):
    return await ranks.generate(prompts, 10)


RANKS = {  # family, its config, how it is quantised, settings
    # The first layer is dense
    "experts cut": ("Qwen3Moe", {"mlp_only_layers": [0], **MOE}, COMPRESSED, {}),
    "linear attention, static": ("Qwen3_5", GATED_DELTA, STATIC, {}),
    "int4 groups": ("Qwen3", {}, INT4, {}),
    # With the first seed, two tokens are within 0.3% of a standard deviation
    "W4A8, ModelSlim, groups": ("Qwen3", {"seed": 1}, W4A8, {}),
    "W4A8, experts cut": ("Qwen3Moe", {**MOE, "moe_intermediate_size": 64}, W4A8, {}),
    "W4A16, experts shared out": (
        "Qwen3Moe",
        MOE,
        W4A16,
        {"enable_expert_parallel": True},
    ),
    "Kimi K2": (*DEEPSEEK, {**W4A16, "keep": KIMI_K2}, {"enable_expert_parallel": True}),
    "W4A16, experts with zero points cut": (
        "Qwen3Moe",
        {**MOE, "moe_intermediate_size": 64},
        INT4,
        {},
    ),
    "AWQ, experts cut": ("Qwen3Moe", {**MOE, "moe_intermediate_size": 64}, AWQ, {}),
    "GPTQ, experts cut": ("Qwen3Moe", {**MOE, "moe_intermediate_size": 64}, GPTQ, {}),
    "W4A8, words, experts cut": (
        "Qwen3Moe",
        {**MOE, "moe_intermediate_size": 64},
        {**W4A8, **COMPRESSED},
        {},
    ),
    # With the first seed, a level decides which expert a token takes
    "linear attention, experts shared out": (
        "Qwen3Next",
        {**QWEN3_NEXT, "seed": 1},
        DYNAMIC,
        {"enable_expert_parallel": True},
    ),
}


@pytest.mark.parametrize(("family", "config", "how", "settings", "runner"), on_both(RANKS))
def test_two_ranks_compute_with_their_slices(tmp_path, seed, family, config, how, settings, runner):
    """Static scales are those of one rank; dynamic ones are of the slice that a rank has.

    That is how vllm-ascend and compressed-tensors' kernels round: no rank sees the whole row. So
    with dynamic scales, tokens are those of a model that rounds each half for itself, and not those
    of one rank.
    """
    model, folder = make_model(tmp_path / "float", family, **config), tmp_path / "int8"
    quantize_with_signs(model, folder, **how)
    prompts = prompts_of(seed, [3, 1, 60, 17])
    talk = partial(all_at_once, prompts=prompts)
    with asked_for(runner):
        got = serve_on_ranks(folder, {"tensor_parallel_size": 2, **settings}, talk)
    rounded = rounded_model(model, folder, 2, expert_ranks=1 if settings else 2)
    expected = greedy_tokens(rounded, prompts, 10)
    assert got == expected
    assert is_varied(expected)
    whole = greedy_tokens(rounded_model(model, folder), prompts, 10)
    assert (whole == expected) == (how == STATIC or "W4A16" in how.get("scheme", ""))
