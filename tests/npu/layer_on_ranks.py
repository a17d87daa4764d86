"""A layer of experts on several cards, whose tokens are gathered, and exchanged by MC2.

Under the emulated runtime, ``python -m tests.npu.layer_on_ranks 4`` prints what each rank counted,
with two experts for each token, and with one whose weight is applied to its input.
"""

import json
import sys
from itertools import product
from types import SimpleNamespace

import torch
import torch.distributed as dist

import ascend_emulator
from tests.emulator.ranks import run_ranks
from vllm_npu_prep.device.mc2 import Mc2, join
from vllm_npu_prep.ops.npu.experts import (
    OwnedExperts,
    UnquantisedExperts,
    compute_experts,
    compute_on_ranks,
)

EXPERTS, HIDDEN, INNER, TOKENS = 8, 64, 32, 16


def drawn(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16() / 8


def choose(logits, is_padding, top_k):
    weights, ids, _ = torch.ops.npu.npu_moe_gating_top_k_softmax_v2(
        logits, k=top_k, finished=is_padding, renorm=int(top_k > 1)
    )
    return weights, ids


def layer(rank, count):
    """Rows of both ways, and what they took on this rank, first with two experts for each token.

    Rank 1 has no token.
    """
    local, num_tokens = EXPERTS // count, 0 if rank == 1 else TOKENS - 3
    mine = slice(rank * local, (rank + 1) * local)
    x, gate = drawn(rank, TOKENS, HIDDEN).npu() * 8, drawn(100, EXPERTS, HIDDEN).npu() * 8
    weights = SimpleNamespace(
        w13_weight=drawn(101, EXPERTS, 2 * INNER, HIDDEN)[mine].npu(),
        w2_weight=drawn(102, EXPERTS, HIDDEN, INNER)[mine].npu(),
    )
    experts = UnquantisedExperts(weights, lambda rows: torch.ops.npu.npu_swiglu(rows, -1))
    is_padding = (torch.arange(TOKENS) >= num_tokens).npu()
    numbers = torch.full((EXPERTS,), -1, dtype=torch.int32)
    numbers[mine] = torch.arange(local, dtype=torch.int32)
    owned = OwnedExperts.of(numbers.npu(), EXPERTS)
    all_padding = torch.empty(TOKENS * count, dtype=torch.uint8, device="npu")
    dist.all_gather_single(all_padding, is_padding.view(torch.uint8))
    group = Mc2(*join(range(count)), count, TOKENS, "fullmesh", is_padding.logical_not())
    logits = x @ gate.t()

    def gathered(top_k, **how):
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

    def exchanged(top_k, **how):
        chosen = choose(logits, is_padding, top_k)
        return compute_on_ranks(x, *chosen, EXPERTS, group, experts, **how)

    told = []
    for top_k, way in product((2, 1), (gathered, exchanged)):
        how = {"top_k": top_k, "apply_router_weight_on_input": top_k == 1}
        way(**how)  # makes what is made once
        torch.npu.synchronize()
        with ascend_emulator.count() as counts:
            result = way(**how)
            torch.npu.synchronize()
        rows = result[:num_tokens].float().cpu().tolist()
        told.append({"rows": rows, "launches": counts.launches, "bytes": counts.sent_bytes})
    dist.destroy_process_group()
    return told


if __name__ == "__main__":
    number = int(sys.argv[1])
    print(json.dumps(run_ranks(lambda rank: layer(rank, number), number)))
