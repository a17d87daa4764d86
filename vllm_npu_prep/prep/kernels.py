"""The fused pass: one numba kernel writes every array of a step straight into its buffer.

Compiled code is cached on disk beside this file (or in ``NUMBA_CACHE_DIR``); a worker loads it
before its first request (`vllm_npu_prep.prep.batch.warm_up`).

The wide tables are read in loops of their own. With little else in a loop, the processor waits for
the rows of many requests at once; one loop over everything took twice the time.
"""

import numpy as np
from numba import carray, njit, types
from numba.core import cgutils
from numba.extending import intrinsic

# Constants live here, beside the code that is compiled with them: numba's cache on disk notices
# changes of this file only.

SOME_COMPUTED = 1
SOME_DRAFTS = 2
SOME_BEYOND_DRAFTS = 4
SOME_SEVERAL_TOKENS = 8
SOME_PAST_PROMPT = 16
"""Bits of what the attention state follows from; `vllm_npu_prep.prep.state.batch_facts` says what
they mean."""

PAD_SLOT_ID = -1
"""Slot of a padding token: skipped by every cache writer."""

NULL_BLOCK_ID = 0
"""The block that nobody owns; rows of padding requests hold it."""

PADDING_ROWS = 1
"""Rows of a block table behind those of requests, always the null block: a mixed batch that fills a
full graph's requests still needs one for the rest of its tokens."""

NO_PREVIOUS_ROW = -1
"""Entry of `previous_rows` for a request that the last step did not sample for."""

compiled = njit(cache=True, boundscheck=False, error_model="numpy")


