"""Host time of a step beside upstream's V1 runner: same process, same schedule, step about.

    python benchmarks/host_step.py [--json] [--steps 200] [--case decode-256] [--growth FILE.png]
                                   [--check off] [--record] [--looks] [--threads 1 2]
                                   [--thread-time] [--markdown]

Both runners get every step, one after the other and each first in turn, and must leave the same
arrays and tokens: where they don't, the benchmark stops and prints no number. Times are medians in
microseconds.

=============  =====================================================================================
case           what is measured
=============  =====================================================================================
decode-256     `_prepare_inputs`, padding decision, slots and metadata of 256 decodes
decode-1024    the same, 1024 decodes
prefill-8192   the same, 32 prompts of 256 tokens
mixed-2200     the same, 200 decodes and 8 prompts of 250 tokens
step-256       `execute_model` and `sample_tokens` of 256 decodes; model and sampler return at once
drafts-256     as decode-256, three drafts to verify for each, of which some are accepted
mrope-256      as decode-256, of a model with M-RoPE (Qwen2.5-VL)
drafts-step    as step-256, with these drafts; the drafter returns at once, too
=============  =====================================================================================

Upstream's metadata builder is one that hands on the common metadata as it is: the cheapest there
could be. Its slot mapping is this plugin's torch replacement of a Triton kernel, which can't run
here: about a fifth of its time.

Our steps are counted for metrics and cheaply checked, as they are by default (``--check off``: not
checked), and with ``--record`` the last 64 are kept for a record. ``--looks`` times each of these
by itself: ``count_us``, ``check_us``, ``keep_us``, and in percent of our step. The cheap check is
a part of the fused pass: ``check_us`` is only what is left of it afterwards.

``--thread-time`` counts the time that the thread ran instead of the time that passed: for machines
on which others work, too. It leaves out waiting for torch's other threads.

With ``--async-scheduling`` drafts stay on the device, as an EAGLE head's do; without it they come
from n-grams, which asynchronous scheduling does not have. The drafter itself never runs.

``--threads 1`` pins torch to one thread in both runners. Upstream's preparation calls torch where
ours does not, and these calls wait for threads on a busy machine: not pinned, ratios flatter us.
With several numbers each case is measured with each. ``--threads 1 2 --markdown`` prints the rows
of the table in docs/guides/performance.md: times with the first number, and all ratios.
"""

import argparse
import contextlib
import copy
import dataclasses
import itertools
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from gc import collect, freeze, unfreeze  # of the module `engine` makes the last two do nothing
from pathlib import Path
from typing import Any

os.environ.setdefault("NPU_PREP_DEVICE", "cpu")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
import torch
from rich.console import Console
from rich.table import Column, Table
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import SamplerOutput
from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer
from workloads import CASES, VOCAB, Case, Schedule, growth_cases, speculation

from tests.helpers.demo import make_demo
from tests.helpers.engine import make_model, runner_of
from tests.helpers.stepping import bookkeep, upstream_twin
from tests.helpers.v2 import engine_of

WARM_UP = 20
TITLES = {
    "decode-256": "256 decodes",
    "decode-1024": "1024 decodes",
    "prefill-8192": "32 prompts of 256 tokens",
    "mixed-2200": "200 decodes and 8 prompts of 250 tokens",
    "step-256": "whole step, 256 decodes",
    "drafts-256": "256 decodes with three drafts each",
    "mrope-256": "256 decodes of a model with M-RoPE",
    "drafts-step": "whole step, 256 decodes with three drafts each",
}
"""Of cases in the guide's table."""

LOOKS = {
    "count": ("metrics", "add"),
    "keep": ("recorder", "keep"),
    "check": ("step_check", "verify"),
}
"""What looks at each of our steps: an attribute of the runner, and its method."""


class MismatchError(Exception):
    """The runners disagree: nothing that was measured means anything."""


class CommonBuilder:
    """A metadata builder that costs nothing."""

    supports_update_block_table = False

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, **_: Any
    ) -> CommonAttentionMetadata:
        """Hand on what there is."""
        return common_attn_metadata


