"""One prepared step as ``explain``, pages and pictures show it, with its reasons (`StepView`).

A view is made from a scenario, which is prepared now, or from a record of a prepared step, right or
wrong.
"""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from vllm_npu_prep.errors import PrepError
from vllm_npu_prep.prep.batch import PreparedStep, prepare_step
from vllm_npu_prep.prep.mask import MaskForm, MaskKind, MaskPlan, plan_mask
from vllm_npu_prep.prep.padding import GraphMode
from vllm_npu_prep.prep.state import AttentionState
from vllm_npu_prep.records.expert_counts import ExpertTokens, read_expert_counts
from vllm_npu_prep.records.record import StepRecord
from vllm_npu_prep.records.record_file import read_record
from vllm_npu_prep.records.scenario import Scenario, scenario_batch
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
class GroupView:
    """Layers that see the step alike: a KV-cache group, or a part of one.

    Attributes
    ----------
    table
        Group whose block table they use; None: layers without a KV cache.
    block_size
        Block size of that table; 0 without one.
    plan
        Their mask.
    sliding_window, attention_chunk_size
        Limits of what a token sees; None: no limit.
    mask_itemsize
        Bytes of a cell of a dense mask.
    causal
        Whether tokens see only what is before them.
    """

    table: int | None
    block_size: int
    plan: MaskPlan
    sliding_window: int | None = None
    attention_chunk_size: int | None = None
    mask_itemsize: int = 1
    causal: bool = True

    @property
    def mask_bytes(self) -> int:
        rows, columns = self.plan.shape or (0, 0)
        return rows * columns * (1 if self.plan.kind is MaskKind.COMPRESSED else self.mask_itemsize)


@dataclass(frozen=True)
class StepView:
    """A prepared step and what is known of its requests and groups.

    Attributes
    ----------
    name
        For a heading.
    requests, groups
        In the order of the batch and of the engine.
    graph
        Which graph it replays or why it runs eagerly, in a few words.
    padded
        Whether the device sees other sizes than the scheduler's.
    tokens_per_expert
        By layer: tokens of each expert, if the record was asked for them.
    state_groups
        KV-cache groups that hold recurrent states; they are not among `groups`, because nobody
        attends.
    """

    name: str
    step: PreparedStep
    requests: list[RequestView]
    groups: list[GroupView]
    graph: str
    padded: bool
    tokens_per_expert: ExpertTokens = field(default_factory=dict)
    state_groups: list[int] = field(default_factory=list)

    @classmethod
    def of_scenario(cls, scenario: Scenario) -> "StepView":
        """Prepare a scenario's step and plan the mask of each KV-cache group."""
        step = prepare_step(*scenario_batch(scenario))
        groups = []
        for table, group in enumerate(scenario.groups):
            if group.holds_states:
                continue
            local = step.local if group.attention_chunk_size is not None else None
            plan = plan_mask(
                step.attn_state,
                MaskForm(scenario.mask),
                step.num_input_tokens,
                step.max_seq_len if local is None else local.max_seq_len,
                sliding_window=group.sliding_window,
                attention_chunk_size=group.attention_chunk_size,
            )
            groups.append(
                GroupView(
                    table, group.block_size, plan, group.sliding_window, group.attention_chunk_size
                )
            )
        requests = [
            RequestView(
                request.req_id,
                request.num_prompt_tokens,
                [ItemView(item.modality, item.offset, item.length) for item in request.multimodal],
            )
            for request in scenario.requests
        ]
        return cls(
            scenario.name or "scenario",
            step,
            requests,
            groups,
            _graph_of(scenario, step),
            bool(scenario.capture_sizes),
            state_groups=[i for i, group in enumerate(scenario.groups) if group.holds_states],
        )

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
        settings, step = record.settings, record.step()
        groups = []
        for group, plan in zip(settings.groups, record.plans(step)):
            if group.state_threshold is not None:
                continue
            has_table = group.group < len(settings.block_sizes)
            groups.append(
                GroupView(
                    group.group if has_table else None,
                    settings.block_sizes[group.group] if has_table else 0,
                    plan,
                    group.sliding_window,
                    group.attention_chunk_size,
                    settings.mask_itemsize,
                    group.causal,
                )
            )
        items: list[list[ItemView]] = [[] for _ in settings.req_ids]
        for (row, start, end), kind in zip(record.batch.placeholders.tolist(), settings.modalities):
            items[row].append(ItemView(kind, start, end - start))
        requests = [
            RequestView(req_id, num_prompt_tokens, of_row)
            for req_id, num_prompt_tokens, of_row in zip(
                settings.req_ids, record.batch.num_prompt_tokens.tolist(), items
            )
        ]
        graph = settings.kind
        if step.padding.mode is not GraphMode.NONE:
            graph += f" of {counted(step.num_input_tokens, 'token')}"
        states = list(settings.states.groups) if settings.states is not None else []
        return cls(name, step, requests, groups, graph, padded=True, state_groups=states)

    # ----------------------------------------------------------------- why

    @property
    def state_reason(self) -> str:
        """The rule that matched, and the request that decided."""
        step = self.step
        if step.padding.mode is GraphMode.FULL:
            kind = "decodes" if step.padding.decode_query_len else "mixed batches"
            return f"the full graph of {kind} was captured for it"
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
        view = self.groups[group]
        if not view.causal:
            return "tokens see both ways"
        reason = MASK_RULES[view.plan.kind]
        if view.sliding_window is not None:
            return f"{reason}; a window of {view.sliding_window} narrows it"
        if view.attention_chunk_size is not None:
            return f"{reason}; positions count in chunks of {view.attention_chunk_size}"
        return reason

    # ----------------------------------------------------------------- what

    @property
    def model_input(self) -> str:
        return "inputs_embeds" if self.step.batch.takes_embeds else "input_ids"

    @property
    def tables(self) -> dict[int, int]:
        """For each entry of `groups` that has a block table, by its index, the table's group."""
        return {i: group.table for i, group in enumerate(self.groups) if group.table is not None}

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
        if self.step.batch.tables.dcp is not None:  # other ranks write the others
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


def _graph_of(scenario: Scenario, step: PreparedStep) -> str:
    if not scenario.capture_sizes:
        return "eager: no capture sizes given"
    largest = max(scenario.capture_sizes)
    if step.total_num_scheduled_tokens > largest:
        return f"eager: more than {counted(largest, 'token')}, the largest capture size"
    return f"full graph of {counted(step.num_input_tokens, 'token')}"


def view_of_record(file: Path) -> StepView:
    """Return the step of a record, with the tokens of its experts where these were counted.

    Raises
    ------
    PrepError
        One line: what is wrong with the file.
    """
    record = read_record(file)
    try:
        view = StepView.of_record(record, f"step {record.number} of {file}")
    except PrepError as error:
        raise PrepError(f"{file}: {error}") from None
    return replace(view, tokens_per_expert=read_expert_counts(file))
