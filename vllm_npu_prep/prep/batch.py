"""A step's batch as the scheduler made it, and the same step prepared for the device.

`prepare_step` makes a `PreparedStep` of a `StepBatch`.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from operator import attrgetter

import numpy as np

from vllm_npu_prep.prep.arrays import STEP_ARRAYS, Array, Arrays, Level
from vllm_npu_prep.prep.bookkeeping import (
    append_sampled_tokens,
    append_verified_tokens,
    count_accepted_tokens,
    enter_counts,
    place_samples,
    take_back_drafts,
    write_draft_tokens,
)
from vllm_npu_prep.prep.checks import NO_LIMITS, Rule, ScheduledStep, find_fault
from vllm_npu_prep.prep.fused_pass import (
    fill_step_at,
    find_states_at,
    plan_contexts_at,
    plan_rank_contexts_at,
    share_out_at,
    split_at_chunks_at,
)
from vllm_npu_prep.prep.latent_split import NO_LATENT_STEP, LatentStep
from vllm_npu_prep.prep.layout import StepArrays, StepLayout, targets_per_row
from vllm_npu_prep.prep.local_attention import NO_LOCAL_REQUESTS, LocalRequests
from vllm_npu_prep.prep.mrope import MropeTables
from vllm_npu_prep.prep.padding import GraphMode, Padding
from vllm_npu_prep.prep.pcp import NO_PCP_STEP, PCPStep, gathered_places, largest_share
from vllm_npu_prep.prep.recurrent_states import NO_RECURRENT_STEP, RecurrentStep
from vllm_npu_prep.prep.shape import PLAIN_SHAPE, EngineShape
from vllm_npu_prep.prep.state import AttentionState, attention_state, captured_state
from vllm_npu_prep.prep.tables import BatchTables, device_has_all

NO_PREVIOUS_ROWS = np.empty(0, np.int64)
NO_COUNTS = np.empty(0, np.int32)


@dataclass(slots=True)
class StepBatch:
    """The input of `prepare_step`: one scheduled batch and the runner's tables."""

    tables: BatchTables
    num_scheduled_tokens: np.ndarray  # [num_reqs] int32
    num_draft_tokens: np.ndarray  # [num_reqs or more] int32
    total_num_scheduled_tokens: int
    # [num_reqs or more] int64: row of each request in the last step's samples if only the device
    # has these (asynchronous scheduling, or speculation on V2), else -1; not read if
    # `num_sampled_rows` is 0
    previous_rows: np.ndarray = field(default_factory=lambda: NO_PREVIOUS_ROWS)
    num_sampled_rows: int = 0  # rows of the last step's samples, 0 if they are not on the device
    num_sampled_drafts: int = 0  # drafts after the sample of each of these rows
    takes_embeds: bool = False  # the model gets embeddings (`vllm_npu_prep.prep.embeds`)
    # [1 + num_groups] int64, as `checks.find_fault` takes them: the step is checked as soon as it
    # is written. Empty: it is not checked
    check_limits: np.ndarray = field(default_factory=lambda: NO_LIMITS)
    # [num_reqs or more] int32: how many tokens of each request's last step count, without rejected
    # drafts. It is 1 where that step kept its last state only, or where there was no such step.
    # Only an engine with recurrent states and speculation reads it (`prep.recurrent_states`).
    num_accepted_tokens: np.ndarray = field(default_factory=lambda: NO_COUNTS)
    num_reqs: int = field(init=False)
    # Scatter targets of the last step's samples, including samples that nothing uses
    num_targets: int = field(init=False)

    def __post_init__(self) -> None:
        rows = self.num_sampled_rows
        self.num_reqs = self.num_scheduled_tokens.shape[0]
        self.num_targets = rows * targets_per_row(self.num_sampled_drafts) if rows else 0