class StubModel(torch.nn.Module):
    """Returns at once, and keeps what it was given."""

    def __init__(self, max_num_tokens: int) -> None:
        super().__init__()
        self.hidden_states = torch.zeros(max_num_tokens, 8)
        self.logits = torch.zeros(max_num_tokens, VOCAB)
        self.inputs: dict[str, torch.Tensor] = {}

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, **_: Any) -> torch.Tensor:
        """No model."""
        self.inputs = {"input_ids": input_ids, "positions": positions}
        return self.hidden_states[: len(input_ids)]

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """No logits."""
        return self.logits[: len(hidden_states)]


class StubSampler(torch.nn.Module):
    """Returns tokens that were drawn before."""

    def __init__(self) -> None:
        super().__init__()
        self.sampled_token_ids = torch.zeros(0)

    def forward(self, *_: Any, **__: Any) -> SamplerOutput:
        """No sampling."""
        return SamplerOutput(sampled_token_ids=self.sampled_token_ids, logprobs_tensors=None)


Clock = Callable[[], int]
"""Nanoseconds: of the wall, or of this thread on a processor."""


def prepare(
    runner: Any, output: SchedulerOutput, clock: Clock = time.perf_counter_ns
) -> tuple[float, dict[str, Any]]:
    """Microseconds of one prepared step, and what it left."""
    runner._update_states(output)
    batch = runner.input_batch
    counts = np.array([output.num_scheduled_tokens[r] for r in batch.req_ids], np.int32)
    total, reqs, longest = int(counts.sum()), batch.num_reqs, int(counts.max())
    start = clock()
    logits_indices, drafts, max_num_sampled_tokens = runner._prepare_inputs(output, counts)
    _, descriptor, *_ = runner._determine_batch_execution_and_padding(
        num_tokens=total,
        num_reqs=reqs,
        num_scheduled_tokens_np=counts,
        max_num_scheduled_tokens=longest,
        allow_microbatching=runner._allow_microbatching(reqs, counts),
    )
    slots, _ = runner._get_slot_mappings(
        num_tokens_padded=total, num_reqs_padded=reqs, num_tokens_unpadded=total
    )
    metadata, _ = runner._build_attention_metadata(
        num_tokens=total,
        num_reqs=reqs,
        max_query_len=longest,
        logits_indices=logits_indices,
        max_num_sampled_tokens=max_num_sampled_tokens,
        num_scheduled_tokens=output.num_scheduled_tokens,
        slot_mappings=slots,
    )
    elapsed = (clock() - start) / 1e3
    of_layer = next(iter(metadata.values()))
    table = batch.block_table[0]
    seen = getattr(of_layer, "block_tables", None)
    seen = of_layer.block_table_tensor if seen is None else seen
    owned = np.arange(seen.shape[1]) < table.num_blocks_per_row[:reqs, None]
    left = {
        "req_ids": list(batch.req_ids),
        "descriptor": descriptor,
        "logits_indices": logits_indices,
        "input_ids": runner.input_ids.gpu[:total],
        "positions": runner.positions[:total],
        "mrope_positions": runner.mrope_positions.gpu[:, :total] if runner.uses_mrope else None,
        "slot_mapping": of_layer.slot_mapping[:total],
        "query_start_loc": of_layer.query_start_loc,
        "seq_lens": of_layer.seq_lens,
        "num_computed_tokens": runner.num_computed_tokens[:reqs],
        "discard_request_mask": runner.discard_request_mask.gpu[:reqs],
        "block_table": torch.from_numpy(seen.numpy()[owned]),
    }
    if drafts is not None:
        left |= vars(drafts)
    return elapsed, left


