"""The atb attention operators against attention by definition, beyond rows of `verify-device`."""

import math

import pytest
import torch

from tests.emulator.operators import formula
from tests.emulator.operators.calls import (
    call,
    decode_arguments,
    flash_arguments,
    splitfuse_arguments,
    unpad_arguments,
)

FLASH = "atb::_npu_flash_attention"
PAGED = "atb::_npu_paged_attention"
SPLITFUSE = "atb::_npu_paged_attention_splitfuse"
DTYPES = [torch.float16, torch.bfloat16]


def same(name, arguments, batch, visible=formula.causal):
    assert call(name, arguments) is None
    expected = torch.cat(formula.of_batch(batch, visible)[0])
    formula.assert_close(arguments["out"], expected, batch.dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_prompts_with_an_empty_request(dtype, seed):
    same(FLASH, *flash_arguments(seed, dtype, lengths=[(0, 5), (0, 0), (0, 3)]))


@pytest.mark.parametrize("dtype", DTYPES)
def test_sequences_of_an_encoder(dtype, seed):
    name = "atb::_npu_flash_attention_unpad"
    same(name, *unpad_arguments(seed, dtype), formula.everything)


@pytest.mark.parametrize(("block_size", "heads"), [(16, (1, 1)), (32, (8, 1)), (128, (6, 6))])
def test_block_sizes_and_heads(block_size, heads, seed):
    same(PAGED, *decode_arguments(seed, block_size=block_size, heads=heads))
    same(SPLITFUSE, *splitfuse_arguments(seed, block_size=block_size, heads=heads))


def test_decodes_with_a_workspace(seed):
    arguments, batch = decode_arguments(seed)
    workspace = call("atb::_npu_paged_attention_get_workspace", arguments)
    same(PAGED, arguments | {"workspace": workspace}, batch)


def test_mixed_steps_take_rows_of_padding_and_wider_masks(seed):
    arguments, batch = splitfuse_arguments(seed)
    mask = arguments["mask"]
    wide = torch.zeros(mask.shape[0] + 5, mask.shape[1] + 40, dtype=mask.dtype)
    wide[: mask.shape[0], : mask.shape[1]] = mask
    same(SPLITFUSE, arguments | {"mask": wide}, batch)


@pytest.mark.parametrize(
    ("name", "build"), [(FLASH, flash_arguments), (SPLITFUSE, splitfuse_arguments)]
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_mask_values_of_another_kernel_give_wrong_results(dtype, name, build, seed):
    arguments, _ = build(seed, dtype)
    call(name, arguments)
    right = arguments["out"].clone()
    flags = (arguments["mask"] != 0).to(dtype)
    # Flags where values are added; -inf where flags are wanted.
    if (name, dtype) == (FLASH, torch.bfloat16):
        flags = torch.zeros_like(flags).masked_fill(flags.bool(), -math.inf)
    call(name, arguments | {"mask": flags})
    assert not torch.allclose(arguments["out"], right, atol=1e-2)
