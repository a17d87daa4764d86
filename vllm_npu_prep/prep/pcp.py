"""Prefill context parallelism: several ranks share out the tokens that a step computes.

A request with several scheduled tokens is cut into twice as many chunks as there are ranks. Rank r
computes chunk r and, counted from the end, chunk r again (*zig-zag*): early chunks see short
contexts and late ones long contexts, so every rank has about the same work. With two ranks:

====  ====================================
rank  chunks of a prompt
====  ====================================
0     the first and the last
1     the two between them
====  ====================================

A request with one scheduled token, a decode for example, is computed by one rank; such requests go
to the ranks in turn. A *row* is a run of neighbouring tokens of one request that a rank computes: a
chunk, or such a token. Attention sees rows as requests, whose contexts end with the row.

Every rank keeps the K and V of all tokens. So ranks exchange them in each layer: K and V of all
ranks, each padded to the largest share of a rank, come one after another (*gathered*). Rank r's
share begins at ``r * rank_tokens``, and `Arrays.pcp_slot_mapping` has a slot for each place.

The chunks are those of vLLM's ``PCPManager``. It gives chunks of one token to ranks by their number
in the prompt, too; here they go in turn, as decodes do.
"""

from dataclasses import dataclass

import numpy as np

from vllm_npu_prep.prep.arrays import NO_PREVIOUS_ROW, PAD_SLOT_ID
from vllm_npu_prep.prep.compiled import compiled, inlined


@dataclass(frozen=True)
class PCPRank:
    """The ranks that share the tokens of a step, and the one that prepares it.

    Attributes
    ----------
    world_size, rank
        The number of ranks (vLLM's ``prefill_context_parallel_size``), and this one.
    most_rows
        The most rows of a rank: two chunks of each request.
    """

    world_size: int
    rank: int
    most_rows: int

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size or self.most_rows < 1:
            raise ValueError(
                f"rank {self.rank} of {self.world_size} with at most {self.most_rows} rows: ranks "
                "count from 0, and a request has a row"
            )

    def __bool__(self) -> bool:
        return self.world_size > 1

    def rank_tokens(self, num_input_tokens: int) -> int:
        """Return the tokens of each rank, padding included, in a step of so many gathered ones."""
        return num_input_tokens // self.world_size


NO_PCP = PCPRank(1, 0, 1)
"""One rank computes all tokens: there is no prefill context parallelism. It is false."""


@dataclass(frozen=True)
class PCPStep:
    """The sizes of what one rank computes of a step, without padding.

    Attributes
    ----------
    num_tokens, num_rows
        The number of its tokens, and of its rows.
    max_query_len, max_seq_len
        The tokens of its longest row, and the end of the longest context that a row sees.
    num_samples
        The most requests whose last token one rank computes: each rank sends so many hidden states
        to the others.
    """

    num_tokens: int = 0
    num_rows: int = 0
    max_query_len: int = 0
    max_seq_len: int = 0
    num_samples: int = 0


NO_PCP_STEP = PCPStep()


@inlined
def length_of_chunks(query_len, world_size):
    """Return the length of a request's chunks; the last ones may be shorter, or empty."""
    return (query_len + 2 * world_size - 1) // (2 * world_size)


@inlined
def rank_of_chunk(chunk, world_size):
    return chunk if chunk < world_size else 2 * world_size - 1 - chunk


@compiled
def largest_share(num_scheduled_tokens, world_size):
    """Return the most tokens and the most rows that one rank has of these requests.

    Padding is decided by them, before the step is prepared: all ranks have to pad alike.
    """
    tokens = np.zeros(world_size, np.int64)
    rows = np.zeros(world_size, np.int64)
    num_singles = 0
    for req in range(num_scheduled_tokens.shape[0]):
        query_len = num_scheduled_tokens[req]
        if query_len == 1:
            tokens[num_singles % world_size] += 1
            rows[num_singles % world_size] += 1
            num_singles += 1
            continue
        length = length_of_chunks(query_len, world_size)
        for chunk in range(2 * world_size):
            taken = min(length, query_len - chunk * length)
            if taken <= 0:
                break
            tokens[rank_of_chunk(chunk, world_size)] += taken
            rows[rank_of_chunk(chunk, world_size)] += 1
    return tokens.max(), rows.max()