@compiled
def fill_step(
    # The runner's tables, whose rows are requests; more rows than the step has
    num_computed_tokens,  # [max_num_reqs] int32
    num_prompt_tokens,  # [max_num_reqs] int32
    num_tokens,  # [max_num_reqs] int32
    token_ids,  # [max_num_reqs, max_model_len] int32
    block_entries,  # [sum of rows * max_num_blocks] int32, the groups' tables in turn
    max_num_blocks,  # [num_groups] int32
    block_sizes,  # [num_groups] int32
    num_blocks,  # [num_groups, max_num_reqs] int32
    num_known_blocks,  # [num_groups, max_num_reqs] int32, updated
    num_device_blocks,  # [num_groups, max_num_reqs] int32, updated
    # The step
    num_scheduled_tokens,  # [num_reqs] int32
    num_draft_tokens,  # [num_reqs or more] int32
    previous_rows,  # [num_reqs or more] int64
    num_sampled_rows,
    num_sampled_drafts,  # of each row
    decode_query_len,
    # Outputs; T = num_input_tokens, R = num_reqs_padded, S = R where there can be drafts, else 0
    input_ids,  # [T + 1]
    positions,  # [T]
    slot_mapping,  # [num_groups, T]
    query_start_loc,  # [R + 1]
    seq_lens,  # [R]
    computed,  # [R]
    logits_indices,  # [max_logits]
    target_logits_indices,  # [max_drafts]
    draft_token_ids,  # [max_drafts]
    bonus_logits_indices,  # [S]
    cu_num_draft_tokens,  # [S]
    cu_num_sampled_tokens,  # [S]
    backup_next_token_ids,  # [S]
    discard_request_mask,  # [R]
    is_padding,  # [T]
    tail_int64,
    tail_int32,  # the same memory
    input_ids_place,  # first elements of two arrays in the whole buffer, as int32
    draft_ids_place,
):
    """Write the arrays of one step, padding included.

    See `vllm_npu_prep.prep.batch` for the inputs, `vllm_npu_prep.prep.layout` for the outputs,
    `vllm_npu_prep.prep.padding` for the values in padding and `vllm_npu_prep.prep.oracle` for the
    same result in plain loops.

    Returns
    -------
    tuple of int
        ``max_query_len``, ``max_seq_len``, the number of logits, the facts that decide the
        attention state (`vllm_npu_prep.prep.state.batch_facts`), and how many block-table entries
        are new to the device.

    Raises
    ------
    ValueError
        If the counts don't fit the layout or the tables, before anything is written past an end.
    """
    num_reqs = num_scheduled_tokens.shape[0]
    num_input_tokens = positions.shape[0]
    if num_reqs > seq_lens.shape[0] or num_reqs > num_tokens.shape[0]:
        raise ValueError("more requests than rows of the layout or of the tables")
    targets_per_row = 1 + 2 * num_sampled_drafts
    num_targets = num_sampled_rows * targets_per_row
    if num_targets > tail_int64.shape[0]:
        raise ValueError("the staging buffer has no room for the last step's samples")
    max_query_len = 0
    max_seq_len = 0
    num_logits = 0
    num_drafts = 0
    facts = 0
    start = 0
    query_start_loc[0] = 0
    speculates = draft_token_ids.shape[0] > 0
    for index in range(num_targets):
        tail_int64[index] = input_ids_place + num_input_tokens  # nobody waits for it: spare
    for req in range(num_reqs):
        query_len = num_scheduled_tokens[req]
        drafts = num_draft_tokens[req]
        first = num_computed_tokens[req]
        end = start + query_len
        seq_len = first + query_len
        query_start_loc[req + 1] = end
        seq_lens[req] = seq_len
        computed[req] = first
        discard_request_mask[req] = seq_len < num_tokens[req]
        if query_len < 1 or first < 0 or end > num_input_tokens or seq_len > token_ids.shape[1]:
            raise ValueError("scheduled tokens past the layout or past max_model_len")
        if drafts < 0 or drafts >= query_len or num_logits + drafts >= logits_indices.shape[0]:
            raise ValueError("more drafts than scheduled tokens or than the layout has logits")
        if num_drafts + drafts > draft_token_ids.shape[0]:
            raise ValueError("more drafts than the layout has places for")
        if num_sampled_rows > 0 and previous_rows[req] != NO_PREVIOUS_ROW:
            if previous_rows[req] >= num_sampled_rows:
                raise ValueError("a previous row behind the last step's samples")
            target = previous_rows[req] * targets_per_row
            tail_int64[target] = input_ids_place + end - 1 - drafts
            for draft in range(min(drafts, num_sampled_drafts)):
                target += 1
                tail_int64[target] = input_ids_place + end - drafts + draft
                tail_int64[target + num_sampled_drafts] = draft_ids_place + num_drafts + draft
        for index in range(end - 1 - drafts, end):
            logits_indices[num_logits] = index
            num_logits += 1
        if speculates:
            for draft in range(drafts):
                target_logits_indices[num_drafts + draft] = num_logits - 1 - drafts + draft
            num_drafts += drafts
            bonus_logits_indices[req] = num_logits - 1
            cu_num_draft_tokens[req] = num_drafts
            cu_num_sampled_tokens[req] = num_logits
        if first > 0:
            facts |= SOME_COMPUTED
        if drafts > 0:
            facts |= SOME_DRAFTS
        if query_len - drafts != 1:
            facts |= SOME_BEYOND_DRAFTS
        if query_len != 1:
            facts |= SOME_SEVERAL_TOKENS
        if first >= num_prompt_tokens[req]:
            facts |= SOME_PAST_PROMPT
        max_query_len = max(max_query_len, query_len)
        max_seq_len = max(max_seq_len, seq_len)
        start = end

    for group in range(block_sizes.shape[0]):
        if max_num_blocks[group] * block_sizes[group] < max_seq_len:
            raise ValueError("a sequence is longer than its row of the block table")
    for req in range(num_reqs):
        first, start = computed[req], query_start_loc[req]
        query_len = query_start_loc[req + 1] - start
        if query_len == 1:  # a decode: loops would cost more than what they do
            input_ids[start] = token_ids[req, first]
            positions[start] = first
        else:
            for offset in range(query_len):
                input_ids[start + offset] = token_ids[req, first + offset]
            for offset in range(query_len):
                positions[start + offset] = first + offset
    for draft in range(num_drafts):
        token = logits_indices[target_logits_indices[draft]] + 1
        draft_token_ids[draft] = input_ids[token]
        input_ids[token] = max(input_ids[token], 0)  # a place kept for a draft is no token
    if speculates:
        for req in range(num_reqs):
            known = min(seq_lens[req], num_tokens[req] - 1)  # behind a chunk, or the last known
            backup_next_token_ids[req] = max(token_ids[req, known], 0)
    fill_slots(
        num_reqs,
        block_entries,
        max_num_blocks,
        block_sizes,
        computed,
        seq_lens,
        query_start_loc,
        slot_mapping,
        num_computed_tokens.shape[0] + PADDING_ROWS,
    )
    pad(
        num_reqs,
        decode_query_len,
        input_ids,
        positions,
        slot_mapping,
        query_start_loc,
        seq_lens,
        computed,
        discard_request_mask,
        is_padding,
    )
    num_block_changes = list_block_changes(
        block_entries,
        max_num_blocks,
        num_blocks,
        num_known_blocks,
        num_device_blocks,
        num_reqs,
        seq_lens.shape[0],
        num_targets,
        tail_int64,
        tail_int32,
    )
    return max_query_len, max_seq_len, num_logits, facts, num_block_changes


