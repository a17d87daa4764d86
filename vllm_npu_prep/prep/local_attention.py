"""Chunked local attention: every request is cut at the borders of its attention chunks.

A token at position p sees the positions from ``p // C * C`` to p, where ``C`` is the attention
chunk size (Llama 4, vLLM's ``ChunkedLocalAttention``). A *virtual request* is the part of one
request in one chunk. Causal attention within it follows this rule, so kernels see an ordinary
request, whose row of blocks begins at its chunk. vLLM's ``make_local_attention_virtual_batches``
makes the same virtual requests.

Their number depends on where chunks begin. The largest possible number depends on the padded sizes
alone (`LocalGroups.max_reqs`), and so do the offsets of their arrays.
"""

from dataclasses import dataclass

from vllm_npu_prep.prep.compiled import inlined


@dataclass(frozen=True)
class LocalGroups:
    """The KV-cache groups that have layers with chunked local attention.

    Attributes
    ----------
    blocks_per_chunk
        The blocks of a chunk. Chunks are whole blocks, and rows of block tables are whole chunks.
    """

    attention_chunk_size: int  # the tokens of a chunk
    blocks_per_chunk: int
    groups: tuple[int, ...]  # the indices of these groups

    def __bool__(self) -> bool:
        return len(self.groups) > 0

    def max_reqs(self, num_input_tokens: int, num_reqs_padded: int) -> int:
        """Return the most virtual requests of a step of these sizes.

        A request's first token is in one virtual request, its second token may begin another, and
        after that only every C-th token can begin one.
        """
        if not self:
            return 0
        spare = num_input_tokens - 2 * num_reqs_padded
        if spare <= 0:
            return num_input_tokens
        return 2 * num_reqs_padded + spare // self.attention_chunk_size


NO_LOCAL_GROUPS = LocalGroups(1, 1, ())
"""The groups of an engine without chunked local attention, which are false."""


@dataclass(frozen=True)
class LocalRequests:
    """The sizes of a step's virtual requests, without padding."""

    num_reqs: int = 0
    max_query_len: int = 0
    max_seq_len: int = 0  # positions of a chunk, this step's included


NO_LOCAL_REQUESTS = LocalRequests()


@inlined
def split_at_chunks(t, out, num_reqs, attention_chunk_size, decode_query_len):
    """Write the virtual requests of a step, padding included.

    Virtual requests are padded like requests: they have the null block, and as many keys as tokens,
    which are cut into parts of at most one chunk (`vllm_npu_prep.prep.padding`).
    `LocalGroups.max_reqs` has room for these, too: the parts of padding never number more than what
    its requests would be cut into.

    Returns
    -------
    tuple of int
        The sizes of `LocalRequests`.

    Raises
    ------
    ValueError
        If there are more virtual requests than the layout has room for. Nothing is written past an
        end before.
    """
    num_groups, num_places = out.chunk_local_table_rows.shape
    max_query_len = 0
    max_seq_len = 0
    count = 0
    end = 0
    out.chunk_local_query_start_loc[0] = 0
    for req in range(num_reqs):
        position, seq_len = out.num_computed_tokens[req], out.seq_lens[req]
        end = out.query_start_loc[req]
        while position < seq_len:
            if count == num_places:
                raise ValueError("more virtual requests than the layout has room for")
            chunk = position // attention_chunk_size
            chunk_start = chunk * attention_chunk_size
            query_len = min(seq_len, chunk_start + attention_chunk_size) - position
            end += query_len
            out.chunk_local_query_start_loc[count + 1] = end
            out.chunk_local_num_computed_tokens[count] = position - chunk_start
            position += query_len
            out.chunk_local_seq_lens[count] = position - chunk_start
            for group in range(num_groups):
                row = t.first_local_rows[group] + req * t.chunks_per_req[group] + chunk
                out.chunk_local_table_rows[group, count] = row
            max_query_len = max(max_query_len, query_len)
            max_seq_len = max(max_seq_len, position - chunk_start)
            count += 1
    padding_query_len = attention_chunk_size
    if decode_query_len > 0:
        padding_query_len = min(decode_query_len, attention_chunk_size)
    for padding in range(count, num_places):
        start, end = end, min(end + padding_query_len, out.positions.shape[0])
        out.chunk_local_query_start_loc[padding + 1] = end
        out.chunk_local_seq_lens[padding] = end - start
        out.chunk_local_num_computed_tokens[padding] = 0
        for group in range(num_groups):
            row = t.first_local_rows[group] + t.num_tokens.shape[0] * t.chunks_per_req[group]
            out.chunk_local_table_rows[group, padding] = row
    return count, max_query_len, max_seq_len