@dataclass(slots=True)
class PreparedStep(Arrays[np.ndarray]):
    """A prepared step, with every variable of the reference documents under its own name.

    Each array of the table `vllm_npu_prep.prep.arrays` is an attribute, without its padding;
    `arrays` has the same arrays with graph padding. All of them are views of one buffer. Values
    that the device doesn't need (``req_indices`` and the like) are computed on access. Counts are
    those of the batch, without padding, except for `num_input_tokens`.
    """

    batch: StepBatch
    padding: Padding
    layout: StepLayout
    arrays: StepArrays
    attn_state: AttentionState
    max_query_len: int
    max_seq_len: int
    num_logits: int
    num_block_changes: int  # block-table entries that travel with the step
    local: LocalRequests = NO_LOCAL_REQUESTS  # virtual requests of chunked local attention
    latent: LatentStep = NO_LATENT_STEP  # decodes, prefills and context chunks of latent attention
    states: RecurrentStep = (
        NO_RECURRENT_STEP  # decodes and prefills of layers with recurrent states
    )
    rule: int = Rule.NOT_CHECKED  # the rule that the step breaks
    pcp: PCPStep = NO_PCP_STEP  # this rank's share with prefill context parallelism

    @property
    def shape(self) -> EngineShape:
        return self.batch.tables.shape

    # --- scalars
    @property
    def num_reqs(self) -> int:
        return self.batch.num_reqs

    @property
    def total_num_scheduled_tokens(self) -> int:
        return self.batch.total_num_scheduled_tokens

    @property
    def num_input_tokens(self) -> int:
        """The number of tokens after graph padding."""
        return self.padding.num_input_tokens

    @property
    def num_sampled_tokens(self) -> np.ndarray:
        """The rows of logits of each request, ``[num_reqs]``: its drafts and one after them."""
        return self.batch.num_draft_tokens[: self.num_reqs] + 1

    @property
    def max_num_sampled_tokens(self) -> int:
        return int(self.num_sampled_tokens.max())

    @property
    def nbytes(self) -> int:
        """The number of bytes that travel to the device: the arrays and the variable part."""
        return self.layout.nbytes(self.batch.num_targets, self.num_block_changes)

    # --- request level
    @property
    def num_drafts(self) -> int:
        """The number of draft tokens: rows of logits that are not the last of their request."""
        return self.num_logits - self.num_reqs

    @property
    def request_rows(self) -> np.ndarray:
        """The request row of each request in the tables, ``[num_reqs]``."""
        return self.batch.tables.request_rows[: self.num_reqs]

    @property
    def num_prefills(self) -> int:
        """The number of requests after the decodes, with latent attention or recurrent states.

        It is 0 in an engine that has neither.
        """
        return (self.latent if self.shape.latent else self.states).num_prefills

    def keeps_each_state(self, req: int) -> bool:
        """Return whether the recurrent state after each of a request's tokens is kept."""
        return self.shape.states.num_drafts > 0 and req < self.states.num_decodes

    @property
    def query_lens(self) -> np.ndarray:
        """The number of scheduled tokens of each request, ``[num_reqs]``."""
        return self.batch.num_scheduled_tokens

    @property
    def cu_num_tokens(self) -> np.ndarray:
        """The running sum of `query_lens`, ``[num_reqs]``."""
        return self.arrays.query_start_loc[1 : self.num_reqs + 1]

    # --- token level
    @property
    def req_indices(self) -> np.ndarray:
        """The request of each token, ``[total_num_scheduled_tokens]``."""
        return np.repeat(np.arange(self.num_reqs), self.query_lens)

    @property
    def query_pos(self) -> np.ndarray:
        """The index of each token among its request's scheduled tokens (the batched arange)."""
        return self.positions - self.num_computed_tokens[self.req_indices]

    @property
    def token_indices(self) -> np.ndarray:
        """The index of each token in a flattened token table with rows in the batch's order."""
        return self.req_indices * self.batch.tables.max_model_len + self.positions

    def max_num_blocks_per_req(self, group: int = 0) -> int:
        """Return the columns of the logical block table: ``ceil(max_model_len / block_size)``.

        Here a block's size is all positions for which it stands. vLLM's real rows are wider
        (aligned to 128 tokens); the documents have this width.
        """
        return -(-self.batch.tables.max_model_len // self.batch.tables.tokens_per_block(group))

    def block_table(self, group: int = 0) -> np.ndarray:
        """Return the physical block of each logical one, ``[num_reqs, max_num_blocks_per_req]``."""
        columns = self.max_num_blocks_per_req(group)
        return self.batch.tables.block_table(group)[self.request_rows, :columns]

    def local_requests(self, group: int) -> dict[str, np.ndarray]:
        """Return the virtual requests that a group with chunked local attention sees.

        They are those of the batch, without padding.

        Returns
        -------
        dict
            ``query_start_loc`` ``[local.num_reqs + 1]``, ``seq_lens`` and ``num_computed_tokens``
            ``[local.num_reqs]``, ``block_table`` ``[local.num_reqs, blocks_per_chunk]``.
        """
        groups, local = self.shape.local, self.local
        rows = self.arrays.chunk_local_table_rows[groups.groups.index(group), : local.num_reqs]
        device_tables = self.batch.tables.device_block_table_flat()
        chunks = device_tables.reshape(-1, groups.blocks_per_chunk)
        return {
            "query_start_loc": self.arrays.chunk_local_query_start_loc[: local.num_reqs + 1],
            "seq_lens": self.arrays.chunk_local_seq_lens[: local.num_reqs],
            "num_computed_tokens": self.arrays.chunk_local_num_computed_tokens[: local.num_reqs],
            "block_table": chunks[rows],
        }

    def block_table_indices(self, group: int = 0) -> np.ndarray:
        """Return the index of each token's block in the flattened logical block table.

        It is not ``token_indices // block_size``: rows of the two tables have different lengths
        whenever ``max_model_len`` is no multiple of the block size.
        """
        blocks = self.positions // self.batch.tables.tokens_per_block(group)
        return self.req_indices * self.max_num_blocks_per_req(group) + blocks

    def block_numbers(self, group: int = 0) -> np.ndarray:
        """Return the physical block of each token.

        In a step that went wrong, positions may be past its table. Such a token gets some block in
        place of an error, so that the step can still be shown.
        """
        table = self.block_table(group).reshape(-1)
        return table.take(self.block_table_indices(group), mode="clip")

    def block_offsets(self, group: int = 0) -> np.ndarray:
        """Return the offset of each token inside its block, on the rank that keeps the token."""
        positions = self.shape.dcp.local_position(self.positions)
        return positions % self.batch.tables.block_sizes[group]

    def owners(self) -> np.ndarray:
        """Return the rank that keeps each token; empty without decode context parallelism."""
        dcp = self.shape.dcp
        return dcp.owner(self.positions) if dcp else self.positions[:0]

    @property
    def num_rank_tokens(self) -> int:
        """The number of tokens that the model sees: with prefill context parallelism, those of this
        rank, padding included."""
        return self.shape.pcp.rank_tokens(self.num_input_tokens)

    @property
    def model_positions(self) -> np.ndarray:
        """The positions of the tokens that the model sees, without padding."""
        return self.pcp_positions if self.shape.pcp else self.positions

    def gathered_places(self) -> np.ndarray:
        """Return where each token is among those of all ranks (`vllm_npu_prep.prep.pcp`)."""
        return gathered_places(self.query_lens, self.shape.pcp.world_size, self.num_rank_tokens)

    def computing_ranks(self) -> np.ndarray:
        """Return the rank that computes each token; empty without prefill context parallelism."""
        if not self.shape.pcp:
            return self.positions[:0]
        return self.gathered_places() // self.num_rank_tokens


COUNTS: dict[Level, Callable[[PreparedStep], int]] = {
    Level.TOKEN: attrgetter("total_num_scheduled_tokens"),
    Level.REQUEST: attrgetter("num_reqs"),
    Level.LOGIT: attrgetter("num_logits"),
    Level.DRAFT: attrgetter("num_drafts"),
    Level.CHUNK: attrgetter("local.num_reqs"),
    Level.PREFILL: attrgetter("num_prefills"),
    Level.PIECE: attrgetter("latent.num_pieces"),
    Level.RANK_TOKEN: attrgetter("pcp.num_tokens"),
    Level.GATHERED: attrgetter("num_input_tokens"),
    Level.ROW: attrgetter("pcp.num_rows"),
    Level.SAMPLE: attrgetter("pcp.num_samples"),
}
"""The number of elements of each level that the batch has, without padding."""


def _of_batch(line: Array) -> property:
    """Make the property of a `PreparedStep` that returns an array without its padding.

    A ``__getattr__`` would be shorter. But each read would first fail and raise, which takes four
    to five times as long as this, several microseconds.
    """
    name, count, borders = line.name, COUNTS[line.level], int(line.has_borders)

    def of_batch(step: PreparedStep) -> np.ndarray:
        return getattr(step.arrays, name)[..., : count(step) + borders]

    return property(of_batch)


for _line in STEP_ARRAYS.values():
    setattr(PreparedStep, _line.name, _of_batch(_line))


def prepare_step(
    batch: StepBatch,
    padding: Padding,
    layout: StepLayout | None = None,
    arrays: StepArrays | None = None,
) -> PreparedStep:
    """Prepare one step: write all of its arrays, and decide its attention state.

    Parameters
    ----------
    batch
        The scheduled batch. `num_synced_blocks` and `num_device_blocks` of its tables are updated.
    padding
        The sizes that were decided for the batch.
    layout, arrays
        Where the step is written. By default it gets a fresh buffer of the padded size.

    Returns
    -------
    PreparedStep
        The step. Its arrays are `arrays`, padding included.

    Raises
    ------
    ValueError
        If the batch doesn't fit the layout or the tables.
    """
    tables, shape = batch.tables, batch.tables.shape
    if layout is None:
        layout = StepLayout(padding.num_input_tokens, padding.num_reqs_padded, shape)
    if arrays is None:
        arrays = layout.allocate(batch.num_targets, len(tables.block_table_flat))
    in_full_graph = padding.mode is GraphMode.FULL
    has_pcp = shape.pcp.world_size > 1  # then graphs see the rows of a rank
    max_query_len, max_seq_len, num_logits, flags, num_block_changes, rule = fill_step_at(
        tables.addresses,
        arrays.addresses,
        batch.check_limits,
        batch.num_scheduled_tokens,
        batch.num_draft_tokens,
        batch.previous_rows,
        batch.num_sampled_rows,
        batch.num_sampled_drafts,
        batch.total_num_scheduled_tokens,
        padding.decode_query_len,
        in_full_graph and not has_pcp,
    )
    if shape.mrope_dims:
        tables.mrope.fill(batch.num_reqs, arrays)
    if in_full_graph:
        attn_state = captured_state(padding.decode_query_len)
    elif has_pcp:  # ranks read K and V of each other from the cache
        attn_state = AttentionState.DecodeOnly
        if max_query_len > 1:
            attn_state = AttentionState.ChunkedPrefill
    else:
        attn_state = attention_state(flags, tables.chunked_prefill)
    # Attributes, because to ask whether an object is true calls a function of Python
    has_local, has_latent = shape.local.groups, shape.latent.max_model_len
    pcp = _share_of_rank(batch, padding, arrays) if has_pcp else NO_PCP_STEP
    return PreparedStep(
        batch,
        padding,
        layout,
        arrays,
        attn_state,
        max_query_len,
        max_seq_len,
        num_logits,
        num_block_changes,
        _local_requests(batch, padding, arrays) if has_local else NO_LOCAL_REQUESTS,
        _latent_step(batch, arrays, pcp) if has_latent else NO_LATENT_STEP,
        _state_step(batch, arrays) if shape.states.groups else NO_RECURRENT_STEP,
        rule,
        pcp,
    )


def _share_of_rank(batch: StepBatch, padding: Padding, arrays: StepArrays) -> PCPStep:
    """Write what this rank computes of the step, from arrays that are written already."""
    return PCPStep(
        *share_out_at(batch.tables.addresses, arrays.addresses, scheduled(batch, padding))
    )


def scheduled(batch: StepBatch, padding: Padding) -> ScheduledStep:
    return ScheduledStep(
        batch.num_scheduled_tokens,
        batch.num_draft_tokens,
        batch.previous_rows,
        batch.num_sampled_rows,
        batch.num_sampled_drafts,
        batch.total_num_scheduled_tokens,
        padding.decode_query_len,
        padding.mode is GraphMode.FULL,
    )


def _local_requests(batch: StepBatch, padding: Padding, arrays: StepArrays) -> LocalRequests:
    """Write the step's virtual requests from arrays that are written already."""
    return LocalRequests(
        *split_at_chunks_at(
            batch.tables.addresses,
            arrays.addresses,
            batch.num_reqs,
            batch.tables.shape.local.attention_chunk_size,
            padding.decode_query_len,
        )
    )


def _latent_step(batch: StepBatch, arrays: StepArrays, pcp: PCPStep) -> LatentStep:
    """Write the split of latent attention from arrays that are written already.

    With prefill context parallelism it is that of this rank's rows.
    """
    latent = batch.tables.shape.latent
    sizes = latent.decode_threshold, latent.workspace_tokens, latent.block_size
    if batch.tables.shape.pcp:
        return LatentStep(*plan_rank_contexts_at(arrays.addresses, pcp.num_rows, *sizes))
    return LatentStep(*plan_contexts_at(arrays.addresses, batch.num_reqs, *sizes))


def _state_step(batch: StepBatch, arrays: StepArrays) -> RecurrentStep:
    """Write where recurrent states are, from arrays that are written already."""
    states = batch.tables.shape.states
    if states.num_drafts and len(batch.num_accepted_tokens) < batch.num_reqs:
        raise ValueError("an engine with states and speculation counts accepted tokens")
    return RecurrentStep(
        *find_states_at(
            batch.tables.addresses,
            arrays.addresses,
            batch.num_reqs,
            states.decode_threshold,
            states.num_drafts,
            batch.num_draft_tokens,
            batch.num_accepted_tokens,
        )
    )


def warm_up(shape: EngineShape = PLAIN_SHAPE) -> PreparedStep:
    """Compile the compiled code or load it from its cache, so that no request waits for it.

    Code that only engines of some shapes need is compiled if `shape` needs it.

    Returns
    -------
    PreparedStep
        A small step, with which the caller can warm up other compiled code that reads steps.
    """
    shape = replace(
        shape,
        num_groups=1,
        local=replace(shape.local, blocks_per_chunk=1, groups=(0,) if shape.local else ()),
        states=replace(shape.states, groups=(0,) if shape.states else ()),
    )
    # No token of the step ends a block of states, and blocks are whole runs of one rank.
    block_size = (3 + shape.states.num_drafts) * shape.dcp.interleave_size
    one, table = np.ones(1, np.int32), np.zeros((1, 1), np.int32)
    tables = BatchTables(
        num_computed_tokens=one,
        num_prompt_tokens=one,
        num_tokens=one,
        token_ids=np.zeros((1, 2), np.int32),
        block_sizes=np.full(1, block_size, np.int32),
        shape=shape,
        mrope=MropeTables(shape.mrope_dims, 1),
        **device_has_all([table]),
    )
    batch = StepBatch(tables, one, np.zeros(1, np.int32), 1, num_accepted_tokens=one)
    step = prepare_step(batch, Padding(shape.pcp.world_size, 1))
    find_fault(step, np.zeros(2, np.int64))
    if shape.pcp:
        largest_share(one, shape.pcp.world_size)
        step.gathered_places()
    token_table = one.copy(), table.copy(), table > 0
    append_sampled_tokens(np.zeros(1, np.int64), table[0] > 0, *token_table)
    append_verified_tokens(table, table[0] > 0, 1, *token_table, one.copy(), np.zeros(2, np.int32))
    first = np.zeros(1, np.int64)
    enter_counts(first, one, *(one.copy() for _ in range(4)))
    place_samples(first, table[0] > 0, first.copy())
    count_accepted_tokens(
        table.astype(np.int64), table[0] > 0, one, one, table[0].repeat(2), table.repeat(4, 0)
    )
    take_back_drafts(first, one.copy(), first, 0, one, one, one)
    write_draft_tokens(np.arange(1), one - 1, table[0, :0], *token_table)
    return step
