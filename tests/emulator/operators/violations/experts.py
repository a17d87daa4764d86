"""Calls of grouped products, and of what brings tokens to experts and back."""

import torch

from tests.emulator.operators import calls, layer_calls
from tests.emulator.operators.calls import strided
from tests.emulator.operators.layer_calls import int32
from tests.emulator.operators.violations.breaking import (
    first,
    int8,
    of,
    zeros,
)

T = torch.Tensor
FAMILIES = {}
ONE_SCALE = {name: [zeros(3, 65536)] for name in ("antiquant_scale", "antiquant_offset")}

matmuls = of("npu::npu_grouped_matmul", calls.matmul_arguments)
FAMILIES["npu_grouped_matmul"] = [
    ("not grouped", matmuls(group_type=2), matmuls(group_list=torch.tensor([2, 3]))),
    ("tensor count", matmuls(x=lambda x: x[:1]), matmuls(bias=lambda b: b[:1])),
    ("dtype", matmuls(weight=first(T.float)), matmuls(x=lambda x: [each.double() for each in x])),
    ("shapes", matmuls(x=first(lambda x: x[:, :4].contiguous())), matmuls(x=first(lambda x: x[0]))),
    ("contiguous", matmuls(x=first(strided))),
    ("transposed alike", matmuls(weight=first(T.contiguous))),
    ("inner limit", matmuls(x=[zeros(1, 65536)] * 2, weight=[zeros(4, 65536).t()] * 2, bias=None)),
    ("bias", matmuls(bias=first(T.float)), matmuls(bias=first(lambda b: b[:1]))),
]

grouped = of("npu::npu_grouped_matmul", layer_calls.rows)
FAMILIES["npu_grouped_matmul, rows"] = [
    ("one tensor each", grouped(x=lambda x: x * 2), grouped(split_item=0)),
    ("plain", grouped(bias=[zeros(3, 6)]), grouped(act_type=5), grouped(output_dtype=1)),
    ("dtype", grouped(weight=first(T.float)), grouped(x=first(T.double))),
    ("shapes", grouped(weight=first(lambda w: w[0]))),
    ("contiguous", grouped(x=first(strided))),
    ("inner limit", grouped(x=[zeros(7, 65536)], weight=[zeros(3, 6, 65536).mT])),
    ("group list", grouped(group_list=T.int), grouped(group_list=None), grouped(group_list_type=2)),
    ("group sizes", grouped(group_list=torch.tensor([2, -1, 3]))),
]

packed_rows = of("npu::npu_grouped_matmul", layer_calls.int8_rows_of_int4)
FAMILIES["npu_grouped_matmul, int8 rows and int4 weights"] = [
    ("one tensor each", packed_rows(x=lambda x: x * 2), packed_rows(split_item=0)),
    ("form", packed_rows(offset=[zeros(3, 1, 16)]), packed_rows(act_type=5)),
    ("result", packed_rows(output_dtype=None), packed_rows(output_dtype=3)),
    ("words", packed_rows(weight=first(strided)), packed_rows(weight=first(lambda w: w[0]))),
    ("shapes", packed_rows(x=first(lambda x: x[:, :256].contiguous()))),
    ("contiguous", packed_rows(x=first(strided))),
    (
        "inputs",
        packed_rows(x=[int8(zeros(7, 96))], weight=first(lambda w: w[:, :96].contiguous())),
        packed_rows(x=[int8(zeros(7, 18496))], weight=[zeros(3, 18496, 2, dtype=torch.int32)]),
    ),
    (
        "scale",
        packed_rows(scale=None),
        packed_rows(scale=first(T.float)),
        packed_rows(scale=[layer_calls.bits_of(3, 4, 16)]),
    ),
    ("upper halves", packed_rows(scale=first(T.neg))),
    ("bias", packed_rows(bias=None), packed_rows(bias=first(T.half))),
    ("token scale", packed_rows(per_token_scale=None), packed_rows(per_token_scale=first(T.half))),
    ("group list", packed_rows(group_list=None), packed_rows(group_list_type=0)),
    ("group sizes", packed_rows(group_list=torch.tensor([2, -1, 3]))),
]

