"""A step's batch as the scheduler left it, and the same step prepared for the device."""

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from vllm_npu_prep.prep.kernels import NO_PREVIOUS_ROW, fill_step
from vllm_npu_prep.prep.layout import StepArrays, StepLayout
from vllm_npu_prep.prep.padding import Padding
from vllm_npu_prep.prep.state import AttentionState, attention_state


@dataclass(frozen=True)
class StepBatch:
    """What `prepare_step` reads: views of the runner's tables, nothing copied."""

    num_computed_tokens: np.ndarray  # [num_reqs] int32
    num_scheduled_tokens: np.ndarray  # [num_reqs] int32
    num_draft_tokens: np.ndarray  # [num_reqs] int32
    num_prompt_tokens: np.ndarray  # [num_reqs] int32
    num_tokens: np.ndarray  # [num_reqs] int32, tokens known of each request, drafts excluded
    token_ids: np.ndarray  # [max_num_reqs, max_model_len] int32
    block_tables: tuple[np.ndarray, ...]  # each [max_num_reqs, max_num_blocks] int32
    block_sizes: np.ndarray  # [num_groups] int32, tokens
    chunked_prefill: bool = True
    # [num_reqs] int64: row of each request in the last step's sampled tokens when these are still
    # on the device (async scheduling), -1 for the others
    previous_rows: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))

    def __post_init__(self) -> None:
        if not self.previous_rows.size:
            rows = np.full(self.num_reqs, NO_PREVIOUS_ROW, np.int64)
            object.__setattr__(self, "previous_rows", rows)

    @property
    def num_reqs(self) -> int:
        """Requests of the step."""
        return self.num_scheduled_tokens.shape[0]

    @property
    def num_groups(self) -> int:
        """KV-cache groups."""
        return len(self.block_tables)

    @property
    def max_model_len(self) -> int:
        """Columns of the token table."""
        return self.token_ids.shape[1]

    @cached_property
    def total_num_scheduled_tokens(self) -> int:
        """Real tokens of the step."""
        return int(self.num_scheduled_tokens.sum())


@dataclass(frozen=True)
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
    num_sampled_tokens_on_device: int

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

    # --- token level
    @property
    def input_ids(self) -> np.ndarray:
        """Token ids, ``[total_num_scheduled_tokens]``."""
        return self.arrays.input_ids[: self.total_num_scheduled_tokens]

    @property
    def positions(self) -> np.ndarray:
        """Position of each token in its request, ``[total_num_scheduled_tokens]``."""
        return self.arrays.positions[: self.total_num_scheduled_tokens]

    @cached_property
    def req_indices(self) -> np.ndarray:
        """Request of each token, ``[total_num_scheduled_tokens]``."""
        return np.repeat(np.arange(self.num_reqs), self.query_lens)

    @cached_property
    def query_pos(self) -> np.ndarray:
        """Index of each token among its request's scheduled ones (the batched arange)."""
        return self.positions - self.num_computed_tokens[self.req_indices]

    @cached_property
    def token_indices(self) -> np.ndarray:
        """Index of each token in the flattened token table."""
        return self.req_indices * self.batch.max_model_len + self.positions

    def slot_mapping(self, group: int = 0) -> np.ndarray:
        """Slot that each token's K and V are written to, ``[total_num_scheduled_tokens]``."""
        return self.arrays.slot_mapping[group, : self.total_num_scheduled_tokens]

    def max_num_blocks_per_req(self, group: int = 0) -> int:
        """Columns of the logical block table: ``ceil(max_model_len / block_size)``.

        vLLM's real rows are wider (aligned to 128 tokens); readers want the documents' width.
        """
        return -(-self.batch.max_model_len // int(self.batch.block_sizes[group]))

    def block_table(self, group: int = 0) -> np.ndarray:
        """Physical block of each logical one, ``[num_reqs, max_num_blocks_per_req]``."""
        columns = self.max_num_blocks_per_req(group)
        return self.batch.block_tables[group][: self.num_reqs, :columns]

    def block_table_indices(self, group: int = 0) -> np.ndarray:
        """Index of each token's block in the flattened logical block table.

        Not ``token_indices // block_size``: rows of the two tables have different lengths whenever
        ``max_model_len`` is no multiple of the block size.
        """
        blocks = self.positions // self.batch.block_sizes[group]
        return self.req_indices * self.max_num_blocks_per_req(group) + blocks

    def block_numbers(self, group: int = 0) -> np.ndarray:
        """Physical block of each token."""
        return self.block_table(group).reshape(-1)[self.block_table_indices(group)]

    def block_offsets(self, group: int = 0) -> np.ndarray:
        """Place of each token inside its block."""
        return self.positions % self.batch.block_sizes[group]


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
        The scheduled batch.
    padding
        Sizes that were decided for it.
    layout, arrays
        Where to write. By default a fresh buffer of the padded size.

    Returns
    -------
    PreparedStep
        Every array written, padding included, and the attention state decided.
    """
    if layout is None:
        layout = StepLayout(padding.num_input_tokens, padding.num_reqs_padded, batch.num_groups)
    if arrays is None:
        arrays = layout.views(np.zeros(layout.nbytes, np.uint8))
    max_query_len, max_seq_len, num_logits, num_sampled = fill_step(
        batch.num_computed_tokens,
        batch.num_scheduled_tokens,
        batch.num_draft_tokens,
        batch.num_tokens,
        batch.token_ids,
        batch.block_tables,
        batch.block_sizes,
        batch.previous_rows,
        padding.decode_query_len,
        arrays.input_ids,
        arrays.positions,
        arrays.slot_mapping,
        arrays.query_start_loc,
        arrays.seq_lens,
        arrays.num_computed_tokens,
        arrays.discard_request_mask,
        arrays.sampled_token_indices,
        arrays.sampled_token_rows,
        arrays.logits_indices,
    )
    state = attention_state(
        batch.num_computed_tokens,
        batch.num_scheduled_tokens,
        batch.num_draft_tokens,
        batch.num_prompt_tokens,
        batch.chunked_prefill,
    )
    return PreparedStep(
        batch,
        padding,
        layout,
        arrays,
        state,
        max_query_len,
        max_seq_len,
        num_logits,
        num_sampled,
    )
