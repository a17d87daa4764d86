"""The fused pass: one compiled function writes every array of a step straight into its buffer.

A worker loads it from numba's cache on disk before its first request
(`vllm_npu_prep.prep.batch.warm_up`).

The wide tables are read in loops of their own: a short loop lets the processor fetch the rows of
many requests at once. One loop over everything took twice the time.
"""

from vllm_npu_prep.prep.arrays import (
    NO_PREVIOUS_ROW,
    NULL_BLOCK_ID,
    PAD_SLOT_ID,
    PADDING_ROWS,
)
from vllm_npu_prep.prep.checks import Rule, ScheduledStep, StepSizes, check_step_at
from vllm_npu_prep.prep.compiled import arrays_of, compiled, inlined, prefetch, write_padding
from vllm_npu_prep.prep.latent_split import SplitArrays, plan_contexts
from vllm_npu_prep.prep.local_attention import split_at_chunks
from vllm_npu_prep.prep.pcp import share_out
from vllm_npu_prep.prep.recurrent_states import find_recurrent_states
from vllm_npu_prep.prep.state import (
    SOME_COMPUTED,
    SOME_DRAFTS,
    SOME_NOT_VERIFYING,
    SOME_PAST_PROMPT,
    SOME_SEVERAL_TOKENS,
)
from vllm_npu_prep.prep.tables import tables_of


@compiled
def fill_step_at(
    tables,  # int64, `vllm_npu_prep.prep.tables.BatchTables.addresses`
    arrays,  # int64, `vllm_npu_prep.prep.layout.StepArrays.addresses`
    limits,  # int64, of `vllm_npu_prep.prep.checks.find_fault`; empty: the step is not checked
    num_scheduled_tokens,
    num_draft_tokens,
    previous_rows,
    num_sampled_rows,
    num_sampled_drafts,
    total_num_scheduled_tokens,
    decode_query_len,
    in_full_graph,
):
    """Call `fill_step` by address: unboxing two dozen arrays costs as much as the pass itself.

    It returns what `fill_step` returns, and the rule that the step breaks (`checks.Rule`).
    """
    step = ScheduledStep(
        num_scheduled_tokens,
        num_draft_tokens,
        previous_rows,
        num_sampled_rows,
        num_sampled_drafts,
        total_num_scheduled_tokens,
        decode_query_len,
        in_full_graph,
    )
    max_query_len, max_seq_len, num_logits, flags, num_block_changes = fill_step(
        tables_of(tables), step, arrays_of(arrays)
    )
    rule = Rule.NOT_CHECKED
    if limits.shape[0] > 0:
        sizes = StepSizes(max_query_len, max_seq_len, num_logits)
        rule = check_step_at(tables, arrays, limits, step, sizes)[0]
    return max_query_len, max_seq_len, num_logits, flags, num_block_changes, rule.value


@compiled
def split_at_chunks_at(tables, arrays, num_reqs, attention_chunk_size, decode_query_len):
    """Write the virtual requests of a step by address (`prep.local_attention`)."""
    t, out = tables_of(tables), arrays_of(arrays)
    return split_at_chunks(t, out, num_reqs, attention_chunk_size, decode_query_len)


@compiled
def share_out_at(tables, arrays, step):
    """Write what this rank computes of a step by address (`prep.pcp`)."""
    t, out = tables_of(tables), arrays_of(arrays)
    return share_out(out, step, t.pcp[0], t.pcp[1], t.num_computed_tokens.shape[0])


@compiled
def plan_contexts_at(arrays, num_reqs, decode_threshold, workspace_tokens, block_size):
    """Write the split of latent attention by address (`prep.latent_split`)."""
    out = arrays_of(arrays)
    return plan_contexts(out, num_reqs, decode_threshold, workspace_tokens, block_size)


@compiled
def plan_rank_contexts_at(arrays, num_rows, decode_threshold, workspace_tokens, block_size):
    """Do what `plan_contexts_at` does for the rows of a rank (`prep.pcp`)."""
    out = arrays_of(arrays)
    rows = SplitArrays(
        out.pcp_query_start_loc,
        out.pcp_num_computed_tokens,
        out.prefill_query_start_loc,
        out.context_piece_reqs,
        out.context_piece_starts,
        out.context_piece_lens,
        out.context_piece_chunks,
    )
    return plan_contexts(rows, num_rows, decode_threshold, workspace_tokens, block_size)


@compiled
def find_states_at(
    tables, arrays, num_reqs, decode_threshold, num_drafts, num_draft_tokens, kept_tokens
):
    """Write where recurrent states are by address (`prep.recurrent_states`)."""
    t, out, sizes = tables_of(tables), arrays_of(arrays), (decode_threshold, num_drafts)
    return find_recurrent_states(t, out, num_reqs, *sizes, num_draft_tokens, kept_tokens)


