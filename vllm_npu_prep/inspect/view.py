"""One prepared step as ``explain``, pages and pictures show it, with its reasons (`StepView`).

A view is made from a scenario, which is prepared now, or from a record of a prepared step, right or
wrong.
"""

from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from vllm_npu_prep.errors import PrepError
from vllm_npu_prep.inspect.texts import input_texts
from vllm_npu_prep.prep.batch import PreparedStep
from vllm_npu_prep.prep.mask import MaskForm, MaskKind, MaskPlan
from vllm_npu_prep.prep.padding import GraphMode
from vllm_npu_prep.prep.state import AttentionState
from vllm_npu_prep.records.contract import mask_plan
from vllm_npu_prep.records.record import StepRecord
from vllm_npu_prep.records.record_file import read_record
from vllm_npu_prep.records.scenario import Scenario
from vllm_npu_prep.records.settings import LayerGroup, RecordSettings
from vllm_npu_prep.records.step_choices import read_choices
from vllm_npu_prep.records.step_samples import StepSamples, read_samples
from vllm_npu_prep.wording import counted

STATE_RULES = {
    AttentionState.PrefillNoCache: "nothing is computed for any request",
    AttentionState.SpecDecoding: "some request has drafts; for all, scheduled - drafts = 1",
    AttentionState.DecodeOnly: "each request has one scheduled token",
    AttentionState.PrefillCacheHit: "chunked prefill is off, and every request is in its prompt",
    AttentionState.ChunkedPrefill: "none of the other rules holds",
}
"""The rule of each state (`vllm_npu_prep.prep.state.AttentionState`), in the order of the table."""

MASK_RULES = {
    MaskKind.NONE: "a decode sees all before it",
    MaskKind.MATRIX: "nothing is cached, so one causal matrix serves all requests",
    MaskKind.ROWS: "a row of the causal matrix for each token, by its position",
    MaskKind.COMPRESSED: "a constant, which the kernel lays on each request's diagonal",
}


@dataclass(frozen=True)
class ItemView:
    """An image or a video of a prompt."""

    modality: str
    offset: int
    length: int

    @property
    def end(self) -> int:
        return self.offset + self.length


@dataclass(frozen=True)
class RequestView:
    """What is known about a request that is not in the step's arrays."""

    req_id: str
    num_prompt_tokens: int
    items: list[ItemView] = field(default_factory=list)


