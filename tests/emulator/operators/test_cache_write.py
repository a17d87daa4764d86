"""Cache writers beyond the rows of `verify-device`."""

import pytest
import torch

from tests.emulator.operators.calls import cache_arguments, call, scatter_arguments

RESHAPE = "atb::_npu_reshape_and_cache"
SCATTER = "npu::npu_scatter_pa_kv_cache"
WRITERS = [(RESHAPE, cache_arguments), (SCATTER, scatter_arguments)]


def written(arguments, rows, cache):
    """The cache after the write."""
    slots = arguments.get("slot_indices", arguments.get("slot_mapping")).long()
    after = arguments[cache].clone()
    after.view(-1, *after.shape[2:])[slots[slots >= 0]] = arguments[rows][slots >= 0]
    return after


@pytest.mark.parametrize(("name", "build"), WRITERS)
def test_head_sizes_of_k_and_v_may_differ(name, build, seed):
    changes = {
        "value": torch.randn(5, 2, 8).half(),
        "value_cache": torch.zeros(4, 16, 2, 8, dtype=torch.float16),
    }
    arguments = build(seed, **changes)
    expected = written(arguments, "value", "value_cache")
    call(name, arguments)
    assert torch.equal(arguments["value_cache"], expected)


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
    expected = written(arguments, "key", "key_cache")
    call(SCATTER, arguments)
    assert torch.equal(arguments["key_cache"], expected)
