"""A layer of experts on several cards, whose tokens are gathered, and exchanged by MC2.

Under the emulated runtime, ``python -m tests.npu.layer_on_ranks 4`` prints what each rank counted
of each kind of layer in `KINDS`.
"""

import json
import sys
from types import SimpleNamespace

import torch
import torch.distributed as dist
from vllm.model_executor.layers.fused_moe.activation import MoEActivation

import ascend_emulator
from tests.emulator.ranks import run_ranks
from vllm_npu_prep.device.mc2 import Mc2, join
from vllm_npu_prep.ops.npu.experts import (
    OwnedExperts,
    UnquantisedExperts,
    compute_experts,
    compute_on_ranks,
)
from vllm_npu_prep.quantization.experts import NPUInt8Experts

EXPERTS, HIDDEN, INNER, TOKENS = 16, 64, 32, 16
KINDS = {"two experts": (2, False), "one": (1, False), "eight": (8, False), "int8": (8, True)}
"""Experts of a token, and whether they and their inputs are int8. A token with one expert has its
weight applied to its input."""


def drawn(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16() / 8


def choose(logits, is_padding, top_k):
    weights, ids, _ = torch.ops.npu.npu_moe_gating_top_k_softmax_v2(
        logits, k=top_k, finished=is_padding, renorm=int(top_k > 1)
    )
    return weights, ids


def rounded(weight):
    """Int8 numbers of each expert's weights, and a scale for each output."""
    scale = weight.float().abs().amax(-1, keepdim=True) / 127
    return (weight.float() / scale).round().to(torch.int8), scale


def experts_of(mine, is_int8):
    """This rank's experts."""
    w13, w2 = drawn(101, EXPERTS, 2 * INNER, HIDDEN)[mine], drawn(102, EXPERTS, HIDDEN, INNER)[mine]
    if not is_int8:
        layer = SimpleNamespace(w13_weight=w13.npu(), w2_weight=w2.npu())
        return UnquantisedExperts(layer, lambda rows: torch.ops.npu.npu_swiglu(rows, -1))
    names = "w13_weight", "w13_weight_scale", "w2_weight", "w2_weight_scale"
    values = (each.npu() for each in (*rounded(w13), *rounded(w2)))
    layer = SimpleNamespace(activation=MoEActivation.SILU, **dict(zip(names, values, strict=True)))
    return NPUInt8Experts(layer, torch.bfloat16, True)


def layer(rank, count):
    """Of each kind, what both ways took on this rank, and their rows; rank 1 has no token.

    Before it joins the group, rank 1 waits for work of rank 0 that needs its Python code.
    """
    local, num_tokens = EXPERTS // count, 0 if rank == 1 else TOKENS - 3
    mine = slice(rank * local, (rank + 1) * local)
    x, gate = drawn(rank, TOKENS, HIDDEN).npu() * 8, drawn(100, EXPERTS, HIDDEN).npu() * 8
    is_padding = (torch.arange(TOKENS) >= num_tokens).npu()
    numbers = torch.full((EXPERTS,), -1, dtype=torch.int32)
    numbers[mine] = torch.arange(local, dtype=torch.int32)
    owned = OwnedExperts.of(numbers.npu(), EXPERTS)
    all_padding = torch.empty(TOKENS * count, dtype=torch.uint8, device="npu")
    dist.all_gather_single(all_padding, is_padding.view(torch.uint8))
    for _ in range(200):
        torch.ops.npu.npu_dynamic_quant(x)
    dist.all_reduce(torch.zeros(1, device="npu"))
    if rank == 1:
        torch.npu.synchronize()
    group = Mc2(*join(range(count)), count, TOKENS, "fullmesh", is_padding.logical_not())
    logits = x @ gate.t()

    def gathered(experts, top_k, **how):
        rows = x.new_empty(count * TOKENS, HIDDEN)
        scores = logits.new_empty(count * TOKENS, EXPERTS)
        dist.all_gather_single(rows, x)
        dist.all_gather_single(scores, logits)
        chosen = choose(scores, all_padding.view(torch.bool), top_k)
        how |= {"has_padding": True, "is_final": True}
        total = compute_experts(rows, *chosen, owned, experts, **how)
        result = torch.empty_like(x)
        dist.reduce_scatter_single(result, total)
        return result

    def exchanged(experts, top_k, **how):
        chosen = choose(logits, is_padding, top_k)
        return compute_on_ranks(x, *chosen, EXPERTS, group, experts, **how)

    told = {}
    for kind, (top_k, is_int8) in KINDS.items():
        experts = experts_of(mine, is_int8)
        how = {"top_k": top_k, "apply_router_weight_on_input": top_k == 1}
        told[kind] = []
        for way in (gathered, exchanged):
            way(experts, **how)  # makes what is made once
            torch.npu.synchronize()
            with ascend_emulator.count() as counts:
                result = way(experts, **how)
                torch.npu.synchronize()
            rows = result[:num_tokens].float().cpu().tolist()
            sent = {"launches": counts.launches, "bytes": counts.sent_bytes}
            told[kind].append({"rows": rows, **sent})
    dist.destroy_process_group()
    return told


if __name__ == "__main__":
    number = int(sys.argv[1])
    print(json.dumps(run_ranks(lambda rank: layer(rank, number), number)))
