"""Records: what a step was prepared from and what was prepared, one ``.npz`` for each step.

A file's arrays are of three kinds (``docs/recording.md`` lists them all):

==================  ===============================================================================
name                what
==================  ===============================================================================
``settings``        JSON: sizes, groups, padding (`RecordSettings`), the version of the format
``batch.*``         what the step was prepared from: counts, ids and blocks of its requests
any other           what was prepared, by the keys of the JSON contract, a key of a key joined by a
                    dot (``kv_cache_groups.1.slot_mapping``); arrays that the device got are there
                    with padding, too (``*_padded``)
==================  ===============================================================================

Neither vLLM nor torch is needed to read them, and nothing in a file is taken on trust: sizes are
checked before memory is asked for, and values before compiled code sees them.
"""

import io
import json
import math
import os
import re
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import numpy as np
from numba import carray
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from vllm_npu_prep.errors import PrepError
from vllm_npu_prep.inspect.scenario import BlockSize, Count, Positive, Size, Text
from vllm_npu_prep.prep.batch import BatchTables, PreparedStep, StepBatch
from vllm_npu_prep.prep.embeds import NO_PLACEHOLDERS, Placeholders, takes_embeds
from vllm_npu_prep.prep.kernels import NO_PREVIOUS_ROW, PADDING_ROWS, compiled, pointer
from vllm_npu_prep.prep.layout import ALIGNMENT, StepArrays, StepLayout, targets_per_row
from vllm_npu_prep.prep.local_attention import LocalGroups, LocalRequests
from vllm_npu_prep.prep.mask import MaskForm, MaskKind, MaskPlan, build_mask, plan_mask
from vllm_npu_prep.prep.mrope import MropeTables
from vllm_npu_prep.prep.padding import GraphMode, Padding
from vllm_npu_prep.prep.state import AttentionState

FORMAT = 1
"""Version of the format; readers refuse any other."""

MAX_RECORD_BYTES = 1 << 28
"""Most bytes of a record's arrays: a step of 8192 tokens and 256 rows of blocks has 10 MB."""

MAX_TOKEN_CELLS = 1 << 30
MAX_BLOCK_CELLS = 1 << 25
"""Most cells of the tables that a record is prepared on. They are zeros nobody touches, but for the
step's own, and take address space, not memory."""

FULL_MASK_CELLS = 4096
"""Masks up to this many cells are kept cell by cell, as in the JSON contract."""

GROUP_LEVEL = (
    "block_table",
    "block_table_indices",
    "block_numbers",
    "block_offsets",
    "slot_mapping",
)
REQUEST_LEVEL = (
    "query_lens",
    "cu_num_tokens",
    "query_start_loc",
    "seq_lens",
    "num_computed_tokens",
    "logits_indices",
)
TOKEN_LEVEL = ("req_indices", "query_pos", "positions", "token_indices", "input_ids")
SCALARS = (
    "total_num_scheduled_tokens",
    "num_input_tokens",
    "num_reqs",
    "max_query_len",
    "max_seq_len",
)
LOCAL_SCALARS = ("num_reqs", "max_query_len", "max_seq_len")

