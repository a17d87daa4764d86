"""A step's batch as the scheduler left it, and the same step prepared for the device."""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any

import numpy as np

from vllm_npu_prep.prep.checks import find_fault
from vllm_npu_prep.prep.kernels import PADDING_ROWS, book_tokens, fill_step_at
from vllm_npu_prep.prep.layout import (
    ALIGNMENT,
    StepArrays,
    StepLayout,
    step_layout,
    targets_per_row,
)
from vllm_npu_prep.prep.local_attention import LocalGroups, LocalRequests, split_at_chunks
from vllm_npu_prep.prep.mrope import MropeTables
from vllm_npu_prep.prep.padding import GraphMode, Padding
from vllm_npu_prep.prep.state import AttentionState, attention_state, captured_state


@dataclass(frozen=True)
class BatchTables:
    """The runner's tables, which stay from step to step: views, nothing copied.

    The fused pass reads and writes them by address, so they are neither replaced nor resized.

    Rows belong to requests in the order of the batch; rows behind the last request hold anything.
    ``M`` is ``max_num_reqs``, ``G`` the number of KV-cache groups.
    """

    num_computed_tokens: np.ndarray  # [M] int32
    num_prompt_tokens: np.ndarray  # [M] int32
    num_tokens: np.ndarray  # [M] int32, tokens known of each request, drafts excluded
    token_ids: np.ndarray  # [M, max_model_len] int32
    # [sum of (M + PADDING_ROWS) * max_num_blocks] int32, the groups' tables in turn
    block_entries: np.ndarray
    max_num_blocks: np.ndarray  # [G] int32, width of each group's table
    block_sizes: np.ndarray  # [G] int32, tokens
    num_blocks: np.ndarray  # [G, M] int32, entries that a request owns
    # What the device has of the block tables: rows that are replaced, and `prepare_step`, keep it
    # up to date.
    num_known_blocks: np.ndarray  # [G, M] int32, leading entries that are the same on the device
    # [G, M] int32, leading entries that on the device may be other than the null block
    num_device_blocks: np.ndarray
    chunked_prefill: bool = True
    mrope: MropeTables | None = None  # of a model with M-RoPE
    local: LocalGroups | None = None  # groups with chunked local attention

    def __post_init__(self) -> None:
        for item in fields(self):
            array = getattr(self, item.name)
            if isinstance(array, np.ndarray) and (
                array.dtype != np.int32 or not array.flags.c_contiguous
            ):
                raise TypeError(f"{item.name} is {array.dtype}, not contiguous int32")
        if self.local is not None and (self.max_num_blocks % self.local.blocks_per_chunk).any():
            raise ValueError("rows of block tables are not whole chunks")

    @property
    def num_groups(self) -> int:
        """KV-cache groups."""
        return len(self.block_sizes)

    @property
    def max_model_len(self) -> int:
        """Columns of the token table."""
        return self.token_ids.shape[1]

    def block_table(self, group: int) -> np.ndarray:
        """Block table of a group, int32 ``[M, max_num_blocks]``."""
        sizes = (len(self.token_ids) + PADDING_ROWS) * self.max_num_blocks
        table = np.split(self.block_entries, np.cumsum(sizes)[:-1])[group]
        return table.reshape(-1, self.max_num_blocks[group])[: len(self.token_ids)]

    @cached_property
    def local_rows(self) -> tuple[np.ndarray, np.ndarray]:
        """Where the tables of local groups begin, and the length of their rows, in chunks.

        Returns
        -------
        first_table_rows, chunks_per_req
            int32 ``[num_local_groups]`` each.
        """
        assert self.local is not None
        groups = list(self.local.groups)
        chunks = self.max_num_blocks // self.local.blocks_per_chunk
        ends = np.cumsum(chunks * (len(self.token_ids) + PADDING_ROWS), dtype=np.int32)
        return np.append(np.int32(0), ends)[groups], chunks[groups]

    @cached_property
    def addresses(self) -> np.ndarray:
        """Sizes and addresses for `vllm_npu_prep.prep.kernels.fill_step_at`, int64."""
        sizes = (*self.token_ids.shape, self.num_groups, len(self.block_entries))
        arrays = (
            self.num_computed_tokens,
            self.num_prompt_tokens,
            self.num_tokens,
            self.token_ids,
            self.block_entries,
            self.max_num_blocks,
            self.block_sizes,
            self.num_blocks,
            self.num_known_blocks,
            self.num_device_blocks,
        )
        return np.array([*sizes, *(array.ctypes.data for array in arrays)], np.int64)