@compiled
def fill_slots(
    num_reqs,
    block_entries,  # [sum of rows * max_num_blocks]
    max_num_blocks,  # [num_groups]
    block_sizes,  # [num_groups]
    num_computed_tokens,  # [num_reqs or more]
    seq_lens,  # [num_reqs or more]
    query_start_loc,  # [num_reqs + 1 or more]
    slot_mapping,  # [num_groups, T], written
    num_rows,
):
    """Slot of each scheduled token: its place in the physical block of its position."""
    table = 0  # first entry of the group
    for group in range(slot_mapping.shape[0]):
        block_size, width = block_sizes[group], max_num_blocks[group]
        for req in range(num_reqs):
            row = table + req * width
            position, seq_len = num_computed_tokens[req], seq_lens[req]
            token = query_start_loc[req]
            if seq_len - position == 1:  # a decode
                block = position // block_size
                offset = position - block * block_size
                slot_mapping[group, token] = block_entries[row + block] * block_size + offset
                continue
            while position < seq_len:
                block = position // block_size
                slot = block_entries[row + block] * block_size + position % block_size
                in_block = min(seq_len, (block + 1) * block_size) - position
                for offset in range(in_block):
                    slot_mapping[group, token + offset] = slot + offset
                token += in_block
                position += in_block
        table += num_rows * width


@compiled
def pad(
    num_reqs,
    decode_query_len,
    input_ids,  # [T + 1]; all arrays are written behind the real tokens and requests
    positions,  # [T]
    slot_mapping,  # [num_groups, T]
    query_start_loc,  # [R + 1]
    seq_lens,  # [R]
    num_computed_tokens,  # [R]
    discard_request_mask,  # [R]
    is_padding,  # [T], written whole
):
    """Values in padding, by the tables of `vllm_npu_prep.prep.padding`."""
    num_input_tokens = positions.shape[0]
    end = query_start_loc[num_reqs]
    for token in range(end):
        is_padding[token] = False
    for token in range(end, num_input_tokens):
        is_padding[token] = True
        input_ids[token] = 0
        positions[token] = 0
        for group in range(slot_mapping.shape[0]):
            slot_mapping[group, token] = PAD_SLOT_ID
    for req in range(num_reqs, seq_lens.shape[0]):
        if decode_query_len == 0:
            end = num_input_tokens
        else:
            end = min(end + decode_query_len, num_input_tokens)
        query_start_loc[req + 1] = end
        seq_lens[req] = 0
        num_computed_tokens[req] = 0
        discard_request_mask[req] = True


@compiled
def list_block_changes(
    block_entries,  # [sum of rows * max_num_blocks]
    max_num_blocks,  # [num_groups]
    num_blocks,  # [num_groups, max_num_reqs]
    num_known_blocks,  # [num_groups, max_num_reqs], updated
    num_device_blocks,  # [num_groups, max_num_reqs], updated
    num_reqs,
    num_reqs_padded,
    taken,  # places of the tail that hold something already, in units of int64
    tail_int64,
    tail_int32,
):
    """List the block-table entries that the device doesn't have yet, and count them as known.

    A row only ever grows behind what the device knows of it, or is replaced whole, which resets
    `num_known_blocks`: so this costs a look at each request and a write for each new block,
    however wide the table is. Rows of padding requests are set to the null block.

    Indices count as `block_entries` does. They come behind what is `taken`, and the block ids
    behind them (`vllm_npu_prep.prep.layout.StepLayout.tail`).

    Returns
    -------
    int
        How many entries there are.
    """
    num_groups, max_num_reqs = num_blocks.shape
    last_padded = min(num_reqs_padded, max_num_reqs)
    count = 0
    for group in range(num_groups):
        for req in range(num_reqs):
            count += max(0, num_blocks[group, req] - num_known_blocks[group, req])
        for req in range(num_reqs, last_padded):
            count += num_device_blocks[group, req]
    if count == 0:
        return 0
    if 2 * taken + 3 * count > tail_int32.shape[0]:
        raise ValueError("the staging buffer has no room for the new block-table entries")

    index_of, id_of = taken, 2 * (taken + count)
    table = 0  # first entry of the group
    for group in range(num_groups):
        width = max_num_blocks[group]
        for req in range(num_reqs):
            end = num_blocks[group, req]
            if end <= num_known_blocks[group, req]:
                continue
            for block in range(num_known_blocks[group, req], end):
                entry = table + req * width + block
                tail_int64[index_of] = entry
                tail_int32[id_of] = block_entries[entry]
                index_of += 1
                id_of += 1
            num_known_blocks[group, req] = end
            num_device_blocks[group, req] = max(num_device_blocks[group, req], end)
        for req in range(num_reqs, last_padded):
            for block in range(num_device_blocks[group, req]):
                tail_int64[index_of] = table + req * width + block
                tail_int32[id_of] = NULL_BLOCK_ID
                index_of += 1
                id_of += 1
            num_known_blocks[group, req] = 0
            num_device_blocks[group, req] = 0
        table += (max_num_reqs + PADDING_ROWS) * width
    return count