ARRAY_HEADER = re.compile(
    rb"\x93NUMPY\x01\x00..\{'descr': '(<i4|<i8|\|b1|\|u1|\|S[1-9]\d?)', "
    rb"'fortran_order': False, 'shape': \(([\d, ]{0,100})\), \} *\n",
    re.DOTALL,
)
"""How numpy begins the arrays that records hold; anything else is refused unread."""


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
    groups
        Layers that see the step alike, in the engine's order.
    mode, num_input_tokens, num_reqs_padded, decode_query_len
        See `vllm_npu_prep.prep.padding.Padding`.
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
    block_sizes: Annotated[list[BlockSize], Field(max_length=256)]
    max_num_blocks: Annotated[list[Positive], Field(max_length=256)]
    groups: Annotated[list[RecordGroup], Field(max_length=1024)]
    total_num_scheduled_tokens: Size
    mode: Literal["NONE", "PIECEWISE", "FULL"]
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
    # [R] int32, the token behind those of the step or the last known one; empty without speculation
    next_token_ids: np.ndarray
    num_blocks: np.ndarray  # [G, R] int32, entries that a request owns
    block_ids: np.ndarray  # [sum of num_blocks] int32, group by group
    mrope_positions: np.ndarray  # [P, T] int64, of prompts' tokens; 0 behind them
    mrope_lengths: np.ndarray  # [R] int64, tokens of the prompt that have some; empty without
    mrope_position_deltas: np.ndarray  # [R] int64; empty without M-RoPE
    placeholders: np.ndarray  # [any, 3] int64: request, first position, behind the last one
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
                f"step {settings.step}: tables of {num_rows} requests of {settings.max_model_len} "
                "tokens are more than this machine has addresses for"
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
            block_entries=entries,
            max_num_blocks=widths,
            block_sizes=np.array(settings.block_sizes, np.int32),
            num_blocks=num_blocks,
            # The device has all, and nothing to be cleared
            num_known_blocks=num_blocks.copy(),
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
        targets = arrays.tail_int64[: batch.num_targets]
        if len(targets):
            targets[:] = self._array("sampled_token_targets", targets)
        local = None
        if settings.local is not None:
            most = layout.local_sizes[0], layout.num_input_tokens, settings.max_model_len
            sizes = zip(LOCAL_SCALARS, most)
            local = LocalRequests(*(self._scalar(f"local_requests.{n}", m) for n, m in sizes))
            num_chunks = len(batch.tables.block_entries) // settings.local.blocks_per_chunk
            arrays.local_table_rows.clip(0, num_chunks - 1, out=arrays.local_table_rows)
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


# ---------------------------------------------------------------------- what is recorded


@dataclass(frozen=True)
class Recorded:
    """What is the same for all records of an engine."""

    groups: tuple[RecordGroup, ...]
    mask: MaskForm


@compiled
def copy_step(
    tables,  # int64, `vllm_npu_prep.prep.batch.BatchTables.addresses`
    arrays,  # int64, `vllm_npu_prep.prep.layout.StepArrays.addresses`
    num_scheduled_tokens,  # [num_reqs] int32
    previous_rows,  # [num_reqs or more] int64
    num_sampled_rows,
    staged_size,
    kept,  # int32, written: `KeptStep.parts`
):
    """Copy what is kept of a step, in one pass: a dozen calls of numpy took four times as long."""
    reqs, model_len, groups = tables[0], tables[1], tables[2]
    num_reqs = num_scheduled_tokens.shape[0]
    computed = carray(pointer(tables[4]), reqs, np.int32)
    num_tokens = carray(pointer(tables[6]), reqs, np.int32)
    token_ids = carray(pointer(tables[7]), (reqs, model_len), np.int32)
    num_blocks = carray(pointer(tables[11]), (groups, reqs), np.int32)
    kept[:staged_size] = carray(pointer(arrays[8]), staged_size, np.int32)  # from `positions` on
    end = staged_size
    kept[end : end + num_reqs] = computed[:num_reqs]
    end += num_reqs
    kept[end : end + num_reqs] = carray(pointer(tables[5]), reqs, np.int32)[:num_reqs]
    end += num_reqs
    kept[end : end + num_reqs] = num_tokens[:num_reqs]
    end += num_reqs
    for group in range(groups):
        kept[end : end + num_reqs] = num_blocks[group, :num_reqs]
        end += num_reqs
    if num_sampled_rows > 0:
        for req in range(num_reqs):
            kept[end + req] = previous_rows[req]
        end += num_reqs
    if arrays[3] > 0:  # there can be drafts
        for req in range(num_reqs):
            seq_len = computed[req] + num_scheduled_tokens[req]
            kept[end + req] = token_ids[req, min(seq_len, num_tokens[req] - 1)]
        end += num_reqs
    for req in range(num_reqs):
        first = computed[req]
        for offset in range(num_scheduled_tokens[req]):
            kept[end + offset] = token_ids[req, first + offset]
        end += num_scheduled_tokens[req]


