"""Probes of the operators of experts: the plugin's own calls, beside formulas in float64."""

from types import SimpleNamespace
from typing import Any, cast

import torch

from vllm_npu_prep.verify import formulas
from vllm_npu_prep.verify.row import Probe, Put, Results, uniform

EXPERTS, TOP_K, NOBODY = 6, 2, 6
CHOSEN = ((5, 1), (2, 0), (NOBODY, NOBODY), (3, 2), (1, 4), (2, 3), (-1, -1))
"""Experts of each token: both orders of two experts, two tokens of padding, experts of other
ranks."""


def experts(dtype: torch.dtype) -> Probe:
    """Probe a layer of six experts: this rank has all, three, one, or three scattered ones.

    The last result is the sum with shared experts that have a gate.
    """
    hidden, inner = 64, 32
    x = uniform(len(CHOSEN), hidden, dtype=dtype) / 2
    w13 = uniform(EXPERTS, 2 * inner, hidden, dtype=dtype, seed=1) / 8
    w2 = uniform(EXPERTS, hidden, inner, dtype=dtype, seed=2) / 4
    ids = torch.tensor(CHOSEN, dtype=torch.int32)
    weights = uniform(len(CHOSEN), TOP_K, dtype=torch.float32, seed=3).abs() + 0.1
    shared = uniform(len(CHOSEN), hidden, dtype=dtype, seed=4)
    gate = uniform(len(CHOSEN), 1, dtype=dtype, seed=5)
    shares = (range(EXPERTS), range(1, 4), range(2, 3), range(1, EXPERTS, 2))

    def call(put: Put) -> Results:
        from vllm_npu_prep.ops.npu.experts import (
            OwnedExperts,
            UnquantisedExperts,
            add_gated,
            compute_experts,
        )

        arguments = put(x), put(weights), put(ids)
        results = []
        for share in shares:
            numbers = torch.full((EXPERTS,), -1, dtype=torch.int32)
            numbers[list(share)] = torch.arange(len(share), dtype=torch.int32)
            owned = OwnedExperts.of(put(numbers), EXPERTS)
            mine = slice(share.start, share.stop, share.step)
            layer = SimpleNamespace(w13_weight=put(w13[mine]), w2_weight=put(w2[mine]))
            layer_weights = UnquantisedExperts(layer, lambda y: torch.ops.npu.npu_swiglu(y, -1))
            result = compute_experts(
                *arguments, owned, layer_weights, has_padding=True, is_final=False
            )
            results.append(result)
        return (*results, add_gated(put(x), put(shared), put(gate)))

    def expected() -> Results:
        results = (formulas.experts(x, w13, w2, weights, ids, share) for share in shares)
        return (*results, x.double() + shared.double() / (1 + (-gate.double()).exp()))

    return Probe(call, expected)


def expert_adapters(dtype: torch.dtype) -> Probe:
    """Probe LoRA adapters on six experts, of which this rank has three.

    Some tokens have the adapter in slot 0, some that in slot 1, one has none. Masks of rows are
    routed in int8, as few columns as there are slots.
    """
    hidden, inner, rank, slots = 64, 32, 8, (0, 1, -1, 1, 0, 1, 0)
    x = uniform(len(CHOSEN), hidden, dtype=dtype) / 2
    w13 = uniform(EXPERTS, 2 * inner, hidden, dtype=dtype, seed=1) / 8
    w2 = uniform(EXPERTS, hidden, inner, dtype=dtype, seed=2) / 4
    ids = torch.tensor(CHOSEN, dtype=torch.int32)
    weights = uniform(len(CHOSEN), TOP_K, dtype=torch.float32, seed=3).abs() + 0.1
    # By expert, as the plugin keeps them
    up_a = uniform(EXPERTS, 2, rank, hidden, dtype=dtype, seed=4) / 8
    up_b = uniform(EXPERTS, 2 * inner, 2, rank, dtype=dtype, seed=5) / 8
    down_a = uniform(EXPERTS, 2, rank, inner, dtype=dtype, seed=6) / 4
    down_b = uniform(EXPERTS, hidden, 2, rank, dtype=dtype, seed=7) / 8
    mine = slice(1, 4)

    def call(put: Put) -> Results:
        from vllm_npu_prep.ops.moe_lora import AdaptersOfExperts
        from vllm_npu_prep.ops.npu.experts import (
            OwnedExperts,
            UnquantisedExperts,
            compute_experts,
        )

        layer = SimpleNamespace(
            w13_lora_a_stacked=[put(up_a[mine]).transpose(0, 1)],
            w13_lora_b_stacked=[put(up_b[mine]).permute(2, 0, 1, 3)],
            w2_lora_a_stacked=[put(down_a[mine]).transpose(0, 1)],
            w2_lora_b_stacked=[put(down_b[mine]).permute(2, 0, 1, 3)],
            fully_sharded=False,
            tp_size=1,
        )
        foreign = put(torch.tensor(slots)[:, None, None] != torch.arange(2)[:, None])
        wrapper: Any = SimpleNamespace(is_active=True, foreign_tokens=foreign)
        adapters = AdaptersOfExperts(cast("Any", layer), wrapper)
        held = SimpleNamespace(w13_weight=put(w13[mine]), w2_weight=put(w2[mine]))
        of_layer = UnquantisedExperts(held, lambda y: torch.ops.npu.npu_swiglu(y, -1))
        arguments = put(x), put(weights), put(ids), OwnedExperts(EXPERTS, 1, 4), of_layer
        return (compute_experts(*arguments, has_padding=True, is_final=False, adapters=adapters),)

    def expected() -> Results:
        result = formulas.experts(x, w13, w2, weights, ids, range(1, 4))
        for slot in range(2):
            up = w13.double() + up_b[:, :, slot].double() @ up_a[:, slot].double()
            down = w2.double() + down_b[:, :, slot].double() @ down_a[:, slot].double()
            of_slot = formulas.experts(x, up, down, weights, ids, range(1, 4))
            result = torch.where(torch.tensor(slots)[:, None] == slot, of_slot, result)
        return (result,)

    return Probe(call, expected)


