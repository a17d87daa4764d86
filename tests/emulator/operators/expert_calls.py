"""Valid calls of the operators of experts, and calls that break one demand each."""

import torch

from tests.emulator.operators.calls import call, spoiled, strided

INIT_ROUTING = "npu::npu_moe_init_routing_v2"
TOKEN_UNPERMUTE = "npu::_npu_moe_token_unpermute"
FINALIZE_ROUTING = "npu::npu_moe_finalize_routing"
GATING = "npu::npu_moe_gating_top_k"
GATING_SOFTMAX = "npu::npu_moe_gating_top_k_softmax_v2"
GROUPED_MATMUL = "npu::npu_grouped_matmul"

IDS = [[5, 1], [2, 0], [6, 6], [3, 2], [-1, -1], [1, 3]]
"""Experts 0 to 5 and 6 for none; experts 1 to 3 are active."""


def random(*shape, dtype=torch.float16, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def routing_arguments(seed=0, dtype=torch.float16, **changes):
    """Six tokens with two experts each, of which three experts are active."""
    return {
        "x": random(6, 8, dtype=dtype, seed=seed),
        "expert_idx": torch.tensor(IDS, dtype=torch.int32),
        "active_num": 12,
        "expert_num": 7,
        "expert_tokens_num_type": 1,
        "expert_tokens_num_flag": True,
        "active_expert_range": [1, 4],
        **changes,
    }


def unpermute_arguments(seed=0, dtype=torch.float16, **changes):
    """Three tokens with two rows each; one row is past the end, one has no probability."""
    return {
        "permuted_tokens": random(6, 8, dtype=dtype, seed=seed),
        "sorted_indices": torch.tensor([3, 0, 9, 5, 1, -1], dtype=torch.int32),
        "probs": torch.tensor([[0.5, 0.25], [0.9, 0.1], [1.0, 0.0]]),
        **changes,
    }


def finalize_arguments(seed=0, dtype=torch.bfloat16, **changes):
    """Four tokens with two rows each: of one both lack a row, of two the first or the second."""
    return {
        "expanded_permuted_rows": random(8, 1, 16, dtype=dtype, seed=seed),
        "skip1": None,
        "skip2": None,
        "bias": None,
        "scales": torch.tensor([[0.5, 0.25], [0.9, 0.1], [1.0, 0.3], [0.7, 0.2]]).to(dtype),
        "expanded_src_to_dst_row": torch.tensor([3, 0, -1, 2, -1, -1, 1, -1], dtype=torch.int32),
        "export_for_source_row": None,
        "drop_pad_mode": 3,
        **changes,
    }


def gating_arguments(seed=0, dtype=torch.float32, **changes):
    """Five tokens and twelve experts in four groups, with a bias."""
    return {
        "x": random(5, 12, dtype=dtype, seed=seed),
        "k": 3,
        "bias": random(12, dtype=dtype, seed=seed + 1) / 4,
        "k_group": 2,
        "group_count": 4,
        "group_select_mode": 1,
        "norm_type": 1,
        **changes,
    }


def softmax_arguments(seed=0, dtype=torch.float32, **changes):
    """Five tokens and twelve experts; the last token is finished."""
    finished = torch.tensor([False] * 4 + [True])
    return {"x": random(5, 12, dtype=dtype, seed=seed), "k": 3, "finished": finished, **changes}


def rows_arguments(seed=0, dtype=torch.float16, **changes):
    """Seven rows in three groups, of which five belong to a group; transposed weights."""
    return {
        "x": [random(7, 8, dtype=dtype, seed=seed)],
        "weight": [random(3, 6, 8, dtype=dtype, seed=seed + 1).transpose(1, 2)],
        "group_list": torch.tensor([2, 0, 3]),
        "group_list_type": 1,
        "group_type": 0,
        "split_item": 2,
        **changes,
    }


def broken(name, make):
    """Function that makes a call with arguments replaced by functions of themselves."""
    return lambda **functions: lambda: call(name, spoiled(make(), **functions))


def changed(name, make):
    """Function that makes a call with arguments given."""
    return lambda **values: lambda: call(name, make(**values))


routing, route = broken(INIT_ROUTING, routing_arguments), changed(INIT_ROUTING, routing_arguments)
unpermute = broken(TOKEN_UNPERMUTE, unpermute_arguments)
unpermuted = changed(TOKEN_UNPERMUTE, unpermute_arguments)
finalize = broken(FINALIZE_ROUTING, finalize_arguments)
finalized = changed(FINALIZE_ROUTING, finalize_arguments)
gating, gate = broken(GATING, gating_arguments), changed(GATING, gating_arguments)
softmax = changed(GATING_SOFTMAX, softmax_arguments)
rows, grouped = broken(GROUPED_MATMUL, rows_arguments), changed(GROUPED_MATMUL, rows_arguments)


def only(function):
    return lambda tensors: [function(tensors[0])]


ROUTING_VIOLATIONS = {
    "dtype": [
        routing(x=torch.Tensor.double),
        lambda: call(
            INIT_ROUTING, spoiled(routing_arguments(quant_mode=1), x=lambda x: x.to(torch.int8))
        ),
    ],
    "shapes": [routing(x=lambda x: x[:5]), routing(expert_idx=torch.Tensor.flatten)],
    "ids dtype": [routing(expert_idx=torch.Tensor.long)],
    "ids": [routing(expert_idx=lambda ids: ids + 2)],
    "expert_num": [
        route(expert_num=0),
        route(expert_num=10241),
        route(expert_num=5121, expert_tokens_num_type=2),
    ],
    "active range": [
        route(active_expert_range=[]),
        route(active_expert_range=[2, 2]),
        route(active_expert_range=[0, 8]),
        route(active_expert_range=[-1, 3]),
    ],
    "active_num": [route(active_num=-1), route(active_num=11)],
    "unsupported mode": [route(drop_pad_mode=1), route(row_idx_type=1)],
    "expert tokens": [
        route(expert_tokens_num_type=0),
        route(expert_tokens_num_flag=False),
    ],
    "quant_mode": [route(quant_mode=0)],
    "scale": [
        route(scale=torch.ones(5)),
        route(scale=torch.ones(6, dtype=torch.float16)),
        route(quant_mode=1, scale=torch.ones(2, 8)),
        route(offset=torch.ones(6)),
    ],
}
UNPERMUTE_VIOLATIONS = {
    "dtype": [unpermute(permuted_tokens=torch.Tensor.double), unpermute(probs=torch.Tensor.int)],
    "shapes": [
        unpermute(probs=lambda p: p[:2]),
        unpermute(sorted_indices=lambda s: s.view(3, 2)),
        unpermuted(sorted_indices=torch.zeros(1026, dtype=torch.int32), probs=torch.ones(2, 513)),
    ],
    "indices dtype": [unpermute(sorted_indices=torch.Tensor.long)],
    "negative index": [unpermute(probs=torch.ones_like)],
    "repeated index": [unpermute(sorted_indices=lambda s: s.clamp(max=0))],
    "unsupported mode": [unpermuted(padded_mode=True), unpermuted(restore_shape=[3, 8])],
}
FINALIZE_VIOLATIONS = {
    "dtype": [
        finalize(expanded_permuted_rows=torch.Tensor.double),
        finalize(scales=torch.Tensor.half),
        finalize(expanded_permuted_rows=torch.Tensor.half, scales=torch.Tensor.float),
    ],
    "shapes": [
        finalize(expanded_permuted_rows=lambda x: x[:, 0]),
        finalize(scales=lambda s: s[:3]),
        finalize(expanded_src_to_dst_row=lambda i: i.view(4, 2)),
        finalize(expanded_permuted_rows=lambda x: x.view(1, 8, 16)),
    ],
    "indices dtype": [finalize(expanded_src_to_dst_row=torch.Tensor.long)],
    "indices": [
        finalize(expanded_src_to_dst_row=lambda i: i - 1),
        finalize(expanded_src_to_dst_row=lambda i: i + 5),
    ],
    "cut rows": [
        finalized(
            expanded_permuted_rows=torch.zeros(4, 1, 8208).bfloat16(),
            scales=torch.ones(1, 4),
            expanded_src_to_dst_row=torch.arange(4, dtype=torch.int32),
        )
    ],
    "unsupported mode": [finalized(drop_pad_mode=2), finalized(drop_pad_mode=0)],
    "unsupported argument": [
        finalized(skip1=torch.zeros(4, 16).bfloat16()),
        finalized(export_for_source_row=torch.zeros(4, 2, dtype=torch.int32)),
        finalized(k=2),
    ],
}
GATING_VIOLATIONS = {
    "dtype": [gating(x=torch.Tensor.double), gating(bias=torch.Tensor.half)],
    "shapes": [gating(bias=lambda b: b[:11]), gate(x=torch.zeros(2, 2049), bias=None)],
    "k": [gate(k=0), gate(k=7), gate(k_group=0), gate(k_group=5)],
    "groups": [gate(group_count=5), gate(group_count=6), gate(group_count=0)],
    "padded groups": [gate(x=torch.zeros(2, 195), bias=None, group_count=65)],
    "modes": [gate(norm_type=2), gate(group_select_mode=2)],
    "renorm": [gate(renorm=1)],
    "no table": [gate(input_ids=torch.zeros(5).int(), tid2eid=torch.zeros(9, 3).int())],
}
SOFTMAX_VIOLATIONS = {
    "dtype": [softmax(x=torch.zeros(5, 12).double())],
    "shapes": [
        softmax(x=torch.zeros(5), finished=None),
        softmax(finished=torch.zeros(4).bool()),
        softmax(finished=torch.zeros(5).int()),
    ],
    "k": [softmax(k=0), softmax(k=13), softmax(x=torch.zeros(5, 1030), k=1025)],
    "renorm": [softmax(renorm=2)],
}
ROWS_VIOLATIONS = {
    "one tensor each": [rows(x=lambda x: x * 2), grouped(split_item=0)],
    "plain": [
        grouped(bias=[torch.zeros(3, 6).half()]),
        grouped(act_type=5),
        grouped(output_dtype=1),
    ],
    "dtype": [rows(weight=only(torch.Tensor.float)), rows(x=only(torch.Tensor.double))],
    "shapes": [rows(weight=only(lambda w: w[0])), rows(x=only(lambda x: x[:, :4].contiguous()))],
    "contiguous": [
        rows(x=only(strided)),
        rows(weight=only(lambda w: torch.cat((w, w), 1)[:, ::2])),
    ],
    "inner limit": [
        grouped(
            x=[torch.zeros(1, 65536).half()],
            weight=[torch.zeros(2, 4, 65536).half().transpose(1, 2)],
            group_list=torch.tensor([1, 0]),
        )
    ],
    "group list": [
        rows(group_list=torch.Tensor.int),
        rows(group_list=lambda g: g[:2]),
        grouped(group_list=None),
        grouped(group_list_type=2),
        grouped(weight=[torch.zeros(1, 8, 6).half()], group_list=torch.tensor([5])),
    ],
    "group sizes": [
        grouped(group_list=torch.tensor([2, -1, 3])),
        grouped(group_list=torch.tensor([2, 3, 3])),
        grouped(group_list=torch.tensor([2, 1, 3]), group_list_type=0),
    ],
}

EXPERT_VIOLATIONS = {
    "npu_moe_init_routing_v2": ROUTING_VIOLATIONS,
    "npu_moe_token_unpermute": UNPERMUTE_VIOLATIONS,
    "npu_moe_finalize_routing": FINALIZE_VIOLATIONS,
    "npu_moe_gating_top_k": GATING_VIOLATIONS,
    "npu_moe_gating_top_k_softmax_v2": SOFTMAX_VIOLATIONS,
    "npu_grouped_matmul, rows": ROWS_VIOLATIONS,
}
"""By family and demand."""