@dataclass(slots=True)
class KeptStep:
    """Copies of what a step read and wrote, for a record to be made later.

    Tables and staging buffers go on to the next step; `step` is kept for its sizes. Block tables
    are not here, only the entries that were new to the device: they travelled with the step
    (`BlockTablesThen`).
    """

    number: int
    step: PreparedStep
    req_ids: Sequence[str]
    copied: np.ndarray  # int32, `parts` behind one another
    mrope: tuple[list[np.ndarray], np.ndarray] | None  # prompts' positions, deltas, by row
    placeholders: Placeholders
    modalities: Sequence[str]  # of each run of placeholders
    rows_with_embeds: Sequence[int]

    @classmethod
    def of_step(
        cls,
        number: int,
        step: PreparedStep,
        req_ids: Sequence[str],
        placeholders: Placeholders = NO_PLACEHOLDERS,
        modalities: Sequence[str] = (),
        rows_with_embeds: Sequence[int] = (),
    ) -> "KeptStep":
        """Copy what is needed of a step that was just prepared.

        Parameters
        ----------
        number
            Of the step, since start-up.
        step
            The prepared step, in its buffer.
        req_ids
            Of the batch; kept as it is.
        placeholders, modalities, rows_with_embeds
            See `vllm_npu_prep.prep.embeds`; kept as they are.
        """
        batch, tables = step.batch, step.batch.tables
        num_reqs, staged_size = batch.num_reqs, step.nbytes // 4
        has_samples, has_drafts = batch.num_sampled_rows > 0, step.layout.max_drafts > 0
        columns = 3 + step.layout.num_groups + has_samples + has_drafts
        size = staged_size + columns * num_reqs + batch.total_num_scheduled_tokens
        copied = np.empty(size, np.int32)
        copy_step(
            tables.addresses,
            step.arrays.addresses,
            batch.num_scheduled_tokens,
            batch.previous_rows,
            batch.num_sampled_rows,
            staged_size,
            copied,
        )
        mrope = None
        if tables.mrope is not None:
            mrope = tables.mrope.prompts, tables.mrope.position_deltas[:num_reqs].copy()
        return cls(number, step, req_ids, copied, mrope, placeholders, modalities, rows_with_embeds)

    @property
    def nbytes(self) -> int:
        """Bytes that are kept, near enough."""
        return self.copied.nbytes + 64 * len(self.req_ids)

    def parts(self) -> dict[str, np.ndarray]:
        """What was copied: ``staged``, the buffer that travelled, and arrays of `RecordBatch`."""
        batch, num_reqs = self.step.batch, self.step.num_reqs
        num_groups = self.step.layout.num_groups
        sizes = {
            "staged": self.step.nbytes // 4,
            "num_computed_tokens": num_reqs,
            "num_prompt_tokens": num_reqs,
            "num_tokens": num_reqs,
            "num_blocks": num_groups * num_reqs,
            "previous_rows": num_reqs if batch.num_sampled_rows else 0,
            "next_token_ids": num_reqs if self.step.layout.max_drafts else 0,
            "token_ids": batch.total_num_scheduled_tokens,
        }
        ends = np.cumsum(list(sizes.values()))[:-1]
        parts = dict(zip(sizes, np.split(self.copied, ends)))
        parts["num_blocks"] = parts["num_blocks"].reshape(num_groups, num_reqs)
        parts["previous_rows"] = parts["previous_rows"].astype(np.int64)
        return parts

    @property
    def staged(self) -> np.ndarray:
        """The buffer that travelled, uint8, up to a multiple of 8 bytes."""
        staged = self.parts()["staged"]
        return np.pad(staged, (0, len(staged) % 2)).view(np.uint8)

    def record(self, recorded: Recorded, req_ids: list[str], blocks: np.ndarray) -> StepRecord:
        """Make the record.

        Parameters
        ----------
        recorded
            The engine's.
        req_ids
            Names to record for the requests.
        blocks
            int32, block tables as the device had them (`BlockTablesThen.entries`).
        """
        then, layout = self.step, self.step.layout
        tables, padding = then.batch.tables, then.padding
        settings = RecordSettings(
            step=self.number,
            req_ids=req_ids,
            max_num_reqs=len(tables.token_ids),
            max_model_len=tables.max_model_len,
            chunked_prefill=tables.chunked_prefill,
            mask=recorded.mask.value,
            block_sizes=tables.block_sizes.tolist(),
            max_num_blocks=tables.max_num_blocks.tolist(),
            groups=list(recorded.groups),
            total_num_scheduled_tokens=then.total_num_scheduled_tokens,
            mode=cast(Any, padding.mode.value),
            num_input_tokens=padding.num_input_tokens,
            num_reqs_padded=padding.num_reqs_padded,
            decode_query_len=padding.decode_query_len,
            max_logits=layout.max_logits,
            max_drafts=layout.max_drafts,
            mrope_dims=layout.mrope_dims,
            num_sampled_rows=then.batch.num_sampled_rows,
            num_sampled_drafts=then.batch.num_sampled_drafts,
            takes_embeds=then.batch.takes_embeds,
            modalities=list(self.modalities),
        )
        placed, parts = self.placeholders, self.parts()
        del parts["staged"]
        batch = RecordBatch(
            num_scheduled_tokens=then.batch.num_scheduled_tokens,
            num_draft_tokens=then.batch.num_draft_tokens[: then.num_reqs],
            block_ids=self._block_ids(tables, parts["num_blocks"], blocks),
            placeholders=np.stack([placed.rows, placed.starts, placed.ends], axis=1),
            rows_with_embeds=np.array(self.rows_with_embeds, np.int64),
            **self._mrope_arrays(parts["num_computed_tokens"]),
            **parts,
        )
        record = StepRecord(settings, batch, {})
        step = replace(then, arrays=layout.views(self.staged), batch=record.step_batch()[0])
        step.batch.takes_embeds = then.batch.takes_embeds
        record.prepared.update(prepared_arrays(step, settings))
        return record

    @staticmethod
    def _block_ids(tables: BatchTables, num_blocks: np.ndarray, blocks: np.ndarray) -> np.ndarray:
        """Blocks that the requests own, group by group."""
        found, first = [np.empty(0, np.int32)], 0
        num_rows = len(tables.token_ids)
        for width, owned in zip(tables.max_num_blocks.tolist(), num_blocks):
            table = blocks[first : first + len(owned) * width].reshape(len(owned), width)
            found.append(table[np.arange(width) < owned[:, None]])
            first += (num_rows + PADDING_ROWS) * width
        return np.concatenate(found)

    def _mrope_arrays(self, num_computed_tokens: np.ndarray) -> dict[str, np.ndarray]:
        """M-RoPE positions of the prompts' tokens in the step."""
        batch, dims = self.step.batch, self.step.layout.mrope_dims
        total = batch.total_num_scheduled_tokens
        positions = np.zeros((dims, total if dims else 0), np.int64)
        if self.mrope is None:
            return {
                "mrope_positions": positions,
                "mrope_lengths": np.empty(0, np.int64),
                "mrope_position_deltas": np.empty(0, np.int64),
            }
        prompts, deltas = self.mrope
        lengths, start = np.zeros(len(deltas), np.int64), 0
        counts = batch.num_scheduled_tokens.tolist()
        for req, (first, count) in enumerate(zip(num_computed_tokens.tolist(), counts)):
            if prompts[req].ndim == 2:  # others count up from 0
                lengths[req] = prompts[req].shape[1]
                seen = prompts[req][:, first : first + count]
                positions[:, start : start + seen.shape[1]] = seen
            start += count
        return {
            "mrope_positions": positions,
            "mrope_lengths": lengths,
            "mrope_position_deltas": deltas,
        }