def whole_step(
    runner: Any, output: SchedulerOutput, clock: Clock = time.perf_counter_ns
) -> tuple[float, dict[str, Any]]:
    """Microseconds of one step from the scheduler's output to the sampled tokens."""
    start = clock()
    runner.execute_model(output)
    result = runner.sample_tokens(None)
    if runner.use_async_scheduling:
        elapsed = (clock() - start) / 1e3
        result = result.get_output()
    else:
        elapsed = (clock() - start) / 1e3
    left = dict(runner.model.inputs)
    left["sampled_token_ids"] = result.sampled_token_ids
    left["req_ids"] = result.req_ids
    left["outputs"] = [len(runner.requests[r].output_token_ids) for r in result.req_ids]
    if not runner.use_async_spec_decode:  # upstream's then count rejected drafts, too
        left["num_tokens"] = runner.input_batch.num_tokens_no_spec[: len(result.req_ids)].tolist()
    return elapsed, left


def compare(ours: dict[str, Any], upstream: dict[str, Any]) -> None:
    """Stop unless both runners left the same."""
    for name, expected in upstream.items():
        got = ours[name]
        if isinstance(expected, torch.Tensor):
            same = got.shape == expected.shape and bool((got == expected).all())
        else:
            same = got == expected
        if not same:
            raise MismatchError(f"{name} differs from upstream's")


@dataclasses.dataclass
class Timing:
    """Microseconds of each measured step."""

    ours: np.ndarray
    upstream: np.ndarray
    looks: dict[str, np.ndarray]  # parts of ours, by name

    def row(self, case: str, threads: int) -> dict[str, Any]:
        """The line of a case; least and most are ours."""
        ours, upstream = float(np.median(self.ours)), float(np.median(self.upstream))
        row = {
            "case": case,
            "threads": threads,
            "ours_us": round(ours, 1),
            "upstream_us": round(upstream, 1),
            "ratio": round(upstream / ours, 2),
            "min_us": round(float(self.ours.min()), 1),
            "max_us": round(float(self.ours.max()), 1),
        }
        for name, times in self.looks.items():
            part = float(np.median(times))
            row |= {f"{name}_us": round(part, 1), f"{name}_%": round(100 * part / ours, 2)}
        return row


def stub(runner: Any) -> None:
    """Let the model and the sampler return at once."""
    runner.model = StubModel(runner.max_num_tokens)
    runner.sampler = runner.rejection_sampler = StubSampler()
    if runner.speculative_config is not None:
        runner.drafter.drafts = None  # `give` may set those of a device
        runner.drafter.propose = lambda *_, **__: (
            [[] for _ in runner.input_batch.req_ids]
            if runner.drafter.drafts is None
            else runner.drafter.drafts
        )
    runner.execute_model_state = None


def twin_of(runner: Any) -> Any:
    """Upstream's runner with a metadata builder that costs nothing."""
    twin = upstream_twin(runner)
    twin.model = runner.model  # it knows what M-RoPE positions are
    twin.recorder = None  # for which our worker asks
    if isinstance(getattr(twin, "drafter", None), SpecDecodeBaseProposer):
        twin.drafter.kv_cache_gid = runner.drafter.kv_cache_gid  # of layers that it hasn't loaded
    twin.attn_groups = [
        [dataclasses.replace(group, metadata_builders=[CommonBuilder()]) for group in groups]
        for groups in runner.attn_groups
    ]
    return twin


def time_looks(runner: Any) -> dict[str, list[float]]:
    """Microseconds that what looks at a step takes of it, for all steps from now on."""
    times: dict[str, list[float]] = {}
    for name, (attribute, method) in LOOKS.items():
        looker = getattr(runner, attribute)
        if looker is not None:
            times[name] = []
            setattr(looker, method, _timed(getattr(looker, method), times[name]))
    return times


def _timed(method: Any, times: list[float]) -> Any:
    def timed(*args: Any, **options: Any) -> None:
        start = time.perf_counter_ns()
        method(*args, **options)
        times.append((time.perf_counter_ns() - start) / 1e3)

    return timed


