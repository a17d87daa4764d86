"""Fused operators: how many launches are left, and that the results are those of vLLM's code."""

from types import SimpleNamespace

import pytest
import torch
from vllm import SamplingParams
from vllm.config import set_current_vllm_config
from vllm.model_executor.layers import activation, layernorm, rotary_embedding
from vllm.model_executor.layers.attention.mm_encoder_attention import MMEncoderAttention
from vllm.model_executor.layers.rotary_embedding.common import ApplyRotaryEmb
from vllm.v1.sample import rejection_sampler
from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler, apply_top_k_top_p

import ascend_emulator
from ascend_emulator import profiles
from ascend_emulator.operators.schemas import signature
from tests.helpers.counting import ModuleCounts
from tests.helpers.engine import (
    engine_config,
    generate,
    greedy,
    make_model,
    runner_of,
)
from tests.helpers.fused import MODEL, compare_paths, forget_layers, settings, wrong_operator
from tests.helpers.v2 import engine_of
from vllm_npu_prep.attention.fused_releases import version_of
from vllm_npu_prep.config import FUSED_OPERATORS
from vllm_npu_prep.ops import register_fused, register_overrides
from vllm_npu_prep.ops.npu import rotary, vision
from vllm_npu_prep.ops.npu.router_norms import CastingNorm
from vllm_npu_prep.ops.npu.top_k_top_p import FusedTopKTopPSampler, largest_k_of, limit_drafts_by
from vllm_npu_prep.verify.fused import is_right

BUDGET = {"Qwen3": 12, "Llama": 10}
"""Launches of a layer, with the copies that operators make of strided inputs."""

ROTARY = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
    "partial": {"rope_type": "default", "partial_rotary_factor": 0.5},
    "proportional": {"rope_type": "proportional", "partial_rotary_factor": 0.5},
}
"""Parameters of rotary embeddings, by what is special about them."""


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("qwen3"), **MODEL)


@pytest.mark.parametrize("family", BUDGET)
def test_a_layer_stays_within_its_budget(qwen3, tmp_path, family):
    model = qwen3 if family == "Qwen3" else make_model(tmp_path / "model", family, **MODEL)
    forget_layers()
    with engine_of("V1", model, **settings()) as llm:
        runner, sampling = runner_of(llm), {}
        counted = ModuleCounts(runner.get_model(), ["model.layers.1"])
        sample = runner.sampler.forward

        def counted_sample(logits, sampling_metadata, **kwargs):
            with ascend_emulator.count() as c:
                output = sample(logits, sampling_metadata, **kwargs)
            kind = "greedy" if sampling_metadata.all_greedy else "random"
            sampling[kind] = c.launches + c.hidden_copies
            return output

        runner.sampler.forward = counted_sample
        limits = SamplingParams(temperature=0.7, top_k=9, top_p=0.9, max_tokens=3, detokenize=False)
        generate(llm, [[5, 6, 7], [8], [9, 10]], greedy(3))
        (layer,) = counted.counts.values()
        generate(llm, [[5, 6, 7], [8]], limits)
    assert set(layer) == {"launches"}, "no copies, hidden or not, and no syncs"
    assert layer["launches"] == BUDGET[family]
    assert sampling["greedy"] <= 8
    assert sampling["random"] <= 12


@pytest.fixture(scope="module")
def configs(qwen3):
    """Configs with and without fused operators, whose layers are registered."""
    made = {}
    for fused in (True, False):
        made[fused] = engine_config(qwen3, **settings(fused=fused))
    register_fused(made[True], print)
    return made


def pair(configs, make, **weights):
    """A fused layer and vLLM's own, with one set of random weights, on the device."""
    layers = []
    for fused in (True, False):
        forget_layers()
        with set_current_vllm_config(configs[fused]), torch.device("npu"):
            layer = make()
        layers.append(layer.to("npu"))
    for mine, theirs in zip(layers[0].parameters(), layers[1].parameters()):
        values = torch.randn(mine.shape, generator=torch.Generator().manual_seed(1)) / 4 + 0.5
        mine.data.copy_(values)
        theirs.data.copy_(values)
    return layers


