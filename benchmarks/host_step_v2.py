"""Host time of a step of Model Runner V2: ours, vLLM's own with free kernels, and our V1 runner.

    python benchmarks/host_step_v2.py [--json] [--steps 200] [--case step-256] [--thread-time]

All three get every step from the scheduler's output to the sampled tokens, one after the other and
each first in turn; model and sampler return at once. Our two must give the model the same tokens
and positions: where they don't, the benchmark stops and prints no number. Times are medians in
microseconds.

===========  ==========================================
case         a step
===========  ==========================================
step-256     256 decodes
step-1024    1024 decodes
mixed-2200   200 decodes and 8 prompts of 250 tokens
===========  ==========================================

vLLM's own V2 launches Triton kernels, which can't run here: they do nothing, which is the least
that they can cost. So what it gives the model is not compared. Its metadata builder hands on what
it gets: the cheapest there could be. What it keeps in memory that host and device share costs it
no copy here. All that flatters it.
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
    show,
)
from workloads import VOCAB, Case, Schedule

from tests.helpers.engine import make_model, runner_of
from tests.helpers.v2 import engine_of
from vllm_npu_prep.compat import kernels, v2

WARM_UP = 20
CASES = {
    "step-256": Case(256, whole_step=True),
    "step-1024": Case(1024, whole_step=True),
    "mixed-2200": Case(200, 8, 250, whole_step=True),
}


class FreeSampler:
    """A V2 sampler that returns tokens that were drawn before; all else is upstream's."""

    def __init__(self, sampler: Any) -> None:
        self._sampler = sampler
        self.sampled_token_ids = torch.zeros(0)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sampler, name)

    def __call__(self, logits: torch.Tensor, *_: Any) -> Any:
        """No sampling."""
        from vllm.v1.worker.gpu.sample.output import SamplerOutput

        count = len(logits)
        return SamplerOutput(
            sampled_token_ids=self.sampled_token_ids,
            logprobs_tensors=None,
            num_nans=None,
            num_sampled=torch.ones(count, dtype=torch.int32),
            num_rejected=torch.zeros(count, dtype=torch.int32),
        )


def free_kernels() -> None:
    """Let each Triton kernel of vLLM's V2 runner do nothing, but for rows of logits: all the first.

    Indices that nobody wrote could be any.
    """
    found = {
        f"{module.__name__}.{name}": lambda *_, **__: None
        for module in v2.modules()
        for name, value in vars(module).items()
        if name.endswith("_kernel") and getattr(value, "__module__", "") == module.__name__
    }
    combine = "vllm.v1.worker.gpu.input_batch._combine_sampled_and_draft_tokens_kernel"
    found[combine] = lambda *args, **_: args[9].zero_()
    kernels.override_triton_kernels(found)


def stock_of(ours: Any) -> Any:
    """vLLM's own V2 runner, with a metadata builder that costs nothing and without a cache."""
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

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
    runner.initialize_kv_cache(ours.kv_cache_config)
    return runner


def stub(runner: Any) -> None:
    """Let the model and the sampler return at once."""
    is_v1 = hasattr(runner, "_model_forward")
    runner.model = StubModel(runner.max_num_tokens)
    runner.sampler = StubSampler() if is_v1 else FreeSampler(runner.sampler)
    if getattr(runner, "step_check", None) is not None:
        runner.step_check.limits[1:] = np.iinfo(np.int32).max  # blocks are made up


def told_to_v2(output: Any) -> Any:
    """A scheduler's output as its schedulers make it for V2."""
    for new in output.scheduled_new_reqs:
        new.prefill_token_ids = new.prompt_token_ids
    return output


def model_in(folder: Path) -> Path:
    """A small model."""
    return make_model(folder, vocab_size=VOCAB, num_hidden_layers=1, max_position_embeddings=4096)


def run(runner: Any, output: Any, sampled: dict[str, list[int]], clock: Clock) -> tuple[float, Any]:
    """Microseconds of one step, and what the model got of each request."""
    is_v1 = hasattr(runner, "_model_forward")
    rows = as_rows(sampled)
    runner.sampler.sampled_token_ids = rows if is_v1 else rows.long()
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


def measure(case: Case, runners: dict[str, Any], steps: int, clock: Clock) -> dict[str, float]:
    """Medians of each runner, in microseconds."""
    schedule = Schedule(case)
    times: dict[str, list[float]] = {name: [] for name in runners}
    for step in range(WARM_UP + steps):
        output, given = told_to_v2(schedule.step()), {}
        sampled = schedule.sampled()
        names = list(runners)
        for name in names[step % len(names) :] + names[: step % len(names)]:
            elapsed, given[name] = run(runners[name], copy.deepcopy(output), sampled, clock)
            if step >= WARM_UP:
                times[name].append(elapsed)
        if given["ours"] != given["v1"]:
            raise MismatchError("what the model gets differs from what V1 gives it")
    return {f"{name}_us": round(float(np.median(each)), 1) for name, each in times.items()}


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
    ) as llm:
        ours = runner_of(llm)
        with torch.inference_mode(), ours.prep_device.host_streams():
            torch.set_num_threads(1)
            yield ours


def of_case(case: Case, folder: Path, steps: int, clock: Clock) -> dict[str, float]:
    """Medians of the three runners on an engine of the case's size."""
    from vllm.v1.worker.gpu import async_utils

    with runner_for(case, folder) as ours:
        runners = {"ours": ours, "v1": v1_of(ours), "stock": stock_of(ours)}
        free_kernels()
        free_streams: Any = lambda *_: contextlib.nullcontext()  # noqa: E731
        async_utils.stream = free_streams  # upstream's knows CUDA's alone
        for runner in runners.values():
            stub(runner)
        collect()
        freeze()  # as vLLM's worker does once it is made
        try:
            return measure(case, runners, steps, clock)
        finally:
            unfreeze()


def main() -> None:
    """Measure and print."""
    args = parser_of(__doc__.splitlines()[0], CASES).parse_args()
    rows = []
    v2.let_it_run_without_triton()
    with tempfile.TemporaryDirectory() as name:
        model = model_in(Path(name) / "model")
        for name in args.case or CASES:
            print(f"{name} ...", file=sys.stderr, flush=True)
            try:
                row = {"case": name, **of_case(CASES[name], model, args.steps, args.clock)}
            except MismatchError as error:
                sys.exit(f"{name}: {error}; no numbers")
            rows.append(row)
            if args.json:
                print(json.dumps(row), flush=True)
    if not args.json:
        show(rows)


if __name__ == "__main__":
    main()