@inlined
def fill_step(t, step, out):
    """Write the arrays of one step, padding included.

    Parameters
    ----------
    t
        The runner's tables (`vllm_npu_prep.prep.tables.BatchTables`): row ``request_rows[req]`` is
        that of a request.
    step
        A `ScheduledStep`.
    out
        The step's arrays (`vllm_npu_prep.prep.arrays.Arrays`), written. See
        `vllm_npu_prep.prep.padding` for the values in padding, and `vllm_npu_prep.prep.oracle` for
        the same result in plain loops.

    Returns
    -------
    tuple of int
        ``max_query_len``, ``max_seq_len``, the number of logits, the batch flags that decide the
        attention state (`vllm_npu_prep.prep.state.batch_flags`), and how many block-table entries
        are new to the device.

    Raises
    ------
    ValueError
        If the counts don't fit the layout or the tables. Nothing is written past an end before.
    """
    num_reqs = step.num_scheduled_tokens.shape[0]
    num_input_tokens = out.positions.shape[0]
    if num_reqs > out.seq_lens.shape[0] or num_reqs > t.num_tokens.shape[0]:
        raise ValueError("more requests than rows of the layout or of the tables")
    targets_per_row = 1 + 2 * step.num_sampled_drafts
    num_targets = step.num_sampled_rows * targets_per_row
    if num_targets > out.variable_int64.shape[0]:
        raise ValueError("the staging buffer has no room for the last step's samples")
    max_query_len = 0
    max_seq_len = 0
    max_computed = 0
    num_drafts = 0
    some_past_prompt = False
    start = 0
    out.query_start_loc[0] = 0
    for req in range(num_reqs):
        query_len = step.num_scheduled_tokens[req]
        drafts = step.num_draft_tokens[req]
        request_row = t.request_rows[req]
        first = t.num_computed_tokens[request_row]
        prefetch(t.token_ids, request_row * t.token_ids.shape[1] + first)
        end = start + query_len
        seq_len = first + query_len
        out.query_start_loc[req + 1] = end
        out.seq_lens[req] = seq_len
        out.num_computed_tokens[req] = first
        out.discard_request_mask[req] = seq_len < t.num_tokens[request_row]
        if query_len < 1 or first < 0 or end > num_input_tokens or seq_len > t.token_ids.shape[1]:
            raise ValueError("scheduled tokens past the layout or past max_model_len")
        if drafts < 0 or drafts >= query_len:
            raise ValueError("more drafts than scheduled tokens")
        num_drafts += drafts
        some_past_prompt |= first >= t.num_prompt_tokens[request_row]
        max_query_len = max(max_query_len, query_len)
        max_seq_len = max(max_seq_len, seq_len)
        max_computed = max(max_computed, first)
        start = end
    if num_reqs + num_drafts > out.logits_indices.shape[0]:
        raise ValueError("more drafts than the layout has logits")
    if num_drafts > out.draft_token_ids.shape[0]:
        raise ValueError("more drafts than the layout has room for")
    # Sums and maxima tell what holds for some request, as each has a token that is no draft.
    flags = 0
    if max_computed > 0:
        flags |= SOME_COMPUTED
    if num_drafts > 0:
        flags |= SOME_DRAFTS
    if start - num_drafts != num_reqs:
        flags |= SOME_NOT_VERIFYING
    if max_query_len > 1:
        flags |= SOME_SEVERAL_TOKENS
    if some_past_prompt:
        flags |= SOME_PAST_PROMPT

    if num_targets > 0:
        list_targets(step, num_targets, out)
    speculates = out.draft_token_ids.shape[0] > 0
    if speculates:
        list_verified(step, out)
    else:
        for req in range(num_reqs):
            out.logits_indices[req] = out.query_start_loc[req + 1] - 1
    for group in range(t.block_sizes.shape[0]):
        if t.max_num_blocks[group] * t.block_sizes[group] * t.dcp[0] < max_seq_len:
            raise ValueError("a sequence is longer than its row of the block table")
    for req in range(num_reqs):
        first, start = out.num_computed_tokens[req], out.query_start_loc[req]
        request_row = t.request_rows[req]
        query_len = out.query_start_loc[req + 1] - start
        if query_len == 1:  # a decode: two loops would cost more than their work
            out.input_ids[start] = t.token_ids[request_row, first]
            out.positions[start] = first
        else:
            # Slices: the compiler sees that no index is negative, and writes many tokens at once.
            known_ids = t.token_ids[request_row, first : first + query_len]
            input_ids = out.input_ids[start : start + query_len]
            positions = out.positions[start : start + query_len]
            for offset in range(query_len):
                input_ids[offset] = known_ids[offset]
            for offset in range(query_len):
                positions[offset] = first + offset
    for draft in range(num_drafts):
        token = out.logits_indices[out.target_logits_indices[draft]] + 1
        out.draft_token_ids[draft] = out.input_ids[token]
        out.input_ids[token] = max(out.input_ids[token], 0)  # -1: the draft is not known yet
    if speculates:
        for req in range(num_reqs):
            request_row = t.request_rows[req]
            # The next token, or the last known
            known = min(out.seq_lens[req], t.num_tokens[request_row] - 1)
            out.backup_next_token_ids[req] = max(t.token_ids[request_row, known], 0)
    if out.idx_mapping.shape[0] > 0:
        for req in range(num_reqs):
            out.idx_mapping[req] = t.request_rows[req]
    if t.dcp[0] > 1:
        fill_sharded_slots(t, num_reqs, out)
    else:
        fill_slots(t, num_reqs, out)
    pad(num_reqs, step.decode_query_len, t.token_ids.shape[1], out)
    num_block_changes = list_block_changes(t, num_reqs, num_targets, out)
    return max_query_len, max_seq_len, num_reqs + num_drafts, flags, num_block_changes