@intrinsic
def pointer(typingctx, address):
    """Pointer of an address, in compiled code."""

    def codegen(context, builder, signature, args):
        return builder.inttoptr(args[0], cgutils.voidptr_t)

    return types.voidptr(address), codegen


@compiled
def fill_step_at(
    tables,  # int64: sizes and addresses, `vllm_npu_prep.prep.batch.BatchTables.addresses`
    arrays,  # int64: sizes and addresses, `vllm_npu_prep.prep.layout.StepArrays.addresses`
    num_scheduled_tokens,
    num_draft_tokens,
    previous_rows,
    num_sampled_rows,
    num_sampled_drafts,
    decode_query_len,
):
    """`fill_step` on arrays that stay: numba looks at every array that it is handed.

    For two dozen of them, not used since the last step, that took as long as filling them for 256
    decodes. Positions count in the order in which `addresses` lists them.
    """
    reqs, model_len, groups, entries = tables[0], tables[1], tables[2], tables[3]
    tokens, reqs_padded, logits, drafts, tail = (
        arrays[0],
        arrays[1],
        arrays[2],
        arrays[3],
        arrays[4],
    )
    drafters = reqs_padded if drafts > 0 else 0
    return fill_step(
        carray(pointer(tables[4]), reqs, np.int32),
        carray(pointer(tables[5]), reqs, np.int32),
        carray(pointer(tables[6]), reqs, np.int32),
        carray(pointer(tables[7]), (reqs, model_len), np.int32),
        carray(pointer(tables[8]), entries, np.int32),
        carray(pointer(tables[9]), groups, np.int32),
        carray(pointer(tables[10]), groups, np.int32),
        carray(pointer(tables[11]), (groups, reqs), np.int32),
        carray(pointer(tables[12]), (groups, reqs), np.int32),
        carray(pointer(tables[13]), (groups, reqs), np.int32),
        num_scheduled_tokens,
        num_draft_tokens,
        previous_rows,
        num_sampled_rows,
        num_sampled_drafts,
        decode_query_len,
        carray(pointer(arrays[7]), tokens + 1, np.int32),
        carray(pointer(arrays[8]), tokens, np.int64),
        carray(pointer(arrays[9]), (groups, tokens), np.int32),
        carray(pointer(arrays[10]), reqs_padded + 1, np.int32),
        carray(pointer(arrays[11]), reqs_padded, np.int32),
        carray(pointer(arrays[12]), reqs_padded, np.int32),
        carray(pointer(arrays[13]), logits, np.int32),
        carray(pointer(arrays[14]), drafts, np.int32),
        carray(pointer(arrays[15]), drafts, np.int32),
        carray(pointer(arrays[16]), drafters, np.int32),
        carray(pointer(arrays[17]), drafters, np.int32),
        carray(pointer(arrays[18]), drafters, np.int32),
        carray(pointer(arrays[19]), drafters, np.int32),
        carray(pointer(arrays[20]), reqs_padded, np.bool_),
        carray(pointer(arrays[21]), tokens, np.bool_),
        carray(pointer(arrays[22]), tail, np.int64),
        carray(pointer(arrays[22]), 2 * tail, np.int32),
        arrays[5],
        arrays[6],
    )


@compiled
def book_tokens(
    sampled_token_ids,  # [num_reqs] int64
    discard_request_mask,  # [num_reqs] bool
    num_tokens,  # [max_num_reqs] int32, updated
    token_ids,  # [max_num_reqs, max_model_len] int32, updated
    is_token_ids,  # [max_num_reqs, max_model_len] bool, updated
):
    """Enter one sampled token for each request that is not discarded into the token table.

    Returns
    -------
    int
        Row of a request that has no room for its token, -1 if there is none. Rows before it are
        entered.
    """
    for req in range(sampled_token_ids.shape[0]):
        if discard_request_mask[req]:
            continue
        end = num_tokens[req]
        if end >= token_ids.shape[1]:
            return req
        token_ids[req, end] = sampled_token_ids[req]
        is_token_ids[req, end] = True
        num_tokens[req] = end + 1
    return -1
