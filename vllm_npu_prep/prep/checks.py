"""The check of a prepared step before it is launched, in one compiled pass over its arrays.

The checks are written from the rules, independently of `vllm_npu_prep.prep.fused_pass`. They read
every request and every token once, which takes about as long as writing a decode step does. The
fused pass calls them itself once it has written a step: its arrays are in the cache then, and a
call of compiled code takes as long as the check of 256 decodes. `vllm_npu_prep.observe.check` puts
a broken rule into words.
"""

from collections import namedtuple
from enum import IntEnum
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from vllm_npu_prep.prep.arrays import NO_PREVIOUS_ROW, PADDING_ROWS
from vllm_npu_prep.prep.checks_pcp import wrong_row, wrong_sample, wrong_token_of_ranks
from vllm_npu_prep.prep.compiled import arrays_of, compiled, inlined
from vllm_npu_prep.prep.padding import GraphMode
from vllm_npu_prep.prep.recurrent_states import first_kept, read_column, state_column
from vllm_npu_prep.prep.tables import tables_of

if TYPE_CHECKING:
    from vllm_npu_prep.prep.batch import PreparedStep

NO_LIMITS = np.empty(0, np.int64)
"""What a step has in place of `find_fault`'s limits if the pass that writes it doesn't check it."""

NO_SLOTS = 0
"""The number of slots of a group whose layers write none, because it holds recurrent states."""


class Rule(IntEnum):
    """The rules for a step's arrays, roughly in the order in which they are checked.

    `title` names a rule in messages, and `text` says what it demands.
    """

    title: str
    text: str

    def __new__(cls, number: int, title: str = "", text: str = "") -> "Rule":
        member = int.__new__(cls, number)
        member._value_, member.title, member.text = number, title, text
        return member

    NOT_CHECKED = -1
    HOLDS = 0
    STARTS_AT_ZERO = 1, "starts", "query_start_loc starts at 0"
    QUERY_LENS = 2, "query lengths", "query_start_loc rises by the scheduled tokens"
    ENDS_AT_TOKENS = 3, "end", "real requests end at total_num_scheduled_tokens"
    SEQ_LENS = 4, "lengths", "seq_lens are the computed and the scheduled tokens"
    MODEL_LEN = 5, "model length", "seq_lens stay within max_model_len"
    BLOCKS = 6, "blocks", "sequences fit the blocks that their request owns"
    POSITIONS = 7, "positions", "positions continue after the computed tokens"
    VOCABULARY = 8, "vocabulary", "input_ids are of the vocabulary"
    SLOTS = 9, "slots", "slots lie in the cache and not in the null block"
    LAST_SLOT = 10, "table", "a slot is the one that the block table names"
    MAX_QUERY_LEN = 11, "longest query", "max_query_len is the longest query's"
    MAX_SEQ_LEN = 12, "longest sequence", "max_seq_len is the longest sequence's"
    LOGITS = 13, "logits", "logits_indices are tokens of the step"
    PADDING_TOKENS = 14, "padding", "padding writes no slot"
    PADDING_REQS = 15, "padding requests", "padding requests are as long as their tokens"
    ENDS_AT_INPUT_TOKENS = 16, "TND end", "query_start_loc of a full graph ends at its tokens"
    LOCAL_QUERY_LENS = 17, "local queries", "chunk_local_query_start_loc rises from 0"
    LOCAL_SEQ_LENS = 18, "local lengths", "chunk_local_seq_lens stay within a chunk"
    LOCAL_ENDS_AT_TOKENS = 19, "local end", "virtual requests end at the step's tokens"
    LOCAL_ENDS_AT_INPUT_TOKENS = (
        20,
        "local TND end",
        "chunk_local_query_start_loc of a full graph ends at its tokens",
    )
    NO_SLOT = 21, "state slots", "layers with recurrent states write no slots"
    STATE_BLOCKS = 22, "states", "a recurrent state is in the block that the table names"
    STATE_SHARED = 23, "shared state", "no two running requests share a recurrent state"
    STATE_BEGINS = 24, "initial state", "a recurrent state is read if tokens are computed already"
    STATE_PADDING = (
        25,
        "padding states",
        "padding, and tokens whose recurrent state is not kept, have that of the null block",
    )
    SHARDED_SLOTS = 26, "shared slots", "a token has its slot on the one rank that keeps it"
    SHARDED_LENS = 27, "shared lengths", "a rank's lengths count the tokens that it keeps"
    STATE_ACCEPTED = (
        28,
        "accepted tokens",
        "a recurrent state is that after the last token that counts",
    )
    RANK_TOKENS = 29, "tokens of ranks", "a rank computes its own chunks of each request"
    RANK_SLOTS = 30, "slots of ranks", "gathered tokens have their slots, and padding has none"
    RANK_ROWS = 31, "rows of ranks", "a row is a chunk of its request, and its context ends there"
    RANK_SAMPLES = 32, "samples of ranks", "a request is sampled after its last token"
    RANK_PADDING = 33, "padding of ranks", "padding rows see their own tokens alone"


