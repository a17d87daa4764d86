"""Int8 models on the device: launches, and logits near those of rounded weights and inputs."""

from typing import Any, NamedTuple

import pytest
import torch

from tests.helpers.counting import ModuleCounts
from tests.helpers.engine import engine, generate, graphs, greedy, make_model, runner_of
from tests.helpers.fused import MODEL, forget_layers, settings, wrong_operator
from tests.helpers.hybrids import EXPERTS, ON_NPUS
from tests.helpers.latent import LATENT_ON_NPUS
from tests.helpers.prompts import prompts_of
from tests.helpers.quantized import (
    QUANTIZE,
    change_tensors,
    draw_biases,
    draw_norms,
    quantize_with_signs,
    rounded_model,
)
from tests.helpers.step_logits import greedy_steps
from tests.npu.models import INDEXED
from vllm_npu_prep.errors import PrepError
from vllm_npu_prep.quantization.formats import LAYERS_OPERATOR, OF_INT8
from vllm_npu_prep.verify import formulas
from vllm_npu_prep.verify import int8 as int8_probes

COMPRESSED, MODELSLIM = "compressed-tensors", "modelslim"
BOUND = {"float16": 0.25, "bfloat16": 0.7}
"""Logits beside float32, in standard deviations: a level more or less here and there. A wrong scale
moves them by several."""

FEW = 3
"""Tokens of a mixture that may be off: experts are nearly even, and its router chooses others."""

LENGTHS = [5, 33, 17, 1]
MIXTURE = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32, **MODEL}
LATENT = {**LATENT_ON_NPUS, "q_lora_rank": 96, "first_k_dense_replace": 2}
LATENT |= {"n_routed_experts": 0, "spread": 0.1}
WHOLE = {**LATENT, "q_lora_rank": None}
"""As DeepSeek V2 Lite: two projections read a layer's input."""
CHOOSING = {**LATENT, "index_n_heads": 8, "index_head_dim": 128, "index_topk": 64}
SHARING = {**CHOOSING, "index_topk_freq": 2, "index_skip_topk_offset": 1}
WIDE = {**MODEL, "hidden_size": 512, "intermediate_size": 768, "num_attention_heads": 8}
"""Inputs of layers are multiples of 256: NPUs multiply by packed weights."""
WIDE_LATENT = {**LATENT, "hidden_size": 512, "q_lora_rank": 256, "intermediate_size": 512}
WIDE_MIXTURE = {**MIXTURE, **WIDE, "moe_intermediate_size": 512}
HYBRID = {**ON_NPUS, "head_dim": 256, "spread": 0.1, "embedding_scale": 20}


class Case(NamedTuple):
    """A model, how it is quantised, and launches of its second layer with copies; 0: not asked."""

    family: str
    dtype: str
    form: str
    launches: int = 0
    config: dict[str, Any] = MODEL
    static: bool = False
    left_out: tuple[str, ...] = ()
    in_graphs: bool = False
    scheme: str = "W8A8"
    group: int = 0


