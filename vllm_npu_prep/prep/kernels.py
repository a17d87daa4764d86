"""The fused pass: one numba kernel writes every array of a step straight into its buffer.

Compiled code is cached on disk beside this file (or in ``NUMBA_CACHE_DIR``); a worker loads it
before its first request with `warm_up`.
"""

import numpy as np
from numba import njit

from vllm_npu_prep.prep.padding import PAD_SLOT_ID

NO_PREVIOUS_ROW = -1
"""Entry of `previous_rows` for a request that the last step did not sample for."""


@njit(cache=True, boundscheck=False)
def fill_step(
    num_computed_tokens,  # [num_reqs] int32
    num_scheduled_tokens,  # [num_reqs] int32
    num_draft_tokens,  # [num_reqs] int32
    num_tokens,  # [num_reqs] int32
    token_ids,  # [max_num_reqs, max_model_len] int32
    block_tables,  # tuple of [max_num_reqs, max_num_blocks] int32, one for each group
    block_sizes,  # [num_groups] int32
    previous_rows,  # [num_reqs] int64
    decode_query_len,
    # Outputs; T = num_input_tokens, R = num_reqs_padded
    input_ids,  # [T]
    positions,  # [T]
    slot_mapping,  # [num_groups, T]
    query_start_loc,  # [R + 1]
    seq_lens,  # [R]
    computed,  # [R]
    discard_request_mask,  # [R]
    sampled_token_indices,  # [R]
    sampled_token_rows,  # [R]
    logits_indices,  # [T]
):
    """Write the arrays of one step, padding included.

    See `vllm_npu_prep.prep.batch.StepBatch` for the inputs,
    `vllm_npu_prep.prep.layout.StepArrays` for the outputs,
    `vllm_npu_prep.prep.padding` for the values in padding and
    `vllm_npu_prep.prep.oracle` for the same result in plain loops.

    Returns
    -------
    tuple of int
        ``max_query_len``, ``max_seq_len``, the number of logits and the number of tokens that come
        from the last step's samples.
    """
    num_reqs = num_scheduled_tokens.shape[0]
    num_input_tokens = input_ids.shape[0]
    max_query_len = 0
    max_seq_len = 0
    num_logits = 0
    num_sampled = 0
    start = 0
    query_start_loc[0] = 0
    for req in range(num_reqs):
        query_len = num_scheduled_tokens[req]
        first = num_computed_tokens[req]
        end = start + query_len
        seq_len = first + query_len

        for offset in range(query_len):
            input_ids[start + offset] = token_ids[req, first + offset]
            positions[start + offset] = first + offset

        for group in range(len(block_tables)):
            block_size = block_sizes[group]
            position = first
            while position < seq_len:
                block = position // block_size
                block_end = min(seq_len, (block + 1) * block_size)
                # Slot of the block's first position, shifted so that adding a position gives a slot
                base = (block_tables[group][req, block] - block) * block_size
                for p in range(position, block_end):
                    slot_mapping[group, start + p - first] = base + p
                position = block_end

        query_start_loc[req + 1] = end
        seq_lens[req] = seq_len
        computed[req] = first
        discard_request_mask[req] = seq_len < num_tokens[req]
        drafts = num_draft_tokens[req]
        for index in range(end - 1 - drafts, end):
            logits_indices[num_logits] = index
            num_logits += 1
        if previous_rows[req] >= 0:
            sampled_token_indices[num_sampled] = end - 1 - drafts
            sampled_token_rows[num_sampled] = previous_rows[req]
            num_sampled += 1
        max_query_len = max(max_query_len, query_len)
        max_seq_len = max(max_seq_len, seq_len)
        start = end

    for token in range(start, num_input_tokens):
        input_ids[token] = 0
        positions[token] = 0
        for group in range(len(block_tables)):
            slot_mapping[group, token] = PAD_SLOT_ID
    for req in range(num_reqs, seq_lens.shape[0]):
        if decode_query_len == 0:
            start = num_input_tokens
        else:
            start = min(start + decode_query_len, num_input_tokens)
        query_start_loc[req + 1] = start
        seq_lens[req] = 0
        computed[req] = 0
        discard_request_mask[req] = True
    return max_query_len, max_seq_len, num_logits, num_sampled


def warm_up(num_groups: int = 1) -> None:
    """Compile or load the fused pass for `num_groups` KV-cache groups."""
    ones = np.ones(1, np.int32)
    zeros = np.zeros(1, np.int32)
    fill_step(
        zeros,
        ones,
        zeros,
        ones,
        np.zeros((1, 1), np.int32),
        tuple(np.zeros((1, 1), np.int32) for _ in range(num_groups)),
        np.ones(num_groups, np.int32),
        np.full(1, NO_PREVIOUS_ROW, np.int64),
        0,
        np.zeros(1, np.int32),
        np.zeros(1, np.int64),
        np.zeros((num_groups, 1), np.int32),
        np.zeros(2, np.int32),
        np.zeros(1, np.int32),
        np.zeros(1, np.int32),
        np.zeros(1, np.bool_),
        np.zeros(1, np.int64),
        np.zeros(1, np.int64),
        np.zeros(1, np.int32),
    )
