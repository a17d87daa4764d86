"""The drafters' kernels against a scalar reading of the Triton source, launched as vLLM does."""

from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.kernels import (
    Launch,
    expanded_inputs,
    next_draft_step,
    padded_inputs,
    padded_next_tokens,
)
from vllm_npu_prep.ops import register_overrides

PADDING_SLOT = -1
seeds = st.integers(0, 10**6)

register_overrides("replace")


def check(launch: Launch, expected: dict[str, list[Any]]) -> None:
    assert set(launch.written) == set(expected)
    for name, values in launch.run().items():
        assert values.tolist() == expected[name], name


def scalar_step(
    positions: list[int],
    table: list[list[int]],
    seq_lens: list[int],
    block_size: int,
    max_model_len: int,
    input_batch_size: int,
) -> dict[str, list[int]]:
    """``eagle_step_slot_mapping_metadata_kernel``, a program at a time."""
    seq_lens, out_positions, slots = list(seq_lens), [], []
    for row in range(input_batch_size):
        if row >= len(positions):
            slots.append(PADDING_SLOT)
            continue
        position = positions[row] + 1
        exceeds = position >= max_model_len
        if exceeds:
            position = 0
        block_number = min(position // block_size, len(table[row]) - 1)
        slot = table[row][block_number] * block_size + position % block_size
        slots.append(PADDING_SLOT if exceeds else slot)
        seq_lens[row] = min(1 if exceeds else seq_lens[row] + 1, max_model_len)
        out_positions.append(position)
    return {"seq_lens": seq_lens, "out_clamped_positions": out_positions, "out_slot_mapping": slots}


@settings(max_examples=300)
@given(
    st.integers(1, 6),
    st.integers(0, 3),
    st.sampled_from([1, 4, 16]),
    st.integers(1, 50),
    st.booleans(),
    seeds,
)
def test_a_draft_step_equals_the_scalar_reading(
    batch, padding, block_size, max_len, in_place, seed
):
    launch = next_draft_step(batch, padding, block_size, max_len, in_place, seed)
    given = launch.arguments
    expected = scalar_step(
        given["positions_1d"].tolist(),
        given["block_table_tensor"].tolist(),
        given["seq_lens"].tolist(),
        block_size,
        max_len,
        batch + padding,
    )
    check(launch, expected)


def test_a_draft_behind_the_context_starts_over_without_slot():
    launch = next_draft_step(3, 1, 4, 16, False, 0)
    launch.arguments["positions_1d"].copy_(torch.tensor([13, 14, 15]))
    launch.arguments["seq_lens"].copy_(torch.tensor([14, 15, 16, 0]))
    written = launch.run()
    assert written["out_clamped_positions"].tolist() == [14, 15, 0]
    assert written["seq_lens"].tolist() == [15, 16, 1, 0]
    block = launch.arguments["block_table_tensor"][:, 3].tolist()
    assert written["out_slot_mapping"].tolist() == [block[0] * 4 + 2, block[1] * 4 + 3, -1, -1]


@settings(max_examples=300)
@given(st.lists(st.integers(0, 4), min_size=1, max_size=7), seeds)
def test_padded_inputs_equal_the_scalar_reading(num_drafts, seed):
    """``eagle_prepare_inputs_padded_kernel``, a program at a time."""
    launch = padded_inputs(num_drafts, seed)
    ends = launch.arguments["cu_num_draft_tokens"].tolist()
    counts = launch.arguments["valid_sampled_tokens_count"].tolist()
    query_start_loc = launch.arguments["query_start_loc_gpu"].tolist()
    indices, rejected = [], []
    for row in range(len(num_drafts)):
        drafts = ends[row] if row == 0 else ends[row] - ends[row - 1]
        rejected.append(drafts + 1 - counts[row] if drafts > 0 else 0)
        indices.append(query_start_loc[row + 1] - 1 - rejected[row])
    check(launch, {"token_indices_to_sample": indices, "num_rejected_tokens_gpu": rejected})


@settings(max_examples=300)
@given(st.integers(1, 7), st.integers(1, 5), seeds)
def test_padded_next_tokens_equal_the_scalar_reading(num_reqs, num_sampled, seed):
    """``eagle_prepare_next_token_padded_kernel``, a program at a time."""
    launch = padded_next_tokens(num_reqs, num_sampled, seed)
    sampled = launch.arguments["sampled_token_ids"].tolist()
    discarded = launch.arguments["discard_request_mask"].tolist()
    backup = launch.arguments["backup_next_token_ids"].tolist()
    next_tokens, counts = [], []
    for row in range(num_reqs):
        valid = []
        if not discarded[row]:
            for token in sampled[row]:
                if token != -1 and token < launch.arguments["vocab_size"]:
                    valid.append(token)
        next_tokens.append(valid[-1] if valid else backup[row])
        counts.append(len(valid))
    check(launch, {"next_token_ids": next_tokens, "valid_sampled_tokens_count": counts})


def scalar_expansion(given: dict[str, Any]) -> dict[str, list[Any]]:
    """``copy_and_expand_eagle_inputs_kernel``, a program and a token at a time."""
    given = {
        name: value.tolist() if isinstance(value, torch.Tensor) else value
        for name, value in given.items()
    }
    written = {name: list(value) for name, value in given.items() if name.startswith("out_")}
    slots, shift = given["num_padding_slots_per_request"], given["shift_input_ids"]
    for row in range(given["batch_size"]):
        start, next_start = given["query_start_loc_ptr"][row : row + 2]
        end = given["query_end_loc_ptr"][row]
        if shift:
            num_valid, offset = end - start, 1
            output_start = start + row * (slots - 1)
        else:
            num_valid, offset = end - start + 1, 0
            output_start = start + row * slots
        num_rejected = next_start - end - 1
        for j in range(num_valid + slots + num_rejected):
            out = output_start + j
            position = given["target_positions_ptr"][start] + j
            is_rejected = is_masked = False
            if j < num_valid:
                token = given["target_token_ids_ptr"][start + offset + j]
            elif j == num_valid:
                token = given["next_token_ids_ptr"][row]
            elif j < num_valid + slots:
                token, is_masked = given["parallel_drafting_token_id"], True
            else:
                token, is_rejected, position = given["padding_token_id"], True, 0
            written["out_input_ids_ptr"][out] = token
            written["out_positions_ptr"][out] = position
            written["out_is_rejected_token_mask_ptr"][out] = is_rejected
            written["out_is_masked_token_mask_ptr"][out] = is_masked
            if num_valid <= j < num_valid + slots:
                written["out_new_token_indices_ptr"][row * slots + j - num_valid] = out
            if shift and j < next_start - start:
                written["out_hidden_state_mapping_ptr"][start + j] = out
    return written


@settings(max_examples=500)
@given(st.lists(st.integers(1, 6), min_size=1, max_size=6), st.integers(1, 4), st.booleans(), seeds)
def test_expanded_inputs_equal_the_scalar_reading(query_lens, num_slots, shift, seed):
    launch = expanded_inputs(query_lens, num_slots, shift, seed)
    check(launch, scalar_expansion(launch.arguments))


def test_drafts_in_parallel_follow_the_sample():
    launch = expanded_inputs([3, 2], 3, True, 0)
    launch.arguments["target_token_ids_ptr"].copy_(torch.tensor([10, 11, 12, 20, 21]))
    launch.arguments["target_positions_ptr"].copy_(torch.tensor([5, 6, 7, 40, 41]))
    launch.arguments["next_token_ids_ptr"].copy_(torch.tensor([13, 22]))
    launch.arguments["query_end_loc_ptr"].copy_(torch.tensor([1, 4]))  # token 12 was rejected
    written = launch.run()
    rows = [11, 13, 301, 301, 300, 21, 22, 301, 301]
    assert written["out_input_ids_ptr"][:9].tolist() == rows
    assert written["out_positions_ptr"][:9].tolist() == [5, 6, 7, 8, 0, 40, 41, 42, 43]
    assert written["out_new_token_indices_ptr"].tolist() == [1, 2, 3, 6, 7, 8]
    assert written["out_hidden_state_mapping_ptr"].tolist() == [0, 1, 2, 5, 6]
