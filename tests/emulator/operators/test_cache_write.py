"""Cache writers against a loop over tokens."""

import pytest
import torch

from tests.emulator.operators.calls import cache_arguments, call, scatter_arguments

RESHAPE = "atb::_npu_reshape_and_cache"
SCATTER = "npu::npu_scatter_pa_kv_cache"
WRITERS = [(RESHAPE, cache_arguments), (SCATTER, scatter_arguments)]


def write_by_hand(arguments):
    """Both caches after the write, token by token."""
    slots = arguments.get("slot_indices", arguments.get("slot_mapping")).tolist()
    expected = []
    for rows, cache in (("key", "key_cache"), ("value", "value_cache")):
        after = arguments[cache].clone()
        for token, slot in enumerate(slots):
            if slot >= 0:
                after[slot // after.shape[1], slot % after.shape[1]] = arguments[rows][token]
        expected.append(after)
    return expected


@pytest.mark.parametrize(("name", "build"), WRITERS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_each_token_lands_in_its_slot_and_padding_nowhere(name, build, dtype, seed):
    arguments = build(seed, dtype)
    expected = write_by_hand(arguments)
    assert call(name, arguments) is None
    assert torch.equal(arguments["key_cache"], expected[0])
    assert torch.equal(arguments["value_cache"], expected[1])


@pytest.mark.parametrize(("name", "build"), WRITERS)
def test_head_sizes_of_k_and_v_may_differ(name, build, seed):
    changes = {
        "value": torch.randn(5, 2, 8).half(),
        "value_cache": torch.zeros(4, 16, 2, 8, dtype=torch.float16),
    }
    arguments = build(seed, **changes)
    expected = write_by_hand(arguments)
    call(name, arguments)
    assert torch.equal(arguments["value_cache"], expected[1])


@pytest.mark.parametrize(("name", "build"), WRITERS)
def test_only_padding_and_no_tokens_write_nothing(name, build, seed):
    slot_name = "slot_indices" if name == RESHAPE else "slot_mapping"
    arguments = build(seed, **{slot_name: torch.full((5,), -1, dtype=torch.int32)})
    before = arguments["key_cache"].clone()
    call(name, arguments)
    empty = {"key": arguments["key"][:0], "value": arguments["value"][:0]}
    call(name, arguments | empty | {slot_name: torch.zeros(0, dtype=torch.int32)})
    assert torch.equal(arguments["key_cache"], before)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("cache_mode", ["Norm", None])
def test_scatter_takes_both_slot_dtypes_and_names_of_the_mode(dtype, cache_mode, seed):
    arguments = scatter_arguments(seed, cache_mode=cache_mode)
    arguments["slot_mapping"] = arguments["slot_mapping"].to(dtype)
    expected = write_by_hand(arguments)
    call(SCATTER, arguments)
    assert torch.equal(arguments["key_cache"], expected[0])