def measure(
    case: Case,
    ours: Any,
    upstream: Any,
    steps: int,
    looks: bool = False,
    clock: Clock = time.perf_counter_ns,
) -> Timing:
    """Run one schedule through both runners; with `looks`, time what looks at our steps, too."""
    schedule = Schedule(case, ours.use_async_scheduling)
    runners = {"ours": ours, "upstream": upstream}
    if case.whole_step:
        for runner in runners.values():
            stub(runner)
    times: dict[str, list[float]] = {name: [] for name in runners}
    looking = time_looks(ours) if looks else {}
    for step in range(WARM_UP + steps):
        output = schedule.step()
        left = {}
        sampled, drafts = schedule.sampled(), proposed(schedule)
        for name in sorted(runners, reverse=bool(step % 2)):
            runner, own = runners[name], copy.deepcopy(output)
            if case.whole_step:
                give(runner, sampled, drafts)
                elapsed, left[name] = whole_step(runner, own, clock)
            else:
                elapsed, left[name] = prepare(runner, own, clock)
                bookkeep(runner, own, sampled, drafts)
            if step >= WARM_UP:
                times[name].append(elapsed)
        compare(left["ours"], left["upstream"])
    shares = {name: np.array(each[WARM_UP:]) for name, each in looking.items()}
    return Timing(np.array(times["ours"]), np.array(times["upstream"]), shares)


def proposed(schedule: Schedule) -> torch.Tensor | None:
    """Drafts for the next step, int32 ``[num_reqs, num_drafts]``, if a device would have them."""
    if not schedule.ahead:
        return None
    return torch.tensor(list(schedule.proposed.values()), dtype=torch.int32)


def give(runner: Any, sampled: dict[str, list[int]], drafts: torch.Tensor | None) -> None:
    """What the sampler and the drafter of a `stub` return next."""
    runner.sampler.sampled_token_ids = as_rows(sampled)
    if drafts is not None:
        runner.drafter.drafts = drafts


def as_rows(tokens: dict[str, list[int]]) -> torch.Tensor:
    """As samplers return them: int32 ``[num_reqs, most]``, -1 after the valid tokens.

    Requests keep their rows here, in the order of their arrival.
    """
    width = max(map(len, tokens.values()))
    rows = [row + [-1] * (width - len(row)) for row in tokens.values()]
    return torch.tensor(rows, dtype=torch.int32)


@contextlib.contextmanager
def runners(
    case: Case, folder: Path, async_scheduling: bool, options: dict[str, Any], threads: int
) -> Iterator[tuple[Any, Any]]:
    """Ours and upstream's, on an engine of the case's size; torch with `threads` threads."""
    model = folder / f"{case.num_layers}-layers"
    if case.mrope:
        model = make_demo("tiny_vision_model.py", "tiny-vision") / "qwen2_5_vl"
    elif not model.exists():
        make_model(
            model,
            vocab_size=VOCAB,
            num_hidden_layers=case.num_layers,
            max_position_embeddings=1 << 20,
        )
    with (
        engine_of(
            "V1",
            model,
            load_format="dummy",
            kv_cache_memory_bytes=case.kv_cache_bytes(),
            async_scheduling=async_scheduling,
            skip_tokenizer_init=not case.mrope,
            # As NPUs get it. A dense mask is gathered on the device, which here is this processor.
            additional_config={"npu_prep": {"mask": "compressed", **options}},
            **case.engine_settings(),
            **speculation(case.num_drafts, model, async_scheduling),
        ) as llm,
        torch.inference_mode(),
    ):
        torch.set_num_threads(threads)
        ours = runner_of(llm)
        if ours.step_check is not None:
            ours.step_check.limits[1:] = np.iinfo(np.int32).max  # blocks are made up
        upstream = twin_of(ours)
        collect()
        freeze()  # as vLLM's worker does once it is made; collections then skip both runners
        try:
            with ours.prep_device.host_streams():  # upstream's asynchronous outputs make some
                yield ours, upstream
        finally:
            unfreeze()


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Draw time against requests and against prompt tokens."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for axis, what in zip(axes, ("requests", "prompt tokens")):
        points = [row for row in rows if row["case"].endswith(f" {what}")]
        sizes = [int(row["case"].split()[0]) for row in points]
        for name in ("upstream", "ours"):
            axis.plot(sizes, [row[f"{name}_us"] for row in points], marker="o", label=name)
        axis.set(xscale="log", yscale="log", xlabel=what, ylabel="us a step")
        axis.grid(visible=True, which="both", alpha=0.3)
        axis.legend()
    figure.suptitle("Preparing a step on the host")
    figure.savefig(path, dpi=120)


