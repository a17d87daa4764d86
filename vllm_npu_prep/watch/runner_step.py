"""A step as another runner has prepared it, and the one form of steps made of it.

`StepMaker` puts the runner's arrays in the places of those that the core prepares of the same
batch. What comes after it is the code that looks at this plugin's own steps.
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from vllm_npu_prep.observe.ledger_owners import prompt_length
from vllm_npu_prep.observe.violation import given_allowed
from vllm_npu_prep.prep.arrays import PADDING_ROWS
from vllm_npu_prep.prep.batch import PreparedStep, StepBatch, prepare_step
from vllm_npu_prep.prep.layout import StepLayout
from vllm_npu_prep.prep.padding import GraphMode, Padding
from vllm_npu_prep.prep.shape import EngineShape
from vllm_npu_prep.prep.tables import BatchTables

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

INT32 = np.iinfo(np.int32)


@dataclass
class RunnerStep:
    """What a runner prepared, read from its device: ``R`` requests, ``T`` tokens, ``G`` groups."""

    req_ids: list[str]  # in the order of the batch
    num_input_tokens: int  # with padding
    kind: str  # how it runs, in words (`vllm_npu_prep.graph.counts`)
    input_ids: np.ndarray  # [T]
    positions: np.ndarray  # [T]
    slot_mapping: np.ndarray  # [G, num_input_tokens]
    query_start_loc: np.ndarray  # [R + 1]
    seq_lens: np.ndarray  # [R]
    num_computed_tokens: np.ndarray  # [R]
    logits_indices: np.ndarray  # [rows of logits]
    num_blocks: np.ndarray  # [G, R], entries of each row of the block tables
    block_tables: list[np.ndarray]  # of each group, [R, columns that are used]
    sampled: dict[str, list[int]]  # by the last step for each request in it, drafts included
    # Lists that attention gets from the host, by the array whose beginning they repeat
    of_layers: dict[str, np.ndarray] = field(default_factory=dict, init=False)


@dataclass
class KnownRequest:
    """What the scheduler has said of a request's tokens."""

    num_prompt_tokens: int
    tokens: list[int]  # from the first one on; empty if it was given as vectors
    num_known: int  # tokens that it had when it began or came back


class KnownRequests:
    """The requests of an engine, by the scheduler's outputs."""

    def __init__(self) -> None:
        self.by_id: dict[str, KnownRequest] = {}

    def follow(self, output: "SchedulerOutput") -> None:
        for req_id in output.finished_req_ids:
            self.by_id.pop(req_id, None)
        for new in output.scheduled_new_reqs:
            prompt, length = list(new.prompt_token_ids or ()), prompt_length(new)
            known = list(getattr(new, "prefill_token_ids", None) or prompt)
            tokens = known if new.prompt_embeds is None else []
            self.by_id[new.req_id] = KnownRequest(length, tokens, max(length, len(known)))
        cached = output.scheduled_cached_reqs
        for req_id, outputs in zip(cached.req_ids, cached.num_output_tokens):
            request = self.by_id.get(req_id)
            if request is not None and req_id in cached.resumed_req_ids:
                request.num_known = request.num_prompt_tokens + outputs
                request.tokens = list(cached.all_token_ids.get(req_id) or request.tokens)


