"""Copies of a step's data, from which a record can be made later while the engine runs on.

A step only copies numbers (`copy_step`); the work of making a record waits until it is written.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from vllm_npu_prep.prep.arrays import PADDING_ROWS
from vllm_npu_prep.prep.batch import PreparedStep
from vllm_npu_prep.prep.compiled import arrays_of, compiled
from vllm_npu_prep.prep.embeds import NO_PLACEHOLDERS, Placeholders
from vllm_npu_prep.prep.mask import MaskForm
from vllm_npu_prep.prep.tables import BatchTables, tables_of
from vllm_npu_prep.records.contract import prepared_arrays
from vllm_npu_prep.records.record import RecordBatch, StepRecord
from vllm_npu_prep.records.settings import (
    LayerGroup,
    RecordExperts,
    RecordSettings,
    StepTimes,
    WatchedRunner,
)


@dataclass(frozen=True)
class Recorded:
    """Settings that all records of an engine share."""

    groups: tuple[LayerGroup, ...]
    mask: MaskForm
    mask_itemsize: int  # bytes of a cell of dense masks
    runner: WatchedRunner | None = None  # who prepared them, if that is another runner


def recorded_groups(builders: Iterable[tuple[int, Any, Any]]) -> tuple[LayerGroup, ...]:
    """Return what the layers of each builder see of a step; layers that see the same, once.

    Parameters
    ----------
    builders
        Groups, builders and names of layers (`vllm_npu_prep.runner.preparer.Builders`).
    """
    groups = (
        LayerGroup(
            group=group,
            sliding_window=builder.sliding_window,
            attention_chunk_size=builder.attention_chunk_size,
            causal=builder.causal,
            state_threshold=builder.reorder_batch_threshold if builder.holds_states else None,
            state_drafts=builder.num_drafts,
            index_topk=builder.index_topk,
        )
        for group, builder, _ in builders
    )
    return tuple(dict.fromkeys(groups))


@compiled
def copy_step(
    tables,  # int64, `vllm_npu_prep.prep.tables.BatchTables.addresses`
    arrays,  # int64, `vllm_npu_prep.prep.layout.StepArrays.addresses`
    num_scheduled_tokens,  # [num_reqs] int32
    previous_rows,  # [num_reqs or more] int64
    num_sampled_rows,
    staged_size,
    copied,  # int32, written: `StepSnapshot.parts`
):
    """Copy what records need of a step in one pass: a dozen numpy calls took 4 times as long."""
    t, out = tables_of(tables), arrays_of(arrays)
    num_reqs = num_scheduled_tokens.shape[0]
    copied[:staged_size] = out.buffer_int32[:staged_size]
    end = staged_size
    for req in range(num_reqs):
        request_row = t.request_rows[req]
        copied[end + req] = t.num_computed_tokens[request_row]
        copied[end + num_reqs + req] = t.num_prompt_tokens[request_row]
        copied[end + 2 * num_reqs + req] = t.num_tokens[request_row]
    end += 3 * num_reqs
    for group in range(t.num_blocks.shape[0]):
        for req in range(num_reqs):
            copied[end + req] = t.num_blocks[group, t.request_rows[req]]
        end += num_reqs
    if num_sampled_rows > 0:
        for req in range(num_reqs):
            copied[end + req] = previous_rows[req]
        end += num_reqs
    if out.draft_token_ids.shape[0] > 0:  # the step may have drafts
        for req in range(num_reqs):
            request_row = t.request_rows[req]
            seq_len = t.num_computed_tokens[request_row] + num_scheduled_tokens[req]
            copied[end + req] = t.token_ids[
                request_row, min(seq_len, t.num_tokens[request_row] - 1)
            ]
        end += num_reqs
    for req in range(num_reqs):
        request_row = t.request_rows[req]
        first = t.num_computed_tokens[request_row]
        for offset in range(num_scheduled_tokens[req]):
            copied[end + offset] = t.token_ids[request_row, first + offset]
        end += num_scheduled_tokens[req]


@compiled
def enter_blocks(
    staged,  # int32, the buffer that was sent
    first_index,  # place of the changed entries' indices, which are int64
    first,  # place of the changed entries' block ids
    end,
    block_table_flat,  # int32, written: `vllm_npu_prep.prep.tables.BatchTables`
):
    """Enter block ids that a step sent; numpy would take twice as long."""
    indices = staged[2 * first_index : 2 * (first_index + end - first)].view(np.int64)
    for entry in range(end - first):
        block_table_flat[indices[entry]] = staged[first + entry]


def warm_up(step: PreparedStep) -> None:
    """Compile this module's code or load it from the cache; any `step` will do."""
    snapshot = StepSnapshot.of_step(0, step, "", [""])
    enter_blocks(snapshot.copied, 0, 0, 0, np.zeros(1, np.int32))


