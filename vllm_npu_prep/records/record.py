"""Records: what a step was prepared from and what was prepared, one ``.npz`` for each step.

A file's arrays are of three kinds (``docs/reference/files.md`` lists them all):

==================  ===============================================================================
name                what
==================  ===============================================================================
``settings``        JSON: sizes, groups, padding (`RecordSettings`), the version of the format
``batch.*``         what the step was prepared from: counts, ids and blocks of its requests
any other           what was prepared, by the keys of the JSON contract, a key of a key joined by a
                    dot (``kv_cache_groups.1.slot_mapping``); arrays that the device got are there
                    with padding, too (``*_padded``)
==================  ===============================================================================

Neither vLLM nor torch is needed to read them.
"""

import io
import zipfile
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any

import numpy as np

from vllm_npu_prep.errors import PrepError
from vllm_npu_prep.prep.arrays import NO_PREVIOUS_ROW, PADDING_ROWS
from vllm_npu_prep.prep.batch import NO_COUNTS, PreparedStep, StepBatch, prepare_step
from vllm_npu_prep.prep.embeds import Placeholders, takes_embeds
from vllm_npu_prep.prep.mrope import MropeTables
from vllm_npu_prep.prep.padding import Padding
from vllm_npu_prep.prep.state import AttentionState
from vllm_npu_prep.prep.tables import BatchTables
from vllm_npu_prep.records.contract import SIZES, staged_arrays
from vllm_npu_prep.records.settings import RecordSettings
from vllm_npu_prep.wording import counted

FORMAT = 2
"""The version of the format; readers refuse any other.

In format 1, padding requests of graphs had a length of 0. Since then they have as many keys as
queries.
"""


@dataclass(frozen=True, slots=True, eq=False)
class RecordBatch:
    """What a step was prepared from, without the rest of the tables.

    ``R`` requests, ``T`` scheduled tokens, ``G`` groups, ``P`` dimensions of M-RoPE positions.
    """

    num_computed_tokens: np.ndarray  # [R] int32
    num_prompt_tokens: np.ndarray  # [R] int32
    num_tokens: np.ndarray  # [R] int32, tokens known
    num_scheduled_tokens: np.ndarray  # [R] int32
    num_draft_tokens: np.ndarray  # [R] int32
    previous_rows: np.ndarray  # [R] int64; empty unless the last step's samples are on the device
    token_ids: np.ndarray  # [T] int32, the token table where the step reads it; drafts as they are
    # [R] int32, the token after those of the step or the last known one; empty without speculation
    next_token_ids: np.ndarray
    num_blocks: np.ndarray  # [G, R] int32, entries that a request owns
    block_ids: np.ndarray  # [sum of num_blocks] int32, group by group
    mrope_positions: np.ndarray  # [P, T] int64, of prompts' tokens; 0 after them
    mrope_lengths: np.ndarray  # [R] int64, prompt tokens with M-RoPE positions; else empty
    mrope_position_deltas: np.ndarray  # [R] int64; empty without M-RoPE
    placeholders: np.ndarray  # [any, 3] int64: request, first position, position after the last
    rows_with_embeds: np.ndarray  # [any] int64: requests whose prompt came as embeddings
    # [R] int32, tokens of each request's last step that count; empty unless it has states and
    # speculates
    num_accepted_tokens: np.ndarray = field(default_factory=lambda: NO_COUNTS)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, RecordBatch):
            return NotImplemented
        names = [item.name for item in fields(self)]
        return all(np.array_equal(getattr(self, n), getattr(other, n)) for n in names)


WIDE = {
    "previous_rows",
    "mrope_positions",
    "mrope_lengths",
    "mrope_position_deltas",
    "placeholders",
    "rows_with_embeds",
}
"""The arrays of a `RecordBatch` that are int64; the others are int32."""