int4_rows = of("npu::npu_grouped_matmul", layer_calls.int4_rows)
FAMILIES["npu_grouped_matmul, int4 weights"] = [
    ("one tensor each", int4_rows(x=lambda x: x * 2), int4_rows(split_item=0)),
    ("form", int4_rows(bias=[zeros(3, 8)]), int4_rows(act_type=5), int4_rows(output_dtype=5)),
    ("words", int4_rows(weight=first(strided)), int4_rows(weight=first(lambda w: w[0]))),
    ("dtype", int4_rows(x=first(T.float))),
    ("shapes", int4_rows(x=first(lambda x: x[:, :4].contiguous()))),
    ("contiguous", int4_rows(x=first(strided))),
    (
        "inner limit",
        int4_rows(weight=[zeros(3, 64, 8192, dtype=torch.int32)], **ONE_SCALE),
    ),
    (
        "scales",
        int4_rows(antiquant_scale=None),
        int4_rows(antiquant_scale=first(T.float)),
        int4_rows(antiquant_scale=first(lambda s: s[..., :4])),
    ),
    (
        "offsets",
        int4_rows(antiquant_offset=None),
        int4_rows(antiquant_offset=first(lambda s: s[:, :1])),
    ),
    ("group list", int4_rows(group_list=None), int4_rows(group_list_type=2)),
    ("group sizes", int4_rows(group_list=torch.tensor([2, -1, 3]))),
]

int8_rows = of("npu::npu_grouped_matmul", layer_calls.int8_rows)
FAMILIES["npu_grouped_matmul, int8 rows"] = [
    ("one tensor each", int8_rows(weight=lambda w: w * 2), int8_rows(split_item=0)),
    ("form", int8_rows(bias=[zeros(3, 6, dtype=torch.int32)]), int8_rows(act_type=5)),
    ("dtype", int8_rows(weight=first(T.half))),
    ("shapes", int8_rows(x=first(lambda x: x[:, :4].contiguous()))),
    ("contiguous", int8_rows(x=first(strided)), int8_rows(weight=first(strided))),
    ("inner limit", int8_rows(x=[int8(zeros(7, 65536))], weight=[int8(zeros(3, 6, 65536)).mT])),
    ("result", int8_rows(output_dtype=None)),
    (
        "scale",
        int8_rows(scale=None),
        int8_rows(output_dtype=layer_calls.CODES[torch.int32]),
        int8_rows(scale=first(lambda s: s.t().contiguous())),
    ),
    ("token scale", int8_rows(per_token_scale=None), int8_rows(per_token_scale=first(T.half))),
    ("group list", int8_rows(group_list=None), int8_rows(group_list_type=2)),
    ("group sizes", int8_rows(group_list=torch.tensor([2, -1, 3]))),
]

routing = of(layer_calls.INIT_ROUTING, layer_calls.routing)
FAMILIES["npu_moe_init_routing_v2"] = [
    ("dtype", routing(x=T.double), routing(x=int8, quant_mode=1)),
    ("shapes", routing(x=lambda x: x[:5]), routing(expert_idx=T.flatten)),
    ("ids dtype", routing(expert_idx=T.long)),
    ("ids", routing(expert_idx=lambda ids: ids + 2)),
    ("expert_num", routing(expert_num=0), routing(expert_num=5121, expert_tokens_num_type=2)),
    ("active range", routing(active_expert_range=[2, 2]), routing(active_expert_range=[0, 8])),
    ("active_num", routing(active_num=-1), routing(active_num=11)),
    ("unsupported mode", routing(drop_pad_mode=1), routing(row_idx_type=1)),
    ("expert tokens", routing(expert_tokens_num_type=0), routing(expert_tokens_num_flag=False)),
    ("quant_mode", routing(quant_mode=0)),
    ("scale", routing(scale=torch.ones(5)), routing(quant_mode=1, scale=torch.ones(2, 8))),
]