class BlockTablesThen:
    """Block tables as the device had them some steps ago, moved on step by step.

    A step brings the entries that are new to the device, so there is no need to copy whole tables.

    Parameters
    ----------
    entries
        int32, the tables of all groups (`BatchTables.block_entries`); moved on in place.
    """

    def __init__(self, entries: np.ndarray) -> None:
        self.entries = entries

    def move_on(self, kept: KeptStep) -> None:
        """Enter what a step sent."""
        step = kept.step
        if not step.num_block_changes:
            return
        _, indices, ids = step.layout.tail(step.batch.num_targets, step.num_block_changes)
        copied = kept.copied  # begins with the buffer
        entries = copied[2 * indices.start : 2 * indices.stop].view(np.int64)
        self.entries[entries] = copied[ids]


def mask_plan(step: PreparedStep, settings: RecordSettings, group: RecordGroup) -> MaskPlan:
    """Mask of a group's layers in a step."""
    local = step.local if group.attention_chunk_size is not None else None
    return plan_mask(
        step.attn_state,
        MaskForm(settings.mask),
        step.num_input_tokens,
        step.max_seq_len if local is None else local.max_seq_len,
        sliding_window=group.sliding_window,
        attention_chunk_size=group.attention_chunk_size,
        causal=group.causal,
    )