def device_has_all(block_tables: Sequence[np.ndarray]) -> dict[str, Any]:
    """The block tables of `BatchTables` for a step of which nothing is sent.

    Parameters
    ----------
    block_tables
        One int32 ``[M, max_num_blocks]`` for each group.
    """
    max_num_reqs = len(block_tables[0])
    nothing = np.zeros((len(block_tables), max_num_reqs), np.int32)
    return {
        "block_entries": np.concatenate(
            [np.pad(table, ((0, PADDING_ROWS), (0, 0))).reshape(-1) for table in block_tables]
        ),
        "max_num_blocks": np.array([table.shape[1] for table in block_tables], np.int32),
        "num_blocks": nothing,
        "num_known_blocks": nothing.copy(),
        "num_device_blocks": nothing.copy(),
    }


NO_PREVIOUS_ROWS = np.empty(0, np.int64)


@dataclass(slots=True)
class StepBatch:
    """What `prepare_step` reads of one step."""

    tables: BatchTables
    num_scheduled_tokens: np.ndarray  # [num_reqs] int32
    num_draft_tokens: np.ndarray  # [num_reqs or more] int32
    total_num_scheduled_tokens: int
    # [num_reqs or more] int64: row of each request in the last step's samples while these are still
    # on the device (async scheduling), -1 for the others; not read without `num_sampled_rows`
    previous_rows: np.ndarray = field(default_factory=lambda: NO_PREVIOUS_ROWS)
    num_sampled_rows: int = 0  # rows of the last step's samples, 0 when they are not on the device
    num_sampled_drafts: int = 0  # drafts behind each of these
    takes_embeds: bool = False  # the model gets embeddings (`vllm_npu_prep.prep.embeds`)

    @property
    def num_reqs(self) -> int:
        """Requests of the step."""
        return self.num_scheduled_tokens.shape[0]

    @property
    def num_targets(self) -> int:
        """Places that the last step's samples go to, wanted or not."""
        return self.num_sampled_rows * targets_per_row(self.num_sampled_drafts)


