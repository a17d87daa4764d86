"""The table of a step's arrays: one line for each array that travels to the device.

Layout, host and device views, addresses for compiled code, padding with a constant, records,
``explain`` and ``replay`` follow from these lines. Only the values are written elsewhere: in
`vllm_npu_prep.prep.fused_pass`, and independently in `vllm_npu_prep.prep.oracle`.
``docs/changing/adding.md`` walks through adding an array.

`vllm_npu_prep.prep.layout.StepLayout.dims` has the sizes of dimensions. They depend on the padded
sizes of a step and on the shape of its engine; an engine that lacks a part has 0 of it:

==================  ===============================================================================
tokens              ``num_input_tokens``
reqs                ``num_reqs_padded``; ``reqs + 1`` for borders between requests
groups              KV-cache groups
mrope_dims          dimensions of M-RoPE positions
logits              ``max_logits``
drafts              ``max_drafts``
drafting_reqs       requests of an engine with speculation
local_reqs          most virtual requests of chunked local attention; ``local_reqs + 1`` for their
                    borders
local_groups        KV-cache groups whose layers see virtual requests
state_groups        KV-cache groups that hold recurrent states (linear attention)
state_reqs          requests of an engine with recurrent states
token_state_groups  `state_groups` of an engine with speculation
counted_reqs        requests of an engine with recurrent states and speculation
row_reqs            requests of vLLM's V2 runner
sharded_reqs        requests of an engine with decode context parallelism
split_reqs          requests of an engine with latent attention or recurrent states;
                    ``split_reqs + 1`` for borders of its prefills
context_pieces      most pieces of contexts that prefills of latent attention read
rank_tokens         tokens that one rank computes with prefill context parallelism
gathered_tokens     tokens of all such ranks, one rank after another
rank_rows           most rows of such a rank; ``rank_rows + 1`` for their borders
rank_reqs           requests of an engine with prefill context parallelism
==================  ===============================================================================
"""

from enum import Enum, Flag
from typing import Any, Generic, TypeVar

import numpy as np
from numpy import bool_, int32, int64

PAD_SLOT_ID = -1
"""The slot of a padding token, which every cache writer skips."""

NULL_BLOCK_ID = 0
"""The block that no request owns. Rows of padding requests hold it."""

PADDING_ROWS = 1
"""The number of extra rows after those of requests, which always hold the null block. A mixed batch
can fill all requests of a full graph, and its padding tokens then still need a request of their
own."""

NO_PREVIOUS_ROW = -1
"""The entry of `previous_rows` for a request without a sample in the last step."""


class Level(Enum):
    """What one element belongs to.

    It decides how much of an array is the batch, and how much is padding.
    """

    TOKEN = "token"  # along the last dimension
    REQUEST = "request"
    LOGIT = "row of logits"  # a request has one for each of its drafts, and one after them
    DRAFT = "draft"
    CHUNK = "virtual request"  # of chunked local attention
    PREFILL = "prefill"  # a request after the decodes (latent attention, recurrent states)
    PIECE = "piece of a context"  # which a prefill of latent attention reads in one chunk
    # With prefill context parallelism: of the rank, or of all ranks one after another
    RANK_TOKEN = "token of the rank"
    GATHERED = "token of all ranks"
    ROW = "row of the rank"
    SAMPLE = "sampled token of the rank"


class PaddingRule(Enum):
    """What an array holds past the batch's own elements, if that is not a constant."""

    BY_RULE = "written by the pass that writes the array, by the tables of `prep.padding`"
    UNDEFINED = "never read; a record has zeros there"


class ShownInExplain(Flag):
    """What ``explain --json`` shows of an array, and what a record adds to the bytes sent."""

    NOTHING = 0
    BATCH = 1  # the batch's elements, under the array's name
    PADDED = 2  # the whole array, under its name and ``_padded``


class ArrayType:
    """The type and the dimensions of an array that compiled code knows by name.

    ``dtype`` is the type of an element; ``dims`` has the names of the dimensions, separated by
    commas.
    """

    name: str  # of the attribute

    def __init__(self, dtype: type, dims: str) -> None:
        self.dtype = np.dtype(dtype)
        self.dims = tuple(dim.strip() for dim in dims.split(","))


