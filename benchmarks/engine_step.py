"""Host time of a whole step of the engine process, beside vLLM's scheduler and runner.

    python benchmarks/engine_step.py [--json] [--steps 200] [--case decode-256] [--synchronous]
                                     [--parts] [--markdown]
                                     [--runner V1] [--against V1]

A step is one call of the engine's loop: ``schedule``, ``execute_model`` and ``sample_tokens`` of a
runner whose model and sampler return at once, and ``update_from_output``. One engine of this
process gets, in turns, our scheduler and V2 runner, and vLLM's `AsyncScheduler` and V2 runner,
which launches kernels that do nothing, as in `host_step_v2.py`. Both sides serve the same requests.
Where their outputs differ, the benchmark stops and prints no number. With ``--runner V1`` both
runners are V1's. With ``--against V1`` alone, vLLM's is V1, which it takes where Triton is missing.
Times are medians in microseconds of this thread's processor time, torch pinned to one thread.
A turn has ten steps: an engine's step follows one of its own, which has left in the processor's
caches what the next one reads.

===============  ==================================================================================
case             what is measured
===============  ==================================================================================
decode-32        32 decodes
decode-256       256 decodes
decode-1024      1024 decodes
arrivals-256     256 requests; in each step a prompt of 128 tokens arrives, and a request ends
drafts-256       256 decodes with three drafts each, of which one is accepted
decode-4096      4096 decodes
waiting-10000    256 decodes, and 10,000 requests that wait
preempting-256   256 requests in a cache that is too small: requests are preempted and resumed
abort-256        as arrivals-256, and every step four requests are aborted and replaced
offloading-256   256 decodes, and the host keeps blocks (vLLM's side has vLLM's connector)
pulled-256       as arrivals-256 on an instance that decodes: prompts are computed elsewhere
===============  ==================================================================================

The first five are run unless cases are named. Columns: ``ours_us``, ``upstream_us`` and their
``ratio``; with ``--parts`` also where each side's time goes: in ``schedule``, in the runner, in
``update_from_output``, and in the rest of the engine's loop; ``max_us`` and
``upstream_max_us`` are the longest steps. ``--parts --markdown`` prints the rows of the table of
parts in docs/guides/performance.md.
"""

import argparse
import contextlib
import dataclasses
import gc
import json
import os
import statistics
import sys
import tempfile
import time
from collections import defaultdict, deque
from collections.abc import Iterator
from gc import freeze, unfreeze  # of the module `engine` makes them do nothing
from pathlib import Path
from typing import Any

os.environ.setdefault("NPU_PREP_DEVICE", "cpu")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
import torch
from connectors import SETTINGS, as_upstream_has_it, worker_part
from host_step import MismatchError, StubModel, show, twin_of
from host_step_v2 import FreeDrafter, FreeSampler, free_kernels, stock_of
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import SamplerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata
from workloads import VOCAB, speculation

from tests.helpers.engine import make_model, runner_of
from tests.helpers.v2 import engine_of
from vllm_npu_prep.compat import v2
from vllm_npu_prep.scheduling.scheduler import BatchedAsyncScheduler, BatchedScheduler

WARM_UP = 30
TURN = 10
"""Steps that one side takes before the other takes the same."""
PARTS = ("schedule", "runner", "update")
TOKEN = 9
"""The token that is always sampled."""


@dataclasses.dataclass(frozen=True)
class Case:
    """Requests of a case.

    Attributes
    ----------
    running
        Requests that run.
    arrivals
        Requests that arrive, and end, in each step.
    waiting
        Requests that wait throughout.
    aborts
        Requests that are aborted in each step, and as many that arrive.
    blocks
        Blocks of the KV cache for each request that runs.
    drafts
        That each request has to verify in a step.
    connector
        One of `connectors.SETTINGS`.
    """

    running: int
    arrivals: int = 0
    waiting: int = 0
    aborts: int = 0
    blocks: int = 16
    drafts: int = 0
    connector: str = ""


CASES = {
    "decode-32": Case(32),
    "decode-256": Case(256),
    "decode-1024": Case(1024),
    "arrivals-256": Case(256, arrivals=1),
    "drafts-256": Case(256, drafts=3),
    "decode-4096": Case(4096),
    "waiting-10000": Case(256, waiting=10_000),
    "preempting-256": Case(256, arrivals=1, blocks=2),
    "abort-256": Case(256, arrivals=1, aborts=4),
    "offloading-256": Case(256, connector="offloading"),
    "pulled-256": Case(256, arrivals=1, connector="pulled"),
}
SHOWN = ("decode-32", "decode-256", "decode-1024", "arrivals-256", "drafts-256")
TITLES = {
    "decode-32": "32 decodes",
    "decode-256": "256 decodes",
    "decode-1024": "1024 decodes",
    "arrivals-256": "256, one in and one out",
    "drafts-256": "256 decodes with three drafts each",
}
"""Of cases in the guide's table."""