@dataclass(slots=True)
class StepSnapshot:
    """Copies of what a step read and wrote, for a record to be made later.

    The next step overwrites tables and staging buffers, so `step` is kept only for its sizes and
    for arrays of its batch that are made anew for each step. Of the block tables only the entries
    sent with the step are kept (`advance`).
    """

    number: int
    step: PreparedStep
    kind: str
    req_ids: Sequence[str]
    copied: np.ndarray  # int32, `parts` one after the other
    mrope: tuple[list[np.ndarray], np.ndarray] | None  # prompts' positions, deltas, by row
    placeholders: Placeholders
    modalities: Sequence[str]  # kind of input of each run of placeholders
    rows_with_embeds: Sequence[int]
    # When its preparation began and how long it took, in seconds, and its waits; None if unknown
    times: tuple[float, float, int] | None
    nbytes: int  # size of the copies, approximately
    # Where experts that move are: fields of `RecordExperts`, which nobody changes; or None
    experts: Mapping[str, Any] | None = None

    @classmethod
    def of_step(
        cls,
        number: int,  # number of the step, since start-up
        step: PreparedStep,  # the prepared step, in its buffer
        kind: str,  # how it runs (`vllm_npu_prep.graph.counts.StepCounts.kind`)
        req_ids: Sequence[str],  # ids of the batch's requests; the sequence is kept as it is
        placeholders: Placeholders = NO_PLACEHOLDERS,
        modalities: Sequence[str] = (),
        rows_with_embeds: Sequence[int] = (),
        times: tuple[float, float, int] | None = None,
    ) -> "StepSnapshot":
        """Copy what is needed of a step that was just prepared; the rest is kept as it is."""
        batch, tables = step.batch, step.batch.tables
        num_reqs, staged_size = batch.num_reqs, step.nbytes // 4
        has_samples, has_drafts = batch.num_sampled_rows > 0, step.layout.max_drafts > 0
        columns = 3 + step.shape.num_groups + has_samples + has_drafts
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
        if tables.mrope:
            mrope = tables.mrope.prompts, tables.mrope.position_deltas[:num_reqs].copy()
        nbytes = copied.nbytes + 64 * len(req_ids)
        return cls(
            *(number, step, kind, req_ids, copied, mrope),
            *(placeholders, modalities, rows_with_embeds, times, nbytes),
        )

    def parts(self) -> dict[str, np.ndarray]:
        """Return the copies: ``staged``, the buffer that was sent, and arrays of `RecordBatch`."""
        batch, num_reqs = self.step.batch, self.step.num_reqs
        num_groups = self.step.shape.num_groups
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

    def advance(self, block_table_flat: np.ndarray) -> None:
        """Bring block tables, int32, from before this step to what the device had in it.

        Each step sends the entries that are new to the device, so whole tables need no copy.
        """
        step = self.step
        if step.num_block_changes:
            parts = step.layout.variable_part(step.batch.num_targets, step.num_block_changes)
            _, indices, ids = parts
            # The copies begin with the buffer that was sent
            enter_blocks(self.copied, indices.start, ids.start, ids.stop, block_table_flat)

    @property
    def staged(self) -> np.ndarray:
        """The buffer that was sent, uint8, padded to a multiple of 8 bytes."""
        staged = self.parts()["staged"]
        return np.pad(staged, (0, len(staged) % 2)).view(np.uint8)

    def record(
        self,
        recorded: Recorded,  # the engine's settings for all records
        req_ids: list[str],  # names to record for the requests
        blocks: np.ndarray,  # int32, block tables as the device had them (`advance`)
    ) -> StepRecord:
        """Make the record."""
        then, layout = self.step, self.step.layout
        tables, times = then.batch.tables, None
        if self.times is not None:
            started, prepared, waits = self.times
            times = StepTimes(started=started, prepared=prepared, waits=waits)
        settings = RecordSettings.of(
            then.padding,
            layout,
            step=self.number,
            req_ids=req_ids,
            max_num_reqs=len(tables.token_ids),
            max_model_len=tables.max_model_len,
            chunked_prefill=tables.chunked_prefill,
            mask=recorded.mask.value,
            mask_itemsize=recorded.mask_itemsize,
            block_sizes=tables.block_sizes.tolist(),
            max_num_blocks=tables.max_num_blocks.tolist(),
            groups=list(recorded.groups),
            total_num_scheduled_tokens=then.total_num_scheduled_tokens,
            kind=self.kind,
            num_sampled_rows=then.batch.num_sampled_rows,
            num_sampled_drafts=then.batch.num_sampled_drafts,
            takes_embeds=then.batch.takes_embeds,
            modalities=list(self.modalities),
            experts=None if self.experts is None else RecordExperts(**self.experts),
            times=times,
            runner=recorded.runner,
        )
        placed, parts = self.placeholders, self.parts()
        del parts["staged"]
        batch = RecordBatch(
            num_scheduled_tokens=then.batch.num_scheduled_tokens,
            num_draft_tokens=then.batch.num_draft_tokens[: then.num_reqs],
            block_ids=self._block_ids(tables, parts["num_blocks"], blocks),
            placeholders=np.stack([placed.rows, placed.starts, placed.ends], axis=1),
            rows_with_embeds=np.array(self.rows_with_embeds, np.int64),
            num_accepted_tokens=then.batch.num_accepted_tokens[: then.num_reqs],
            **self._mrope_arrays(parts["num_computed_tokens"]),
            **parts,
        )
        record = StepRecord(settings, batch)
        arrays = layout.views(self.staged)
        batch.token_ids[self._embedded(record, arrays.input_ids)] = 0
        step = replace(then, arrays=arrays, batch=record.step_batch()[0])
        step.batch.takes_embeds = then.batch.takes_embeds
        record.prepared.update(prepared_arrays(step, settings))
        return record

    @staticmethod
    def _embedded(record: StepRecord, input_ids: np.ndarray) -> np.ndarray:
        """Return which tokens, bool ``[T]``, came as embeddings: the device got token 0 there.

        The table has an invalid id there (`vllm_npu_prep.runner.prompt_embeds`) that no step
        prepares.
        """
        batch = record.batch
        reqs = np.repeat(np.arange(record.settings.num_reqs), batch.num_scheduled_tokens)
        in_prompt = record.scheduled_positions < batch.num_prompt_tokens[reqs]
        return in_prompt & np.isin(reqs, batch.rows_with_embeds) & (input_ids[: len(reqs)] == 0)

    @staticmethod
    def _block_ids(tables: BatchTables, num_blocks: np.ndarray, blocks: np.ndarray) -> np.ndarray:
        """Return the blocks that the requests own, group by group."""
        found, first = [np.empty(0, np.int32)], 0
        num_rows = len(tables.token_ids)
        for width, owned in zip(tables.max_num_blocks.tolist(), num_blocks):
            table = blocks[first : first + len(owned) * width].reshape(len(owned), width)
            found.append(table[np.arange(width) < owned[:, None]])
            first += (num_rows + PADDING_ROWS) * width
        return np.concatenate(found)

    def _mrope_arrays(self, num_computed_tokens: np.ndarray) -> dict[str, np.ndarray]:
        batch, dims = self.step.batch, self.step.shape.mrope_dims
        total = batch.total_num_scheduled_tokens
        positions = np.zeros((dims, total if dims else 0), np.int64)
        prompts, deltas = self.mrope or ([], np.empty(0, np.int64))
        lengths, start = np.zeros(len(deltas), np.int64), 0
        counts = num_computed_tokens.tolist(), batch.num_scheduled_tokens.tolist()
        for req, (prompt, first, count) in enumerate(zip(prompts, *counts)):
            if prompt.ndim == 2:  # other positions count up from 0
                lengths[req] = prompt.shape[1]
                seen = prompt[:, first : first + count]
                positions[:, start : start + seen.shape[1]] = seen
            start += count
        return {
            "mrope_positions": positions,
            "mrope_lengths": lengths,
            "mrope_position_deltas": deltas,
        }
