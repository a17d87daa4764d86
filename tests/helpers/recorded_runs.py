"""A run of random requests that no engine made, as a recorder writes it, and what is true of it."""

from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from vllm_npu_prep.config import RecordConfig
from vllm_npu_prep.observe import recorder as recorder_module
from vllm_npu_prep.observe.recorder import StepRecorder
from vllm_npu_prep.observe.step_snapshot import Recorded
from vllm_npu_prep.prep.arrays import PADDING_ROWS
from vllm_npu_prep.prep.batch import BatchTables, PreparedStep, StepBatch, prepare_step
from vllm_npu_prep.prep.mask import MaskForm
from vllm_npu_prep.prep.padding import GraphMode, Padding
from vllm_npu_prep.prep.shape import EngineShape
from vllm_npu_prep.records.settings import LayerGroup

BLOCK_SIZE = 4
FULL, PIECEWISE, EAGER = "full graph", "piecewise graphs", "eager: more than 32 tokens"


@dataclass
class Request:
    name: str
    num_prompt_tokens: int
    num_tokens: int  # at its end
    computed: int = 0
    known: int = 0  # tokens
    drafts: int = 0  # of its next step
    blocks: list[int] = field(default_factory=list)
    # step, computed before, scheduled, drafts, accepted of them
    done: list[tuple[int, int, int, int, int]] = field(default_factory=list)
    hits: list[tuple[int, int]] = field(default_factory=list)
    preemptions: list[int] = field(default_factory=list)


@dataclass
class Truth:
    """What a step was given."""

    state: str
    kind: str
    requests: int
    tokens: int
    padding: int
    drafts: int
    blocks: int
    times: tuple[float, float, int]


