"""Records: what a step was prepared from and what was prepared, one ``.npz`` for each step.

A file's arrays are of three kinds (``docs/guides/recording.md`` lists them all):

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
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Annotated, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from vllm_npu_prep.errors import PrepError
from vllm_npu_prep.inspect.contract import LOCAL_SCALARS, mask_plan, staged_arrays
from vllm_npu_prep.inspect.scenario import BlockSize, Count, Positive, Size, Text
from vllm_npu_prep.prep.arrays import NO_PREVIOUS_ROW, PADDING_ROWS
from vllm_npu_prep.prep.batch import PreparedStep, StepBatch
from vllm_npu_prep.prep.embeds import Placeholders, takes_embeds
from vllm_npu_prep.prep.layout import ALIGNMENT, StepLayout
from vllm_npu_prep.prep.local_attention import LocalGroups, LocalRequests
from vllm_npu_prep.prep.mask import MaskPlan
from vllm_npu_prep.prep.mrope import MropeTables
from vllm_npu_prep.prep.padding import GraphMode, Padding
from vllm_npu_prep.prep.state import AttentionState
from vllm_npu_prep.prep.tables import BatchTables
from vllm_npu_prep.wording import counted

FORMAT = 1
"""Version of the format; readers refuse any other."""


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class RecordGroup(_Strict):
    """Layers that see the step alike: a KV-cache group, or the part of one with its own window."""

    group: Annotated[int, Field(ge=0, le=255)]  # whose block table they use
    sliding_window: Positive | None = None
    attention_chunk_size: Positive | None = None
    causal: bool = True


class RecordSettings(_Strict):
    """What is no array: sizes of the engine's tables, of the step, and how it was padded.

    Attributes
    ----------
    step
        Its number: how many came before it since start-up.
    max_num_reqs, max_model_len, block_sizes, max_num_blocks
        Of the engine's tables; the latter two for each KV-cache group that has one.
    mask, mask_itemsize
        Form of masks; bytes of a cell of dense ones.
    groups
        Layers that see the step alike, in the engine's order.
    mode, num_input_tokens, num_reqs_padded, decode_query_len
        See `vllm_npu_prep.prep.padding.Padding`.
    kind
        How the step ran, of an eager one why (`vllm_npu_prep.graph.counts.StepCounts.kind`).
    max_logits, max_drafts, mrope_dims
        See `vllm_npu_prep.prep.layout.StepLayout`.
    num_sampled_rows, num_sampled_drafts
        See `vllm_npu_prep.prep.batch.StepBatch`.
    takes_embeds
        What was decided (`vllm_npu_prep.prep.embeds`).
    modalities
        Of each run of placeholders.
    """

    format: Literal[1] = 1
    step: Annotated[int, Field(ge=0, lt=1 << 62)]
    req_ids: Annotated[list[Text], Field(min_length=1, max_length=1 << 16)]
    max_num_reqs: Annotated[int, Field(ge=1, le=1 << 16)]
    max_model_len: Positive
    chunked_prefill: bool = True
    mask: Literal["dense", "compressed"]
    mask_itemsize: Literal[1, 2, 4]
    block_sizes: Annotated[list[BlockSize], Field(max_length=256)]
    max_num_blocks: Annotated[list[Positive], Field(max_length=256)]
    groups: Annotated[list[RecordGroup], Field(max_length=1024)]
    total_num_scheduled_tokens: Size
    mode: Literal["NONE", "PIECEWISE", "FULL"]
    kind: Text
    num_input_tokens: Size
    num_reqs_padded: Size
    decode_query_len: Count
    max_logits: Size
    max_drafts: Count
    mrope_dims: Annotated[int, Field(ge=0, le=4)]
    num_sampled_rows: Count
    num_sampled_drafts: Annotated[int, Field(ge=0, le=1 << 10)]
    takes_embeds: bool
    modalities: Annotated[list[Text], Field(max_length=1 << 20)]

    @property
    def num_reqs(self) -> int:
        """Requests of the step."""
        return len(self.req_ids)

    @property
    def local(self) -> LocalGroups | None:
        """Groups with chunked local attention."""
        chunked = {g.group: g.attention_chunk_size for g in self.groups if g.attention_chunk_size}
        if not chunked:
            return None
        group, chunk_size = next(iter(chunked.items()))
        return LocalGroups(chunk_size, chunk_size // self.block_sizes[group], tuple(chunked))

    @property
    def group_prefixes(self) -> list[str]:
        """What the names of each group's arrays begin with; the first has them without, too."""
        if len(self.groups) == 1 and not self.groups[0].attention_chunk_size:
            return [""]
        return [f"kv_cache_groups.{index}." for index in range(len(self.groups))]

    @property
    def layout(self) -> StepLayout:
        """Where the step's arrays lay."""
        return StepLayout(
            self.num_input_tokens,
            self.num_reqs_padded,
            len(self.block_sizes),
            self.max_logits,
            self.max_drafts,
            self.mrope_dims,
            self.local,
        )

    @property
    def padding(self) -> Padding:
        """Sizes that were decided."""
        return Padding(
            self.num_input_tokens,
            self.num_reqs_padded,
            self.decode_query_len,
            GraphMode(self.mode),
        )