def run(layer, *arguments):
    """Results on the host, and how many launches they took."""
    with torch.inference_mode(), ascend_emulator.count() as c:
        results = layer(*arguments)
    results = results if isinstance(results, tuple) else (results,)
    return [None if each is None else each.float().cpu() for each in results], c


def check(layers, *arguments, launches, more_than=1, tolerance=0.02):
    results, counts = zip(*(run(layer, *arguments) for layer in layers))
    for ours, theirs in zip(*results, strict=True):
        if theirs is None:
            assert ours is None
            continue
        scale = float(theirs.abs().max())
        torch.testing.assert_close(ours, theirs, rtol=0, atol=tolerance * max(scale, 1e-3))
    assert counts[0].launches + counts[0].hidden_copies == launches
    assert counts[1].launches + counts[1].hidden_copies >= more_than + launches


def on_device(*shape, dtype=torch.float16, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype).npu()


DTYPES = [torch.float16, torch.bfloat16]


def ropes(configs, size, is_neox=True, dtype=torch.float16, **parameters):
    """Rotary embeddings of a head size, by parameters of a model's config."""
    of_model = {"rope_theta": 10000.0, "rope_type": "default", **parameters}
    get_rope = rotary_embedding.get_rope
    return pair(configs, lambda: get_rope(size, 256, is_neox, of_model, dtype))


def test_a_router_in_float32_gets_the_rows_of_the_norm(configs):
    norm, theirs = pair(configs, lambda: layernorm.RMSNorm(512, dtype=torch.float16))
    norm.__class__ = CastingNorm
    x, residual = on_device(5, 512), on_device(5, 512, seed=1)
    (rows, total), (expected, expected_total) = (
        norm(x, residual),
        theirs(x.clone(), residual.clone()),
    )
    torch.testing.assert_close(rows.cast, expected.float(), rtol=2e-3, atol=2e-3)
    assert torch.equal(rows.values, rows.cast.half())
    torch.testing.assert_close(total, expected_total)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ROTARY)
@pytest.mark.parametrize("is_neox", [True, False], ids=["half", "interleaved"])
def test_rotary_embeddings(configs, name, is_neox, dtype, seed):
    layers = ropes(configs, 64, is_neox, dtype, **ROTARY[name])
    projected = on_device(9, 64 * 8, dtype=dtype, seed=seed)
    query, key, _ = projected.split([256, 128, 128], -1)
    positions = torch.tensor([0, 1, 2, 200, 3, 64, 5, 6, 120]).npu()
    check(layers, positions, query, key, launches=1)
    check(layers, positions, query, None, launches=1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("is_neox", [True, False], ids=["half", "interleaved"])
def test_rotary_embeddings_of_indexers(configs, is_neox, dtype, seed):
    """Of the first half of each head, stretched as DeepSeek V3.2's checkpoints ask for."""
    parameters = {"rope_type": "deepseek_yarn", "factor": 4.0, "rope_dim": 64}
    layers = ropes(configs, 128, is_neox, dtype, **parameters, original_max_position_embeddings=64)
    query, key = (on_device(9, heads, 128, dtype=dtype, seed=seed + heads) for heads in (8, 1))
    positions = torch.tensor([0, 1, 2, 200, 3, 64, 5, 6, 120]).npu()
    check(layers, positions, query, key, launches=1)


OF_IMAGES = torch.tensor([[0, 9, 9, 9, 20], [0, 3, 4, 5, 20], [0, 7, 2, 1, 20]])


@pytest.fixture
def on_85(monkeypatch):
    """The operators of CANN 8.5, which has no second form of ``npu_mrope``."""
    monkeypatch.setenv(profiles.PROFILE, "8.5")
    profiles._of_process.cache_clear()
    monkeypatch.setattr(rotary, "is_missing", lambda function: True)
    yield
    monkeypatch.undo()
    profiles._of_process.cache_clear()


@pytest.mark.parametrize("cann", ["9", "8.5"])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("sections", [(16, 24, 24), (24, 20, 20), (40, 12, 12)])
def test_rotary_embeddings_of_images(configs, sections, interleaved, cann, seed, request):
    """One launch where the operator knows the sections; before CANN 9, none in turn."""
    if cann == "8.5":
        request.getfixturevalue("on_85")
    layers = ropes(configs, 128, mrope_section=list(sections), mrope_interleaved=interleaved)
    query, key = on_device(5, 512, seed=seed), on_device(5, 256, seed=seed + 1)
    is_known = sections[0] < 40 and not (interleaved and cann == "8.5")
    check(layers, OF_IMAGES.npu(), query, key, launches=1 if is_known else 5)
    check(layers, OF_IMAGES[0].npu(), query, key, launches=1)


@pytest.mark.parametrize(
    ("size", "is_neox", "most"), [(128, True, 53), (64, False, 94)], ids=["half", "interleaved"]
)
def test_many_heads_are_left_to_torch_before_cann_9(configs, on_85, size, is_neox, most, seed):
    layers = ropes(configs, size, is_neox)
    positions = torch.tensor([3, 0, 200]).npu()
    key = on_device(3, size, seed=seed)
    check(layers, positions, on_device(3, most * size, seed=seed), key, launches=1)
    results, counts = zip(
        *(run(layer, positions, on_device(3, (most + 1) * size), key) for layer in layers)
    )
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*results))
    assert counts[0].launches == counts[1].launches