ScheduledStep = namedtuple(
    "ScheduledStep",
    [
        "num_scheduled_tokens",  # [num_reqs] int32
        "num_draft_tokens",  # [num_reqs or more] int32
        "previous_rows",  # [num_reqs or more] int64
        "num_sampled_rows",
        "num_sampled_drafts",  # of each row
        "total_num_scheduled_tokens",
        "decode_query_len",
        "in_full_graph",
    ],
)
"""The inputs of a step apart from the tables: see `vllm_npu_prep.prep.batch.StepBatch`."""

StepSizes = namedtuple("StepSizes", ["max_query_len", "max_seq_len", "num_logits"])
"""The sizes of a step that the fused pass returns."""


class Fault(NamedTuple):
    """The first rule that a step breaks, and where."""

    rule: Rule
    req: int  # row of the batch, or virtual request of a local rule; -1: the whole step
    token: int  # of the step; -1: the whole request
    group: int  # KV-cache group; -1: all


def find_fault(step: "PreparedStep", limits: np.ndarray) -> Fault | None:
    """Check every request and token of a step; return None if all rules hold.

    Parameters
    ----------
    step
        A step that is prepared, and not yet launched.
    limits
        int64 ``[1 + num_groups]``: the size of the vocabulary, and each group's number of slots,
        `NO_SLOTS` for groups that hold recurrent states. A step with embeddings has undefined ids,
        so its caller gives no limit for the vocabulary.
    """
    batch, padding, arrays, shape = step.batch, step.padding, step.arrays.addresses, step.shape
    in_full_graph = padding.mode is GraphMode.FULL
    inputs = ScheduledStep(
        batch.num_scheduled_tokens,
        batch.num_draft_tokens,
        batch.previous_rows,
        batch.num_sampled_rows,
        batch.num_sampled_drafts,
        batch.total_num_scheduled_tokens,
        padding.decode_query_len,
        in_full_graph and not shape.pcp,  # else graphs see the rows of a rank
    )
    sizes = StepSizes(step.max_query_len, step.max_seq_len, step.num_logits)
    found = check_step_at(batch.tables.addresses, arrays, limits, inputs, sizes)
    if found[0] == Rule.HOLDS and shape.local:
        found = check_local_requests_at(
            arrays,
            step.local.num_reqs,
            shape.local.attention_chunk_size,
            batch.total_num_scheduled_tokens,
            in_full_graph,
        )
    if found[0] == Rule.HOLDS and shape.states:
        found = check_states_at(
            batch.tables.addresses,
            arrays,
            batch.num_reqs,
            step.states.num_decodes,
            shape.states.num_drafts,
            batch.num_accepted_tokens,
        )
    if found[0] == Rule.HOLDS and shape.pcp:
        found = check_ranks_at(
            batch.tables.addresses,
            arrays,
            batch.num_reqs,
            step.pcp.num_rows,
            step.pcp.num_samples,
            in_full_graph,
        )
    return None if found[0] == Rule.HOLDS else Fault(*found)