class ConstantSampler(torch.nn.Module):
    """Returns the same token for each request."""

    def forward(self, logits: torch.Tensor, *_: Any, **__: Any) -> SamplerOutput:
        """No sampling."""
        tokens = torch.full((len(logits), 1), TOKEN, dtype=torch.int32)
        return SamplerOutput(sampled_token_ids=tokens, logprobs_tensors=None)


class ConstantSamplerV2(FreeSampler):
    """Returns the same tokens for each request, and accepts the first draft of each that has some.

    Everything else is done by the sampler that it replaces. The output of a step without drafts,
    in which each prompt ends, is made once for each number of requests.
    """

    def __init__(self, sampler: Any) -> None:
        super().__init__(sampler)
        self._kept: dict[int, Any] = {}

    def __call__(self, logits: torch.Tensor, batch: Any, *_: Any) -> Any:
        """No sampling."""
        drafts, cut = batch.num_draft_tokens_per_req, None
        if batch.has_prefill:
            ends = batch.num_computed_prefill_tokens_np + batch.num_scheduled_tokens
            cut = ends < batch.prefill_len_np
        if drafts is None and (cut is None or not cut.any()):
            if batch.num_reqs not in self._kept:
                self.give(torch.full((batch.num_reqs, 1), TOKEN))
                self._kept[batch.num_reqs] = super().__call__()
            return self._kept[batch.num_reqs]
        width = 1 if drafts is None else 1 + int(drafts.max())
        tokens = torch.full((batch.num_reqs, width), -1)
        tokens[:, 0] = TOKEN
        if drafts is not None:
            tokens[torch.from_numpy(drafts > 0), 1] = TOKEN
        if cut is not None:
            tokens[torch.from_numpy(cut)] = -1
        self.give(tokens)
        return super().__call__()


class ConstantVerifier(torch.nn.Module):
    """Accepts the first draft of each request that has some."""

    def forward(self, metadata: SpecDecodeMetadata, *_: Any, **__: Any) -> SamplerOutput:
        """No sampling."""
        has_drafts = torch.tensor(metadata.num_draft_tokens) > 0
        tokens = torch.full((len(has_drafts), 1 + metadata.max_spec_len), -1, dtype=torch.int32)
        tokens[:, 0] = TOKEN
        tokens[has_drafts, 1:2] = TOKEN
        return SamplerOutput(sampled_token_ids=tokens, logprobs_tensors=None)


def proposer(runner: Any) -> Any:
    """A drafter's `propose` that returns at once, in the form of the runner's method."""
    num_drafts, asynchronous = runner.num_spec_tokens, runner.use_async_scheduling

    def propose(*_: Any, **__: Any) -> torch.Tensor | list[list[int]]:
        count = runner.input_batch.num_reqs
        if asynchronous:
            return torch.full((count, num_drafts), TOKEN, dtype=torch.int32)
        return [[TOKEN] * num_drafts for _ in range(count)]

    return propose


def stub_v2(runner: Any) -> None:
    """Let the sampler and the drafter of a V2 runner return at once."""
    runner.sampler = runner.rejection_sampler = ConstantSamplerV2(runner.sampler)
    count, drafter = runner.num_speculative_steps, runner.speculator
    if isinstance(drafter, FreeDrafter):
        drafter.propose = lambda batch, *_, **__: torch.full((batch.num_reqs, count), TOKEN)
    elif drafter is not None:
        drafter.draft = lambda in_flight, *_, **__: torch.full(
            (in_flight.step.num_reqs, count), TOKEN, dtype=torch.int32
        )


@dataclasses.dataclass
class Side:
    """A scheduler and a runner, and what the engine keeps between their steps.

    Attributes
    ----------
    scheduler, runner
        Ours, or vLLM's.
    queue
        Steps in flight, of asynchronous scheduling.
    worker_part
        What the worker's connector keeps for this side.
    times
        Microseconds of each step, by part; ``all`` is the whole step.
    arrived
        Requests that have arrived.
    """

    scheduler: Any
    runner: Any
    queue: deque | None
    worker_part: Any = None  # of a KV connector
    times: dict[str, list[float]] = dataclasses.field(default_factory=lambda: defaultdict(list))
    now: dict[str, float] = dataclasses.field(default_factory=lambda: defaultdict(float))
    arrived: int = 0

    def timed(self, part: str, method: Any) -> Any:
        """A method whose time is added to a part of the step."""

        def call(*args: Any, **kwargs: Any) -> Any:
            start = time.thread_time_ns()
            try:
                return method(*args, **kwargs)
            finally:
                self.now[part] += (time.thread_time_ns() - start) / 1e3

        return call


