"""Arguments of valid calls: operators of experts, with int8, and of the gated delta rule."""

import torch

from tests.emulator.operators.formula import random

INIT_ROUTING = "npu::npu_moe_init_routing_v2"
TOKEN_UNPERMUTE = "npu::_npu_moe_token_unpermute"
FINALIZE_ROUTING = "npu::npu_moe_finalize_routing"
GATING = "npu::npu_moe_gating_top_k"
GATING_SOFTMAX = "npu::npu_moe_gating_top_k_softmax_v2"
GROUPED_MATMUL = "npu::npu_grouped_matmul"
HALF = torch.float16

IDS = [[5, 1], [2, 0], [6, 6], [3, 2], [-1, -1], [1, 3]]
"""Experts 0 to 5 and 6 for none; experts 1 to 3 are active."""


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


def routing(seed=0, **changes):
    """Six tokens with two experts each, of which three experts are active."""
    return {
        "x": random(6, 8, dtype=HALF, seed=seed),
        "expert_idx": torch.tensor(IDS, dtype=torch.int32),
        "active_num": 12,
        "expert_num": 7,
        "expert_tokens_num_type": 1,
        "expert_tokens_num_flag": True,
        "active_expert_range": [1, 4],
        **changes,
    }


def unpermute(seed=0, dtype=HALF, **changes):
    """Three tokens with two rows each; one row is past the end, one has no probability."""
    return {
        "permuted_tokens": random(6, 8, dtype=dtype, seed=seed),
        "sorted_indices": int32(3, 0, 9, 5, 1, -1),
        "probs": torch.tensor([[0.5, 0.25], [0.9, 0.1], [1.0, 0.0]]),
        **changes,
    }


def finalize(seed=0, dtype=torch.bfloat16, **changes):
    """Four tokens with two rows each: of one both lack a row, of two the first or the second."""
    return {
        "expanded_permuted_rows": random(8, 1, 16, dtype=dtype, seed=seed),
        **dict.fromkeys(("skip1", "skip2", "bias", "export_for_source_row")),
        "scales": torch.tensor([[0.5, 0.25], [0.9, 0.1], [1.0, 0.3], [0.7, 0.2]]).to(dtype),
        "expanded_src_to_dst_row": int32(3, 0, -1, 2, -1, -1, 1, -1),
        "drop_pad_mode": 3,
        **changes,
    }


def gating():
    """Five tokens and twelve experts in four groups, with a bias."""
    sizes = {"k": 3, "k_group": 2, "group_count": 4, "group_select_mode": 1, "norm_type": 1}
    return {"x": random(5, 12), "bias": random(12, seed=1) / 4, **sizes}


def softmax():
    """Five tokens and twelve experts; the last token is finished."""
    return {"x": random(5, 12), "k": 3, "finished": torch.arange(5) == 4}


def rows(seed=0, **changes):
    """Seven rows in three groups, of which five belong to a group; transposed weights."""
    return {
        "x": [random(7, 8, dtype=HALF, seed=seed)],
        "weight": [random(3, 6, 8, dtype=HALF, seed=seed + 1).transpose(1, 2)],
        "group_list": torch.tensor([2, 0, 3]),
        "group_list_type": 1,
        "group_type": 0,
        "split_item": 2,
        **changes,
    }


DYNAMIC, QUANTIZE = "npu::npu_dynamic_quant", "npu::npu_quantize"
QUANT_MATMUL, NORM = "npu::npu_quant_matmul", "npu::npu_add_rms_norm_dynamic_quant"
STATIC_NORM, SWIGLU = "npu::npu_add_rms_norm_quant", "npu::npu_dequant_swiglu_quant"
CODES = {torch.int8: 1, torch.int32: 3, HALF: 5, torch.qint8: 12, torch.bfloat16: 15}


def small(*shape):
    return torch.randint(-127, 128, shape, dtype=torch.int8)


def dynamic():
    return {"input": random(5, 8, dtype=HALF)}


def quantize():
    """A scale and an offset for all."""
    given = {"scales": torch.full((1,), 0.01), "zero_points": int32(-7)}
    return {"input": random(5, 8, dtype=HALF), "dtype": CODES[torch.qint8], "axis": -1, **given}


