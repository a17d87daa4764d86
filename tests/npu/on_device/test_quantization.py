"""Int8 models on the device: launches, and logits near those of rounded weights and inputs."""

import pytest
import torch

from tests.helpers.counting import ModuleCounts
from tests.helpers.engine import engine, generate, graphs, greedy, make_model, runner_of
from tests.helpers.fused import MODEL, forget_layers, settings
from tests.helpers.latent import LATENT_ON_NPUS
from tests.helpers.prompts import prompts_of
from tests.helpers.quantized import (
    QUANTIZE,
    change_tensors,
    draw_biases,
    draw_norms,
    make_static,
    rounded_model,
)
from tests.helpers.step_logits import greedy_steps
from vllm_npu_prep.errors import PrepError
from vllm_npu_prep.verify import formulas
from vllm_npu_prep.verify import int8 as int8_probes

BUDGET = {"Qwen3": 14, "Llama": 12}
"""Launches of a layer, with copies: two more than of the float layer. One rounds the input of the
attention's last projection; one copies V out of the projection, which int8 products don't split."""

LATENT = {"float": 15, "int8": 21}
"""Launches of a dense latent layer with its MLP. Five copy parts of what two projections give, as
int8 products have one result; one rounds the input of the attention's last projection."""

FORMATS = {
    "compressed-tensors": ("compressed-tensors", False),
    "ModelSlim, dynamic": ("modelslim", False),
    "ModelSlim, static": ("modelslim", True),
}
BOUND = {"float16": 0.25, "bfloat16": 0.7}
"""Logits beside float32, in standard deviations: a level more or less here and there. A wrong scale
moves them by several."""

BOUND_OF_EXPERTS = 0.5
"""Of a mixture, in which a router may come to weigh experts a little differently."""

MOE = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32, **MODEL}
LENGTHS = [5, 33, 17, 1]

GLM = {
    "num_hidden_layers": 3,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_shared_experts": 1,
    "first_k_dense_replace": 2,
    "use_qk_norm": True,
}


def distance(model, int8, dtype, seed, **more):
    """Largest difference of a logit to transformers' rounded model, and counts of a layer."""
    forget_layers()
    prompts = prompts_of(seed, LENGTHS)
    with engine(int8, **settings(dtype), **more) as llm:
        steps = greedy_steps(llm, prompts, 6)
        counted = ModuleCounts(runner_of(llm).get_model(), ["model.layers.1"])
        if not more:
            generate(llm, [[5, 6, 7], [8], [9, 10]], greedy(3))
        counts = next(iter(counted.counts.values()), {})
    network, worst = rounded_model(model, int8), 0.0
    for prompt, tokens, logits in zip(prompts, steps.tokens, steps.logits, strict=True):
        with torch.no_grad():
            expected = network(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
        worst = max(worst, float((logits - expected).abs().max() / expected.std()))
    print(f"{int8.name} {dtype}: {worst:.3f} standard deviations")
    return worst, counts


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("qwen3"), **MODEL)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("compressed-tensors", "float16"),
        ("ModelSlim, dynamic", "bfloat16"),
        ("ModelSlim, static", "float16"),
        ("ModelSlim, static", "bfloat16"),
    ],
)
def test_logits_and_launches_of_a_layer(qwen3, tmp_path, seed, name, dtype):
    QUANTIZE(qwen3, tmp_path / "int8", *FORMATS[name])
    worst, counts = distance(qwen3, tmp_path / "int8", dtype, seed)
    assert worst < BOUND[dtype]
    assert set(counts) == {"launches"}, "no syncs"
    assert counts["launches"] == BUDGET["Qwen3"]


def test_a_llama_in_graphs_stays_within_its_budget(tmp_path, seed):
    model = make_model(tmp_path / "float", "Llama", **MODEL)
    QUANTIZE(model, tmp_path / "int8", "compressed-tensors")
    _, counts = distance(model, tmp_path / "int8", "float16", seed)
    assert counts["launches"] == BUDGET["Llama"]
    replayed, _ = distance(
        model, tmp_path / "int8", "float16", seed, **graphs("FULL_AND_PIECEWISE", 4, 16)
    )
    assert replayed < BOUND["float16"]