@dataclass(slots=True)
class PreparedStep:
    """A prepared step: every variable of the reference documents by its name.

    The arrays that a device needs are views of one buffer; what only a reader needs
    (``req_indices`` and the like) is computed when asked for. Request-level and token-level
    properties cover the real batch; `arrays` holds the same with graph padding.
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
    local: LocalRequests | None = None  # virtual requests of chunked local attention

    # --- scalars
    @property
    def num_reqs(self) -> int:
        """Requests of the step, padding excluded."""
        return self.batch.num_reqs

    @property
    def total_num_scheduled_tokens(self) -> int:
        """Tokens of the step, padding excluded."""
        return self.batch.total_num_scheduled_tokens

    @property
    def num_input_tokens(self) -> int:
        """Tokens of the step after graph padding."""
        return self.padding.num_input_tokens

    @property
    def num_sampled_tokens(self) -> np.ndarray:
        """Rows of logits of each request, ``[num_reqs]``: its drafts and the token behind them."""
        return self.batch.num_draft_tokens[: self.num_reqs] + 1

    @property
    def max_num_sampled_tokens(self) -> int:
        """Most rows of logits of one request."""
        return int(self.num_sampled_tokens.max())

    @property
    def nbytes(self) -> int:
        """Bytes that travel to the device."""
        return self.layout.nbytes(self.batch.num_targets, self.num_block_changes)

    # --- request level
    @property
    def query_lens(self) -> np.ndarray:
        """Scheduled tokens of each request, ``[num_reqs]``."""
        return self.batch.num_scheduled_tokens

    @property
    def cu_num_tokens(self) -> np.ndarray:
        """Running sum of `query_lens`, ``[num_reqs]``."""
        return self.arrays.query_start_loc[1 : self.num_reqs + 1]

    @property
    def query_start_loc(self) -> np.ndarray:
        """First token of each request and the end, ``[num_reqs + 1]``."""
        return self.arrays.query_start_loc[: self.num_reqs + 1]

    @property
    def seq_lens(self) -> np.ndarray:
        """Computed and scheduled tokens of each request, ``[num_reqs]``."""
        return self.arrays.seq_lens[: self.num_reqs]

    @property
    def num_computed_tokens(self) -> np.ndarray:
        """Tokens already in the KV cache, ``[num_reqs]``."""
        return self.arrays.num_computed_tokens[: self.num_reqs]

    @property
    def logits_indices(self) -> np.ndarray:
        """Tokens whose logits are wanted, ``[num_logits]``: the last of each request; with drafts,
        the last ``num_draft_tokens + 1``."""
        return self.arrays.logits_indices[: self.num_logits]

    @property
    def num_drafts(self) -> int:
        """Draft tokens of the step: the logits that are not some request's last."""
        return self.num_logits - self.num_reqs

    @property
    def target_logits_indices(self) -> np.ndarray:
        """Rows of logits that verify a draft, ``[num_drafts]``."""
        return self.arrays.target_logits_indices[: self.num_drafts]

    @property
    def bonus_logits_indices(self) -> np.ndarray:
        """Row of logits behind the last draft of each request, ``[num_reqs]``."""
        return self.arrays.bonus_logits_indices[: self.num_reqs]

    @property
    def cu_num_draft_tokens(self) -> np.ndarray:
        """Running sum of the requests' drafts, ``[num_reqs]``."""
        return self.arrays.cu_num_draft_tokens[: self.num_reqs]

    @property
    def cu_num_sampled_tokens(self) -> np.ndarray:
        """Running sum of `num_sampled_tokens`, ``[num_reqs]``."""
        return self.arrays.cu_num_sampled_tokens[: self.num_reqs]

    @property
    def backup_next_token_ids(self) -> np.ndarray:
        """What drafters go on from where nothing is sampled, ``[num_reqs]``: the token behind a
        chunk of a prompt, else the last known one."""
        return self.arrays.backup_next_token_ids[: self.num_reqs]

    @property
    def draft_token_ids(self) -> np.ndarray:
        """Drafts that the step verifies, ``[num_drafts]``."""
        return self.arrays.draft_token_ids[: self.num_drafts]

    # --- token level
    @property
    def input_ids(self) -> np.ndarray:
        """Token ids, ``[total_num_scheduled_tokens]``."""
        return self.arrays.input_ids[: self.total_num_scheduled_tokens]

    @property
    def positions(self) -> np.ndarray:
        """Position of each token in its request, ``[total_num_scheduled_tokens]``."""
        return self.arrays.positions[: self.total_num_scheduled_tokens]

    @property
    def mrope_positions(self) -> np.ndarray:
        """M-RoPE position of each token, ``[mrope_dims, total_num_scheduled_tokens]``."""
        return self.arrays.mrope_positions[:, : self.total_num_scheduled_tokens]

    @property
    def req_indices(self) -> np.ndarray:
        """Request of each token, ``[total_num_scheduled_tokens]``."""
        return np.repeat(np.arange(self.num_reqs), self.query_lens)

    @property
    def query_pos(self) -> np.ndarray:
        """Index of each token among its request's scheduled ones (the batched arange)."""
        return self.positions - self.num_computed_tokens[self.req_indices]

    @property
    def token_indices(self) -> np.ndarray:
        """Index of each token in the flattened token table."""
        return self.req_indices * self.batch.tables.max_model_len + self.positions

    def slot_mapping(self, group: int = 0) -> np.ndarray:
        """Slot that each token's K and V are written to, ``[total_num_scheduled_tokens]``."""
        return self.arrays.slot_mapping[group, : self.total_num_scheduled_tokens]

    def max_num_blocks_per_req(self, group: int = 0) -> int:
        """Columns of the logical block table: ``ceil(max_model_len / block_size)``.

        vLLM's real rows are wider (aligned to 128 tokens); readers want the documents' width.
        """
        return -(-self.batch.tables.max_model_len // int(self.batch.tables.block_sizes[group]))

    def block_table(self, group: int = 0) -> np.ndarray:
        """Physical block of each logical one, ``[num_reqs, max_num_blocks_per_req]``."""
        columns = self.max_num_blocks_per_req(group)
        return self.batch.tables.block_table(group)[: self.num_reqs, :columns]

    def local_requests(self, group: int) -> dict[str, np.ndarray]:
        """Virtual requests that a group with chunked local attention sees, padding excluded.

        Returns
        -------
        dict
            ``query_start_loc`` ``[num_local_reqs + 1]``, ``seq_lens`` and ``num_computed_tokens``
            ``[num_local_reqs]``, ``block_table`` ``[num_local_reqs, blocks_per_chunk]``.
        """
        tables, local = self.batch.tables, self.local
        assert tables.local is not None and local is not None
        rows = self.arrays.local_table_rows[tables.local.groups.index(group), : local.num_reqs]
        chunks = tables.block_entries.reshape(-1, tables.local.blocks_per_chunk)
        return {
            "query_start_loc": self.arrays.local_query_start_loc[: local.num_reqs + 1],
            "seq_lens": self.arrays.local_seq_lens[: local.num_reqs],
            "num_computed_tokens": self.arrays.local_num_computed_tokens[: local.num_reqs],
            "block_table": chunks[rows],
        }

    def block_table_indices(self, group: int = 0) -> np.ndarray:
        """Index of each token's block in the flattened logical block table.

        Not ``token_indices // block_size``: rows of the two tables have different lengths whenever
        ``max_model_len`` is no multiple of the block size.
        """
        blocks = self.positions // self.batch.tables.block_sizes[group]
        return self.req_indices * self.max_num_blocks_per_req(group) + blocks

    def block_numbers(self, group: int = 0) -> np.ndarray:
        """Physical block of each token.

        Of a step that went wrong, positions may be past its table: readers get some block then.
        """
        table = self.block_table(group).reshape(-1)
        return table.take(self.block_table_indices(group), mode="clip")

    def block_offsets(self, group: int = 0) -> np.ndarray:
        """Place of each token inside its block."""
        return self.positions % self.batch.tables.block_sizes[group]


def prepare_step(
    batch: StepBatch,
    padding: Padding,
    layout: StepLayout | None = None,
    arrays: StepArrays | None = None,
) -> PreparedStep:
    """Prepare one step.

    Parameters
    ----------
    batch
        The scheduled batch. What its tables say of the device is brought up to date.
    padding
        Sizes that were decided for it.
    layout, arrays
        Where to write. By default a fresh buffer of the padded size.

    Returns
    -------
    PreparedStep
        Every array written, padding included, and the attention state decided.

    Raises
    ------
    ValueError
        If the batch doesn't fit the layout or the tables.
    """
    tables = batch.tables
    if layout is None:
        layout = step_layout(
            padding.num_input_tokens,
            padding.num_reqs_padded,
            tables.num_groups,
            1 + int(batch.num_draft_tokens.max(initial=0)),
            0 if tables.mrope is None else tables.mrope.num_dims,
            tables.local,
        )
    if arrays is None:
        nbytes = layout.nbytes(batch.num_targets, len(tables.block_entries))
        arrays = layout.views(np.zeros(-(-nbytes // ALIGNMENT) * ALIGNMENT, np.uint8))
    max_query_len, max_seq_len, num_logits, facts, num_block_changes = fill_step_at(
        tables.addresses,
        arrays.addresses,
        batch.num_scheduled_tokens,
        batch.num_draft_tokens,
        batch.previous_rows,
        batch.num_sampled_rows,
        batch.num_sampled_drafts,
        padding.decode_query_len,
    )
    if tables.mrope is not None:
        tables.mrope.fill(batch.num_reqs, arrays)
    if padding.mode is GraphMode.FULL:
        attn_state = captured_state(padding.decode_query_len)
    else:
        attn_state = attention_state(facts, tables.chunked_prefill)
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
        _local_requests(batch, padding, arrays) if tables.local is not None else None,
    )


def _local_requests(batch: StepBatch, padding: Padding, arrays: StepArrays) -> LocalRequests:
    """Write the step's virtual requests, which follow from what is written already."""
    tables = batch.tables
    assert tables.local is not None
    sizes = split_at_chunks(
        batch.num_reqs,
        padding.num_input_tokens,
        padding.decode_query_len,
        tables.local.attention_chunk_size,
        arrays.query_start_loc,
        arrays.seq_lens,
        arrays.num_computed_tokens,
        *tables.local_rows,
        len(tables.token_ids),
        arrays.local_query_start_loc,
        arrays.local_seq_lens,
        arrays.local_num_computed_tokens,
        arrays.local_table_rows,
    )
    return LocalRequests(*sizes)


def warm_up(mrope_dims: int = 0, local: LocalGroups | None = None) -> PreparedStep:
    """Compile or load the compiled code, for the types that runners use.

    Parameters
    ----------
    mrope_dims
        Dimensions of the model's M-RoPE positions.
    local
        The engine's groups with chunked local attention.

    Returns
    -------
    PreparedStep
        A small one, for what else has compiled code that reads steps.
    """
    if local is not None:
        local = LocalGroups(local.attention_chunk_size, 1, (0,))
    one, table = np.ones(1, np.int32), np.zeros((1, 1), np.int32)
    tables = BatchTables(
        num_computed_tokens=one,
        num_prompt_tokens=one,
        num_tokens=one,
        token_ids=np.zeros((1, 2), np.int32),
        block_sizes=np.full(1, 2, np.int32),
        mrope=MropeTables(mrope_dims, 1) if mrope_dims else None,
        local=local,
        **device_has_all([table]),
    )
    step = prepare_step(StepBatch(tables, one, np.zeros(1, np.int32), 1), Padding(1, 1))
    find_fault(step, np.zeros(2, np.int64))
    book_tokens(np.zeros(1, np.int64), table[0] > 0, one.copy(), table.copy(), table > 0)
    return step