class StepMaker:
    """Makes a `PreparedStep` of what a runner prepared.

    Parameters
    ----------
    block_sizes, num_columns
        Of each group's block table.
    max_drafts
        The most drafts of a request.
    """

    def __init__(
        self,
        block_sizes: list[int],
        num_columns: list[int],
        *,
        max_num_reqs: int,
        max_model_len: int,
        max_drafts: int,
        chunked_prefill: bool,
    ) -> None:
        num_groups, widths = len(block_sizes), np.array(num_columns, np.int32)
        self.requests = KnownRequests()
        of_requests = np.zeros((3, max_num_reqs), np.int32)
        of_tables = np.zeros((3, num_groups, max_num_reqs), np.int32)
        self.tables = BatchTables(
            num_computed_tokens=of_requests[0],
            num_prompt_tokens=of_requests[1],
            num_tokens=of_requests[2],
            token_ids=np.zeros((max_num_reqs, max_model_len), np.int32),
            block_table_flat=np.zeros((max_num_reqs + PADDING_ROWS) * int(widths.sum()), np.int32),
            max_num_blocks=widths,
            block_sizes=np.array(block_sizes, np.int32),
            num_blocks=of_tables[0],
            num_synced_blocks=of_tables[1],
            num_device_blocks=of_tables[2],
            shape=EngineShape(num_groups=num_groups, max_logits_per_req=1 + max_drafts),
            chunked_prefill=chunked_prefill,
        )

    def make(self, given: RunnerStep, output: "SchedulerOutput") -> PreparedStep:
        """Return the step, with the runner's arrays.

        Raises
        ------
        StepCheckError
            If counts are beyond the runner's own tables: nothing can be read by them.
        """
        tables, num_reqs = self.tables, len(given.req_ids)
        scheduled = self._int32([output.num_scheduled_tokens.get(r, 0) for r in given.req_ids])
        drafts = output.scheduled_spec_decode_tokens
        num_drafts = self._int32([len(drafts.get(r, ())) for r in given.req_ids])
        self._refuse_counts(given, scheduled)
        self._fill_tables(given, scheduled, num_drafts)
        num_tokens = int(scheduled.sum())
        is_padded = given.num_input_tokens > num_tokens
        mode = GraphMode.PIECEWISE if is_padded else GraphMode.NONE
        padding = Padding(given.num_input_tokens, num_reqs, mode=mode)
        layout = StepLayout(given.num_input_tokens, num_reqs, tables.shape)
        arrays = layout.allocate(0, int(tables.num_blocks[:, :num_reqs].sum()))
        batch = StepBatch(tables, scheduled, num_drafts, num_tokens)
        step = prepare_step(batch, padding, layout, arrays)
        if len(given.logits_indices) != step.num_logits:
            text = "a request has a row of logits for each draft, and one more"
            rows = len(given.logits_indices), step.num_logits
            raise given_allowed("logits", text, *rows)
        self._put(arrays.positions, given.positions)
        self._put(arrays.input_ids, given.input_ids)
        self._put(arrays.slot_mapping, given.slot_mapping)
        self._put(arrays.query_start_loc, given.query_start_loc)
        self._put(arrays.seq_lens, given.seq_lens)
        self._put(arrays.num_computed_tokens, given.num_computed_tokens)
        self._put(arrays.logits_indices, given.logits_indices)
        return step

    @staticmethod
    def _int32(values: list[int]) -> np.ndarray:
        return np.array(values, np.int32)

    @staticmethod
    def _put(target: np.ndarray, values: np.ndarray) -> None:
        """Write the elements of the batch; what a runner leaves in padding is not looked at.

        Slots are read with their padding.
        """
        target[..., : values.shape[-1]] = values.clip(INT32.min, INT32.max)

    def _refuse_counts(self, given: RunnerStep, scheduled: np.ndarray) -> None:
        tables = self.tables
        for row, req_id in enumerate(given.req_ids):
            computed, end = int(given.num_computed_tokens[row]), int(scheduled[row])
            end += computed
            if computed < 0 or end > tables.max_model_len or not scheduled[row]:
                text = "a step computes tokens of a sequence"
                allowed = f"up to max_model_len {tables.max_model_len}, and at least one"
                raise given_allowed(
                    "counts", text, f"tokens {computed} to {end}", allowed, request=req_id
                )
            for group, owned in enumerate(given.num_blocks[:, row].tolist()):
                room = min(int(tables.max_num_blocks[group]), given.block_tables[group].shape[1])
                if not 0 <= owned <= room:
                    text = "a request's blocks fit its row of the table"
                    allowed = f"0 to {room}"
                    raise given_allowed("blocks", text, owned, allowed, request=req_id, group=group)

    def _fill_tables(
        self, given: RunnerStep, scheduled: np.ndarray, num_drafts: np.ndarray
    ) -> None:
        tables, num_reqs = self.tables, len(given.req_ids)
        tables.num_computed_tokens[:num_reqs] = given.num_computed_tokens
        tables.num_blocks[:, :num_reqs] = given.num_blocks
        for group, entries in enumerate(given.block_tables):
            table = tables.block_table(group)
            table[:num_reqs, : entries.shape[1]] = entries.clip(INT32.min, INT32.max)
        # The device gets each row anew, as records see it
        tables.num_synced_blocks[:] = tables.num_device_blocks[:] = 0
        start = 0
        for row, req_id in enumerate(given.req_ids):
            request = self.requests.by_id.get(req_id, KnownRequest(0, [], 0))
            first, count = int(given.num_computed_tokens[row]), int(scheduled[row])
            known_now = first + count - int(num_drafts[row])
            tables.num_prompt_tokens[row] = request.num_prompt_tokens
            tables.num_tokens[row] = max(request.num_known, known_now)
            ids = given.input_ids[start : start + count].clip(INT32.min, INT32.max)
            tables.token_ids[row, first : first + count] = ids
            told = request.tokens[first : first + count]
            if first >= request.num_known:  # it goes on from what was sampled
                told = given.sampled.get(req_id, [])[-1:]
            tables.token_ids[row, first : first + len(told)] = told
            start += count


def check_lists(given: RunnerStep, step: PreparedStep) -> None:
    """Check that attention gets from the host what the device has.

    Raises
    ------
    StepCheckError
        Names the first request for which it does not.
    """
    for name, told in given.of_layers.items():
        text = f"attention gets the {name} that the device has"
        own = getattr(step, name)[: len(told)]
        for index in np.flatnonzero(told != own)[:1].tolist():
            row = index if name == "seq_lens" else max(index - 1, 0)
            request = given.req_ids[row]
            rule, values = f"{name} of layers", (int(told[index]), int(own[index]))
            raise given_allowed(rule, text, *values, request=request)
