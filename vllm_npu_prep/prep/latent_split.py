"""Latent attention: decodes before prefills, and the plan by which prefills read their context.

The cache keeps one latent row for each token. A *decode* (a request with at most
`LatentSplit.decode_threshold` tokens in this step) attends over these rows as they are. A *prefill*
attends over K and V that its new tokens were projected to, and then over its *context*: the rows
that are in the cache already. The rows of a context have to be gathered and projected as well,
which takes memory. So the contexts of a step are read in *context chunks* of at most
`workspace_tokens` rows; the part of a request in a chunk is a *piece*. The results are merged by
their log-sum-exp.

The split and the plan are those of vLLM's ``split_decodes_and_prefills`` and
``plan_mla_context_chunks``. The most pieces that there can be depend on the padded sizes alone
(`LatentSplit.max_pieces`), and so do the offsets of their arrays.
"""

from collections import namedtuple
from dataclasses import dataclass

from vllm_npu_prep.prep.compiled import compiled, inlined


@dataclass(frozen=True)
class LatentSplit:
    """How an engine with latent attention splits its steps."""

    decode_threshold: int  # the most tokens of a decode: one, and one for each draft
    workspace_tokens: int  # the most rows of a context chunk, a multiple of `block_size`
    block_size: int  # the tokens of a block of the cache: a context is cut between blocks only
    max_model_len: int  # the most tokens of a request; 0 in `NO_LATENT_SPLIT`

    def __post_init__(self) -> None:
        if self.decode_threshold < 1:
            raise ValueError(f"decodes of {self.decode_threshold} tokens: there is at least one")
        if self.workspace_tokens < 1 or self.workspace_tokens % self.block_size:
            raise ValueError(
                f"context chunks of {self.workspace_tokens} tokens: they consist of whole blocks "
                f"of {self.block_size}"
            )

    def __bool__(self) -> bool:
        return self.max_model_len > 0

    def max_pieces(self, num_input_tokens: int, num_reqs_padded: int) -> int:
        """Return the most context pieces of a step of these sizes.

        A request's first piece fills what is left of a chunk; each further piece is a whole chunk,
        or the rest of the context.
        """
        if not self:
            return 0
        pieces_of_one = 1 + -(-self.max_model_len // self.workspace_tokens)
        return min(num_input_tokens, num_reqs_padded) * pieces_of_one


NO_LATENT_SPLIT = LatentSplit(1, 1, 1, 0)
"""The split of an engine without latent attention, which is false."""


@dataclass(frozen=True)
class LatentStep:
    """The sizes of a step's split and plan, without padding.

    Attributes
    ----------
    num_decodes, num_decode_tokens
        The number of leading requests that are decodes, and of their tokens.
    num_prefills
        The number of requests after them.
    num_pieces, num_chunks
        The number of pieces of contexts, and of the context chunks that they make up.
    """

    num_decodes: int = 0
    num_decode_tokens: int = 0
    num_prefills: int = 0
    num_pieces: int = 0
    num_chunks: int = 0


NO_LATENT_STEP = LatentStep()


SplitArrays = namedtuple(
    "SplitArrays",
    [
        "query_start_loc",  # [num_reqs + 1 or more] int32
        "num_computed_tokens",  # [num_reqs or more] int32
        "prefill_query_start_loc",  # [num_reqs + 1 or more] int32, written
        # Pieces of contexts, [`LatentSplit.max_pieces`] int32 each, written
        "context_piece_reqs",
        "context_piece_starts",
        "context_piece_lens",
        "context_piece_chunks",
    ],
)
"""The arrays of a step that the split reads and writes, for a step that has no others."""


@compiled
def split_prefills(step, num_reqs, decode_threshold, workspace_tokens, block_size):
    """Call `plan_contexts` for a `SplitArrays`."""
    return plan_contexts(step, num_reqs, decode_threshold, workspace_tokens, block_size)


@inlined
def split_decodes(step, num_reqs, decode_threshold):
    """Return the number of leading requests that are decodes, and write where prefills begin."""
    num_decodes = 0
    while num_decodes < num_reqs:
        query_len = step.query_start_loc[num_decodes + 1] - step.query_start_loc[num_decodes]
        if query_len > decode_threshold:
            break
        num_decodes += 1
    num_decode_tokens = step.query_start_loc[num_decodes]
    for req in range(num_decodes, num_reqs + 1):
        start = step.query_start_loc[req] - num_decode_tokens
        step.prefill_query_start_loc[req - num_decodes] = start
    return num_decodes


@inlined
def plan_contexts(step, num_reqs, decode_threshold, workspace_tokens, block_size):
    """Find where prefills begin, and plan the chunks in which their contexts are read.

    Requests that follow each other share a chunk. If a request doesn't fit into the rest of a
    chunk, as many of its blocks as fit are read with that chunk. A request without context ends a
    chunk, so that the requests of a chunk are neighbours.

    Returns
    -------
    tuple of int
        The sizes of `LatentStep`.

    Raises
    ------
    ValueError
        If there are more pieces than the layout has room for. Nothing is written past an end
        before.
    """
    num_decodes = split_decodes(step, num_reqs, decode_threshold)
    num_decode_tokens = step.query_start_loc[num_decodes]
    num_pieces = 0
    num_chunks = 0
    is_open = False  # whether the last chunk takes more pieces
    rows = 0  # of that chunk
    for req in range(num_decodes, num_reqs):
        context_len = step.num_computed_tokens[req]
        if context_len == 0:
            is_open = False
        start = 0
        while start < context_len:
            room = workspace_tokens - rows if is_open else workspace_tokens
            length = context_len - start
            if length > room:
                length = room // block_size * block_size
            if length == 0:  # not one block: a new chunk, which has room
                is_open = False
                continue
            if num_pieces == step.context_piece_reqs.shape[0]:
                raise ValueError("more pieces of contexts than the layout has room for")
            if not is_open:
                is_open = True
                num_chunks += 1
                rows = 0
            step.context_piece_reqs[num_pieces] = req
            step.context_piece_starts[num_pieces] = start
            step.context_piece_lens[num_pieces] = length
            step.context_piece_chunks[num_pieces] = num_chunks - 1
            num_pieces += 1
            rows += length
            start += length
            if start < context_len:  # a request that was cut ends its chunk
                is_open = False
    return num_decodes, num_decode_tokens, num_reqs - num_decodes, num_pieces, num_chunks