@compiled
def gathered_places(num_scheduled_tokens, world_size, rank_tokens):
    """Return where each token of the batch is among the gathered ones, int64 ``[num_tokens]``.

    Place ``p`` is token ``p % rank_tokens`` of rank ``p // rank_tokens``.
    """
    places = np.empty(num_scheduled_tokens.sum(), np.int64)
    ends = np.arange(world_size) * rank_tokens
    token = 0
    num_singles = 0
    for req in range(num_scheduled_tokens.shape[0]):
        query_len = num_scheduled_tokens[req]
        length = length_of_chunks(query_len, world_size)
        for offset in range(query_len):
            rank = rank_of_chunk(offset // length, world_size)
            if query_len == 1:
                rank = num_singles % world_size
            places[token] = ends[rank]
            ends[rank] += 1
            token += 1
        num_singles += query_len == 1
    return places


@inlined
def share_out(out, step, world_size, this_rank, null_row):
    """Write what this rank computes of a step, from arrays that are written already.

    Parameters
    ----------
    out
        The step's arrays (`vllm_npu_prep.prep.arrays.Arrays`).
    step
        A `ScheduledStep`. If the last step's samples are on the device only, each goes to the
        tokens of the rank that computes its request.
    null_row
        The row of the device's block tables that always holds the null block, for padding rows.

    Returns
    -------
    tuple of int
        The sizes of `PCPStep`.

    Raises
    ------
    ValueError
        If a rank has more tokens or rows than the layout has room for. Nothing is written past an
        end before.
    """
    num_reqs = step.num_scheduled_tokens.shape[0]
    num_groups, num_places = out.pcp_slot_mapping.shape
    rank_tokens, most_rows = num_places // world_size, out.pcp_seq_lens.shape[0]
    for group in range(num_groups):
        out.pcp_slot_mapping[group, :] = PAD_SLOT_ID
    targets_per_row = 1 + 2 * step.num_sampled_drafts
    spare = out.pcp_input_ids_offset + rank_tokens
    for index in range(step.num_sampled_rows * targets_per_row):
        out.variable_int64[index] = spare
    num_tokens = np.zeros(world_size, np.int64)  # of each rank so far
    num_samples = np.zeros(world_size, np.int64)
    num_singles = 0
    num_rows = 0
    max_query_len = 0
    max_seq_len = 0
    out.pcp_query_start_loc[0] = 0
    for req in range(num_reqs):
        start, end = out.query_start_loc[req], out.query_start_loc[req + 1]
        length = length_of_chunks(end - start, world_size)
        for chunk in range(2 * world_size):
            first = start + chunk * length
            last = min(first + length, end)
            if last <= first:
                break
            rank = rank_of_chunk(chunk, world_size)
            if end - start == 1:
                rank = num_singles % world_size
                num_singles += 1
            token = num_tokens[rank]
            count = last - first
            if token + count > rank_tokens:
                raise ValueError("a rank has more tokens than the layout has room for")
            num_tokens[rank] += count
            place = rank * rank_tokens + token
            for group in range(num_groups):
                slots = out.slot_mapping[group, first:last]
                gathered = out.pcp_slot_mapping[group, place : place + count]
                for offset in range(count):
                    gathered[offset] = slots[offset]
            if last == end:
                # Both are put together below, when the largest number of samples is known
                out.pcp_gathered_rows[req] = num_samples[rank] * world_size + rank
                num_samples[rank] += 1
            if rank != this_rank:
                continue
            if num_rows == most_rows:
                raise ValueError("a rank has more rows than the layout has room for")
            for offset in range(count):
                out.pcp_input_ids[token + offset] = out.input_ids[first + offset]
            for offset in range(count):
                out.pcp_positions[token + offset] = out.positions[first + offset]
            computed = out.num_computed_tokens[req] + first - start
            out.pcp_query_start_loc[num_rows + 1] = token + count
            out.pcp_num_computed_tokens[num_rows] = computed
            out.pcp_seq_lens[num_rows] = computed + count
            out.pcp_table_rows[num_rows] = req
            num_rows += 1
            max_query_len = max(max_query_len, count)
            max_seq_len = max(max_seq_len, computed + count)
            if last == end:
                out.pcp_logits_indices[num_samples[rank] - 1] = token + count - 1
                if step.num_sampled_rows > 0 and step.previous_rows[req] != NO_PREVIOUS_ROW:
                    target = step.previous_rows[req] * targets_per_row
                    out.variable_int64[target] = out.pcp_input_ids_offset + token + count - 1
    own_tokens, most_samples = num_tokens[this_rank], num_samples.max()
    for req in range(num_reqs):
        rank, sample = out.pcp_gathered_rows[req] % world_size, out.pcp_gathered_rows[req]
        out.pcp_gathered_rows[req] = rank * most_samples + sample // world_size
    for sample in range(num_samples[this_rank], most_samples):
        out.pcp_logits_indices[sample] = 0
    for token in range(rank_tokens):
        out.pcp_is_padding[token] = token >= own_tokens
    for token in range(own_tokens, rank_tokens):
        out.pcp_input_ids[token] = 0
        out.pcp_positions[token] = 0
    # Full graphs are of decodes: a padding row has one token, and sees it in the null block
    for row in range(num_rows, most_rows):
        start = out.pcp_query_start_loc[row]
        out.pcp_query_start_loc[row + 1] = min(start + 1, rank_tokens)
        out.pcp_seq_lens[row] = out.pcp_query_start_loc[row + 1] - start
        out.pcp_num_computed_tokens[row] = 0
        out.pcp_table_rows[row] = null_row
    return own_tokens, num_rows, max_query_len, max_seq_len, most_samples