def finalize_routing(dtype: torch.dtype) -> Probe:
    """Probe sums of tokens with two, three, four and eight experts, some or all without a row.

    Rows that no pair has hold NaN. Weights are float32 where the operator takes them so.
    """
    forms = []
    for top_k in (2, 3, 4, 8):
        pairs = len(CHOSEN) * top_k
        rows = uniform(pairs, 64, dtype=dtype, seed=top_k)
        shuffled = torch.randperm(pairs, generator=torch.Generator().manual_seed(top_k))
        indices = shuffled.masked_fill(shuffled % 3 == 0, -1).to(torch.int32)
        indices[:top_k] = -1  # no expert of the first token is here
        used = indices[indices >= 0].long()
        unused = torch.ones(pairs, dtype=torch.bool).index_fill(0, used, False)
        scales = uniform(len(CHOSEN), top_k, dtype=torch.float32, seed=10 + top_k).abs()
        scales = scales.half() if dtype == torch.float16 else scales
        forms.append((rows.masked_fill(unused[:, None], float("nan")), scales, indices))

    def call(put: Put) -> Results:
        from vllm_npu_prep.ops.npu.experts import finalize

        return tuple(finalize(put(rows), put(scales), put(at)) for rows, scales, at in forms)

    def expected() -> Results:
        return tuple(formulas.sums(rows, scales, at) for rows, scales, at in forms)

    return Probe(call, expected)


def gating(dtype: torch.dtype) -> Probe:
    """Probe a sigmoid with bias and groups, a sigmoid alone, and a softmax in groups.

    One form has float32 logits. The best expert by score and the best by score and bias differ, and
    so do the best group by its largest score and by the sum of its two largest.
    """
    logits = uniform(5, 12, dtype=dtype)
    bias = uniform(12, dtype=dtype, seed=1) / 8
    forms = (
        (logits, bias, "sigmoid", 3, 2, 2.5),
        (logits.float(), bias.float(), "sigmoid", 3, 1, 1.0),
        (logits, None, "sigmoid", 1, 1, 1.0),
        (logits, None, "softmax", 4, 2, 1.5),
    )

    def call(put: Put) -> Results:
        results: list[torch.Tensor] = []
        for x, added, scoring, groups, kept, factor in forms:
            chosen, ids, _ = torch.ops.npu.npu_moe_gating_top_k(
                put(x),
                3,
                bias=None if added is None else put(added),
                k_group=kept,
                group_count=groups,
                group_select_mode=int(added is not None),
                norm_type=int(scoring == "sigmoid"),
                routed_scaling_factor=factor,
            )
            results += [chosen, ids.float()]
        return tuple(results)

    def expected() -> Results:
        results: list[torch.Tensor] = []
        for x, added, scoring, groups, kept, factor in forms:
            chosen, ids = formulas.gating(x, 3, scoring, added, (groups, kept), factor)
            results += [chosen, ids.double()]
        return tuple(results)

    return Probe(call, expected)


def gating_softmax(dtype: torch.dtype) -> Probe:
    """Probe the k largest of a softmax and the softmax of the k largest, with one finished row."""
    logits, finished = uniform(4, 12, dtype=dtype), torch.tensor([False] * 3 + [True])

    def call(put: Put) -> Results:
        results: list[torch.Tensor] = []
        for renorm in (0, 1):
            weights, ids, _ = torch.ops.npu.npu_moe_gating_top_k_softmax_v2(
                put(logits), k=3, finished=put(finished), renorm=renorm
            )
            results += [weights[:3], ids.float()]
        return tuple(results)

    def expected() -> Results:
        results: list[torch.Tensor] = []
        for renorm in (0, 1):
            weights, ids = formulas.gating(logits, 3, "softmax")
            if renorm:
                weights = weights / weights.sum(-1, keepdim=True)
            ids[3] = logits.shape[1]
            results += [weights[:3], ids.double()]
        return tuple(results)

    return Probe(call, expected)