def staged_arrays(arrays: StepArrays, settings: RecordSettings) -> dict[str, np.ndarray]:
    """What travels to the device, padding included, by a record's names: views, nothing copied."""
    staged = {}
    for name in settings.layout.arrays:
        if name == "slot_mapping":
            for index, group in enumerate(settings.groups):
                if group.group < len(arrays.slot_mapping):
                    where = f"kv_cache_groups.{index}." if index else ""
                    staged[f"{where}slot_mapping_padded"] = arrays.slot_mapping[group.group]
        elif name == "input_ids_and_spare":
            staged["input_ids_padded"] = arrays.input_ids
        else:
            staged[name if name == "is_padding" else f"{name}_padded"] = getattr(arrays, name)
    return staged


def prepared_arrays(step: PreparedStep, settings: RecordSettings) -> dict[str, np.ndarray]:
    """What was prepared, by the keys of the JSON contract; with padding, what the device got.

    Parameters
    ----------
    step
        A prepared step, whose tables hold what it read and owns, and zeros.
    settings
        Its settings.
    """
    out = {"attn_state": np.array(step.attn_state.name, "S")}
    out |= {name: getattr(step, name) for name in (*REQUEST_LEVEL, *TOKEN_LEVEL)}
    for index, (group, prefix) in enumerate(zip(settings.groups, settings.group_prefixes)):
        arrays = _group_arrays(step, settings, group)
        out |= {f"{prefix}{name}": array for name, array in arrays.items()}
        if prefix and index == 0:
            out |= {n: a for n, a in arrays.items() if not n.startswith("local_requests.")}
    scalars: dict[str, Any] = {name: getattr(step, name) for name in SCALARS}
    scalars["num_reqs_padded"] = step.padding.num_reqs_padded
    if step.local is not None:
        scalars |= {f"local_requests.{n}": getattr(step.local, n) for n in LOCAL_SCALARS}
    out |= {name: np.array(value, np.int64) for name, value in scalars.items()}
    out["model_input"] = np.array("inputs_embeds" if step.batch.takes_embeds else "input_ids", "S")
    if settings.mrope_dims:
        out["mrope_positions"] = step.mrope_positions
    drafts, reqs = step.num_drafts, step.num_reqs
    used = {
        "logits_indices_padded": step.num_logits,
        "target_logits_indices_padded": drafts,
        "draft_token_ids_padded": drafts,
        "bonus_logits_indices_padded": reqs,
        "cu_num_draft_tokens_padded": reqs,
        "cu_num_sampled_tokens_padded": reqs,
        "backup_next_token_ids_padded": reqs,
    }
    for name, array in staged_arrays(step.arrays, settings).items():
        if name in used:  # what lies behind is of earlier steps, and not read
            array = np.where(np.arange(len(array)) < used[name], array, array.dtype.type(0))
        out[name] = array
    if step.batch.num_sampled_rows:
        targets = step.arrays.tail_int64[: step.batch.num_targets]
        out["sampled_token_targets"] = targets
        out["is_on_device"] = _on_device(step, targets)
    return {
        name: np.ascontiguousarray(array) if array.ndim else array for name, array in out.items()
    }


def _group_arrays(
    step: PreparedStep, settings: RecordSettings, group: RecordGroup
) -> dict[str, np.ndarray]:
    """What a group has of its own."""
    out = {}
    if group.group < len(settings.block_sizes):
        out = {name: getattr(step, name)(group.group) for name in GROUP_LEVEL}
    plan = mask_plan(step, settings, group)
    out |= {f"attn_mask.{n}": a for n, a in mask_arrays(plan, step.positions).items()}
    if group.attention_chunk_size is not None:
        local = step.local_requests(group.group)
        out |= {f"local_requests.{name}": array for name, array in local.items()}
    return out


