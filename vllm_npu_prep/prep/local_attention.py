"""Chunked local attention: every request is cut at the borders of its chunks.

A token at position p sees positions ``p // C * C`` to p, where ``C`` is the attention chunk size
(Llama 4, vLLM's ``ChunkedLocalAttention``). A *virtual request* is the part of one request in one
chunk. Causal attention within it follows this rule, and kernels see an ordinary request, whose row
of blocks begins at its chunk. vLLM's ``make_local_attention_virtual_batches`` makes the same ones.

Their number depends on where chunks begin. The largest possible number depends on the padded sizes
alone (`max_local_reqs`), and so do the offsets of their arrays.
"""

from dataclasses import dataclass

import numpy as np

from vllm_npu_prep.prep.compiled import compiled
from vllm_npu_prep.prep.padding import Padding


@dataclass(frozen=True)
class LocalGroups:
    """The KV-cache groups that have layers with chunked local attention.

    Attributes
    ----------
    attention_chunk_size
        In tokens.
    blocks_per_chunk
        Blocks of one chunk. Chunks are whole blocks, and rows of block tables are whole chunks.
    groups
        Their indices.
    """

    attention_chunk_size: int
    blocks_per_chunk: int
    groups: tuple[int, ...]


@dataclass(frozen=True)
class LocalRequests:
    """Sizes of a step's virtual requests, padding excluded."""

    num_reqs: int
    max_query_len: int
    max_seq_len: int  # positions of a chunk, this step's included


def max_local_reqs(num_input_tokens: int, num_reqs_padded: int, attention_chunk_size: int) -> int:
    """Most virtual requests of a step of these sizes.

    A request's first token is in one virtual request, its second token may begin another, and after
    that only every C-th token can.
    """
    spare = num_input_tokens - 2 * num_reqs_padded
    if spare <= 0:
        return num_input_tokens
    return 2 * num_reqs_padded + spare // attention_chunk_size


def local_capture_lengths(padding: Padding, local: LocalGroups) -> tuple[np.ndarray, np.ndarray]:
    """Lengths with which local attention is captured: chunks as long as possible.

    See `vllm_npu_prep.prep.padding.capture_lengths`.

    Returns
    -------
    query_start_loc, seq_lens
        int32 ``[num_local_reqs + 1]`` and ``[num_local_reqs]``, for `max_local_reqs` of them.
    """
    num_tokens, chunk_size = padding.num_input_tokens, local.attention_chunk_size
    num_reqs = max_local_reqs(num_tokens, padding.num_reqs_padded, chunk_size)
    query_start_loc = np.arange(num_reqs + 1, dtype=np.int64) * num_tokens // num_reqs
    return query_start_loc.astype(np.int32), np.full(num_reqs, chunk_size, np.int32)


@compiled
def split_at_chunks(
    num_reqs,
    num_input_tokens,
    decode_query_len,
    attention_chunk_size,
    query_start_loc,  # [num_reqs + 1 or more] int32
    seq_lens,  # [num_reqs or more] int32
    num_computed_tokens,  # [num_reqs or more] int32
    # Block tables seen as rows of one chunk, by local group
    first_table_rows,  # [num_local_groups] int32
    chunks_per_req,  # [num_local_groups] int32
    null_req,  # a row of every table that is the null block
    # Outputs; V = `max_local_reqs`
    chunk_local_query_start_loc,  # [V + 1] int32
    chunk_local_seq_lens,  # [V] int32
    chunk_local_num_computed_tokens,  # [V] int32
    chunk_local_table_rows,  # [num_local_groups, V] int32
):
    """Write the virtual requests of a step, padding included.

    They are padded as requests are: length 0, the null block, and the same number of tokens
    (`vllm_npu_prep.prep.padding`).

    Returns
    -------
    tuple of int
        The sizes of `LocalRequests`.

    Raises
    ------
    ValueError
        If there are more than the layout has room for, before anything is written past an end.
    """
    num_groups, num_places = chunk_local_table_rows.shape
    max_query_len = 0
    max_seq_len = 0
    count = 0
    end = 0
    chunk_local_query_start_loc[0] = 0
    for req in range(num_reqs):
        position, seq_len = num_computed_tokens[req], seq_lens[req]
        end = query_start_loc[req]
        while position < seq_len:
            if count == num_places:
                raise ValueError("more virtual requests than the layout has room for")
            chunk = position // attention_chunk_size
            chunk_start = chunk * attention_chunk_size
            query_len = min(seq_len, chunk_start + attention_chunk_size) - position
            end += query_len
            chunk_local_query_start_loc[count + 1] = end
            chunk_local_num_computed_tokens[count] = position - chunk_start
            position += query_len
            chunk_local_seq_lens[count] = position - chunk_start
            for group in range(num_groups):
                row = first_table_rows[group] + req * chunks_per_req[group] + chunk
                chunk_local_table_rows[group, count] = row
            max_query_len = max(max_query_len, query_len)
            max_seq_len = max(max_seq_len, position - chunk_start)
            count += 1
    for padding in range(count, num_places):
        if decode_query_len == 0:
            end = num_input_tokens
        else:
            end = min(end + decode_query_len, num_input_tokens)
        chunk_local_query_start_loc[padding + 1] = end
        chunk_local_seq_lens[padding] = 0
        chunk_local_num_computed_tokens[padding] = 0
        for group in range(num_groups):
            row = first_table_rows[group] + null_req * chunks_per_req[group]
            chunk_local_table_rows[group, padding] = row
    return count, max_query_len, max_seq_len
