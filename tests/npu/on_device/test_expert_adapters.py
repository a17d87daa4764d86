"""LoRA on experts on the device: results are those of merged weights, and launches are counted.

Rows of no active expert hold NaN on this runtime, so that a result that reads one is NaN.
"""

from types import SimpleNamespace

import pytest
import torch

import ascend_emulator
from tests.helpers.expert_adapters import by_expert, by_merged_weights, draw_adapters
from tests.npu.on_device.test_experts import asked_of, assert_near, random_layer
from vllm_npu_prep.ops.npu.experts import OwnedExperts, UnquantisedExperts, compute_experts

EXPERTS, TOKENS, NUM_SLOTS = 8, 23, 3
SLOTS = [slot - 1 for slot in range(NUM_SLOTS + 1)] * 6


def on_device(layer, adapters, share, is_final=True):
    """The result for the experts of a share, on the host, and what the device was asked to do."""
    x, w13, w2, weights, ids = layer
    numbers = torch.full((EXPERTS,), -1, dtype=torch.int32)
    numbers[share] = torch.arange(len(share), dtype=torch.int32)
    owned = OwnedExperts.of(numbers.npu(), EXPERTS)
    held = SimpleNamespace(w13_weight=w13[share].npu(), w2_weight=w2[share].npu())
    format_ = UnquantisedExperts(held, lambda y: torch.ops.npu.npu_swiglu(y, -1))
    arguments = [each.npu() for each in (x, weights, ids)]
    there = adapters and by_expert(adapters, share, "npu")
    torch.npu.synchronize()
    with torch.inference_mode(), ascend_emulator.count() as counts:
        result = compute_experts(
            *arguments, owned, format_, has_padding=True, is_final=is_final, adapters=there
        )
    return result.cpu(), asked_of(counts)


LAUNCHES = {2: 5 + 1 + 3 * 3 + 3, 1: 5 + 1 + 3 * 2 + 2}
"""By the parts of gates and ups: those of the layer, one of masks, three of each A and its B; and
those that join two parts' updates and add them."""


@pytest.mark.parametrize("slices", LAUNCHES)
@pytest.mark.parametrize("share", [[*range(EXPERTS)], [2, 3, 4], [3]], ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_results_are_those_of_merged_weights(seed, dtype, share, slices):
    layer = random_layer(seed, dtype=dtype)
    generator = torch.Generator().manual_seed(seed)
    adapters = draw_adapters(generator, SLOTS[:TOKENS], NUM_SLOTS, *layer[1:3], slices)
    is_final = dtype == torch.bfloat16
    got, asked = on_device(layer, adapters, share, is_final)
    assert_near(got, by_merged_weights(*layer, adapters, share))
    assert asked == {"launches": LAUNCHES[slices] + (not is_final)}
    plain, asked = on_device(layer, None, share, is_final)
    assert asked == {"launches": 5 + (not is_final)}
    without = [token for token in range(TOKENS) if SLOTS[token] < 0]
    assert torch.equal(got[without], plain[without])