def mask_arrays(plan: MaskPlan, positions: np.ndarray) -> dict[str, np.ndarray]:
    """A mask as the JSON contract has it: ``shape``, none without a mask, and what it holds."""
    if plan.shape is None:
        return {"shape": np.empty(0, np.int64)}
    out = {"shape": np.array(plan.shape, np.int64)}
    if plan.kind == MaskKind.COMPRESSED:
        return out | {"form": np.array(MaskForm.COMPRESSED.value, "S")}
    num_rows, max_seq_len = plan.shape
    if num_rows * max_seq_len <= FULL_MASK_CELLS:
        mask = build_mask(plan, positions)
        assert mask is not None
        return out | {"masked": mask}
    rows = np.arange(max_seq_len) if plan.kind == MaskKind.MATRIX else positions
    if plan.kind == MaskKind.ROWS and plan.attention_chunk_size is not None:
        rows = positions % plan.attention_chunk_size
    padding = np.full(num_rows - len(rows), max_seq_len)
    first_masked = np.concatenate([np.minimum(rows + 1, max_seq_len), padding])
    out["first_masked_position_by_row"] = first_masked
    if plan.sliding_window is not None:
        first_visible = np.maximum(rows + 1 - plan.sliding_window, 0)
        out["first_visible_position_by_row"] = np.concatenate([first_visible, 0 * padding])
    return out


def _on_device(step: PreparedStep, targets: np.ndarray) -> np.ndarray:
    """Tokens whose id was not on the host: the device put the last step's samples there."""
    places = targets - step.layout.place("input_ids_and_spare")
    out = np.zeros(step.total_num_scheduled_tokens, np.bool_)
    out[places[(places >= 0) & (places < len(out))]] = True
    return out


# ---------------------------------------------------------------------- files


def write_whole(path: Path, content: bytes | memoryview) -> None:
    """Write a file that nobody sees before it is complete.

    Raises
    ------
    OSError
        If it can't be written; nothing is left behind.
    """
    unfinished = path.with_name(f".{path.name}.tmp")
    try:
        with unfinished.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    except OSError:
        unfinished.unlink(missing_ok=True)
        raise


def read_record(path: Path) -> StepRecord:
    """Read and check a record.

    Raises
    ------
    PrepError
        One line: what is wrong with the file.
    """
    try:
        arrays = _read_arrays(path)
        settings = _read_settings(arrays)
        batch = _read_batch(settings, arrays)
    except PrepError as error:
        raise PrepError(f"{path}: {error}") from None
    return StepRecord(settings, batch, arrays)


def _read_arrays(path: Path) -> dict[str, np.ndarray]:
    """Arrays of an ``.npz`` by name. Nothing is unpickled, and no array is larger than it says."""
    try:
        if path.stat().st_size > MAX_RECORD_BYTES:
            raise PrepError(f"larger than {MAX_RECORD_BYTES:,} bytes, which no record is")
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
            if sum(member.file_size for member in members) > MAX_RECORD_BYTES:
                raise PrepError(f"holds more than {MAX_RECORD_BYTES:,} bytes, which no record does")
            contents = {}
            for member in members:
                if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                    raise PrepError(f"{member.filename!r} is compressed as no record is")
                with archive.open(member) as file:
                    content = file.read(member.file_size + 1)
                if len(content) != member.file_size or member.filename in contents:
                    raise PrepError(f"{member.filename!r} is not what the archive says")
                contents[member.filename] = content
    except OSError as error:
        raise PrepError(error.strerror or str(error)) from None
    except PrepError:
        raise
    except Exception as error:  # zipfile lets all that its parts raise for odd bytes pass
        raise PrepError(f"no record: {type(error).__name__}: {_one_line(error)}") from None
    return {_member_name(name): _parse_array(name, each) for name, each in contents.items()}


def _member_name(name: str) -> str:
    if not re.fullmatch(r"[a-z_.0-9]{1,80}\.npy", name):
        raise PrepError(f"{_one_line(repr(name))} is no array of a record")
    return name.removesuffix(".npy")


def _one_line(text: object) -> str:
    return " ".join(str(text).split())[:200]