class Array(ArrayType):
    """One line of the table of a step's arrays.

    Parameters
    ----------
    dtype, dims
        See `ArrayType`.
    level
        What an element along the last dimension belongs to.
    padding
        What is past the batch's own elements: a constant, which the fused pass writes by itself, or
        a `PaddingRule`.
    shown
        What ``explain`` shows.
    spare
        The number of unused elements after the array, to which unwanted values are written.
    sampled
        Whether the device overwrites elements with samples of the last step (asynchronous
        scheduling, or speculation on V2). Such an array is int32, and compiled code also finds its
        ``<name>_offset``.
    recorded_as
        The array's name in a record; by default its own name and ``_padded``.
    """

    def __init__(
        self,
        dtype: type,
        dims: str,
        level: Level,
        padding: int | PaddingRule,
        shown: ShownInExplain,
        spare: int,
        sampled: bool,
        recorded_as: str,
    ) -> None:
        super().__init__(dtype, dims)
        self.level, self.padding, self.shown = level, padding, shown
        self.spare, self.sampled, self.recorded_as = spare, sampled, recorded_as

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name
        # "chunk_" is newer than the format of records
        self.recorded_as = self.recorded_as or f"{name.removeprefix('chunk_')}_padded"

    @property
    def has_borders(self) -> bool:
        """Whether elements are borders between requests, one more than there are requests."""
        return self.dims[-1].endswith("+ 1")

    @property
    def by_group(self) -> bool:
        return self.dims[0] == "groups"


def array(
    dtype: type,
    dims: str,
    level: Level,
    padding: int | PaddingRule,
    shown: ShownInExplain = ShownInExplain.BATCH,
    *,
    spare: int = 0,
    sampled: bool = False,
    recorded_as: str = "",
) -> Any:
    """Make an `Array`, typed as Any so that type checkers accept it as an attribute's default."""
    return Array(dtype, dims, level, padding, shown, spare, sampled, recorded_as)


A = TypeVar("A")
TOKEN, REQUEST, LOGIT, DRAFT, CHUNK, PREFILL, PIECE, RANK_TOKEN, GATHERED, ROW, SAMPLE = Level
BY_RULE, UNDEFINED = PaddingRule
NOTHING, BOTH = ShownInExplain.NOTHING, ShownInExplain.BATCH | ShownInExplain.PADDED
NULL = NULL_BLOCK_ID


