"""Host time of a step of Model Runner V2: ours, vLLM's own with free kernels, and our V1 runner.

    python benchmarks/host_step_v2.py [--json] [--steps 200] [--case step-256] [--thread-time]
                                      [--prepare | --enter]

All three get every step from the scheduler's output to the sampled tokens, one after the other and
each first in turn; model, sampler and drafter return at once. Our two must give the model the same
tokens and positions: where they don't, the benchmark stops and prints no number. Times are medians
in microseconds, and ``stock_ratio`` is vLLM's own over ours.

===========  ==========================================
case         a step
===========  ==========================================
step-256     256 decodes
step-1024    1024 decodes
mixed-2200   200 decodes and 8 prompts of 250 tokens
drafts-256   256 decodes with three drafts of an EAGLE head each, of which some are accepted
===========  ==========================================

vLLM's own V2 launches Triton kernels, which can't run here: they do nothing, which is the least
that they can cost. So what it gives the model is not compared. Its metadata builder hands on what
it gets: the cheapest there could be. What it keeps in memory that host and device share costs it
no copy here. All that flatters it. In ``charged_us``, and so in ``charged_ratio``, each of its
launches costs `LAUNCH_US`; ``launches`` is their number, without those of its sampler.

With ``--prepare`` only the preparation is timed: the methods in `PREPARING`, up to the metadata. On
V1, requests have been put in order when it begins; ours on V2 is timed from there on, too, so it is
to be compared with V1 alone: stock V2 puts them in order in the methods that are timed. With
``--enter`` the methods in `ENTERING` are timed as well, which take in what the scheduler decided
and put the requests in order.
"""

import contextlib
import copy
import dataclasses
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from gc import collect, freeze, unfreeze
from pathlib import Path
from typing import Any

os.environ.setdefault("NPU_PREP_DEVICE", "cpu")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
import torch
from host_step import (
    Clock,
    CommonBuilder,
    MismatchError,
    StubModel,
    StubSampler,
    as_rows,
    parser_of,
    proposed,
    show,
)
from workloads import VOCAB, Case, Schedule, speculation

from tests.helpers.engine import make_model, runner_of
from tests.helpers.v2 import engine_of
from vllm_npu_prep.compat import kernels, v2

WARM_UP = 20
LAUNCH_US = 8.68
"""What a launch of such a kernel costs the host, as a maintainer of vLLM measured it for kernels of
Model Runner V2 on a GB200: "Triton JIT dispatch: 8.68 us/call" (vllm-project/vllm#34838). On an
Ascend 910B2, triton-ascend's launcher alone takes 8.6 to 23.7 (triton-lang/triton-ascend#1675)."""
CASES = {
    "step-256": Case(256, whole_step=True),
    "step-1024": Case(1024, whole_step=True),
    "mixed-2200": Case(200, 8, 250, whole_step=True),
    "drafts-256": Case(256, num_drafts=3, whole_step=True),
}

OF_V2 = ("prepare_inputs", "prepare_attn", "model_state.prepare_attn")
PREPARING = {
    "v1": (
        "_prepare_inputs",
        "_determine_batch_execution_and_padding",
        "_get_slot_mappings",
        "_build_attention_metadata",
    ),
    "ours": ("_prepare_inputs", *OF_V2),
    "stock": ("gather_batch_req_state", *OF_V2),
}
"""Methods of a runner that prepare a step; no one calls another."""
ENTERED = ("finish_requests", "add_requests", "update_requests")
ENTERING = {
    "v1": ("_update_states", *PREPARING["v1"]),
    "ours": (*ENTERED, "gather_batch_req_state", *OF_V2),  # which calls `_prepare_inputs`
    "stock": (*ENTERED, *PREPARING["stock"]),
}
"""The methods of `PREPARING`, and those that take in the scheduler's output before them."""


class Preparation:
    """A clock that runs while one of the given methods of a runner runs."""

    def __init__(self, runner: Any, clock: Clock, methods: tuple[str, ...]) -> None:
        self.clock, self.elapsed = clock, 0
        for name in methods:
            *part, method = name.split(".")
            owner = getattr(runner, part[0]) if part else runner
            setattr(owner, method, self._timed(getattr(owner, method)))

    def _timed(self, method: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            start = self.clock()
            try:
                return method(*args, **kwargs)
            finally:
                self.elapsed += self.clock() - start

        return call

    def __call__(self) -> int:
        """Nanoseconds so far."""
        return self.elapsed


class FreeSampler:
    """A V2 sampler that returns tokens that were drawn before; all else is upstream's."""

    def __init__(self, sampler: Any) -> None:
        self._sampler = sampler
        self._output: Any = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sampler, name)

    def give(self, sampled_token_ids: torch.Tensor) -> None:
        """What it returns next: int64 ``[num_reqs, width]``, -1 after a request's last token."""
        from vllm.v1.worker.gpu.sample.output import SamplerOutput

        num_sampled = (sampled_token_ids >= 0).sum(1, dtype=torch.int32)
        self._output = SamplerOutput(
            sampled_token_ids=sampled_token_ids,
            logprobs_tensors=None,
            num_nans=None,
            num_sampled=num_sampled,
            num_rejected=sampled_token_ids.shape[1] - num_sampled,
        )

    def __call__(self, *_: Any) -> Any:
        """No sampling."""
        return self._output