def _parse_array(name: str, content: bytes) -> np.ndarray:
    """An array as `numpy.save` writes it, of few types and at most two dimensions."""
    found = ARRAY_HEADER.match(content)
    if found is None or len(found[0]) != 10 + int.from_bytes(content[8:10], "little"):
        raise PrepError(f"{name} is no array that a record holds")
    dtype = np.dtype(found[1].decode())
    shape = tuple(int(size) for size in found[2].decode().replace(",", " ").split())
    if len(shape) > 2 or math.prod(shape) * dtype.itemsize != len(content) - len(found[0]):
        raise PrepError(f"{name} has not the size that it says")
    return np.frombuffer(content, dtype, offset=len(found[0])).reshape(shape).copy()


def _read_settings(arrays: dict[str, np.ndarray]) -> RecordSettings:
    """Take the settings out of a record's arrays and check them."""
    if "settings" not in arrays or arrays["settings"].dtype != np.uint8:
        raise PrepError("no record: it has no settings")
    try:
        data = json.loads(arrays.pop("settings").tobytes())
    except (ValueError, RecursionError) as error:
        raise PrepError(f"settings: not JSON: {_one_line(error)}") from None
    version = data.get("format") if isinstance(data, dict) else None
    if version != FORMAT:
        raise PrepError(
            f"a record of format {_one_line(repr(version))}; this version reads format {FORMAT}"
        )
    try:
        settings = RecordSettings.model_validate(data)
    except ValidationError as error:
        detail = error.errors()[0]
        where = ".".join(str(part) for part in detail["loc"])
        raise PrepError(f"settings.{_one_line(where)}: {_one_line(detail['msg'])}") from None
    _check_settings(settings)
    return settings


def _require(holds: Any, what: str) -> None:
    if not holds:
        raise PrepError(f"contradicts itself: {what}")


def _check_settings(settings: RecordSettings) -> None:
    """What no single setting shows, and what memory it would take."""
    num_groups, widths = len(settings.block_sizes), settings.max_num_blocks
    num_rows = settings.max_num_reqs + PADDING_ROWS
    _require(len(widths) == num_groups, "a width of each block table")
    _require(settings.num_reqs <= settings.max_num_reqs, "more requests than max_num_reqs")
    _require(settings.num_reqs <= settings.num_reqs_padded, "more requests than num_reqs_padded")
    tokens = settings.total_num_scheduled_tokens
    _require(settings.num_reqs <= tokens <= settings.num_input_tokens, "tokens of the step")
    _require(settings.max_logits <= settings.num_input_tokens, "max_logits")
    _require(settings.max_drafts <= settings.num_input_tokens, "max_drafts")
    _require(settings.num_sampled_rows <= 1 << 16, "num_sampled_rows")
    for name, cells, most in (
        ("token", settings.max_num_reqs * settings.max_model_len, MAX_TOKEN_CELLS),
        ("block", num_rows * sum(widths), MAX_BLOCK_CELLS),
    ):
        _require(cells <= most, f"a {name} table of {cells:,} cells")
    _require({g.group for g in settings.groups} >= set(range(num_groups)), "groups")
    sizes = {g.attention_chunk_size for g in settings.groups if g.attention_chunk_size}
    _require(len(sizes) <= 1, "attention chunks of several sizes")
    for group in settings.groups:
        chunk_size = group.attention_chunk_size
        if chunk_size:
            _require(group.group < num_groups, "chunks without a block table")
            block_size = settings.block_sizes[group.group]
            _require(chunk_size % block_size == 0, "chunks that are no whole blocks")
            per_chunk = chunk_size // block_size
            _require(not any(w % per_chunk for w in widths), "rows that are no whole chunks")
    layout_bytes = settings.layout.nbytes(
        settings.num_sampled_rows * targets_per_row(settings.num_sampled_drafts)
    )
    _require(layout_bytes <= MAX_RECORD_BYTES, f"arrays of {layout_bytes:,} bytes")