@inlined
def list_targets(step, num_targets, out):
    """List where the device scatters the last step's samples, and the drafts made after them."""
    targets_per_row = 1 + 2 * step.num_sampled_drafts
    for index in range(num_targets):
        # By default a sample goes to the spare element, which nothing reads
        out.variable_int64[index] = out.input_ids_offset + out.positions.shape[0]
    num_drafts = 0
    for req in range(step.num_scheduled_tokens.shape[0]):
        drafts = step.num_draft_tokens[req]
        if step.previous_rows[req] != NO_PREVIOUS_ROW:
            if step.previous_rows[req] >= step.num_sampled_rows:
                raise ValueError("a previous row past the last step's samples")
            target = step.previous_rows[req] * targets_per_row
            first = out.input_ids_offset + out.query_start_loc[req + 1] - 1 - drafts
            out.variable_int64[target] = first
            for draft in range(min(drafts, step.num_sampled_drafts)):
                target += 1
                out.variable_int64[target] = first + 1 + draft
                draft_offset = out.draft_token_ids_offset + num_drafts + draft
                out.variable_int64[target + step.num_sampled_drafts] = draft_offset
        num_drafts += drafts


@inlined
def list_verified(step, out):
    """List the rows of logits in an engine with speculation: of drafts, and one after them."""
    num_logits = 0
    num_drafts = 0
    for req in range(step.num_scheduled_tokens.shape[0]):
        drafts, end = step.num_draft_tokens[req], out.query_start_loc[req + 1]
        for draft in range(drafts):
            out.target_logits_indices[num_drafts + draft] = num_logits + draft
        for index in range(end - 1 - drafts, end):
            out.logits_indices[num_logits] = index
            num_logits += 1
        num_drafts += drafts
        out.bonus_logits_indices[req] = num_logits - 1
        out.cu_num_draft_tokens[req] = num_drafts
        out.cu_num_sampled_tokens[req] = num_logits


@inlined
def fill_slots(t, num_reqs, out):
    """Write the slot of each scheduled token: its offset in the physical block of its position."""
    num_rows = t.num_computed_tokens.shape[0] + PADDING_ROWS
    table = 0  # first entry of the group
    for group in range(out.slot_mapping.shape[0]):
        block_size, width = t.block_sizes[group], t.max_num_blocks[group]
        per_block = 1.0 / block_size  # an integer division takes longer than all the rest
        for req in range(num_reqs):
            row = table + t.request_rows[req] * width
            position, seq_len = out.num_computed_tokens[req], out.seq_lens[req]
            token = out.query_start_loc[req]
            if seq_len - position == 1:  # a decode
                block = int((position + 0.5) * per_block)  # exact: positions are below 2**31
                offset = position - block * block_size
                out.slot_mapping[group, token] = (
                    t.block_table_flat[row + block] * block_size + offset
                )
                continue
            while position < seq_len:
                block = position // block_size
                slot = t.block_table_flat[row + block] * block_size + position % block_size
                in_block = min(seq_len, (block + 1) * block_size) - position
                slots = out.slot_mapping[group, token : token + in_block]
                for offset in range(in_block):
                    slots[offset] = slot + offset
                token += in_block
                position += in_block
        table += num_rows * width