class Arrays(Generic[A]):
    """The arrays of a step as attributes, either numpy's or torch's.

    Their order is that of the buffer. Token-level arrays come first, so that their offsets depend
    on ``num_input_tokens`` alone: a piecewise graph serves any number of requests.
    """

    __slots__ = ()

    positions: A = array(int64, "tokens", TOKEN, 0, BOTH)
    mrope_positions: A = array(int64, "mrope_dims, tokens", TOKEN, 0)  # time, height and width
    # The spare element takes samples of the last step that no request of this step uses.
    input_ids: A = array(int32, "tokens", TOKEN, 0, BOTH, spare=1, sampled=True)
    slot_mapping: A = array(int32, "groups, tokens", TOKEN, PAD_SLOT_ID, BOTH)
    is_padding: A = array(bool_, "tokens", TOKEN, True, NOTHING, recorded_as="is_padding")
    # Recurrent states with speculation: the block for the state after each token of a decode
    token_state_indices: A = array(int32, "token_state_groups, tokens", TOKEN, NULL, NOTHING)
    # Prefill context parallelism (`prep.pcp`): the tokens that this rank computes, the slots of all
    # ranks' tokens as they are gathered, and the rank's rows, which attention sees as requests.
    # `pcp_table_rows` has the request of each. Their sizes depend on `num_input_tokens` alone.
    pcp_positions: A = array(int64, "rank_tokens", RANK_TOKEN, 0, NOTHING)
    pcp_input_ids: A = array(int32, "rank_tokens", RANK_TOKEN, 0, NOTHING, spare=1, sampled=True)
    pcp_is_padding: A = array(bool_, "rank_tokens", RANK_TOKEN, True, NOTHING)
    pcp_slot_mapping: A = array(int32, "groups, gathered_tokens", GATHERED, PAD_SLOT_ID, NOTHING)
    pcp_query_start_loc: A = array(int32, "rank_rows + 1", ROW, BY_RULE, NOTHING)
    pcp_seq_lens: A = array(int32, "rank_rows", ROW, BY_RULE, NOTHING)
    pcp_num_computed_tokens: A = array(int32, "rank_rows", ROW, 0, NOTHING)
    pcp_table_rows: A = array(int32, "rank_rows", ROW, BY_RULE, NOTHING)
    query_start_loc: A = array(int32, "reqs + 1", REQUEST, BY_RULE, BOTH)
    seq_lens: A = array(int32, "reqs", REQUEST, BY_RULE, BOTH)
    num_computed_tokens: A = array(int32, "reqs", REQUEST, 0)
    logits_indices: A = array(int32, "logits", LOGIT, UNDEFINED)
    # The row of logits that verifies each draft; the draft itself, -1 if it isn't known yet; and
    # the row after a request's last draft.
    target_logits_indices: A = array(int32, "drafts", DRAFT, UNDEFINED, NOTHING)
    draft_token_ids: A = array(int32, "drafts", DRAFT, UNDEFINED, NOTHING, sampled=True)
    bonus_logits_indices: A = array(int32, "drafting_reqs", REQUEST, UNDEFINED, NOTHING)
    cu_num_draft_tokens: A = array(int32, "drafting_reqs", REQUEST, UNDEFINED, NOTHING)
    cu_num_sampled_tokens: A = array(int32, "drafting_reqs", REQUEST, UNDEFINED, NOTHING)
    # Where nothing is sampled, drafters continue from this token: the one after a chunk of a
    # prompt, else the last known one.
    backup_next_token_ids: A = array(int32, "drafting_reqs", REQUEST, UNDEFINED, NOTHING)
    # Virtual requests (`prep.local_attention`). `chunk_local_table_rows` indexes the device's block
    # tables, viewed as rows of one chunk each.
    chunk_local_query_start_loc: A = array(int32, "local_reqs + 1", CHUNK, BY_RULE, NOTHING)
    chunk_local_seq_lens: A = array(int32, "local_reqs", CHUNK, BY_RULE, NOTHING)
    chunk_local_num_computed_tokens: A = array(int32, "local_reqs", CHUNK, 0, NOTHING)
    chunk_local_table_rows: A = array(int32, "local_groups, local_reqs", CHUNK, BY_RULE, NOTHING)
    discard_request_mask: A = array(bool_, "reqs", REQUEST, True, NOTHING)
    # Decode context parallelism (`prep.dcp`): of all tokens of a request, and of those
    # computed before this step, how many this rank keeps.
    dcp_local_seq_lens: A = array(int32, "sharded_reqs", REQUEST, 0, NOTHING)
    dcp_local_context_lens: A = array(int32, "sharded_reqs", REQUEST, 0, NOTHING)
    # Recurrent states (`prep.recurrent_states`): in each of their groups, the block from which a
    # request's state is read and the one to which it is written, with speculation that of its first
    # token; whether the request has a state to read; and how many tokens of its last step count.
    initial_state_indices: A = array(int32, "state_groups, state_reqs", REQUEST, NULL, NOTHING)
    state_indices: A = array(int32, "state_groups, state_reqs", REQUEST, NULL, NOTHING)
    has_initial_state: A = array(bool_, "state_reqs", REQUEST, False, NOTHING)
    num_accepted_tokens: A = array(int32, "counted_reqs", REQUEST, 1, NOTHING)
    # Latent attention (`prep.latent_split`) and recurrent states: where the queries of prefills
    # begin, counted from the first prefill's.
    prefill_query_start_loc: A = array(int32, "split_reqs + 1", PREFILL, UNDEFINED, NOTHING)
    # Latent attention: for each piece of a prefill's context its request, its first position, its
    # length, and the chunk in which it is gathered.
    context_piece_reqs: A = array(int32, "context_pieces", PIECE, UNDEFINED, NOTHING)
    context_piece_starts: A = array(int32, "context_pieces", PIECE, UNDEFINED, NOTHING)
    context_piece_lens: A = array(int32, "context_pieces", PIECE, UNDEFINED, NOTHING)
    context_piece_chunks: A = array(int32, "context_pieces", PIECE, UNDEFINED, NOTHING)
    # Prefill context parallelism: the last tokens of requests among the rank's tokens, as many as
    # the rank with the most has, and where those of each request are when all ranks' are gathered
    pcp_logits_indices: A = array(int32, "rank_reqs", SAMPLE, UNDEFINED, NOTHING)
    pcp_gathered_rows: A = array(int32, "rank_reqs", REQUEST, UNDEFINED, NOTHING)
    # Request row of each request, for samplers of vLLM's V2 runner
    idx_mapping: A = array(int64, "row_reqs", REQUEST, UNDEFINED, NOTHING)


STEP_ARRAYS: dict[str, Array] = {
    name: line for name, line in vars(Arrays).items() if isinstance(line, Array)
}
"""The table by name. Its lines are removed from `Arrays`, so that only instances have the
attributes."""

for _name in STEP_ARRAYS:
    delattr(Arrays, _name)