def test_wide_rows_are_rounded_in_a_launch_of_their_own(tmp_path, seed):
    model = make_model(tmp_path / "float", "Llama", **{**MODEL, "intermediate_size": 7872})
    QUANTIZE(model, tmp_path / "int8", "compressed-tensors")
    worst, counts = distance(model, tmp_path / "int8", "float16", seed)
    assert worst < BOUND["float16"]
    assert counts["launches"] == BUDGET["Llama"] + 1


@pytest.mark.parametrize("form", ["compressed-tensors", "modelslim"])
def test_static_scales_beside_float_biases(tmp_path, seed, form):
    """Of Qwen2's attention; with zero points, which are taken out before biases are added."""
    model = make_model(tmp_path / "float", "Qwen2", **MODEL)
    change_tensors(model, draw_biases)
    if form == "modelslim":
        QUANTIZE(model, tmp_path / "int8", form, True)
    else:
        make_static(model, tmp_path / "int8", symmetric=False)
    worst, _ = distance(model, tmp_path / "int8", "float16", seed)
    assert worst < BOUND["float16"]


def launches_of(folder, dtype, seed):
    """Launches of layer 1 in a decode, copies included."""
    forget_layers()
    with engine(folder, **settings(dtype)) as llm:
        counted = ModuleCounts(runner_of(llm).get_model(), ["model.layers.1"])
        generate(llm, prompts_of(seed, LENGTHS), greedy(3))
    counts = next(iter(counted.counts.values()))
    assert set(counts) <= {"launches", "hidden_copies"}, "no syncs"
    return sum(counts.values())


def test_latent_layers(tmp_path, seed):
    """Of DeepSeek V3, dense; what decodes absorb is int8 in the files, too."""
    config = {**LATENT_ON_NPUS, "q_lora_rank": 96, "first_k_dense_replace": 2}
    model = make_model(tmp_path / "float", "DeepseekV3", spread=0.1, n_routed_experts=0, **config)
    QUANTIZE(model, tmp_path / "int8", "compressed-tensors")
    worst, counts = distance(model, tmp_path / "int8", "bfloat16", seed)
    assert worst < BOUND["bfloat16"]
    assert counts == {"launches": LATENT["int8"]}, "no copies and no syncs"
    assert launches_of(model, "bfloat16", seed) == LATENT["float"]


def test_latent_layers_in_graphs(tmp_path, seed):
    config = {**LATENT_ON_NPUS, "q_lora_rank": 96, "first_k_dense_replace": 2}
    model = make_model(tmp_path / "float", "DeepseekV3", spread=0.1, n_routed_experts=0, **config)
    QUANTIZE(model, tmp_path / "int8", "compressed-tensors")
    mode = graphs("FULL_AND_PIECEWISE", 4, 16)
    assert distance(model, tmp_path / "int8", "bfloat16", seed, **mode)[0] < BOUND["bfloat16"]


@pytest.mark.parametrize("static", [False, True], ids=["dynamic", "static"])
def test_latent_layers_that_project_queries_at_once(tmp_path, seed, static):
    """As DeepSeek V2 Lite's: two projections read the layer's input. One is left in float."""
    config = {**LATENT_ON_NPUS, "q_lora_rank": None, "first_k_dense_replace": 2}
    model = make_model(tmp_path / "float", "DeepseekV3", spread=0.1, n_routed_experts=0, **config)
    left_out = ("kv_b_proj", "q_proj") if static else ()
    QUANTIZE(model, tmp_path / "int8", "modelslim", static, left_out)
    worst, counts = distance(model, tmp_path / "int8", "bfloat16", seed)
    assert worst < BOUND["bfloat16"]
    # Four copies of parts; where queries are left in float, two less and a launch that rounds.
    assert counts == {"launches": LATENT["int8"] - 2 - static}, "no copies and no syncs"