@dataclass(frozen=True)
class StepView:
    """A prepared step and what is known of its requests and groups."""

    name: str  # for a heading
    settings: RecordSettings  # those under which it was prepared
    step: PreparedStep
    requests: list[RequestView]  # in the order of the batch
    padded: bool = True  # whether the device sees other sizes than the scheduler's
    # By row of the batch; empty unless the engine returned masks of sampling or replayed traces
    samples: StepSamples = field(default_factory=list)
    # What each layer's indexer chose, int32 ``[num_tokens, index_topk]``; empty if not recorded
    choices: dict[str, np.ndarray] = field(default_factory=dict)
    # The text of each token (`vllm_npu_prep.inspect.texts`); empty without a tokenizer
    input_texts: list[str | None] = field(default_factory=list)

    @classmethod
    def of_scenario(cls, scenario: Scenario) -> "StepView":
        """Prepare a scenario's step."""
        view = cls.of_record(scenario.record(), scenario.name or "scenario")
        return replace(view, padded=bool(scenario.capture_sizes))

    @classmethod
    def of_record(cls, record: StepRecord, name: str) -> "StepView":
        """Return a recorded step as it was prepared.

        Parameters
        ----------
        record
            The step. Placeholders of its prompts' images are shown as runs.
        name
            For a heading.

        Raises
        ------
        PrepError
            If its arrays are not those of its settings.
        """
        settings = record.settings
        items: list[list[ItemView]] = [[] for _ in settings.req_ids]
        for (row, start, end), kind in zip(record.batch.placeholders.tolist(), settings.modalities):
            items[row].append(ItemView(kind, start, end - start))
        prompts = record.batch.num_prompt_tokens.tolist()
        return cls(
            name, settings, record.step(), list(map(RequestView, settings.req_ids, prompts, items))
        )

    # ----------------------------------------------------------------- groups

    @cached_property
    def groups(self) -> list[LayerGroup]:
        """The groups whose layers attend, in the engine's order."""
        return [group for group in self.settings.groups if not group.holds_states]

    @cached_property
    def state_groups(self) -> list[int]:
        """The KV-cache groups that hold recurrent states: nobody attends there."""
        return list(self.settings.shape.states.groups)

    @cached_property
    def plans(self) -> list[MaskPlan]:
        """The mask of each of `groups`."""
        form = MaskForm(self.settings.mask)
        return [mask_plan(self.step, form, group) for group in self.groups]

    @cached_property
    def tables(self) -> dict[int, int]:
        """For each of `groups` that has a block table, by its index, the table's group."""
        count = len(self.settings.block_sizes)
        return {i: group.group for i, group in enumerate(self.groups) if group.group < count}

    def block_size(self, index: int) -> int:
        """Return the block size of one of `groups`; 0 for layers without a KV cache."""
        return self.settings.block_sizes[self.tables[index]] if index in self.tables else 0

    def mask_bytes(self, index: int) -> int:
        """Return the bytes of the mask of one of `groups`."""
        plan = self.plans[index]
        rows, columns = plan.shape or (0, 0)
        is_constant = plan.kind is MaskKind.COMPRESSED
        return rows * columns * (1 if is_constant else self.settings.mask_itemsize)

    # ----------------------------------------------------------------- why

    @property
    def state_reason(self) -> str:
        """The rule that matched, and the request that decided."""
        step = self.step
        if step.padding.mode is GraphMode.FULL:
            kind = "decodes" if step.padding.decode_query_len else "mixed batches"
            return f"the full graph of {kind} was captured for it"
        if step.shape.pcp and step.attn_state is AttentionState.ChunkedPrefill:
            return "some request has several tokens, whose K and V ranks find in their caches"
        reason = STATE_RULES[step.attn_state]
        computed, scheduled = step.num_computed_tokens, step.query_lens
        drafts = step.batch.num_draft_tokens[: step.num_reqs]
        if step.attn_state is AttentionState.SpecDecoding:
            return f"{reason}: {self._first(drafts > 0, drafts, 'draft')}"
        if step.attn_state is AttentionState.PrefillCacheHit:
            return f"{reason}: {self._first(computed > 0, computed, 'computed token')}"
        if step.attn_state is AttentionState.ChunkedPrefill:
            cached = self._first(computed > 0, computed, "computed token")
            several = self._first(scheduled - drafts != 1, scheduled, "scheduled token")
            if not several:
                several = self._first(scheduled != 1, scheduled, "scheduled token")
            return f"{reason}: {cached}, {several}"
        return reason

    def _first(self, chosen: np.ndarray, values: np.ndarray, what: str) -> str:
        rows = np.flatnonzero(chosen)
        if not len(rows):
            return ""
        row = int(rows[0])
        return f"request {self.requests[row].req_id} has {counted(int(values[row]), what)}"

    def mask_reason(self, group: int) -> str:
        layers = self.groups[group]
        if not layers.causal:
            return "tokens see both ways"
        reason = MASK_RULES[self.plans[group].kind]
        if layers.sliding_window is not None:
            return f"{reason}; a window of {layers.sliding_window} narrows it"
        if layers.attention_chunk_size is not None:
            return f"{reason}; positions count in chunks of {layers.attention_chunk_size}"
        return reason

    # ----------------------------------------------------------------- what

    @property
    def model_input(self) -> str:
        return "inputs_embeds" if self.step.batch.takes_embeds else "input_ids"

    @property
    def graph(self) -> str:
        """Which graph it replays, or why it runs eagerly, in a few words."""
        if self.step.padding.mode is GraphMode.NONE:
            return self.settings.kind
        return f"{self.settings.kind} of {counted(self.step.num_input_tokens, 'token')}"

    def blocks_owned(self, row: int, group: int = 0) -> np.ndarray:
        """Return the blocks of a request, with the null block instead of freed ones."""
        blocks = self.step.block_table(self.tables[group])[row]
        last = np.flatnonzero(blocks)
        return blocks[: last[-1] + 1] if len(last) else blocks[:0]

    def blocks_touched(self, row: int, group: int = 0) -> np.ndarray:
        """Return the blocks that the step writes for a request, in order, each once."""
        starts = self.step.query_start_loc
        tokens, table = slice(starts[row], starts[row + 1]), self.tables[group]
        blocks = self.step.block_numbers(table)[tokens]
        if self.step.shape.dcp:  # other ranks write the others
            blocks = blocks[self.step.slot_mapping[table][tokens] >= 0]
        return blocks[np.flatnonzero(np.diff(blocks, prepend=-1))]

    def spans(self) -> list[dict[str, Any]]:
        """Return images and videos of all requests, and which of their tokens the step computes.

        ``tokens`` are those of the step, as first and end (excluded); None if the step computes
        none of them, because the item is in the KV cache already or comes later.
        """
        step, spans = self.step, []
        for row, request in enumerate(self.requests):
            first, start = int(step.num_computed_tokens[row]), int(step.query_start_loc[row])
            for item in request.items:
                seen = max(item.offset, first), min(item.end, int(step.seq_lens[row]))
                tokens = [start + position - first for position in seen]
                spans.append(
                    {
                        "req_id": request.req_id,
                        "modality": item.modality,
                        "offset": item.offset,
                        "length": item.length,
                        "tokens": tokens if seen[0] < seen[1] else None,
                    }
                )
        return spans


def view_of_record(file: Path) -> StepView:
    """Return the step of a record, with its tokens' texts if the model's tokenizer is at hand."""
    record = read_record(file)
    try:
        view = StepView.of_record(record, f"step {record.number} of {file}")
    except PrepError as error:
        raise PrepError(f"{file}: {error}") from None
    samples = read_samples(file, len(view.requests))
    choices = read_choices(file, view.step.total_num_scheduled_tokens, view.settings.index_topk)
    texts = input_texts(file, record)
    return replace(view, samples=samples, choices=choices, input_texts=texts)
