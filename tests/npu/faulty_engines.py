"""Engines on an emulated card that fails under them, one after another in this process.

python -m tests.npu.faulty_engines FOLDER sync|async V1|V2 FAULT...

The model is FOLDER/model. A line of JSON tells what each engine did. Then the process ends with an
error that nobody catches, as a program of a user's would.
"""

import json
import sys
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import torch

from ascend_emulator import fail_kernel
from tests.helpers.engine import generate, greedy, runner_of
from tests.helpers.prompts import prompts_of
from tests.helpers.v2 import engine_of

TOKENS = 8
STEP = 5
"""Of the second round of requests, the step that fails; requests have got tokens by then."""
KERNEL = "npu::npu_fused_infer_attention_score"
taken: list[torch.Tensor] = []


def take_memory() -> None:
    """Leave nothing of the card's memory, as if another process had it."""
    size = torch.npu.mem_get_info()[0]
    while size >= 512:  # the smallest that torch_npu's allocator gives
        try:
            taken.append(torch.empty(size, dtype=torch.uint8, device="npu"))
        except torch.OutOfMemoryError:
            size //= 2


def get_stuck() -> None:
    """Let the stream wait for an event that nobody records."""
    torch.npu.ExternalEvent().wait(torch.npu.current_stream())


FORWARD, SAMPLE = ("_model_forward", "prepare_attn"), ("_sample", "sample")
FAULTS: dict[str, tuple[tuple[str, str], Callable[[], None]]] = {
    "memory": (FORWARD, take_memory),
    "memory in sampling": (SAMPLE, take_memory),
    "kernel": (FORWARD, lambda: fail_kernel(KERNEL)),
    "kernels": (FORWARD, lambda: fail_kernel(KERNEL, times=1 << 30)),  # from now on, all of them
    "stuck": (FORWARD, get_stuck),
}
"""Before which method of either runner something is done to the card."""


def plant(runner: Any, is_v2: bool, fault: str) -> Callable[[], int]:
    """Let a step of the runner fail; returns a function that tells how many it has begun."""
    methods, do = FAULTS[fault]
    name = methods[is_v2]
    work, calls = getattr(runner, name), count(1)
    begun = 0

    def failing(*args: Any, **kwargs: Any) -> Any:
        nonlocal begun
        begun = next(calls)
        if begun == STEP:
            do()
        return work(*args, **kwargs)

    setattr(runner, name, failing)
    return lambda: begun


def serve(llm: Any, prompts: list[list[int]], said: dict[int, list[int]]) -> None:
    """Serve prompts; what their clients have got so far is in `said`."""
    core = llm.llm_engine
    for number, prompt in enumerate(prompts):
        core.add_request(str(number), {"prompt_token_ids": prompt}, greedy(TOKENS))
    while core.has_unfinished_requests():
        for output in core.step():
            said[int(output.request_id)] = list(output.outputs[0].token_ids)


def main(folder: Path, scheduling: str, runner_name: str, *faults: str) -> None:
    """Serve, fail, and serve again."""
    prompts = prompts_of(7, [30, 5, 41, 17])
    expected: list[list[int]] = []
    told: dict[str, dict[str, Any]] = {}
    for number, fault in enumerate([*faults, "kernel"]):
        is_last = number == len(faults)
        steps = folder / "steps" / str(number)
        settings = {
            "async_scheduling": scheduling == "async",
            "additional_config": {"npu_prep": {"record": {"dir": str(steps), "steps": "last 4"}}},
        }
        model = folder / "model"
        with engine_of(runner_name, model, dtype="float16", block_size=128, **settings) as llm:
            tokens = generate(llm, prompts, greedy(TOKENS))
            expected = expected or tokens
            of = told["next engine" if is_last else fault] = {"as before": tokens == expected}
            begun = plant(runner_of(llm), runner_name == "V2", fault)
            if is_last:
                print("told", json.dumps(told), flush=True)
                generate(llm, prompts, greedy(TOKENS))
            said: dict[int, list[int]] = {}
            began = time.monotonic()
            try:
                serve(llm, prompts, said)
            except Exception as error:
                of["error"] = f"{type(error).__name__}: {error}"
            of["seconds"], of["steps"] = time.monotonic() - began, begun()
            fail_kernel(KERNEL, times=0)
            taken.clear()
            of["tokens"] = sum(map(len, said.values()))
            of["wrong"] = {n: got for n, got in said.items() if got != expected[n][: len(got)]}
        of["records"] = len(list(steps.rglob("step-*.npz")))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