class FreeDrafter:
    """A speculator of vLLM's V2 whose `propose` is a stub."""

    draft_logits = None
    supports_mm_inputs = False

    def __init__(self, *_: Any) -> None:
        """It needs nothing."""

    def init_cudagraph_manager(self, cudagraph_mode: Any) -> None:
        """No graphs."""


class Launches:
    """Counts the launches of kernels that do nothing."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, *_: Any, **__: Any) -> None:
        """A launch."""
        self.count += 1


LAUNCHES = Launches()


def free_kernels() -> None:
    """Let each Triton kernel of vLLM's V2 runner do nothing, but for rows of logits: all the first.

    Indices that nobody wrote could be any.
    """
    found: dict[str, Any] = {
        f"{module.__name__}.{name}": LAUNCHES
        for module in v2.modules()
        for name, value in vars(module).items()
        if name.endswith("_kernel") and getattr(value, "__module__", "") == module.__name__
    }
    combine = "vllm.v1.worker.gpu.input_batch._combine_sampled_and_draft_tokens_kernel"
    found[combine] = lambda *args, **_: LAUNCHES(args[9].zero_())
    kernels.override_triton_kernels(found)
    async_utils: Any = sys.modules["vllm.v1.worker.gpu.async_utils"]
    async_utils.stream = lambda *_: contextlib.nullcontext()  # upstream's knows CUDA's alone


def stock_of(ours: Any) -> Any:
    """vLLM's own V2 runner, with a metadata builder that costs nothing and without a cache."""
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

    with v2.stand_ins(init_speculator=FreeDrafter):
        stock = GPUModelRunner(ours.vllm_config, ours.device)
    stock.load_model(model=ours.get_model())
    with v2.stand_ins(init_kv_cache=lambda *_, **__: {}):
        stock.initialize_kv_cache(ours.kv_cache_config)
    builders: list[Any] = [CommonBuilder()]
    stock.attn_groups = [
        [dataclasses.replace(group, metadata_builders=builders) for group in groups]
        for groups in stock.attn_groups
    ]
    return stock


def v1_of(ours: Any) -> Any:
    """Our V1 runner, with a cache of its own."""
    from vllm_npu_prep.runner.v1.runner import NPUModelRunner

    runner = NPUModelRunner(ours.vllm_config, ours.device, ours.prep_device)
    runner.model = ours.get_model()
    if ours.speculator is not None:
        runner.drafter.model = ours.speculator.model
        runner.drafter._draft_attn_layer_names = ours.speculator.draft_attn_layer_names
    runner.initialize_kv_cache(ours.kv_cache_config)
    return runner


def stub(runner: Any) -> None:
    """Let the model and the sampler return at once."""
    is_v1 = hasattr(runner, "_model_forward")
    runner.model = StubModel(runner.max_num_tokens)
    runner.sampler = StubSampler() if is_v1 else FreeSampler(runner.sampler)
    if runner.speculative_config is not None:
        runner.rejection_sampler = runner.sampler
        drafter: Any = runner.drafter if is_v1 else runner.speculator
        method = "draft" if hasattr(drafter, "draft") else "propose"
        setattr(drafter, method, lambda *_, **__: drafter.drafts)
    if getattr(runner, "step_check", None) is not None:
        runner.step_check.limits[1:] = np.iinfo(np.int32).max  # blocks are made up


def told_to_v2(output: Any, num_drafts: int) -> Any:
    """A scheduler's output as its schedulers make it for V2."""
    output.num_spec_tokens_to_schedule = num_drafts
    for new in output.scheduled_new_reqs:
        new.prefill_token_ids = new.prompt_token_ids
    return output


def model_in(folder: Path) -> Path:
    """A small model."""
    return make_model(folder, vocab_size=VOCAB, num_hidden_layers=1, max_position_embeddings=4096)


def give(runner: Any, sampled: dict[str, list[int]], drafts: torch.Tensor | None) -> None:
    """What the sampler and the drafter of a `stub` return next."""
    rows = as_rows(sampled)
    is_v1 = hasattr(runner, "_model_forward")
    if is_v1:
        runner.sampler.sampled_token_ids = rows
    else:
        runner.sampler.give(rows.long())
    if drafts is not None:
        drafter = runner.drafter if is_v1 else runner.speculator
        drafter.drafts = drafts.long() if isinstance(drafter, FreeDrafter) else drafts