class Bench:
    """One engine with both sides.

    Parameters
    ----------
    llm
        The engine, whose runner is ours.
    case
        Its requests.
    against
        "V1" or "V2": vLLM's runner.
    """

    def __init__(self, llm: Any, case: Case, against: str) -> None:
        self.core = llm.llm_engine.engine_core.engine_core
        self.worker = self.core.model_executor.driver_worker.worker
        self.case = case
        runner = runner_of(llm)
        if runner.step_check is not None:
            runner.step_check.limits[1:] = np.iinfo(np.int32).max  # blocks are made up
        asynchronous = self.core.vllm_config.scheduler_config.async_scheduling
        kinds = (
            (BatchedAsyncScheduler, AsyncScheduler)
            if asynchronous
            else (BatchedScheduler, Scheduler)
        )
        self.sides = {}
        if case.connector:  # planes of our runner are registered; none of them is copied
            get_kv_transfer_group().register_kv_caches = lambda _: None
        if against == "V2":
            twin = stock_of(runner)
            free_kernels()
            twin.recorder = None  # for which our worker asks
        else:
            twin = twin_of(runner)
        runners = (runner, twin)
        for name, kind, each in zip(("ours", "upstream"), kinds, runners, strict=True):
            each.model = StubModel(each.max_num_tokens)
            is_v1 = hasattr(each, "_model_forward")
            if not is_v1:
                stub_v2(each)
            else:
                each.sampler = ConstantSampler()
            if case.drafts and is_v1:
                each.rejection_sampler = ConstantVerifier()
                each.drafter.propose = proposer(each)
            size = self.core.batch_queue_size
            queue = None if self.core.batch_queue is None else deque(maxlen=size)
            side = Side(self.scheduler(kind), each, queue)
            side.scheduler.schedule = side.timed("schedule", side.scheduler.schedule)
            update = side.timed("update", side.scheduler.update_from_output)
            side.scheduler.update_from_output = update
            if case.connector:
                side.worker_part = worker_part(get_kv_transfer_group())
                if name == "upstream":
                    as_upstream_has_it(side.scheduler.connector)
            for method in ("execute_model", "sample_tokens"):
                setattr(each, method, side.timed("runner", getattr(each, method)))
            self.sides[name] = side

    def begin(self) -> None:
        """The case's first requests arrive."""
        for side in self.sides.values():
            for number in range(self.case.running):
                # With arrivals, one ends in each step from the start
                self.add(side, WARM_UP // 2 + number if self.case.arrivals else 1 << 20)
            for _ in range(self.case.waiting):
                self.add(side, 100)

    def scheduler(self, kind: type) -> Any:
        """A scheduler with as many blocks as the case has."""
        given = self.core.scheduler
        blocks = self.case.running * self.case.blocks + 16
        return kind(
            self.core.vllm_config,
            dataclasses.replace(given.kv_cache_config, num_blocks=blocks),
            self.core.structured_output_manager,
            given.block_size,
            hash_block_size=given.hash_block_size,
            log_stats=True,
        )

    def add(self, side: Side, max_tokens: int) -> None:
        """A request arrives."""
        side.scheduler.add_request(
            Request(
                f"chatcmpl-{side.arrived:032x}",
                np.random.default_rng(side.arrived).integers(10, VOCAB, 128).tolist(),
                SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True),
                None,
                arrival_time=0.0,
                block_hasher=self.core.request_block_hasher,
            )
        )
        side.arrived += 1

    def step(self, side: Side, measured: bool) -> Any:
        """One step of the engine's loop with one side; returns what its clients get."""
        for _ in range(self.case.arrivals):
            self.add(side, self.case.running)
        if self.case.aborts:
            known = list(side.scheduler.requests)[: self.case.aborts]
            side.scheduler.finish_requests(known, RequestStatus.FINISHED_ABORTED)
            for _ in known:
                self.add(side, self.case.running)
        self.core.scheduler, self.worker.model_runner = side.scheduler, side.runner
        self.core.batch_queue = side.queue
        if self.case.connector:
            get_kv_transfer_group().connector_worker = side.worker_part
        side.now.clear()
        start = time.thread_time_ns()
        outputs, _ = self.core.step_fn()
        whole = (time.thread_time_ns() - start) / 1e3
        if measured:
            side.times["all"].append(whole)
            for part in PARTS:
                side.times[part].append(side.now[part])
            side.times["rest"].append(whole - sum(side.now[part] for part in PARTS))
        return [
            (each.request_id, each.new_token_ids, each.finish_reason)
            for group in (outputs or {}).values()
            for each in group.outputs
        ]

    def run(self, steps: int) -> None:
        """Measure; sides take turns of ten steps, and each is first in every other turn.

        Raises
        ------
        MismatchError
            If they returned something else.
        """
        fill = -(-self.case.running * 128 // 8192) + 4
        for first in range(0, fill + WARM_UP + steps, TURN):
            numbers = range(first, first + TURN)
            got = {
                name: [self.step(self.sides[name], each >= fill + WARM_UP) for each in numbers]
                for name in sorted(self.sides, reverse=bool(first // TURN % 2))
            }
            if got["ours"] != got["upstream"]:
                raise MismatchError("outputs differ from upstream's")

    def row(self, name: str, parts: bool) -> dict[str, Any]:
        """The line of the case."""
        times = {side: each.times for side, each in self.sides.items()}
        middle = {
            side: {part: statistics.median(each) for part, each in of.items()}
            for side, of in times.items()
        }
        ours, upstream = middle["ours"]["all"], middle["upstream"]["all"]
        row = {
            "case": name,
            "ours_us": round(ours, 1),
            "upstream_us": round(upstream, 1),
            "ratio": round(upstream / ours, 2),
        }
        if parts:
            row["max_us"] = round(max(times["ours"]["all"]), 1)
            row["upstream_max_us"] = round(max(times["upstream"]["all"]), 1)
            for side, of in middle.items():
                row |= {f"{side}_{part}_us": round(of[part], 1) for part in (*PARTS, "rest")}
        return row


@contextlib.contextmanager
def bench(
    case: Case, folder: Path, synchronous: bool, runner: str, against: str
) -> Iterator[Bench]:
    """An engine of the case's size with both sides."""
    model = folder / "model"
    if not model.exists():
        make_model(model, vocab_size=VOCAB, num_hidden_layers=1, max_position_embeddings=1 << 16)
    max_num_seqs = max(case.running, 256)
    with (
        engine_of(
            runner,
            model,
            load_format="dummy",
            enforce_eager=True,
            max_model_len=2048,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max(8192, max_num_seqs),
            **speculation(case.drafts, model, not synchronous),
            kv_cache_memory_bytes=4 << 20,
            **SETTINGS[case.connector],
            async_scheduling=not synchronous,
            skip_tokenizer_init=True,
            additional_config={"npu_prep": {"mask": "compressed"}},  # as NPUs get it
        ) as llm,
        torch.inference_mode(),
    ):
        torch.set_num_threads(1)
        with runner_of(llm).prep_device.host_streams():
            made = Bench(llm, case, against)
            gc.collect()
            freeze()  # as vLLM's engine does once it is made; what arrives later is collected
            try:
                made.begin()
                yield made
            finally:
                unfreeze()


def markdown(row: dict[str, Any]) -> str:
    """Two rows of the guide's table: vLLM's parts of a step, and ours."""
    lines = []
    title = TITLES.get(row["case"], row["case"])
    for side, name, ratio in (("upstream", "vLLM", ""), ("ours", "ours", f"{row['ratio']:.2f}")):
        names = [f"{side}_{part}_us" for part in (*PARTS, "rest")]
        times = [f"{row[each]:,.0f}" for each in (*names, f"{side}_us")]
        lines.append(
            f"| {' | '.join([f'{title}, {name}', *times, ratio])} |".replace("|  |", "| |")
        )
    return "\n".join(lines)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="one object per line")
    parser.add_argument("--steps", type=int, default=200, help="measured steps of each case")
    parser.add_argument("--case", action="append", choices=CASES, help="one case; may be repeated")
    parser.add_argument("--parts", action="store_true", help="where the time goes, too")
    parser.add_argument("--markdown", action="store_true", help="rows of the guide's table")
    parser.add_argument(
        "--synchronous", action="store_true", help="without asynchronous scheduling"
    )
    parser.add_argument("--runner", choices=("V1", "V2"), default="V2", help="our runner")
    parser.add_argument("--against", choices=("V1", "V2"), help="vLLM's runner (default: the same)")
    args = parser.parse_args()
    runners = args.runner, args.against or args.runner
    if "V2" in runners:
        v2.let_it_run_without_triton()
    if args.markdown and not args.parts:
        parser.error("--markdown prints parts: give --parts, too")
    rows = []
    with tempfile.TemporaryDirectory() as name:
        for each in args.case or SHOWN:
            print(f"{each} ...", file=sys.stderr, flush=True)
            with bench(CASES[each], Path(name), args.synchronous, *runners) as made:
                try:
                    made.run(args.steps)
                except MismatchError as error:
                    sys.exit(f"{each}: {error}; no numbers")
                rows.append(made.row(each, args.parts))
            if args.json:
                print(json.dumps(rows[-1]), flush=True)
    if args.markdown:
        print("\n".join(map(markdown, rows)))
    elif not args.json:
        show(rows)


if __name__ == "__main__":
    main()