permute = of(layer_calls.PERMUTE, layer_calls.permute)
FAMILIES["npu_moe_token_permute"] = [
    ("dtype", permute(tokens=T.double)),
    ("ids dtype", permute(indices=T.short)),
    ("shapes", permute(tokens=lambda t: t[:5]), permute(indices=lambda ids: ids.repeat(1, 257))),
    ("number of pairs", permute(tokens=zeros(32768, 1), indices=int32(0).expand(32768, 512))),
    ("padded_mode", permute(padded_mode=True)),
]

unpermute = of(layer_calls.TOKEN_UNPERMUTE, layer_calls.unpermute)
FAMILIES["npu_moe_token_unpermute"] = [
    ("dtype", unpermute(permuted_tokens=T.double), unpermute(probs=T.int)),
    ("shapes", unpermute(probs=lambda p: p[:2]), unpermute(sorted_indices=lambda s: s.view(3, 2))),
    ("indices dtype", unpermute(sorted_indices=T.long)),
    ("negative index", unpermute(probs=torch.ones_like)),
    ("repeated index", unpermute(sorted_indices=lambda s: s.clamp(max=0))),
    ("unsupported mode", unpermute(padded_mode=True), unpermute(restore_shape=[3, 8])),
]

finalize = of(layer_calls.FINALIZE_ROUTING, layer_calls.finalize)
FAMILIES["npu_moe_finalize_routing"] = [
    ("dtype", finalize(expanded_permuted_rows=T.double), finalize(scales=T.half)),
    ("shapes", finalize(expanded_permuted_rows=lambda x: x[:, 0])),
    ("indices dtype", finalize(expanded_src_to_dst_row=T.long)),
    ("indices", finalize(expanded_src_to_dst_row=lambda i: i - 1)),
    (
        "cut rows",
        finalize(
            expanded_permuted_rows=zeros(4, 1, 8208, dtype=torch.bfloat16),
            scales=torch.ones(1, 4),
            expanded_src_to_dst_row=int32(0, 1, 2, 3),
        ),
    ),
    ("unsupported mode", finalize(drop_pad_mode=2), finalize(drop_pad_mode=0)),
    ("unsupported argument", finalize(skip1=zeros(4, 16, dtype=torch.bfloat16)), finalize(k=2)),
]

gating = of(layer_calls.GATING, layer_calls.gating)
FAMILIES["npu_moe_gating_top_k"] = [
    ("dtype", gating(x=T.double), gating(bias=T.half)),
    ("shapes", gating(bias=lambda b: b[:11]), gating(x=torch.zeros(2, 2049), bias=None)),
    ("k", gating(k=0), gating(k=7), gating(k_group=0), gating(k_group=5)),
    ("groups", gating(group_count=5), gating(group_count=6), gating(group_count=0)),
    ("padded groups", gating(x=torch.zeros(2, 195), bias=None, group_count=65)),
    ("modes", gating(norm_type=2), gating(group_select_mode=2)),
    ("renorm", gating(renorm=1)),
    ("no table", gating(input_ids=torch.zeros(5).int(), tid2eid=torch.zeros(9, 3).int())),
]

softmax = of(layer_calls.GATING_SOFTMAX, layer_calls.softmax)
FAMILIES["npu_moe_gating_top_k_softmax_v2"] = [
    ("dtype", softmax(x=T.double)),
    ("shapes", softmax(x=torch.zeros(5), finished=None), softmax(finished=T.int)),
    ("k", softmax(k=0), softmax(k=13), softmax(x=torch.zeros(5, 1030), k=1025)),
    ("renorm", softmax(renorm=2)),
]