CASES = {
    # Two more than of the float layer. One rounds the input of the attention's last projection; one
    # copies V out of the projection, which int8 products don't split.
    "Qwen3": Case("Qwen3", "float16", COMPRESSED, 14),
    "Qwen3, ModelSlim": Case("Qwen3", "bfloat16", MODELSLIM, 14),
    "Qwen3, static": Case("Qwen3", "float16", MODELSLIM, 14, static=True),
    "Qwen3, static, bfloat16": Case("Qwen3", "bfloat16", MODELSLIM, 14, static=True),
    # Levels are int8 on the device, too, where operators don't take packed ones
    "Qwen3, W4A8, narrow": Case("Qwen3", "bfloat16", MODELSLIM, 14, scheme="W4A8"),
    "Qwen3, W4A8, ModelSlim": Case("Qwen3", "bfloat16", MODELSLIM, 14, WIDE, scheme="W4A8"),
    "Qwen3, W4A8": Case("Qwen3", "float16", COMPRESSED, 14, WIDE, scheme="W4A8"),
    "Qwen3, W4A8, groups": Case("Qwen3", "float16", MODELSLIM, 14, WIDE, scheme="W4A8", group=256),
    "Qwen3, W4A8, groups in graphs": Case(
        "Qwen3", "bfloat16", COMPRESSED, 0, WIDE, in_graphs=True, scheme="W4A8", group=256
    ),
    # One more than of the float layer, which splits Q, K and V in their products
    "Qwen3, AWQ": Case("Qwen3", "float16", "awq", 13, scheme="W4A16_ASYM", group=32),
    "Qwen3, W4A16": Case("Qwen3", "bfloat16", COMPRESSED, in_graphs=True, scheme="W4A16", group=32),
    "latent, W4A16": Case(
        "DeepseekV3", "bfloat16", COMPRESSED, 0, LATENT, scheme="W4A16", group=32
    ),
    # 21 launches, as of int8: its outputs are put in order, too
    "latent, W4A8": Case("DeepseekV3", "bfloat16", MODELSLIM, 21, WIDE_LATENT, scheme="W4A8"),
    "Llama": Case("Llama", "float16", COMPRESSED, 12),
    "Llama in graphs": Case("Llama", "float16", COMPRESSED, in_graphs=True),
    # Rounded in a launch of their own
    "wide rows": Case("Llama", "float16", COMPRESSED, 13, {**MODEL, "intermediate_size": 7872}),
    # Five copy parts of what two projections give, as int8 products have one result.
    "latent": Case("DeepseekV3", "bfloat16", COMPRESSED, 21, LATENT),
    "latent in graphs": Case("DeepseekV3", "bfloat16", COMPRESSED, 0, LATENT, in_graphs=True),
    "latent, whole queries": Case("DeepseekV3", "bfloat16", MODELSLIM, 19, WHOLE),
    # Two copies less, and a launch that rounds
    "latent, float queries": Case(
        *("DeepseekV3", "bfloat16", MODELSLIM, 18, WHOLE), True, ("kv_b_proj", "q_proj")
    ),
    # An indexer takes eleven, and the norm of a layer's input does not round for it
    "sparse": Case("DeepseekV32", "bfloat16", COMPRESSED, 33, CHOOSING),
    # Nor does the norm of queries
    "sparse, float queries of the indexer": Case(
        *("DeepseekV32", "bfloat16", MODELSLIM, 34, CHOOSING), left_out=("wq_b",)
    ),
    # As "latent", of a layer that has no indexer
    "sparse, a shared indexer": Case("GlmMoeDsa", "bfloat16", MODELSLIM, 21, SHARING),
    "sparse, experts, W4A8": Case(
        *("DeepseekV32", "bfloat16", MODELSLIM, 0, {**INDEXED, "spread": 0.1}), scheme="W4A8"
    ),
    "experts": Case("Qwen3Moe", "float16", COMPRESSED, 0, MIXTURE, in_graphs=True),
    "experts, ModelSlim": Case("Qwen3Moe", "float16", MODELSLIM, 0, MIXTURE, in_graphs=True),
    # With the first seed, a level decides which expert a token takes
    "experts, W4A8": Case(
        "Qwen3Moe", "float16", MODELSLIM, 0, {**MIXTURE, "seed": 3}, in_graphs=True, scheme="W4A8"
    ),
    "experts, W4A8, packed": Case(
        *("Qwen3Moe", "float16", MODELSLIM, 0),
        {**WIDE_MIXTURE, "hidden_size": 256, "moe_intermediate_size": 256},
        in_graphs=True,
        scheme="W4A8",
    ),
    "experts, W4A8, groups": Case(
        *("Qwen3Moe", "float16", COMPRESSED, 0, WIDE_MIXTURE), scheme="W4A8", group=256
    ),
    "experts, W4A16": Case(
        "Qwen3Moe", "bfloat16", COMPRESSED, 0, MIXTURE, in_graphs=True, scheme="W4A16", group=32
    ),
    "experts, AWQ": Case(
        "Qwen3Moe", "float16", "awq", 0, MIXTURE, scheme="W4A16_ASYM", group=32, in_graphs=True
    ),
    "experts, GPTQ": Case("Qwen3Moe", "bfloat16", "gptq", 0, MIXTURE, scheme="W4A16", group=32),
    "experts, W4A16, zero points": Case(
        "Qwen3Moe", "float16", COMPRESSED, 0, MIXTURE, scheme="W4A16_ASYM", group=32
    ),
    "linear attention": Case("Qwen3_5", "bfloat16", COMPRESSED, 0, HYBRID),
    "linear attention, experts": Case("Qwen3Next", "bfloat16", MODELSLIM, 0, HYBRID | EXPERTS),
}