def markdown(rows: list[dict[str, Any]], asynchronous: bool) -> str:
    """Rows of the guide's table: times with the first number of threads, and all ratios."""
    lines: dict[str, str] = {}
    for row in rows:
        title = TITLES.get(row["case"], row["case"])
        if asynchronous:
            title += ", asynchronous scheduling"
        first = f"| {title} | {row['ours_us']:,.0f} | {row['upstream_us']:,.0f} |"
        lines[title] = f"{lines.get(title, first)} {row['ratio']:.1f} |"
    return "\n".join(lines.values())


def show(rows: list[dict[str, Any]]) -> None:
    """One table."""
    columns = [name for name in rows[0] if name != "case"]
    table = Table("case", *(Column(name, justify="right") for name in columns))
    for row in rows:
        table.add_row(row["case"], *(f"{row[name]:,}" for name in columns))
    Console(width=100 if len(columns) < 8 else 150).print(table)


def parser_of(title: str, cases: Iterable[str]) -> argparse.ArgumentParser:
    """The options of every benchmark of a step's host time."""
    parser = argparse.ArgumentParser(description=title)
    parser.add_argument("--json", action="store_true", help="one object per line")
    parser.add_argument("--steps", type=int, default=200, help="measured steps of each case")
    parser.add_argument("--case", action="append", choices=cases, help="one case; may be repeated")
    parser.add_argument(
        "--thread-time",
        action="store_const",
        dest="clock",
        const=time.thread_time_ns,
        default=time.perf_counter_ns,
        help="count this thread's time on a processor, which others on the machine disturb less",
    )
    return parser


def main() -> None:
    """Measure and print."""
    parser = parser_of(__doc__.splitlines()[0], CASES)
    parser.add_argument(
        "--async-scheduling",
        action="store_true",
        help="prepare steps as with it: samples stay on the device",
    )
    parser.add_argument("--record", action="store_true", help="keep the last steps for a record")
    parser.add_argument(
        "--check",
        choices=("off", "cheap"),
        default="cheap",
        help="npu_prep.check (default: %(default)s)",
    )
    parser.add_argument("--looks", action="store_true", help="time what looks at our steps, too")
    parser.add_argument(
        "--threads",
        type=int,
        nargs="+",
        default=[torch.get_num_threads()],
        help="torch threads in both runners; torch's own choice unless given",
    )
    parser.add_argument(
        "--markdown",
        action="store_true",
        help="rows of the guide's table, one ratio for each number",
    )
    parser.add_argument(
        "--growth", type=Path, metavar="PNG", help="measure and plot growth instead"
    )
    args = parser.parse_args()
    chosen = {name: CASES[name] for name in args.case or CASES}
    cases = growth_cases() if args.growth else chosen
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        options: dict[str, Any] = {"check": args.check}
        if args.record:
            options["record"] = {"dir": str(folder / "records")}
        for (name, case), threads in itertools.product(cases.items(), args.threads):
            print(f"{name}, torch threads: {threads} ...", file=sys.stderr, flush=True)
            with runners(case, folder, args.async_scheduling, options, threads) as both:
                try:
                    measured = measure(case, *both, args.steps, args.looks, args.clock)
                    row = measured.row(name, threads)
                except MismatchError as error:
                    sys.exit(f"{name}: {error}; no numbers")
            rows.append(row)
            if args.json:
                print(json.dumps(row), flush=True)
    if args.markdown:
        print(markdown(rows, args.async_scheduling))
    elif not args.json:
        show(rows)
    if args.growth:
        plot(rows, args.growth)


if __name__ == "__main__":
    main()