@dataclass(frozen=True)
class StepRecord:
    """One step: what it was prepared from, and what was prepared."""

    settings: RecordSettings
    batch: RecordBatch
    # The arrays of the file by their names; none for a scenario, prepared when it is looked at
    prepared: dict[str, np.ndarray] = field(default_factory=dict)

    @property
    def number(self) -> int:
        return self.settings.step

    @property
    def attn_state(self) -> str:
        """The recorded name of an `AttentionState`, which may be none in a file that was edited."""
        return self._array("attn_state").tobytes().decode("ascii", "replace")

    def to_bytes(self) -> bytes:
        unused = {"runner"} if self.settings.runner is None else set()
        settings = self.settings.model_dump_json(exclude=unused).encode()
        arrays = {"settings": np.frombuffer(settings, np.uint8), **self.prepared}
        arrays |= {f"batch.{f.name}": getattr(self.batch, f.name) for f in fields(RecordBatch)}
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
            for name, array in arrays.items():
                member = io.BytesIO()
                np.lib.format.write_array(member, np.asanyarray(array), allow_pickle=False)
                archive.writestr(f"{name}.npy", member.getbuffer())
        return buffer.getvalue()

    # ----------------------------------------------------------------- preparing it again

    def step_batch(self) -> tuple[StepBatch, Padding]:
        """Return the batch and its padding, on tables that hold what the step read, and zeros."""
        settings, batch = self.settings, self.batch
        num_reqs = settings.num_reqs
        tables = self._tables()
        rows = batch.rows_with_embeds.tolist()
        placeholders = Placeholders(*batch.placeholders.T)
        previous_rows = np.full(num_reqs, NO_PREVIOUS_ROW, np.int64)
        if settings.num_sampled_rows:
            previous_rows = batch.previous_rows
        return (
            StepBatch(
                tables,
                batch.num_scheduled_tokens,
                batch.num_draft_tokens,
                settings.total_num_scheduled_tokens,
                previous_rows,
                settings.num_sampled_rows,
                settings.num_sampled_drafts,
                takes_embeds(tables, batch.num_scheduled_tokens, rows, placeholders),
                num_accepted_tokens=batch.num_accepted_tokens,
            ),
            settings.padding,
        )

    def prepare(self) -> PreparedStep:
        """Prepare the step, whatever was recorded of it.

        Raises
        ------
        PrepError
            If what it is prepared from contradicts itself: the file was edited.
        """
        batch, padding = self.step_batch()
        layout = self.settings.layout
        try:
            return prepare_step(batch, padding, layout, layout.allocate(batch.num_targets))
        except ValueError as error:
            raise PrepError(f"step {self.number} can't be prepared: {error}") from None

    def _tables(self) -> BatchTables:
        settings, batch = self.settings, self.batch
        num_rows = settings.max_num_reqs

        def column(values: np.ndarray) -> np.ndarray:
            out = np.zeros(num_rows, np.int32)
            out[: len(values)] = values
            return out

        try:
            token_ids = np.zeros((num_rows, settings.max_model_len), np.int32)
            widths = np.array(settings.max_num_blocks, np.int32)
            entries = np.zeros(int((num_rows + PADDING_ROWS) * widths.sum()), np.int32)
        except MemoryError:
            raise PrepError(
                f"step {settings.step}: tables of {counted(num_rows, 'request')} of "
                f"{counted(settings.max_model_len, 'token')} do not fit into this machine's "
                "address space"
            ) from None
        reqs = np.arange(settings.num_reqs)
        rows = np.repeat(reqs, batch.num_scheduled_tokens)
        token_ids[rows, self.scheduled_positions] = batch.token_ids
        if len(batch.next_token_ids):
            seq_lens = batch.num_computed_tokens + batch.num_scheduled_tokens
            token_ids[reqs, np.minimum(seq_lens, batch.num_tokens - 1)] = batch.next_token_ids
        first, taken = 0, 0
        for width, owned in zip(widths.tolist(), batch.num_blocks):
            table = entries[first : first + num_rows * width].reshape(num_rows, width)
            count = int(owned.sum())
            ids = batch.block_ids[taken : taken + count]
            table[: len(owned)][np.arange(width) < owned[:, None]] = ids
            first, taken = first + (num_rows + PADDING_ROWS) * width, taken + count
        num_blocks = np.zeros((len(widths), num_rows), np.int32)
        num_blocks[:, : settings.num_reqs] = batch.num_blocks
        return BatchTables(
            num_computed_tokens=column(batch.num_computed_tokens),
            num_prompt_tokens=column(batch.num_prompt_tokens),
            num_tokens=column(batch.num_tokens),
            token_ids=token_ids,
            block_table_flat=entries,
            max_num_blocks=widths,
            block_sizes=np.array(settings.block_sizes, np.int32),
            num_blocks=num_blocks,
            # The device has every entry, and none has to be cleared
            num_synced_blocks=num_blocks.copy(),
            num_device_blocks=np.zeros_like(num_blocks),
            shape=settings.shape,
            chunked_prefill=settings.chunked_prefill,
            mrope=self._mrope_tables(),
        )

    def _mrope_tables(self) -> MropeTables:
        settings, batch = self.settings, self.batch
        rows: list[tuple[np.ndarray | None, int]] = []
        start = 0
        for req, length in enumerate(batch.mrope_lengths.tolist()):
            first, scheduled = batch.num_computed_tokens[req], batch.num_scheduled_tokens[req]
            prompt = None
            if length:
                prompt = np.zeros((settings.mrope_dims, length), np.int64)
                seen = max(0, min(length, int(first + scheduled)) - int(first))
                prompt[:, first : first + seen] = batch.mrope_positions[:, start : start + seen]
            rows.append((prompt, int(batch.mrope_position_deltas[req])))
            start += int(scheduled)
        tables = MropeTables(settings.mrope_dims, settings.max_num_reqs)
        tables.set_rows(rows)
        return tables

    @cached_property
    def scheduled_positions(self) -> np.ndarray:
        """The position of each token, ``[T]``, by the counts that the step was prepared from."""
        counts = self.batch.num_scheduled_tokens
        starts = np.cumsum(counts) - counts
        first = self.batch.num_computed_tokens - starts
        return np.arange(counts.sum()) + np.repeat(first, counts)

    # ----------------------------------------------------------------- looking at it

    def step(self) -> PreparedStep:
        """Return the step as it was prepared, right or wrong; a scenario's is prepared now.

        Raises
        ------
        PrepError
            If its arrays are not those of its settings.
        """
        if not self.prepared:
            return self.prepare()
        settings, layout = self.settings, self.settings.layout
        batch, padding = self.step_batch()
        batch.takes_embeds = settings.takes_embeds
        arrays = layout.allocate(batch.num_targets)
        for name, view in staged_arrays(arrays, settings).items():
            view[...] = self._array(name, view)
        targets = arrays.variable_int64[: batch.num_targets]
        if len(targets):
            targets[:] = self._array("sampled_token_targets", targets)
        shape, num_tokens = layout.shape, layout.num_input_tokens
        num_reqs, room = settings.num_reqs, len(arrays.context_piece_reqs)
        num_local = len(arrays.chunk_local_seq_lens)
        local = self._sizes("local_requests", num_local, num_tokens, settings.max_model_len)
        latent = self._sizes("latent", num_reqs, num_tokens, num_reqs, room, room)
        states = self._sizes("states", num_reqs, num_tokens, num_reqs)
        if shape.local:
            num_chunks = len(batch.tables.block_table_flat) // shape.local.blocks_per_chunk
            rows = arrays.chunk_local_table_rows
            rows.clip(0, num_chunks - 1, out=rows)
        state = self.attn_state
        if state not in AttentionState.__members__:
            raise PrepError(f"step {self.number}: attn_state {state!r} is not an attention state")
        return PreparedStep(
            batch,
            padding,
            layout,
            arrays,
            AttentionState[state],
            self._scalar("max_query_len", settings.max_model_len),
            self._scalar("max_seq_len", settings.max_model_len),
            min(self._array("logits_indices").size, layout.max_logits),
            0,
            local,
            latent,
            states,
        )

    def _array(self, name: str, like: np.ndarray | None = None) -> np.ndarray:
        found = self.prepared.get(name)
        if found is None:
            raise PrepError(f"step {self.number}: {name} is missing")
        if like is not None and (found.shape, found.dtype) != (like.shape, like.dtype):
            raise PrepError(
                f"step {self.number}: {name} is {found.dtype} {list(found.shape)}, but its "
                f"settings say {like.dtype} {list(like.shape)}"
            )
        return found

    def _sizes(self, prefix: str, *most: int) -> Any:
        """Return the sizes of `SIZES` of that name, which are 0 in other engines' records.

        `most` has the limit of each.
        """
        part, kind = SIZES[prefix]
        if not getattr(self.settings.shape, part):
            return kind()
        names = (f"{prefix}.{item.name}" for item in fields(kind))
        return kind(*map(self._scalar, names, most))

    def _scalar(self, name: str, most: int) -> int:
        value = int(self._array(name, np.zeros((), np.int64)))
        if not 0 <= value <= most:
            raise PrepError(f"step {self.number}: {name} {value} is not between 0 and {most}")
        return value