@dataclass(frozen=True, slots=True)
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
    mrope_lengths: np.ndarray  # [R] int64, tokens of the prompt that have some; empty without
    mrope_position_deltas: np.ndarray  # [R] int64; empty without M-RoPE
    placeholders: np.ndarray  # [any, 3] int64: request, first position, position after the last
    rows_with_embeds: np.ndarray  # [any] int64: requests whose prompt came as embeddings

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, RecordBatch):
            return NotImplemented
        names = [item.name for item in fields(self)]
        return all(np.array_equal(getattr(self, n), getattr(other, n)) for n in names)

    __hash__ = None  # type: ignore[assignment]


WIDE = {
    "previous_rows",
    "mrope_positions",
    "mrope_lengths",
    "mrope_position_deltas",
    "placeholders",
    "rows_with_embeds",
}
"""Arrays of a `RecordBatch` that are int64; the others are int32."""


@dataclass(frozen=True)
class StepRecord:
    """One step: what it was prepared from, and what was prepared.

    Attributes
    ----------
    settings, batch
        What it was prepared from.
    prepared
        What was prepared: the arrays of the file by their names.
    """

    settings: RecordSettings
    batch: RecordBatch
    prepared: dict[str, np.ndarray]

    @property
    def number(self) -> int:
        """Of the step, since start-up."""
        return self.settings.step

    def to_bytes(self) -> bytes:
        """The file's content."""
        settings = np.frombuffer(self.settings.model_dump_json().encode(), np.uint8)
        arrays = {"settings": settings, **self.prepared}
        arrays |= {f"batch.{f.name}": getattr(self.batch, f.name) for f in fields(RecordBatch)}
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
            for name, array in arrays.items():
                member = io.BytesIO()
                np.lib.format.write_array(member, np.asanyarray(array), allow_pickle=False)
                archive.writestr(f"{name}.npy", member.getbuffer())
        return buffer.getvalue()

    # ----------------------------------------------------------------- to prepare it again

    def step_batch(self) -> tuple[StepBatch, Padding]:
        """The batch and its padding, on tables that hold what the step read, and zeros."""
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
            ),
            settings.padding,
        )

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
                f"{counted(settings.max_model_len, 'token')} are more than this machine has "
                "addresses for"
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
            # The device has all, and nothing to be cleared
            num_synced_blocks=num_blocks.copy(),
            num_device_blocks=np.zeros_like(num_blocks),
            chunked_prefill=settings.chunked_prefill,
            mrope=self._mrope_tables(),
            local=settings.local,
        )

    def _mrope_tables(self) -> MropeTables | None:
        settings, batch = self.settings, self.batch
        if not settings.mrope_dims:
            return None
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
        """Position of each token, ``[T]``, by the counts that the step was prepared from."""
        counts = self.batch.num_scheduled_tokens
        starts = np.cumsum(counts) - counts
        first = self.batch.num_computed_tokens - starts
        return np.arange(counts.sum()) + np.repeat(first, counts)

    # ----------------------------------------------------------------- to look at it

    def plans(self, step: PreparedStep) -> list[MaskPlan]:
        """Mask of each of the settings' groups in `step`."""
        return [mask_plan(step, self.settings, group) for group in self.settings.groups]

    def step(self) -> PreparedStep:
        """The step as it was prepared, right or wrong.

        Raises
        ------
        PrepError
            If its arrays are not those of its settings.
        """
        settings, layout = self.settings, self.settings.layout
        batch, padding = self.step_batch()
        batch.takes_embeds = settings.takes_embeds
        nbytes = layout.nbytes(batch.num_targets)
        arrays = layout.views(np.zeros(-(-nbytes // ALIGNMENT) * ALIGNMENT, np.uint8))
        for name, view in staged_arrays(arrays, settings).items():
            view[...] = self._array(name, view)
        targets = arrays.variable_int64[: batch.num_targets]
        if len(targets):
            targets[:] = self._array("sampled_token_targets", targets)
        local = None
        if settings.local is not None:
            most = layout.local_sizes[0], layout.num_input_tokens, settings.max_model_len
            sizes = zip(LOCAL_SCALARS, most)
            local = LocalRequests(*(self._scalar(f"local_requests.{n}", m) for n, m in sizes))
            num_chunks = len(batch.tables.block_table_flat) // settings.local.blocks_per_chunk
            rows = arrays.chunk_local_table_rows
            rows.clip(0, num_chunks - 1, out=rows)
        state = self._array("attn_state").tobytes().decode("ascii", "replace")
        if state not in AttentionState.__members__:
            raise PrepError(f"step {self.number}: attn_state {state!r} is none of the states")
        return PreparedStep(
            batch,
            padding,
            layout,
            arrays,
            AttentionState[state],
            self._scalar("max_query_len", settings.max_model_len),
            self._scalar("max_seq_len", settings.max_model_len),
            min(self._array("logits_indices").size, settings.max_logits),
            0,
            local,
        )

    def _array(self, name: str, like: np.ndarray | None = None) -> np.ndarray:
        found = self.prepared.get(name)
        if found is None:
            raise PrepError(f"step {self.number}: {name} is missing")
        if like is not None and (found.shape, found.dtype) != (like.shape, like.dtype):
            raise PrepError(
                f"step {self.number}: {name} is {found.dtype} {list(found.shape)}, its settings "
                f"say {like.dtype} {list(like.shape)}"
            )
        return found

    def _scalar(self, name: str, most: int) -> int:
        value = int(self._array(name, np.zeros((), np.int64)))
        if not 0 <= value <= most:
            raise PrepError(f"step {self.number}: {name} {value} is not between 0 and {most}")
        return value