def distances(model, int8, dtype, seed, **more):
    """Each token's largest difference of a logit to transformers' rounded model, the smallest
    first, and counts of a layer."""
    forget_layers()
    prompts = prompts_of(seed, LENGTHS)
    with engine(int8, **settings(dtype), **more) as llm:
        steps = greedy_steps(llm, prompts, 6)
        counted = ModuleCounts(runner_of(llm).get_model(), ["model.layers.1"])
        if not more:
            generate(llm, [[5, 6, 7], [8], [9, 10]], greedy(3))
        counts = next(iter(counted.counts.values()), {})
    network, found = rounded_model(model, int8), []
    for prompt, tokens, logits in zip(prompts, steps.tokens, steps.logits, strict=True):
        with torch.no_grad():
            expected = network(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
        found += ((logits - expected).abs().amax(1) / expected.std()).tolist()
    found.sort()
    print(f"{int8.name} {dtype}: {', '.join(f'{each:.3f}' for each in found)} standard deviations")
    return found, counts


@pytest.mark.parametrize("name", CASES)
def test_logits_and_launches_of_a_layer(tmp_path, seed, name):
    case = CASES[name]
    model = make_model(tmp_path / "float", case.family, **case.config)
    how = {"keep": case.left_out, "scheme": case.scheme, "group": case.group}
    how |= {"form": case.form, "static": case.static}
    quantize_with_signs(model, tmp_path / "int8", **how)
    mode = graphs("FULL_AND_PIECEWISE", 4, 16) if case.in_graphs else {}
    if "experts" in name:
        mode |= {"enable_expert_parallel": True}
    found, counts = distances(model, tmp_path / "int8", case.dtype, seed, **mode)
    assert found[-1 - FEW if "experts" in name else -1] < BOUND[case.dtype]
    if case.launches:
        assert set(counts) <= {"launches", "hidden_copies"}, "no syncs"
        assert sum(counts.values()) == case.launches


@pytest.mark.parametrize("form", [COMPRESSED, MODELSLIM])
def test_static_scales_beside_float_biases(tmp_path, seed, form):
    """Of Qwen2's attention; with zero points, which are taken out before biases are added."""
    model = make_model(tmp_path / "float", "Qwen2", **MODEL)
    change_tensors(model, draw_biases)
    QUANTIZE(model, tmp_path / "int8", form, static=True)
    found, _ = distances(model, tmp_path / "int8", "float16", seed)
    assert found[-1] < BOUND["float16"]


def cost_of(folder, dtype, seed):
    """Launches of layer 1 in a decode, copies included, and the bytes of its parameters."""
    forget_layers()
    with engine(folder, **settings(dtype)) as llm:
        model = runner_of(llm).get_model()
        counted = ModuleCounts(model, ["model.layers.1"])
        generate(llm, prompts_of(seed, LENGTHS), greedy(3))
        nbytes = sum(each.nbytes for each in model.model.layers[1].parameters())
    counts = next(iter(counted.counts.values()))
    assert set(counts) <= {"launches", "hidden_copies"}, "no syncs"
    return sum(counts.values()), nbytes


def launches_of(folder, dtype, seed):
    return cost_of(folder, dtype, seed)[0]


@pytest.mark.parametrize(("family", "config"), [("Qwen3", WIDE), ("Qwen3Moe", WIDE_MIXTURE)])
def test_packed_levels_take_half_of_the_bytes_of_int8(tmp_path, seed, family, config):
    """Packed levels take half of the bytes of int8, and as many launches."""
    model = make_model(tmp_path / "float", family, **config)
    costs = {}
    for scheme in ("W8A8", "W4A8"):
        QUANTIZE(model, tmp_path / scheme, MODELSLIM, scheme=scheme, group=0)
        costs[scheme] = cost_of(tmp_path / scheme, "float16", seed)
    assert costs["W4A8"][0] == costs["W8A8"][0]
    assert costs["W4A8"][1] < 0.6 * costs["W8A8"][1]


def test_packed_experts_take_the_launches_of_float_ones(tmp_path, seed):
    model = make_model(tmp_path / "float", "Qwen3Moe", **MIXTURE)
    how = {"scheme": "W4A16", "group": 32, "keep": ("self_attn",)}
    QUANTIZE(model, tmp_path / "int4", COMPRESSED, **how)
    launches = [launches_of(folder, "float16", seed) for folder in (model, tmp_path / "int4")]
    assert launches[0] == launches[1]


GLM = {"num_hidden_layers": 3, "n_routed_experts": 8, "num_experts_per_tok": 2, "use_qk_norm": True}
GLM |= {"moe_intermediate_size": 32, "n_shared_experts": 1, "first_k_dense_replace": 2}
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
    found, _ = distances(model, tmp_path / "int8", "bfloat16", seed)
    assert found[-1] < BOUND["bfloat16"]
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


def test_a_wrong_operator_is_named_at_start_up():
    """Planted: a kernel that leaves the scales of tokens out; int4 layers do not call it."""

    def make(right):
        def quant_matmul(*args, pertoken_scale=None, **kwargs):
            ones = None if pertoken_scale is None else torch.ones_like(pertoken_scale)
            return right(*args, pertoken_scale=ones, **kwargs)

        return quant_matmul

    int8_probes.refuse_wrong(torch.bfloat16, torch.Tensor.npu, OF_INT8)
    with wrong_operator("npu_quant_matmul", make):
        int8_probes.refuse_wrong(torch.bfloat16, torch.Tensor.npu, [LAYERS_OPERATOR])
        with pytest.raises(PrepError, match="computes npu_quant_matmul wrongly"):
            int8_probes.refuse_wrong(torch.bfloat16, torch.Tensor.npu, OF_INT8)


def shift_scales(right):
    def product(x, weight, scale, *args, **kwargs):
        return right(x, weight, scale.roll(1, 0), *args, **kwargs)

    return product


def shift_scales_of_experts(right):
    def product(*args, antiquant_scale, **kwargs):
        return right(*args, antiquant_scale=[antiquant_scale[0].roll(1, 1)], **kwargs)

    return product


@pytest.mark.parametrize(
    ("operator", "make"),
    [
        ("npu_weight_quant_batchmatmul", shift_scales),
        ("npu_grouped_matmul", shift_scales_of_experts),
    ],
)
def test_a_wrong_operator_of_int4_is_named_at_start_up(operator, make):
    """Planted: a kernel that takes each group's scale for the next one."""
    int8_probes.refuse_wrong(torch.bfloat16, torch.Tensor.npu, [operator])
    with (
        wrong_operator(operator, make),
        pytest.raises(PrepError, match=f"computes {operator} wrongly"),
    ):
        int8_probes.refuse_wrong(torch.bfloat16, torch.Tensor.npu, [operator])


def forget_correction(right):
    def product(*args, offset=None, bias=None, **kwargs):
        more = {} if offset is None else {"offset": torch.zeros_like(offset)}
        more |= {"bias": [torch.zeros_like(each) for each in bias]} if bias else {}
        return right(*args, **more, **kwargs)

    return product


@pytest.mark.parametrize("operator", ["npu_quant_matmul", "npu_grouped_matmul"])
def test_a_wrong_operator_of_w4a8_is_named_at_start_up(operator):
    """Planted: a kernel that leaves out what the 8 in each row adds."""
    int8_probes.refuse_wrong(torch.float16, torch.Tensor.npu, [], w4a8=True)
    with wrong_operator(operator, forget_correction):
        int8_probes.refuse_wrong(torch.float16, torch.Tensor.npu, [])
        with pytest.raises(PrepError, match=f"computes {operator} wrongly"):
            int8_probes.refuse_wrong(torch.float16, torch.Tensor.npu, [], w4a8=True)