CLIPPED, ROTARY = "npu::npu_clipped_swiglu", "atb::_npu_rotary_embedding"
PERMUTE = "npu::npu_moe_token_permute"


def clipped(dtype=HALF, seed=0, **changes):
    return {"x": random(5, 12, dtype=dtype, seed=seed) * 5, **changes}


def rotary(dtype=HALF, seed=0, **changes):
    """Four tokens with three heads and one of 16, anywhere in a table of nine rows."""
    return {
        "positions": torch.tensor([8, 0, 3, 3]),
        "query": random(4, 48, dtype=dtype, seed=seed),
        "key": random(4, 16, dtype=dtype, seed=seed + 1),
        "head_size": 16,
        "cos_sin_cache": random(9, 16, dtype=dtype, seed=seed + 2),
        "is_neox_style": True,
        **changes,
    }


def permute(seed=0, dtype=HALF, **changes):
    """Six tokens with two experts each."""
    tokens = random(6, 8, dtype=dtype, seed=seed)
    return {"tokens": tokens, "indices": torch.tensor(IDS), **changes}


SCATTER, ADD = "npu::npu_scatter_nd_update_", "atb::_npu_matmul_add_fp32"
WEIGHT_QUANT = "npu::npu_weight_quant_batchmatmul"


def scatter(seed=0, **changes):
    """Three rows of a plane of five by four."""
    places = torch.tensor([[4, 0], [0, 3], [2, 2]])
    given = {"input": random(5, 4, 8, seed=seed), "updates": random(3, 8, seed=seed + 1)}
    return {**given, "indices": places, **changes}


def weight_quant(dtype=HALF, seed=0, **changes):
    """Scales and offsets of columns, and a bias."""
    return {
        "x": random(5, 8, dtype=dtype, seed=seed),
        "weight": small(8, 6),
        "antiquant_scale": (random(6, seed=seed + 1) / 50).to(dtype),
        "antiquant_offset": (random(6, seed=seed + 2) * 9).to(dtype),
        "bias": random(6, dtype=HALF if dtype == HALF else torch.float32, seed=seed + 3),
        **changes,
    }


def int4_groups(seed=0, **changes):
    """64 inputs in two groups, eight outputs in an int32."""
    words = torch.randint(-(2**31), 2**31 - 1, (64, 1), dtype=torch.int64).int()
    scales = (random(2, 8, seed=seed + 1) / 50).to(HALF)
    given = {"x": random(5, 64, dtype=HALF, seed=seed), "weight": words, "antiquant_scale": scales}
    return {**given, "antiquant_group_size": 32, **changes}


def add(dtype=HALF, seed=0):
    x, weight = (random(5, size, dtype=dtype, seed=seed + size) for size in (4, 6))
    return {"x": x, "weight": weight, "C": random(4, 6, seed=seed)}


def multiplied(dtype=HALF, **changes):
    """A factor and an offset for each column."""
    factors = {"scales": random(8, seed=1).abs() * 20, "zero_points": random(8, seed=2) * 10}
    given = {name: tensor.to(dtype) for name, tensor in factors.items()}
    return quantize() | given | {"input": random(5, 8, dtype=dtype), "div_mode": False} | changes


def quant_matmul(dtype=HALF, static=False):
    """A transposed x2; dynamic with a float bias, static with an int32 one."""
    scale = torch.rand(6)
    given = {"x1": small(5, 8), "x2": small(6, 8).t(), "output_dtype": CODES[dtype]}
    if static:
        packed = scale.view(torch.int32).long() if dtype == HALF else scale
        return given | {"scale": packed, "bias": torch.arange(6, dtype=torch.int32)}
    return given | {"scale": scale, "pertoken_scale": torch.rand(5), "bias": random(6)}


def bits_of(*shape, seed=0):
    """Scales, some negative, whose lower bits kernels don't read: the bits of float32 in int64."""
    scales = random(*shape, seed=seed) / 50
    return scales.view(torch.int32).long() & 0xFFFFE000