@pytest.mark.parametrize("is_neox", [True, False], ids=["half", "interleaved"])
def test_rotary_embeddings_of_vision_towers(configs, is_neox, seed):
    layers = pair(configs, lambda: ApplyRotaryEmb(is_neox_style=is_neox))
    x, angles = on_device(2, 9, 3, 80, seed=seed), on_device(9, 40, seed=seed + 1)
    cos, sin = angles.cos(), angles.sin()
    # Factors of whole heads are made of halves by one launch each, once for all layers.
    check(layers, x, cos, sin, launches=3)
    check(layers, x[0], cos, sin, launches=1)


ENDS = torch.tensor([0, 4, 5, 9], dtype=torch.int32)
"""Cumulative lengths of three images, as a tower hands them to its layers: on the host."""


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("kv_heads", "most"), [(4, 1024), (2, 1024), (4, 2)])
def test_attention_of_vision_towers(configs, kv_heads, most, dtype, monkeypatch, seed):
    """Images alone, packed images, more of them than one call takes, and slices of a projection."""
    monkeypatch.setattr(vision, "MAX_LENGTHS", most)
    layers = pair(configs, lambda: MMEncoderAttention(4, 80, num_kv_heads=kv_heads))
    heads = (4, kv_heads, kv_heads)
    rows = [on_device(1, 9, n, 80, dtype=dtype, seed=seed + i) for i, n in enumerate(heads)]
    calls = -(-3 // most) + (most < 3)  # and `cat`
    check(layers, *rows, ENDS, launches=calls)
    check(layers, *(each.flatten(2) for each in rows), launches=1)
    batch = [each[:, :8].reshape(4, 2, *each.shape[2:]) for each in rows]
    check(layers, *batch, launches=1 if most > 4 else 3)
    projected = on_device(1, 9, 3, 4, 80, dtype=dtype, seed=seed)
    query, key, value = (part[:, :, :n] for part, n in zip(projected.unbind(2), heads))
    check(layers, query, key, value, ENDS, launches=calls + 3, more_than=0)
    assert run(layers[0], *rows, ENDS)[1].syncs == 0


def test_lengths_of_images_stay_on_the_host(configs):
    """What vLLM's towers ask for: no copy to the device, which nothing would read."""
    pair(configs, lambda: MMEncoderAttention(4, 80))
    with ascend_emulator.count() as c:
        given = "TORCH_SDPA", ENDS.numpy(), 320, 1, torch.device("npu")
        kept = MMEncoderAttention.maybe_recompute_cu_seqlens(*given)
        assert MMEncoderAttention.maybe_compute_seq_lens(*given[:2], given[-1]) is None
    assert kept.device.type == "cpu"
    assert torch.equal(kept, ENDS)
    assert not set(c.nonzero()) - {"peak_memory_bytes"}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", [layernorm.RMSNorm, layernorm.GemmaRMSNorm])
def test_norms(configs, kind, dtype, seed):
    torch.set_default_dtype(dtype)
    try:
        layers = pair(configs, lambda: kind(64, 0.5))  # an epsilon that shows
    finally:
        torch.set_default_dtype(torch.float32)
    x, residual = on_device(7, 64, dtype=dtype, seed=seed), on_device(7, 64, dtype=dtype, seed=9)
    layers = [by_ir(configs[fused], layer) for fused, layer in zip((True, False), layers)]
    check(layers, x, launches=1)
    check(layers, x, residual, launches=1 if kind is layernorm.RMSNorm else 2)
    heads = on_device(5, 512, dtype=dtype, seed=seed).split([256, 128, 128], -1)[1]
    check(layers, heads.view(5, 2, 64), launches=1)  # a slice that nothing copies


@pytest.mark.parametrize(
    "make",
    [
        activation.SiluAndMul,
        lambda: activation.GeluAndMul("tanh"),
        lambda: activation.GeluAndMul("none"),
        activation.GELU,
        activation.GELUTanh,
        activation.NewGELU,
        activation.FastGELU,
    ],
    ids=["silu", "geglu-tanh", "geglu", "gelu", "gelu-tanh", "gelu-new", "gelu-fast"],
)
def test_activations(configs, make, seed):
    layers = pair(configs, make)
    is_one_anyway = make in (activation.GELU, activation.GELUTanh)
    x = on_device(5, 96, seed=seed) * 2
    check(layers, x, launches=1, more_than=0 if is_one_anyway else 1)


@pytest.mark.parametrize(
    ("profile", "k", "launches"), [("9.1", 1500, 1), ("8.5", 1500, None), ("8.5", 1024, 1)]
)
def test_a_k_that_a_release_does_not_take_is_left_to_torch(profile, k, launches, seed):
    """Known from the host's batch: nothing is read back, and nothing is given to the kernel."""
    release = profiles.find(profile).release
    limits = largest_k_of(version_of(release), documented=False)
    vllms = TopKTopPSampler()
    ours = FusedTopKTopPSampler(vllms, limits, lambda: k)
    logits = on_device(2, 2000, dtype=torch.float32, seed=seed)
    of_rows = torch.tensor([7, k], dtype=torch.int32).npu(), torch.tensor([0.9, 1.0]).npu()
    given = logits.clone()
    with profiles.using(profile), ascend_emulator.count() as c:
        limited = ours.limit(given, *of_rows)
    assert c.syncs == 0 == c.d2h_copies
    assert c.launches == launches or (launches is None and c.launches > 8)
    assert torch.equal(limited.cpu(), apply_top_k_top_p(logits, *of_rows).cpu())
    dummy = FusedTopKTopPSampler(vllms, limits, lambda: None)
    assert dummy._is_taken(of_rows[0]) == (profile == "9.1")


def test_drafts_are_limited_by_the_operator_too(seed):
    register_overrides("replace")
    logits, ends = on_device(6, 90, dtype=torch.float32, seed=seed), torch.tensor([3, 3, 6]).int()
    metadata = SimpleNamespace(
        all_greedy=False,
        temperature=torch.tensor([0.7, 1.0, 0.0]).npu(),
        top_k=torch.tensor([9, 90, 5]).int().npu(),
        top_p=torch.tensor([0.8, 0.9, 1.0]).npu(),
    )
    results, launches, ends = [], [], ends.npu()
    for sampler in (FusedTopKTopPSampler(TopKTopPSampler(), None, lambda: None), None):
        limit_drafts_by(sampler)
        given = logits.clone()
        with ascend_emulator.count() as c:
            limited = rejection_sampler.apply_sampling_constraints(given, ends, metadata)
        results.append(limited.cpu())
        launches.append(c.launches)
        assert c.syncs == 0
    assert torch.equal(*results)
    assert launches[0] == 16 < launches[1]


def other(result=None, **changes):
    """Make of an operator one that gets other values of some arguments, where they are given, or
    whose results are changed, by what it was given."""

    def make(right, signature):
        def operator(*args, **kwargs):
            given = signature.bind(*args, **kwargs)
            given.apply_defaults()
            for name, change in changes.items():
                if given.arguments[name] is not None:
                    given.arguments[name] = change(given.arguments[name])
            results = right(*given.args, **given.kwargs)
            return result(results, given.arguments) if result else results

        return operator

    return make


def one_token_more(kept, given):
    left = given["logits"].masked_fill(kept.isfinite(), float("-inf"))
    more = left.argmax(-1, keepdim=True)
    return kept.scatter(1, more, given["logits"].gather(1, more))


def shifted(ends):
    return [each - 1 for each in ends] if ends[0] else ends


def exchanged(x):
    return torch.cat(x.chunk(2, -1)[::-1], -1)


def without_the_second_of_four(scales):
    """As a kernel of CANN 8.5 does with rows that it has to cut."""
    return scales * torch.tensor([1, 0, 1, 1]) if scales.shape[-1] == 4 else scales


UNPERMUTE, FINALIZE = "_npu_moe_token_unpermute", "npu_moe_finalize_routing"
ROUTING, GATING = "npu_moe_init_routing_v2", "npu_moe_gating_top_k"
OTHER_HALF = {"half": "interleave", "interleave": "half"}
PLANTED = {
    "a swapped rotary half": ("rotary mrope", "npu_mrope", other(rotary_mode=OTHER_HALF.get)),
    "no epsilon": ("rms_norm", "npu_rms_norm", other(epsilon=lambda _: 0.0)),
    "a residual that isn't updated": (
        "add_rms_norm",
        "npu_add_rms_norm",
        other(lambda results, given: (*results[:2], given["x2"])),
    ),
    "a cast of the sum": (
        "add_rms_norm_cast",
        "npu_add_rms_norm_cast",
        other(lambda results, _: (results[-1].float(), *results[1:])),
    ),
    "images that see each other": (
        "vision_attention",
        "npu_fusion_attention",
        other(actual_seq_qlen=lambda ends: ends[-1:], actual_seq_kvlen=lambda ends: ends[-1:]),
    ),
    "top-p off by one": ("top_k_top_p", "npu_top_k_top_p", other(one_token_more)),
    "other groups": ("experts", "npu_grouped_matmul", other(group_list=lambda g: g.roll(1))),
    "weights swapped": ("experts", UNPERMUTE, other(probs=lambda weights: weights.flip(-1))),
    "padding that is routed": ("experts", ROUTING, other(expert_idx=lambda i: i.clamp(min=0))),
    "a shifted range": ("experts", ROUTING, other(active_expert_range=shifted)),
    "gate and up exchanged": ("experts swiglu", "npu_swiglu", other(input=exchanged)),
    "scales swapped": ("finalize_routing", FINALIZE, other(scales=lambda s: s.flip(-1))),
    "one of four lost": ("finalize_routing", FINALIZE, other(scales=without_the_second_of_four)),
    "a row for a pair without one": (
        "finalize_routing",
        FINALIZE,
        other(expanded_src_to_dst_row=lambda rows: rows.clamp(min=0)),
    ),
    "groups without limit": ("gating", GATING, other(k_group=lambda n: n + (n > 1))),
    "finished rows": ("gating_softmax", f"{GATING}_softmax_v2", other(finished=torch.zeros_like)),
}
"""What computes wrongly: the switches whose probes find it, the operator, and how."""


def differing(dtype, lines):
    """Switches whose probe says no."""
    right = {
        name: is_right(name, dtype, torch.Tensor.npu, lines.append) for name in FUSED_OPERATORS
    }
    return {name for name in right if not right[name]}


@pytest.mark.parametrize("bug", PLANTED)
def test_an_operator_that_computes_wrongly_is_switched_off(configs, bug):
    switches, name, make = PLANTED[bug]
    of_operator, lines = signature(f"npu::{name}"), []
    with wrong_operator(name, lambda right: make(right, of_operator)):
        found = differing(torch.float16, lines)
    assert found == set(switches.split())
    assert len(lines) == len(found)
    assert all("is switched off: this device computes it wrongly" in line for line in lines)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_probes_agree_with_operators_that_compute_rightly(configs, dtype):
    lines = []
    assert not differing(dtype, lines), lines


def by_ir(config, layer):
    """A layer under the order in which a config's IR operators choose implementations."""

    def run_layer(*arguments):
        with config.kernel_config.ir_op_priority.set_priority():
            return layer(*arguments)

    return run_layer


def test_logits_in_graphs_are_those_of_the_unfused_path(qwen3, seed):
    compare_paths(qwen3, "Qwen3", "float16", "FULL_AND_PIECEWISE", seed)