FAMILIES = {
    "Mistral": ("float16", {}),
    "Glm4": ("bfloat16", {"partial_rotary_factor": 0.5}),  # vLLM refuses float16
    "Glm4Moe": ("float16", GLM),
    "Gemma3": ("bfloat16", {}),  # the same
}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_dense_layer_takes_two_launches_more(tmp_path, seed, family):
    """Layer 1 is dense; GLM-4.5's is its second of three, of which the last has experts."""
    dtype, config = FAMILIES[family]
    model = make_model(tmp_path / "float", family, **MODEL, **config)
    QUANTIZE(model, tmp_path / "int8", "modelslim")
    launches = {f.name: launches_of(f, dtype, seed) for f in (model, tmp_path / "int8")}
    print(family, launches)
    assert launches["int8"] <= launches["float"] + 2


def test_gemmas_norms_multiply_in_float32(tmp_path, seed):
    """bfloat16 does not hold these factors: scales of rows would be off by up to 0.4 %."""
    model = make_model(tmp_path / "float", "Gemma3", **MODEL)
    change_tensors(model, draw_norms)
    QUANTIZE(model, tmp_path / "int8", "compressed-tensors")
    worst, _ = distance(model, tmp_path / "int8", "bfloat16", seed)
    assert worst < BOUND["bfloat16"]
    forget_layers()
    with engine(tmp_path / "int8", **settings("bfloat16")) as llm, torch.inference_mode():
        layer = runner_of(llm).get_model().model.layers[1]
        for norm in (layer.input_layernorm, layer.pre_feedforward_layernorm):
            rows = torch.randn(64, MODEL["hidden_size"], dtype=torch.bfloat16)
            got, total = norm(rows.npu(), rows.flip(0).npu())
            factors = 1 + norm.norm.weight.double().cpu()
            expected = formulas.rms_norm(total.cpu().double(), factors, 1e-6)
            scales = expected.abs().amax(-1) / 127
            assert torch.allclose(got.scale.cpu().double(), scales, rtol=5e-4)
            alone = norm(total)
            assert torch.allclose(alone.scale.cpu().double(), scales, rtol=5e-4)
            assert (alone.values.cpu() - expected / scales[:, None]).abs().max() < 0.51
            small = total / 1024  # where the epsilon counts
            expected = formulas.rms_norm(small.cpu().double(), factors, 1e-6)
            scales = expected.abs().amax(-1) / 127
            assert torch.allclose(norm(small).scale.cpu().double(), scales, rtol=5e-4)


@pytest.mark.parametrize("form", ["compressed-tensors", "modelslim"])
def test_experts(tmp_path, seed, form):
    """In graphs, one rank of expert parallelism."""
    model = make_model(tmp_path / "float", "Qwen3Moe", **MOE)
    QUANTIZE(model, tmp_path / "int8", form)
    mode = graphs("FULL_AND_PIECEWISE", 4, 16, enable_expert_parallel=True)
    worst, _ = distance(model, tmp_path / "int8", "float16", seed, **mode)
    assert worst < BOUND_OF_EXPERTS


def test_a_wrong_operator_is_named_at_start_up(monkeypatch):
    """Planted: a kernel that leaves the scales of tokens out."""
    real = torch.ops.npu.npu_quant_matmul

    class Planted:
        def __getattr__(self, name):
            if name != "npu_quant_matmul":
                return getattr(torch.ops.npu, name)
            return lambda *args, pertoken_scale, **kwargs: real(
                *args,
                pertoken_scale=None if pertoken_scale is None else torch.ones_like(pertoken_scale),
                **kwargs,
            )

    int8_probes.refuse_wrong(torch.bfloat16, lambda tensor: tensor.npu())
    monkeypatch.setattr(int8_probes, "operators", Planted)
    with pytest.raises(PrepError, match="computes npu_quant_matmul wrongly"):
        int8_probes.refuse_wrong(torch.bfloat16, lambda tensor: tensor.npu())