class Traffic:
    """A small scheduler: chunks, decodes, drafts, prefix hits, and preemptions for want of blocks.

    For 16 steps decodes have up to so many drafts, and for 16 none.
    """

    max_num_reqs, max_num_tokens, num_blocks, longest = 8, 48, 80, 60

    def __init__(self, seed: int, most_drafts: int = 0) -> None:
        self.rng, self.most_drafts = np.random.default_rng(seed), most_drafts
        max_num_reqs, model_len = self.max_num_reqs, 2 * self.longest + 8
        self.free = list(range(self.num_blocks, 0, -1))
        self.owners: dict[int, int] = {}  # of a block, how many
        self.waiting: deque[Request] = deque()
        self.arrived = 0
        self.running: list[Request] = []
        self.requests: list[Request] = []  # in the order of their first steps
        self.steps: list[Truth] = []
        width = -(-model_len // BLOCK_SIZE)
        column = lambda: np.zeros(max_num_reqs, np.int32)  # noqa: E731
        self.tables = BatchTables(
            num_computed_tokens=column(),
            num_prompt_tokens=column(),
            num_tokens=column(),
            token_ids=self.rng.integers(2, 500, (max_num_reqs, model_len)).astype(np.int32),
            block_table_flat=np.zeros((max_num_reqs + PADDING_ROWS) * width, np.int32),
            max_num_blocks=np.array([width], np.int32),
            block_sizes=np.array([BLOCK_SIZE], np.int32),
            num_blocks=np.zeros((1, max_num_reqs), np.int32),
            num_synced_blocks=np.zeros((1, max_num_reqs), np.int32),
            num_device_blocks=np.zeros((1, max_num_reqs), np.int32),
            shape=EngineShape(max_logits_per_req=1 + most_drafts),
        )

    def recorder(self, folder: Path, steps: str = "last 100000", suffix: str = "", **options):
        """A recorder of its steps."""
        config = RecordConfig(dir=str(folder), steps=steps, **options)
        recorded = Recorded((LayerGroup(group=0),), MaskForm.DENSE, 1)
        manifest = {"config": {"model": "a <model>", "num_blocks": self.num_blocks}}
        return StepRecorder(config, self.tables, recorded, manifest, suffix)

    # ----------------------------------------------------------------- scheduling

    def _give(self, request: Request, length: int) -> bool:
        """Blocks for this many tokens, if there are any."""
        missing = -(-length // BLOCK_SIZE) - len(request.blocks)
        if missing > len(self.free):
            return False
        for _ in range(missing):
            request.blocks.append(self.free.pop())
            self.owners[request.blocks[-1]] = 1
        return True

    def _take(self, request: Request) -> None:
        for block in request.blocks:
            self.owners[block] -= 1
            if not self.owners[block]:
                self.free.append(block)
        request.blocks = []

    def _schedule(self) -> list[tuple[Request, int]]:
        chosen: list[tuple[Request, int]] = []
        left, place, preempted = self.max_num_tokens, 0, False
        while place < len(self.running) and left:
            request = self.running[place]
            count = min(request.known + request.drafts - request.computed, left)
            if self._give(request, request.computed + count):
                chosen.append((request, count))
                left, place = left - count, place + 1
                continue
            last = self.running.pop()
            self._take(last)
            last.computed = last.drafts = 0
            self.waiting.appendleft(last)
            preempted = True
        while self.waiting and left and len(self.running) < self.max_num_reqs and not preempted:
            if not self._admit(chosen, left):
                break
            left -= chosen[-1][1]
        if not chosen and self.waiting:  # nothing runs: what was preempted comes back
            assert self._admit(chosen, left)
        return chosen

    def _admit(self, chosen: list[tuple[Request, int]], left: int) -> bool:
        request = self.waiting[0]
        donor = self.running[0] if self.running and self.rng.random() < 0.5 else None
        if donor is not None:
            hit = min(donor.computed, request.known - 1) // BLOCK_SIZE * BLOCK_SIZE
            request.blocks, request.computed = donor.blocks[: hit // BLOCK_SIZE], hit
            for block in request.blocks:
                self.owners[block] += 1
        count = min(request.known - request.computed, left)
        if not self._give(request, request.computed + count):
            self._take(request)
            request.computed = 0
            return False
        self.waiting.popleft()
        self.running.append(request)
        chosen.append((request, count))
        number = len(self.steps)
        if request.computed:
            request.hits.append((number, request.computed))
        if request.done:  # what a record can tell: it has not what its last step left
            _, before, scheduled, drafts, _ = request.done[-1]
            if before + scheduled - drafts <= request.computed <= before + scheduled:
                del request.hits[-1:]
            else:
                request.preemptions.append(number)
        else:
            self.requests.append(request)
        return True

    # ----------------------------------------------------------------- steps

    def step(self) -> tuple[PreparedStep, str, list[str]]:
        """Schedule and prepare a step: it, its kind, and the names of its requests."""
        while not (self.running or self.waiting) or (
            len(self.waiting) < 3 and self.rng.random() < 0.3
        ):
            prompt = int(self.rng.integers(1, self.longest))
            last = prompt + int(self.rng.integers(1, self.longest))
            self.waiting.append(Request(f"request {self.arrived}", prompt, last, known=prompt))
            self.arrived += 1
        chosen = self._schedule()
        tables, number = self.tables, len(self.steps)
        counts = np.array([count for _, count in chosen], np.int32)
        drafts = np.zeros(len(chosen), np.int32)
        tables.num_blocks[:] = tables.num_synced_blocks[:] = 0
        for row, (request, count) in enumerate(chosen):
            drafts[row] = max(request.computed + count - request.known, 0)
            tables.num_computed_tokens[row] = request.computed
            tables.num_prompt_tokens[row] = request.num_prompt_tokens
            tables.num_tokens[row] = request.known
            tables.block_table(0)[row, : len(request.blocks)] = request.blocks
            tables.num_blocks[0, row] = len(request.blocks)
        total = int(counts.sum())
        padding, kind = Padding(total, len(chosen)), EAGER
        if (counts == 1).all():
            padding, kind = Padding(self.max_num_reqs, self.max_num_reqs, 1, GraphMode.FULL), FULL
        elif total <= 32:
            padding, kind = Padding(32, len(chosen), 0, GraphMode.PIECEWISE), PIECEWISE
        step = prepare_step(StepBatch(tables, counts, drafts, total), padding)
        blocks = {block for request, _ in chosen for block in request.blocks}
        times = 10 + 0.03125 * number, float(self.rng.integers(1, 64)) / 4096, int(number % 7 == 3)
        self.steps.append(
            Truth(
                step.attn_state.name,
                kind,
                len(chosen),
                total,
                padding.num_input_tokens - total,
                int(drafts.sum()),
                len(blocks),
                times,
            )
        )
        names = [request.name for request, _ in chosen]
        for row, (request, count) in enumerate(chosen):
            self._advance(request, count, int(drafts[row]))
        return step, kind, names

    def _advance(self, request: Request, count: int, drafts: int) -> None:
        accepted = int(self.rng.integers(0, drafts + 1))
        number = len(self.steps) - 1
        request.done.append((number, request.computed, count, drafts, accepted))
        request.computed += count - drafts + accepted
        if request.computed >= request.known:
            request.known = request.computed + 1
        request.drafts = 0
        if request.known >= request.num_tokens:
            self.running.remove(request)
            self._take(request)
        elif request.computed == request.known - 1 and number // 16 % 2:
            request.drafts = int(self.rng.integers(0, self.most_drafts + 1))

    def record(self, recorder: StepRecorder, count: int, times: bool = True) -> None:
        """Let the recorder note this many steps."""
        waits = sum(step.times[2] for step in self.steps)
        clock, before = [0.0], recorder_module.perf_counter
        recorder_module.perf_counter = lambda: clock[0]
        try:
            for _ in range(count):
                step, kind, names = self.step()
                started, prepared, waited = self.steps[-1].times
                clock[0], waits = started + prepared, waits + waited
                told = {"started": started, "waits": waits} if times else {}
                recorder.keep(step, kind, names, **told)
        finally:
            recorder_module.perf_counter = before


def record_two_engines(folder: Path, count: int) -> tuple[Traffic, Traffic]:
    """Record runs of two engines; K and V of every other request move from one to the other."""
    traffics = Traffic(5), Traffic(6)
    for name, traffic in zip(("prefill", "decode"), traffics):
        recorder = traffic.recorder(folder / name)
        for number in range(0, 1000, 2):
            transfer = {"kv_transfer_params": {"transfer_id": f"transfer {number}"}}
            params = SimpleNamespace(extra_args=transfer)
            noted: Any = SimpleNamespace(req_id=f"request {number}", sampling_params=params)
            recorder.note_transfers([noted])
        traffic.record(recorder, count)
        recorder.dump("asked for")
    return traffics


def record(folder: Path, seed: int, count: int, suffix: str = "", **how) -> Traffic:
    """Record a run of random requests, all of it."""
    traffic = Traffic(seed, most_drafts=how.pop("most_drafts", 0))
    times = how.pop("times", True)
    recorder = traffic.recorder(folder, suffix=suffix, **how)
    traffic.record(recorder, count, times)
    recorder.dump("asked for")
    return traffic