def _read_batch(settings: RecordSettings, arrays: dict[str, np.ndarray]) -> RecordBatch:
    """Take what the step was prepared from out of a record's arrays and check it."""
    reqs, tokens = settings.num_reqs, settings.total_num_scheduled_tokens
    dims = settings.mrope_dims
    shapes: dict[str, tuple[int | None, ...]] = {
        f.name: (reqs,) for f in fields(RecordBatch) if f.name.startswith("num_")
    }
    shapes |= {
        "previous_rows": (reqs if settings.num_sampled_rows else 0,),
        "token_ids": (tokens,),
        "next_token_ids": (reqs if settings.max_drafts else 0,),
        "num_blocks": (len(settings.block_sizes), reqs),
        "block_ids": (None,),
        "mrope_positions": (dims, tokens if dims else 0),
        "mrope_lengths": (reqs if dims else 0,),
        "mrope_position_deltas": (reqs if dims else 0,),
        "placeholders": (len(settings.modalities), 3),
        "rows_with_embeds": (None,),
    }
    found = {}
    for item in fields(RecordBatch):
        name, shape = f"batch.{item.name}", shapes[item.name]
        array = arrays.pop(name, None)
        _require(array is not None, f"{name} is missing")
        assert array is not None
        dtype = np.int64 if item.name in WIDE else np.int32
        fits = len(array.shape) == len(shape) and all(
            want is None or want == size for want, size in zip(shape, array.shape)
        )
        if array.dtype != dtype or not fits:
            raise PrepError(
                f"{name} is {array.dtype} {list(array.shape)}, its settings say "
                f"{np.dtype(dtype)} {['any' if s is None else s for s in shape]}"
            )
        found[item.name] = array
    batch = RecordBatch(**found)
    _check_batch(settings, batch)
    return batch


def _check_batch(settings: RecordSettings, batch: RecordBatch) -> None:
    """What compiled code relies on, which looks at no bounds."""

    def between(array: np.ndarray, least: Any, most: Any) -> bool:
        return bool(((array >= least) & (array <= most)).all())

    max_model_len = settings.max_model_len
    for name in ("num_computed_tokens", "num_scheduled_tokens", "num_prompt_tokens"):
        _require(between(getattr(batch, name), 0, max_model_len), name)
    computed = batch.num_computed_tokens.astype(np.int64)
    scheduled = batch.num_scheduled_tokens.astype(np.int64)
    drafts = batch.num_draft_tokens.astype(np.int64)
    seq_lens = computed + scheduled
    _require(between(batch.num_tokens, 1, max_model_len), "num_tokens")
    _require(between(scheduled, 1, max_model_len), "num_scheduled_tokens")
    _require(between(seq_lens, 1, max_model_len), "tokens past max_model_len")
    _require(scheduled.sum() == settings.total_num_scheduled_tokens, "num_scheduled_tokens")
    _require(between(drafts, 0, scheduled - 1), "num_draft_tokens")
    _require(drafts.sum() <= settings.max_drafts, "more drafts than max_drafts")
    _require(drafts.sum() + len(drafts) <= settings.max_logits, "more logits than max_logits")
    last_row = settings.num_sampled_rows - 1
    _require(between(batch.previous_rows, NO_PREVIOUS_ROW, last_row), "previous_rows")
    widths = np.array(settings.max_num_blocks, np.int64)[:, None]
    block_sizes = np.array(settings.block_sizes, np.int64)[:, None]
    _require(between(batch.num_blocks, 0, widths), "num_blocks")
    num_blocks = batch.num_blocks.sum(axis=1, dtype=np.int64)
    _require(num_blocks.sum() == len(batch.block_ids), "block_ids")
    last_blocks = np.repeat((1 << 31) // block_sizes[:, 0] - 1, num_blocks)
    _require(between(batch.block_ids, 0, last_blocks), "block_ids past 32 bits of slots")
    _require(between(seq_lens, 0, widths * block_sizes), "sequences past their block tables")
    _require(between(batch.mrope_lengths, 0, max_model_len), "mrope_lengths")
    _require(between(batch.mrope_positions, -(1 << 40), 1 << 40), "mrope_positions")
    _require(between(batch.mrope_position_deltas, -(1 << 40), 1 << 40), "mrope_position_deltas")
    _require(between(batch.placeholders[:, 0], 0, len(drafts) - 1), "placeholders")
    _require(between(batch.placeholders[:, 1:], 0, 1 << 40), "placeholders")
    _require(between(batch.rows_with_embeds, 0, len(drafts) - 1), "rows_with_embeds")
