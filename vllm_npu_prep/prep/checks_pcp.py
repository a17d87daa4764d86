"""The check of what a rank computes with prefill context parallelism: a part of `prep.checks`.

It goes from rank to rank and looks at the requests of each; `prep.pcp.share_out` goes from request
to request, and deals their chunks to the ranks.
"""

import numpy as np

from vllm_npu_prep.prep.compiled import inlined


@inlined
def first_and_last(query_len, half, rank, world_size, turn):
    """Return the borders of one of the two chunks of a request that a rank computes.

    `turn` is the rank that computes the request if it has one token.
    """
    if query_len == 1:
        return 0, 1 if half == 0 and rank == turn else 0
    length = -(-query_len // (2 * world_size))
    first = rank * length
    if half == 1:
        first = (2 * world_size - 1 - rank) * length
    return min(first, query_len), min(first + length, query_len)


@inlined
def wrong_token_of_ranks(out, world_size, this_rank, num_reqs):
    """Return the first token that is wrong among those of this rank, and among all gathered ones.

    Both are tokens of the batch, -1 if none is wrong, or the number of scheduled tokens if padding
    is.
    """
    rank_tokens = out.pcp_positions.shape[0]
    total = out.query_start_loc[num_reqs]
    for rank in range(world_size):
        place = rank * rank_tokens
        turn = 0
        for req in range(num_reqs):
            start = out.query_start_loc[req]
            query_len = out.query_start_loc[req + 1] - start
            for half in range(2):
                first, last = first_and_last(query_len, half, rank, world_size, turn)
                for token in range(start + first, start + last):
                    if place == (rank + 1) * rank_tokens:
                        return token, -1
                    for group in range(out.slot_mapping.shape[0]):
                        if out.pcp_slot_mapping[group, place] != out.slot_mapping[group, token]:
                            return -1, token
                    if rank == this_rank:
                        own = place - rank * rank_tokens
                        is_wrong = out.pcp_positions[own] != out.positions[token]
                        is_wrong |= out.pcp_input_ids[own] != out.input_ids[token]
                        if is_wrong or out.pcp_is_padding[own]:
                            return token, -1
                    place += 1
            if query_len == 1:
                turn = 0 if turn + 1 == world_size else turn + 1
        for padding in range(place, (rank + 1) * rank_tokens):
            for group in range(out.slot_mapping.shape[0]):
                if out.pcp_slot_mapping[group, padding] >= 0:
                    return -1, total
            if rank == this_rank and not out.pcp_is_padding[padding - rank * rank_tokens]:
                return total, -1
    return -1, -1


@inlined
def wrong_row(out, num_reqs, world_size, rank, num_rows):
    """Return the first row of the rank whose request, tokens or context is wrong, else -1."""
    row, token, turn = 0, 0, 0
    for req in range(num_reqs):
        query_len = out.query_start_loc[req + 1] - out.query_start_loc[req]
        for half in range(2):
            first, last = first_and_last(query_len, half, rank, world_size, turn)
            if last == first or row == num_rows:
                continue
            computed = out.num_computed_tokens[req] + first
            is_wrong = out.pcp_table_rows[row] != req
            is_wrong |= out.pcp_query_start_loc[row] != token
            token += last - first
            is_wrong |= out.pcp_query_start_loc[row + 1] != token
            is_wrong |= out.pcp_num_computed_tokens[row] != computed
            if is_wrong or out.pcp_seq_lens[row] != computed + last - first:
                return row
            row += 1
        if query_len == 1:
            turn = 0 if turn + 1 == world_size else turn + 1
    return row if row < num_rows else -1


@inlined
def wrong_sample(out, num_reqs, world_size, this_rank, num_samples):
    """Return the first request that is not sampled after its last token, else -1."""
    token, turn = 0, 0  # `token`: behind the request's last one among those of this rank
    samples = np.zeros(world_size, np.int64)  # of each rank so far
    for req in range(num_reqs):
        query_len = out.query_start_loc[req + 1] - out.query_start_loc[req]
        for half in range(2):
            first, last = first_and_last(query_len, half, this_rank, world_size, turn)
            token += last - first
        owner = turn
        if query_len == 1:
            turn = 0 if turn + 1 == world_size else turn + 1
        else:
            chunk = (query_len - 1) // -(-query_len // (2 * world_size))
            owner = min(chunk, 2 * world_size - 1 - chunk)
        sample = samples[owner]
        samples[owner] += 1
        if sample == num_samples or out.pcp_gathered_rows[req] != owner * num_samples + sample:
            return req
        if owner == this_rank and out.pcp_logits_indices[sample] != token - 1:
            return req
    return -1
