"""The check of what a rank computes with prefill context parallelism: a part of `prep.checks`.

It goes from rank to rank and looks at the requests of each; `prep.pcp.share_out` goes from request
to request, and deals their chunks to the ranks.
"""

import numpy as np

from vllm_npu_prep.prep.compiled import inlined


@inlined
def first_and_last(query_len, half, rank, world_size):
    """Return the borders of one of the two chunks of a request that a rank computes."""
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
                first, last = first_and_last(query_len, half, rank, world_size)
                if query_len == 1:  # one rank has it, in turn
                    first, last = 0, 1 if half == 0 and turn == rank else 0
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
def wrong_row(out, num_rows):
    """Return the first row of the rank whose request, tokens or context is wrong, else -1."""
    for row in range(num_rows):
        first, end = out.pcp_query_start_loc[row], out.pcp_query_start_loc[row + 1]
        req = out.pcp_table_rows[row]
        if first < 0 or end <= first or end > out.pcp_positions.shape[0]:
            return row
        begins = out.pcp_positions[first]
        of_request = (
            begins >= out.num_computed_tokens[req] and end - first + begins <= (out.seq_lens[req])
        )
        if not of_request or out.pcp_num_computed_tokens[row] != begins:
            return row
        if out.pcp_seq_lens[row] != out.pcp_positions[end - 1] + 1:
            return row
        if out.pcp_seq_lens[row] - begins != end - first:
            return row
    return -1


@inlined
def wrong_sample(out, num_reqs, world_size, this_rank, num_samples):
    """Return the first request that is not sampled after its last token, else -1."""
    rank_tokens = out.pcp_positions.shape[0]
    turn = 0
    samples = np.zeros(world_size, np.int64)  # of each rank so far
    for req in range(num_reqs):
        query_len = out.query_start_loc[req + 1] - out.query_start_loc[req]
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
        if owner == this_rank:
            token = out.pcp_logits_indices[sample]
            if token < 0 or token >= rank_tokens:
                return req
            if out.pcp_positions[token] != out.seq_lens[req] - 1:
                return req
    return -1