def int4_matmul(seed=0, groups=2, **changes):
    """512 inputs in two groups, or by channel; eight outputs in an int32."""
    draw = torch.Generator().manual_seed(seed)
    words = torch.randint(-(2**31), 2**31 - 1, (512, 2), generator=draw).int()
    rows = torch.randint(-128, 128, (5, 512), dtype=torch.int8, generator=draw)
    given = {"x1": rows, "x2": words, "output_dtype": CODES[HALF], "offset": random(16, seed=seed)}
    if groups:
        scales = {"scale": bits_of(2, 16, seed=seed), "pertoken_scale": torch.rand(5, 1)}
        return given | scales | {"group_sizes": [0, 0, 256]} | changes
    return given | {"scale": bits_of(16, seed=seed), "pertoken_scale": torch.rand(5)} | changes


def norm():
    arguments = {name: random(5, 8, dtype=HALF) for name in ("x1", "x2")}
    return arguments | {"gamma": random(8, dtype=HALF), "epsilon": 1e-5}


def static_norm():
    return norm() | {"scales1": torch.full((8,), 0.02), "zero_points1": int32(*[5] * 8)}


def swiglu(static=False):
    arguments = {"x": random(5, 12, dtype=HALF), "activate_left": True, "quant_mode": 1}
    scales = {"quant_scale": torch.tensor([0.02]), "quant_offset": torch.tensor([3.0])}
    return arguments | ({"quant_mode": 0, **scales} if static else {})


def int4_rows(seed=0, groups=2, **changes):
    """The same rows beside weights of 64 inputs in two groups, eight outputs in an int32."""
    draw = torch.Generator().manual_seed(seed)
    words = torch.randint(-(2**31), 2**31 - 1, (3, 64, 1), generator=draw).int()
    shape = (3, groups, 8) if groups > 1 else (3, 8)
    scales, offsets = (random(*shape, dtype=HALF, seed=seed + each) for each in (2, 3))
    given = {"antiquant_scale": [scales / 50], "antiquant_offset": [offsets * 9]}
    return (
        rows() | {"x": [random(7, 64, dtype=HALF, seed=seed)], "weight": [words]} | given | changes
    )


def int8_rows():
    """Seven rows of three experts, of which the last two belong to none."""
    return rows() | {
        "x": [small(7, 8)],
        "weight": [small(3, 6, 8).transpose(1, 2)],
        "scale": [torch.rand(3, 6)],
        "per_token_scale": [torch.rand(7)],
        "output_dtype": CODES[HALF],
    }


def int8_rows_of_int4(seed=0, groups=2, **changes):
    """Grouped int8 rows of 512 inputs by weights of four bits, in groups or by channel."""
    draw = torch.Generator().manual_seed(seed)
    words = torch.randint(-(2**31), 2**31 - 1, (3, 512, 2), generator=draw).int()
    given = {
        "x": [torch.randint(-128, 128, (7, 512), dtype=torch.int8, generator=draw)],
        "weight": [words],
        "scale": [bits_of(3, groups, 16, seed=seed)],
        "bias": [random(3, 16, seed=seed)],
        "per_token_scale": [torch.rand(7, generator=draw)],
        "output_dtype": CODES[HALF],
        "group_list_type": 1,
    }
    return rows() | given | changes


def rule(lengths, key_heads=2, value_heads=4, dim=128):
    """What both forms of the rule take: queries, keys, values, decays and rates of sequences."""
    tokens = sum(lengths)
    query, key = (
        torch.nn.functional.normalize(random(tokens, key_heads, dim, seed=seed), dim=-1).bfloat16()
        for seed in range(2)
    )
    return {
        "query": query,
        "key": key,
        "value": random(tokens, value_heads, dim).bfloat16(),
        "beta": random(tokens, value_heads).sigmoid().bfloat16(),
        "g": -random(tokens, value_heads).exp(),
        "actual_seq_lengths": int32(*lengths),
        "scale": dim**-0.5,
    }


def recurrent(lengths=(1, 3, 1), blocks=9, **sizes):
    """Three sequences whose states are anywhere in the cache."""
    arguments = rule(lengths, **sizes)
    tokens, heads, dim = arguments["value"].shape
    state = random(blocks, heads, dim, dim).bfloat16()
    return {**arguments, "state": state, "ssm_state_indices": int32(*range(tokens, 0, -1))}


def chunk(lengths=(3, 1), **sizes):
    """Two sequences."""
    arguments = rule(lengths, **sizes)
    _, heads, dim = arguments["value"].shape
    return {**arguments, "initial_state": random(len(lengths), heads, dim, dim).bfloat16()}