def run(runner: Any, output: Any, clock: Clock) -> tuple[float, Any]:
    """Microseconds of one step, and what the model got of each request."""
    start = clock()
    runner.execute_model(output)
    result = runner.sample_tokens(None)
    elapsed = (clock() - start) / 1e3
    req_ids = result.get_output().req_ids
    borders = np.cumsum([0] + [output.num_scheduled_tokens[req_id] for req_id in req_ids])
    inputs = {name: each.tolist() for name, each in runner.model.inputs.items()}
    given = {
        req_id: [each[first:end] for each in inputs.values()]
        for req_id, first, end in zip(req_ids, borders, borders[1:])
    }
    return elapsed, given


def measure(
    case: Case, runners: dict[str, Any], steps: int, clocks: dict[str, Clock]
) -> dict[str, float]:
    """Medians of each runner, in microseconds."""
    schedule = Schedule(case, asynchronous=True)
    times: dict[str, list[float]] = {name: [] for name in (*runners, "charged")}
    counts = []
    for step in range(WARM_UP + steps):
        output, given = told_to_v2(schedule.step(), case.num_drafts), {}
        sampled, drafts = schedule.sampled(), proposed(schedule)
        names = list(runners)
        for name in names[step % len(names) :] + names[: step % len(names)]:
            give(runners[name], sampled, drafts)
            LAUNCHES.count = 0
            elapsed, given[name] = run(runners[name], copy.deepcopy(output), clocks[name])
            if step >= WARM_UP:
                times[name].append(elapsed)
                if name == "stock":
                    times["charged"].append(elapsed + LAUNCHES.count * LAUNCH_US)
                    counts.append(LAUNCHES.count)
        if given["ours"] != given["v1"]:
            raise MismatchError("what the model gets differs from what V1 gives it")
    middle = {name: float(np.median(each)) for name, each in times.items()}
    return {
        **{f"{name}_us": round(each, 1) for name, each in middle.items()},
        "launches": int(np.median(counts)),
        "stock_ratio": round(middle["stock"] / middle["ours"], 2),
        "charged_ratio": round(middle["charged"] / middle["ours"], 2),
    }


@contextlib.contextmanager
def runner_for(case: Case, folder: Path) -> Iterator[Any]:
    """Our runner, of an engine of the case's size."""
    with engine_of(
        "V2",
        folder,
        load_format="dummy",
        kv_cache_memory_bytes=case.kv_cache_bytes(),
        async_scheduling=True,
        additional_config={"npu_prep": {"mask": "compressed"}},
        **case.engine_settings(),
        **speculation(case.num_drafts, folder, asynchronous=True),
    ) as llm:
        ours = runner_of(llm)
        with torch.inference_mode(), ours.prep_device.host_streams():
            torch.set_num_threads(1)
            yield ours


def of_case(
    case: Case,
    folder: Path,
    steps: int,
    clock: Clock,
    timed: dict[str, tuple[str, ...]] | None,
) -> dict[str, float]:
    """Medians of the three runners on an engine of the case's size.

    Only these methods of each runner are timed; None: the whole step.
    """
    with runner_for(case, folder) as ours:
        runners = {"ours": ours, "v1": v1_of(ours), "stock": stock_of(ours)}
        free_kernels()
        for runner in runners.values():
            stub(runner)
        clocks: dict[str, Clock] = {
            name: clock if timed is None else Preparation(runner, clock, timed[name])
            for name, runner in runners.items()
        }
        collect()
        freeze()  # as vLLM's worker does once it is made
        try:
            return measure(case, runners, steps, clocks)
        finally:
            unfreeze()


def main() -> None:
    """Measure and print."""
    parser = parser_of(__doc__.splitlines()[0], CASES)
    part = parser.add_mutually_exclusive_group()
    part.add_argument("--prepare", action="store_true", help="time the preparation alone")
    part.add_argument("--enter", action="store_true", help="time it and what comes before")
    args = parser.parse_args()
    timed = PREPARING if args.prepare else ENTERING if args.enter else None
    rows = []
    v2.let_it_run_without_triton()
    with tempfile.TemporaryDirectory() as name:
        model = model_in(Path(name) / "model")
        for name in args.case or CASES:
            print(f"{name} ...", file=sys.stderr, flush=True)
            try:
                row = {
                    "case": name,
                    **of_case(CASES[name], model, args.steps, args.clock, timed),
                }
            except MismatchError as error:
                sys.exit(f"{name}: {error}; no numbers")
            rows.append(row)
            if args.json:
                print(json.dumps(row), flush=True)
    if not args.json:
        show(rows)


if __name__ == "__main__":
    main()
