"""What goes wrong while an engine serves: a step that fails, a clock that jumps."""

import gc
import re
import weakref
from itertools import count

import pytest
import torch

from tests.helpers.engine import engine, generate, greedy, runner_of
from tests.helpers.prompts import prompts_of
from tests.helpers.v2 import engine_of, on_both
from vllm_npu_prep.errors import PrepError
from vllm_npu_prep.records.record_file import record_files

LENGTHS = [30, 5, 41, 17, 90, 9]
OUT_OF_MEMORY = "NPU out of memory. Tried to allocate 9.00 GiB\nMore of it"
TOLD = (
    r"out of memory in a step with \d+ tokens of \d+ requests \(NPU out of memory. Tried to "
    r"allocate 9.00 GiB\); lower --gpu-memory-utilization, --max-num-batched-tokens or "
    r"--max-num-seqs"
)
KERNEL = "call aclnnGatherV2 failed, error code is 561103"
"""Of a call that is refused. What fails on the device is in tests/npu/test_faults_on_npus.py."""
FAULTS = {
    "memory in the model": ("_model_forward", torch.OutOfMemoryError, OUT_OF_MEMORY, TOLD),
    "memory in sampling": ("_sample", torch.OutOfMemoryError, OUT_OF_MEMORY, TOLD),
    "a kernel": ("_model_forward", RuntimeError, KERNEL, KERNEL),
}
ON_V2 = {"_model_forward": "prepare_attn", "_sample": "sample"}
"""V2's methods at these places of a step; its model is called in several ways."""


def fail_once(runner, method: str, kind: type[Exception], text: str, call: int) -> None:
    """Let a method of the runner fail at one of its calls."""
    work, calls = getattr(runner, method), count(1)

    def failing(*args, **kwargs):
        if next(calls) == call:
            raise kind(text)
        return work(*args, **kwargs)

    setattr(runner, method, failing)


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize(("asynchronous", "runner_name"), on_both({"sync": False, "async": True}))
def test_a_step_that_fails_ends_the_engine_with_its_reason(
    qwen3, seed, tmp_path, fault, asynchronous, runner_name
):
    """Nothing of that engine stays, its last steps are on disk, and the next one serves."""
    method, kind, text, told = FAULTS[fault]
    if runner_name == "V2":
        method = ON_V2[method]
    prompts = prompts_of(seed, LENGTHS)
    record = {"record": {"dir": str(tmp_path), "steps": "last 4"}}
    settings = {"async_scheduling": asynchronous, "additional_config": {"npu_prep": record}}
    with engine_of(runner_name, qwen3, **settings) as llm:
        expected = generate(llm, prompts, greedy(8))
        runner = runner_of(llm)
        fail_once(runner, method, kind, text, call=5)
        with pytest.raises(RuntimeError if fault == "a kernel" else PrepError) as raised:
            generate(llm, prompts, greedy(8))
        assert re.fullmatch(told, str(raised.value))
        cache = weakref.ref(runner.kv_caches[0])
    del llm, runner, raised
    gc.collect()
    assert cache() is None, "the KV cache is given back"
    (folder,) = tmp_path.iterdir()
    assert len(record_files(folder)) == 4
    with engine_of(runner_name, qwen3, async_scheduling=asynchronous) as llm:
        assert generate(llm, prompts, greedy(8)) == expected


def test_memory_of_tests_engines_comes_back(qwen3):
    """An engine freezes what there is when it begins: on a card, memory would be gone for good."""

    class Circle:
        def __init__(self) -> None:
            self.itself = self

    gc.disable()  # a collection by chance would hide that none is asked for
    circle = weakref.ref(Circle())
    assert circle() is not None
    with engine(qwen3) as llm:
        gc.enable()
        assert circle() is None, "what the engine before has left"
        runner = weakref.ref(runner_of(llm))
    assert runner() is None, "although there is a name for its engine"
