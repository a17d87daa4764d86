"""One engine whose steps are counted and timed, in either environment; `peer.py` starts it.

The first line of standard input is a job as JSON (``engine``: arguments of ``LLM``), which a line
``READY`` answers with versions. Each further line is a case, and a line ``STEPS`` answers it.

It imports neither this project nor anything but vLLM and the emulator, so both programs are counted
by the same code. A step's preparation goes from entering `execute_model` to entering the model's
forward pass, or the replay of a graph in its place. The runner's part ends when `sample_tokens`
returns, the engine's step when `LLMEngine.step` does, which reads the tokens of a step, too.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from importlib.metadata import distributions
from statistics import median, median_low
from typing import Any

import ascend_emulator
from ascend_emulator import triton_kernels

PARTS = {
    "prepare": ("execute", "forward"),
    "runner": ("execute", "sampled"),
    "step": ("begin", "end"),
}
"""Parts of an engine's step, by the marks between which they are."""
ROPE = "triton::_triton_rope"
"""A kernel of vllm-ascend that changes no count, and whose interpreter takes most of the time."""
NAMED = ("vllm", "vllm-ascend", "vllm-npu-prep", "torch", "torch_npu", "triton")


def counted() -> dict[str, int]:
    """The emulator's counters."""
    return asdict(ascend_emulator.counters())


def timed() -> dict[str, int]:
    """Processor time of this thread, and what of it was the emulator's."""
    return {"ns": time.thread_time_ns() - ascend_emulator.host_ns()}


class Marks:
    """What `read` says where the parts of the current step begin and end."""

    def __init__(self, runner: Any) -> None:
        self.read: Callable[[], dict[str, int]] = counted
        self.of_step: dict[str, dict[str, int]] = {}
        self.scheduled: dict[str, int] = {}
        self._before(runner, "execute_model", "execute")
        if hasattr(runner, "_model_forward"):
            self._before(runner, "_model_forward", "forward")
        else:
            self._before(runner.model, "forward", "forward")
            if runner.cudagraph_manager is not None:
                self._before(runner.cudagraph_manager, "run_fullgraph", "forward")
        sample_tokens = runner.sample_tokens

        def sampled(*args: Any, **kwargs: Any) -> Any:
            result = sample_tokens(*args, **kwargs)
            self.set("sampled")
            return result

        runner.sample_tokens = sampled

    def set(self, name: str) -> None:
        """A drafter's forward passes come after the model's, which is the first."""
        if name not in self.of_step:
            self.of_step[name] = self.read()

    def _before(self, owner: Any, name: str, mark: str) -> None:
        function = getattr(owner, name)

        def marked(*args: Any, **kwargs: Any) -> Any:
            if mark == "execute":
                output = args[0]
                drafts = output.scheduled_spec_decode_tokens.values()
                self.scheduled = {
                    "requests": len(output.num_scheduled_tokens),
                    "tokens": output.total_num_scheduled_tokens,
                    "drafts": sum(map(len, drafts)),
                }
            self.set(mark)
            return function(*args, **kwargs)

        setattr(owner, name, marked)


class Engine:
    """An engine of whatever program the environment has."""

    def __init__(self, llm: Any) -> None:
        self.engine = llm.llm_engine
        self.core = self.engine.engine_core.engine_core
        self.runner = self.core.model_executor.driver_worker.worker.model_runner
        self.marks = Marks(self.runner)
        self.added = 0

    def about(self) -> dict[str, Any]:
        """Versions, the runner, and what vLLM chose."""
        versions = {each.metadata["Name"]: each.version for each in distributions()}
        versions = {name.replace("-", "_"): version for name, version in versions.items()}
        config = self.core.vllm_config
        kind = type(self.runner)
        return {
            "versions": {
                name: versions[name.replace("-", "_")]
                for name in NAMED
                if name.replace("-", "_") in versions
            },
            "runner": f"{kind.__module__}.{kind.__name__}",
            "asynchronous": bool(config.scheduler_config.async_scheduling),
            "graphs": str(config.compilation_config.cudagraph_mode),
        }

    def add(self, prompts: list[list[int]], tokens: int) -> list[str]:
        from vllm import SamplingParams

        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        names = []
        for prompt in prompts:
            names.append(str(self.added))
            self.added += 1
            self.engine.add_request(names[-1], {"prompt_token_ids": prompt}, params)
        return names

    def step(self) -> dict[str, dict[str, int]]:
        """Marks of one step, whose streams run afterwards if time is measured."""
        if self.marks.read is timed:
            ascend_emulator.let_run()
            ascend_emulator.hold_streams(True)
        self.marks.of_step = {}
        self.marks.set("begin")
        self.engine.step()
        self.marks.set("end")
        ascend_emulator.hold_streams(False)
        return self.marks.of_step

    def run(self, case: dict[str, Any]) -> dict[str, Any]:
        """Medians of the parts of `steps` steps, after `warm` ones that are left out."""
        self.marks.read = timed if case["timed"] else counted
        prompts = list(case["prompts"])  # one list of prompts a step
        running = self.add(case["decodes"], case["longest"])
        parts: dict[str, list[dict[str, int]]] = {part: [] for part in PARTS}
        scheduled: list[dict[str, int]] = []
        for number in range(case["warm"] + case["steps"]):
            if prompts:
                self.add(prompts[number % len(prompts)], 1)
            marks = self.step()
            if number < case["warm"]:
                continue
            scheduled.append(self.marks.scheduled)
            for part, (begin, end) in PARTS.items():
                first, last = marks[begin], marks[end]
                parts[part].append({key: last[key] - first[key] for key in first})
        self.engine.abort_request(running)
        while self.engine.has_unfinished_requests():
            self.engine.step()
        middle: Callable[..., Any] = median if case["timed"] else median_low
        return {
            "scheduled": {key: median_low(s[key] for s in scheduled) for key in scheduled[0]},
            **{
                part: {key: middle(row[key] for row in rows) for key in rows[0]}
                for part, rows in parts.items()
            },
        }


def leave_out_rope() -> None:
    """Launch the kernel as ever, but don't interpret it."""
    interpret = triton_kernels._interpret

    def interpret_others(launch: triton_kernels.Launch) -> None:
        if launch.name != ROPE:
            interpret(launch)

    triton_kernels._interpret = interpret_others


def main() -> None:
    import torch
    from vllm import LLM
    from vllm.model_executor.models import registry

    registry._run_in_subprocess = lambda inspect: inspect()  # which would import all of it again
    job = json.loads(sys.stdin.readline())
    leave_out_rope()
    llm = LLM(disable_log_stats=True, skip_tokenizer_init=True, **job["engine"])
    torch.set_num_threads(1)
    engine = Engine(llm)
    print("READY", json.dumps(engine.about()), flush=True)
    for line in sys.stdin:
        print("STEPS", json.dumps(engine.run(json.loads(line))), flush=True)
    os._exit(0)  # an engine's shutdown takes seconds


if __name__ == "__main__":
    main()