@inlined
def fill_sharded_slots(t, num_reqs, out):
    """Write slots and lengths with decode context parallelism (`prep.dcp`).

    A token that another rank keeps has no slot on this rank.
    """
    world_size, rank, size = t.dcp[0], t.dcp[1], t.dcp[2]
    for req in range(num_reqs):
        out.dcp_local_seq_lens[req] = local_length(out.seq_lens[req], world_size, rank, size)
        computed = out.num_computed_tokens[req]
        out.dcp_local_context_lens[req] = local_length(computed, world_size, rank, size)
    num_rows = t.num_computed_tokens.shape[0] + PADDING_ROWS
    table = 0  # first entry of the group
    for group in range(out.slot_mapping.shape[0]):
        block_size, width = t.block_sizes[group], t.max_num_blocks[group]
        for req in range(num_reqs):
            row = t.request_rows[req] * width + table
            token = out.query_start_loc[req]
            for position in range(out.num_computed_tokens[req], out.seq_lens[req]):
                run = position // size
                slot = PAD_SLOT_ID
                if run % world_size == rank:
                    local = run // world_size * size + position % size
                    block = t.block_table_flat[row + local // block_size]
                    slot = block * block_size + local % block_size
                out.slot_mapping[group, token] = slot
                token += 1
        table += num_rows * width


@inlined
def local_length(length, world_size, rank, size):
    """Return how many of a request's first `length` tokens a rank keeps.

    These are whole rounds of all ranks, and in the last round the tokens of the rank's own run.
    """
    rounds = length // (world_size * size)
    left = length - rounds * world_size * size - rank * size
    return rounds * size + min(max(left, 0), size)


@inlined
def pad(num_reqs, decode_query_len, longest, out):
    """Write padding: the constants of the table of arrays, and the borders and lengths of requests.

    ``longest`` is max_model_len: what one row of the block table holds.
    """
    num_input_tokens = out.positions.shape[0]
    end = out.query_start_loc[num_reqs]
    out.is_padding[:end] = False
    if end < num_input_tokens or num_reqs < out.seq_lens.shape[0]:
        write_padding(out, end, num_reqs)
    query_len = longest if decode_query_len == 0 else decode_query_len
    for req in range(num_reqs, out.seq_lens.shape[0]):
        start, end = end, min(end + query_len, num_input_tokens)
        out.query_start_loc[req + 1] = end
        out.seq_lens[req] = end - start
    if end != num_input_tokens and num_reqs < out.seq_lens.shape[0]:
        raise ValueError("the padding requests can't hold the padding tokens")


@inlined
def list_block_changes(t, num_reqs, num_targets, out):
    """List the block-table entries that the device doesn't have yet, and count them as synced.

    The device's rows are in the order of the batch; the entries come from the requests' rows of the
    tables. A row only grows at its end, or is replaced as a whole, which resets
    `num_synced_blocks`. So this costs one read for each request and one write for each new block,
    however wide the table is. Rows of padding requests are set to the null block.

    Indices are those of `block_table_flat`. They come after the `num_targets` of samples, and the
    block ids come after them (`vllm_npu_prep.prep.layout.StepLayout.variable_part`).

    Returns
    -------
    int
        The number of entries.
    """
    num_groups, max_num_reqs = t.num_blocks.shape
    last_padded = min(out.seq_lens.shape[0], max_num_reqs)
    count = 0
    for group in range(num_groups):
        for req in range(num_reqs):
            owned = t.num_blocks[group, t.request_rows[req]]
            count += max(0, owned - t.num_synced_blocks[group, req])
        for req in range(num_reqs, last_padded):
            count += t.num_device_blocks[group, req]
    if count == 0:
        return 0
    if 2 * num_targets + 3 * count > out.variable_int32.shape[0]:
        raise ValueError("the staging buffer has no room for the new block-table entries")

    index_of, id_of = num_targets, 2 * (num_targets + count)
    table = 0  # first entry of the group
    for group in range(num_groups):
        width = t.max_num_blocks[group]
        for req in range(num_reqs):
            request_row = t.request_rows[req]
            end = t.num_blocks[group, request_row]
            if end <= t.num_synced_blocks[group, req]:
                continue
            for block in range(t.num_synced_blocks[group, req], end):
                out.variable_int64[index_of] = table + req * width + block
                out.variable_int32[id_of] = t.block_table_flat[table + request_row * width + block]
                index_of += 1
                id_of += 1
            t.num_synced_blocks[group, req] = end
            t.num_device_blocks[group, req] = max(t.num_device_blocks[group, req], end)
        for req in range(num_reqs, last_padded):
            for block in range(t.num_device_blocks[group, req]):
                out.variable_int64[index_of] = table + req * width + block
                out.variable_int32[id_of] = NULL_BLOCK_ID
                index_of += 1
                id_of += 1
            t.num_synced_blocks[group, req] = 0
            t.num_device_blocks[group, req] = 0
        table += (max_num_reqs + PADDING_ROWS) * width
    return count