@inlined
def check_dcp(t, out, num_reqs, num_slots, group, table):
    """Check slots and lengths of a group with decode context parallelism.

    Every rank decides in the same way which rank keeps a token, so a token has a slot on exactly
    one of them. This check finds that rank by counting runs in the token's block;
    `fill_sharded_slots` counts from the request's first token.
    """
    world_size, rank, size = t.dcp[0], t.dcp[1], t.dcp[2]
    block_size, width = t.block_sizes[group], t.max_num_blocks[group]
    tokens_per_block = block_size * world_size
    for req in range(num_reqs):
        request_row = t.request_rows[req]
        first, seq_len = out.num_computed_tokens[req], out.seq_lens[req]
        if t.num_blocks[group, request_row] * tokens_per_block < seq_len:
            return Rule.BLOCKS, req, -1
        kept = out.dcp_local_context_lens[req]
        token = out.query_start_loc[req]
        for position in range(first, seq_len):
            in_block = position % tokens_per_block
            run = in_block // size
            slot = out.slot_mapping[group, token]
            if run % world_size != rank:
                if slot >= 0:
                    return Rule.SHARDED_SLOTS, req, token
            else:
                kept += 1
                block = t.block_table_flat[
                    table + request_row * width + position // tokens_per_block
                ]
                offset = run // world_size * size + in_block % size
                if slot != block * block_size + offset:
                    return Rule.SHARDED_SLOTS, req, token
                if slot < block_size or slot >= num_slots:  # below: the null block
                    return Rule.SLOTS, req, token
            token += 1
        before = first // (size * world_size) * size  # of whole rounds; the rest is counted
        for position in range(first // (size * world_size) * size * world_size, first):
            before += position // size % world_size == rank
        if out.dcp_local_context_lens[req] != before or out.dcp_local_seq_lens[req] != kept:
            return Rule.SHARDED_LENS, req, -1
    for req in range(num_reqs, out.dcp_local_seq_lens.shape[0]):
        if out.dcp_local_seq_lens[req] != 0 or out.dcp_local_context_lens[req] != 0:
            return Rule.SHARDED_LENS, req, -1
    return Rule.HOLDS, -1, -1


@compiled
def check_step_at(
    tables,  # int64, `vllm_npu_prep.prep.tables.BatchTables.addresses`
    arrays,  # int64, `vllm_npu_prep.prep.layout.StepArrays.addresses`
    limits,  # [1 + num_groups] int64
    step,  # a `ScheduledStep`
    sizes,  # a `StepSizes`
):
    """Return the first rule that is broken, and where, in the order of the fields of `Fault`."""
    t, out = tables_of(tables), arrays_of(arrays)
    num_reqs, num_groups = step.num_scheduled_tokens.shape[0], t.block_sizes.shape[0]
    num_input_tokens, max_num_reqs = out.positions.shape[0], t.num_computed_tokens.shape[0]
    vocab_size = limits[0]
    longest_query = 0
    longest_seq = 0
    if out.query_start_loc[0] != 0:
        return Rule.STARTS_AT_ZERO, -1, -1, -1
    start = 0
    for req in range(num_reqs):
        query_len, end = step.num_scheduled_tokens[req], out.query_start_loc[req + 1]
        if query_len < 1 or end - start != query_len or end > num_input_tokens:
            return Rule.QUERY_LENS, req, -1, -1
        first, seq_len = out.num_computed_tokens[req], out.seq_lens[req]
        if (
            first < 0
            or first != t.num_computed_tokens[t.request_rows[req]]
            or seq_len != first + query_len
        ):
            return Rule.SEQ_LENS, req, -1, -1
        if seq_len > t.token_ids.shape[1]:
            return Rule.MODEL_LEN, req, -1, -1
        # The host doesn't know this id yet: the last step's sample is still on the device.
        awaited = -1
        if step.num_sampled_rows > 0 and step.previous_rows[req] != NO_PREVIOUS_ROW:
            awaited = end - 1 - step.num_draft_tokens[req]
        # Two loops: without an exit, the processor compares many tokens at once.
        if query_len == 1:  # a decode: slices would cost more than comparing
            token_id = out.input_ids[start]
            is_wrong = out.positions[start] != first or token_id < 0 or token_id >= vocab_size
        else:
            is_wrong = False
            input_ids, positions = out.input_ids[start:end], out.positions[start:end]
            for offset in range(query_len):
                is_wrong |= positions[offset] != first + offset
                is_wrong |= (input_ids[offset] < 0) | (input_ids[offset] >= vocab_size)
        if is_wrong:
            for token in range(start, end):
                token_id = out.input_ids[token]
                if out.positions[token] != first + token - start:
                    return Rule.POSITIONS, req, token, -1
                if (token_id < 0 or token_id >= vocab_size) and token != awaited:
                    return Rule.VOCABULARY, req, token, -1
        longest_query = max(longest_query, query_len)
        longest_seq = max(longest_seq, seq_len)
        start = end
    if start != step.total_num_scheduled_tokens:
        return Rule.ENDS_AT_TOKENS, -1, -1, -1
    table = 0  # first entry of the group
    for group in range(num_groups):
        block_size, num_slots = t.block_sizes[group], limits[1 + group]
        width = t.max_num_blocks[group]
        if num_slots == NO_SLOTS:
            for req in range(num_reqs):
                if t.num_blocks[group, t.request_rows[req]] * block_size < out.seq_lens[req]:
                    return Rule.BLOCKS, req, -1, group
            for token in range(num_input_tokens):
                if out.slot_mapping[group, token] >= 0:
                    return Rule.NO_SLOT, -1, token, group
            table += (max_num_reqs + PADDING_ROWS) * width
            continue
        if t.dcp[0] > 1:
            rule, req, token = check_dcp(t, out, num_reqs, num_slots, group, table)
            if rule != Rule.HOLDS:
                return rule, req, token, group
            for token in range(start, num_input_tokens):
                if out.slot_mapping[group, token] >= 0:
                    return Rule.PADDING_TOKENS, -1, token, group
            table += (max_num_reqs + PADDING_ROWS) * width
            continue
        per_block = 1.0 / block_size
        for req in range(num_reqs):
            request_row = t.request_rows[req]
            if t.num_blocks[group, request_row] * block_size < out.seq_lens[req]:
                return Rule.BLOCKS, req, -1, group
            last, token = out.seq_lens[req] - 1, out.query_start_loc[req + 1] - 1
            # Exact below 2**31; an integer division would cost as much as all the rest.
            block = int((last + 0.5) * per_block)
            slot = t.block_table_flat[table + request_row * width + block] * block_size
            if out.slot_mapping[group, token] != slot + last - block * block_size:
                return Rule.LAST_SLOT, req, token, group
        is_wrong = False
        slots = out.slot_mapping[group, :start]
        for token in range(start):
            slot = slots[token]
            is_wrong |= (slot < block_size) | (slot >= num_slots)  # below: the null block
        if is_wrong:
            for token in range(start):
                slot = out.slot_mapping[group, token]
                if slot < block_size or slot >= num_slots:
                    return Rule.SLOTS, -1, token, group
        for token in range(start, num_input_tokens):
            if out.slot_mapping[group, token] >= 0:
                return Rule.PADDING_TOKENS, -1, token, group
        table += (max_num_reqs + PADDING_ROWS) * width
    if sizes.max_query_len != longest_query:
        return Rule.MAX_QUERY_LEN, -1, -1, -1
    if sizes.max_seq_len != longest_seq:
        return Rule.MAX_SEQ_LEN, -1, -1, -1
    is_wrong = False
    for index in range(sizes.num_logits - 1):
        is_wrong |= out.logits_indices[index] >= out.logits_indices[index + 1]
    if sizes.num_logits > 0:
        is_wrong |= out.logits_indices[0] < 0
        is_wrong |= out.logits_indices[sizes.num_logits - 1] >= start
    if is_wrong:
        previous = -1
        for index in range(sizes.num_logits):
            token = out.logits_indices[index]
            if token <= previous or token >= start:
                return Rule.LOGITS, -1, token, -1
            previous = token
    for req in range(num_reqs, out.seq_lens.shape[0]):
        end = out.query_start_loc[req + 1]
        computed = out.num_computed_tokens[req]
        if end < start or end > num_input_tokens or out.seq_lens[req] != end - start:
            return Rule.PADDING_REQS, req, -1, -1
        if computed != 0 or end - start > t.token_ids.shape[1]:
            return Rule.PADDING_REQS, req, -1, -1
        start = end
    if step.in_full_graph and start != num_input_tokens:
        return Rule.ENDS_AT_INPUT_TOKENS, -1, -1, -1
    return Rule.HOLDS, -1, -1, -1


@compiled
def check_local_requests_at(
    arrays, num_local_reqs, attention_chunk_size, total_num_scheduled_tokens, in_full_graph
):
    """Do what `check_step_at` does for virtual requests (`vllm_npu_prep.prep.local_attention`)."""
    out = arrays_of(arrays)
    if out.chunk_local_query_start_loc[0] != 0:
        return Rule.LOCAL_QUERY_LENS, 0, -1, -1
    end = 0
    for req in range(out.chunk_local_seq_lens.shape[0]):
        start, end = end, out.chunk_local_query_start_loc[req + 1]
        pads = req >= num_local_reqs
        if end < start or end > out.positions.shape[0] or (end == start and not pads):
            return Rule.LOCAL_QUERY_LENS, req, -1, -1
        seq_len = out.chunk_local_num_computed_tokens[req] + end - start
        if out.chunk_local_seq_lens[req] != seq_len or seq_len > attention_chunk_size:
            return Rule.LOCAL_SEQ_LENS, req, -1, -1
        if req == num_local_reqs - 1 and end != total_num_scheduled_tokens:
            return Rule.LOCAL_ENDS_AT_TOKENS, req, -1, -1
    if in_full_graph and end != out.positions.shape[0]:
        return Rule.LOCAL_ENDS_AT_INPUT_TOKENS, -1, -1, -1
    return Rule.HOLDS, -1, -1, -1


@compiled
def check_states_at(tables, arrays, num_reqs, num_decodes, num_drafts, kept_tokens):
    """Do what `check_step_at` does for recurrent states (`vllm_npu_prep.prep.recurrent_states`).

    Blocks have to be the ones that the tables name for the last computed and the last scheduled
    token. No two requests write one state, and no request reads what another one writes in this
    step. With speculation, each token of a decode has a state, and no two tokens write one.
    """
    t, out = tables_of(tables), arrays_of(arrays)
    for req in range(num_reqs):
        if out.has_initial_state[req] != (out.num_computed_tokens[req] > 0):
            return Rule.STATE_BEGINS, req, -1, -1
    for req in range(num_reqs, out.has_initial_state.shape[0]):
        if out.has_initial_state[req]:
            return Rule.STATE_PADDING, req, -1, -1
    speculates = out.num_accepted_tokens.shape[0] > 0
    if speculates:
        for req in range(num_reqs):
            kept = kept_tokens[req] if out.num_computed_tokens[req] > 0 else 1
            if out.num_accepted_tokens[req] != kept:
                return Rule.STATE_ACCEPTED, req, -1, -1
        for req in range(num_reqs, out.num_accepted_tokens.shape[0]):
            if out.num_accepted_tokens[req] != 1:
                return Rule.STATE_PADDING, req, -1, -1
    num_decode_tokens = out.query_start_loc[num_decodes] if speculates else 0
    first_prefill = num_decodes if speculates else 0  # from here on a request has one state
    num_written = num_decode_tokens + num_reqs - first_prefill
    written = np.empty(num_written, np.int32)
    writers = np.empty(num_written, np.int32)
    for index in range(t.state_groups.shape[0]):
        group = t.state_groups[index]
        size, first_entry = t.block_sizes[group], t.first_state_entries[index]
        read, count = out.initial_state_indices[index], 0
        for req in range(num_reqs):
            row = first_entry + t.request_rows[req] * t.max_num_blocks[group]
            first = first_kept(out.num_computed_tokens[req], out.seq_lens[req], req < first_prefill)
            after = t.block_table_flat[row + state_column(first, 0, size, num_drafts)]
            if out.state_indices[index, req] == 0 or out.state_indices[index, req] != after:
                return Rule.STATE_BLOCKS, req, -1, group
            tokens = out.query_start_loc[req + 1] - out.query_start_loc[req] if speculates else 1
            if req >= first_prefill:
                tokens = 1
            for token in range(tokens):
                block = after
                if req < first_prefill:
                    block = out.token_state_indices[index, out.query_start_loc[req] + token]
                    place = row + state_column(first, token, size, num_drafts)
                    if block == 0 or block != t.block_table_flat[place]:
                        return Rule.STATE_BLOCKS, req, out.query_start_loc[req] + token, group
                written[count], writers[count] = block, req
                count += 1
            if out.num_computed_tokens[req] == 0:
                continue
            kept = out.num_accepted_tokens[req] if speculates else 1
            last = row + read_column(out.num_computed_tokens[req], kept, size, num_drafts)
            if read[req] == 0 or read[req] != t.block_table_flat[last]:
                return Rule.STATE_BLOCKS, req, -1, group
        order = np.argsort(written)
        for place in range(1, num_written):
            if written[order[place]] == written[order[place - 1]]:
                return Rule.STATE_SHARED, writers[order[place]], -1, group
        for req in range(num_reqs):
            if not out.has_initial_state[req]:
                continue
            place = np.searchsorted(written[order], read[req])
            if place < num_written:
                writer = order[place]
                if written[writer] == read[req] and writers[writer] != req:
                    return Rule.STATE_SHARED, req, -1, group
        for req in range(num_reqs, out.state_indices.shape[1]):
            if out.state_indices[index, req] != 0 or read[req] != 0:
                return Rule.STATE_PADDING, req, -1, group
        if speculates:
            for token in range(num_decode_tokens, out.token_state_indices.shape[1]):
                if out.token_state_indices[index, token] != 0:
                    return Rule.STATE_PADDING, -1, token, group
    return Rule.HOLDS, -1, -1, -1


@compiled
def check_ranks_at(tables, arrays, num_reqs, num_rows, num_samples, in_full_graph):
    """Do what `check_step_at` does for what a rank computes (`vllm_npu_prep.prep.pcp`)."""
    t, out = tables_of(tables), arrays_of(arrays)
    world_size, rank = t.pcp[0], t.pcp[1]
    token, gathered = wrong_token_of_ranks(out, world_size, rank, num_reqs)
    if token >= 0:
        return Rule.RANK_TOKENS, -1, token, -1
    if gathered >= 0:
        return Rule.RANK_SLOTS, -1, gathered, -1
    row = wrong_row(out, num_reqs, world_size, rank, num_rows)
    if row >= 0:
        return Rule.RANK_ROWS, row, -1, -1
    req = wrong_sample(out, num_reqs, world_size, rank, num_samples)
    if req >= 0:
        return Rule.RANK_SAMPLES, req, -1, -1
    end = out.pcp_query_start_loc[num_rows]
    for row in range(num_rows, out.pcp_seq_lens.shape[0]):
        start, end = end, out.pcp_query_start_loc[row + 1]
        is_wrong = end < start or end > out.pcp_positions.shape[0]
        is_wrong |= out.pcp_seq_lens[row] != end - start or out.pcp_num_computed_tokens[row] != 0
        if is_wrong or out.pcp_table_rows[row] != t.num_computed_tokens.shape[0]:
            return Rule.RANK_PADDING, row, -1, -1
    if in_full_graph and end != out.pcp_positions.shape[0]:
        return Rule.RANK_PADDING, num_rows, -1, -1
    return Rule.HOLDS, -1, -1, -1
