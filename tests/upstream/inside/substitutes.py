"""A plugin for pytest in vLLM's own tests: this plugin's schedulers, and what comes of each test.

Where it is loaded, vLLM's tests are the package ``tests``: it imports none of this project's.
"""

import contextlib
import gc
import json
import os
import re
from collections.abc import Generator, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

OUTCOMES = Path(os.environ["NPU_PREP_UPSTREAM_OUTCOMES"])

SCHEDULERS = "tests/v1/core/test_", "tests/v1/kv_connector/unit/"
"""Begin the names of files that make schedulers alone, but for those that end in `ENGINES`."""
ENGINES = "_e2e.py", "/test_example_connector.py", "/test_offloading_connector.py"

PARTS = "tests/v1/worker/test_gpu_"
"""Begins the names of files that make parts of the V2 runner alone, by these: what they test."""
TESTED_PARTS = "bad_words", "logit_bias", "logits_processors", "sampler_flags", "thinking_budget"

BACKENDS = "tests/v1/e2e/", "tests/basic_correctness/"
"""Begin the names of files whose engines name an attention backend, and get this plugin's."""

OF_PROCESSES = (
    r"See root cause|EngineDead|exited unexpectedly|failed to start|did not start|exit code"
)
"""What the error of a test says if an engine's or a server's process ended by another one."""


def pytest_configure() -> None:
    """Give tests this plugin's schedulers and kernels where they ask vLLM's modules for vLLM's."""
    if "NPU_PREP_UPSTREAM_ALONE" in os.environ:
        return
    import torch
    from vllm.config import model
    from vllm.v1.core.sched import async_scheduler, scheduler

    from vllm_npu_prep.compat.v2 import let_it_run_without_triton
    from vllm_npu_prep.ops import register_overrides
    from vllm_npu_prep.scheduling.scheduler import (
        BatchedAsyncScheduler,
        BatchedMixin,
        BatchedScheduler,
    )

    ours = BatchedMixin._mamba_block_aligned_split
    of_vllm = scheduler.Scheduler._mamba_block_aligned_split

    def split(self: Any, *args: Any, **kwargs: Any) -> int:
        """Tests give vLLM's method something that merely has a scheduler's attributes."""
        method = ours if isinstance(self, BatchedMixin) else of_vllm
        return method(self, *args, **kwargs)

    BatchedMixin._mamba_block_aligned_split = split
    scheduler.Scheduler = BatchedScheduler
    async_scheduler.AsyncScheduler = BatchedAsyncScheduler
    let_it_run_without_triton()
    register_overrides("replace", for_v2_runner=True)

    # of all dtypes, CPUs compute with this one the slowest, and what tests expect is the same
    model._STR_DTYPE_TO_TORCH_DTYPE["half"] = torch.float32


def pytest_collection_finish() -> None:
    """Leave what imports made out of garbage collection: a scheduler's blocks set it off often."""
    gc.collect()
    gc.freeze()


@contextlib.contextmanager
def for_file(file: str) -> Iterator[None]:
    """Give a file's tests, and their imports, what this plugin lets a runner's parts be made of.

    Schedulers can be made with settings that start-up refuses for what a runner lacks. Their
    connectors are vLLM's own: this plugin's wait until ranks have told of their planes.
    """
    # not by the fixture monkeypatch: what tests patch would outlive vLLM's fixtures
    with pytest.MonkeyPatch.context() as patch, contextlib.ExitStack() as stack:
        if "NPU_PREP_UPSTREAM_ALONE" in os.environ:
            pass
        elif file.startswith(SCHEDULERS) and not file.endswith(ENGINES):
            patch.setattr("vllm_npu_prep.platform.refuse_unsupported", lambda *given: None)
            patch.setattr("vllm_npu_prep.platform._settle_connector", lambda *given: [])
        elif file.removeprefix(PARTS).startswith(TESTED_PARTS):
            import torch

            from vllm_npu_prep.compat.v2 import stand_ins
            from vllm_npu_prep.runner.v2.request_states import NPURequestState
            from vllm_npu_prep.runner.v2.runner import NPUModelRunnerV2

            # tests don't say of a request what its parameters read, as the runner does
            states = partial(NPURequestState, use_dense_all_token_ids=True)
            stack.enter_context(NPUModelRunnerV2._stand_ins(torch.device("cpu")))
            stack.enter_context(stand_ins(RequestState=states))
        elif file.startswith(BACKENDS):
            from vllm_npu_prep.platform import NPUPlatform

            check = NPUPlatform.check_and_update_config

            def check_without_backend(vllm_config: Any) -> None:
                vllm_config.attention_config.backend = None
                check(vllm_config)

            patch.setattr(NPUPlatform, "check_and_update_config", check_without_backend)
        yield


@pytest.fixture(autouse=True)
def while_a_test_runs(request: pytest.FixtureRequest) -> Iterator[None]:
    with for_file(request.node.nodeid.partition("::")[0]):
        yield


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Generator[None, Any, Any]:
    with for_file(collector.nodeid):
        return (yield)


def told(test: str, outcome: str, text: str) -> None:
    with OUTCOMES.open("a") as file:
        file.write(json.dumps({"test": test, "outcome": outcome, "text": text}) + "\n")


def errors(report: pytest.CollectReport | pytest.TestReport) -> str:
    """Return the error; if it is another process's, after those that processes have printed."""
    text = report.longreprtext[-6000:]
    if not re.search(OF_PROCESSES, text):
        return text
    printed = [*report.capstderr.splitlines(), *report.capstdout.splitlines()]
    return "\n".join([*[f"E {line[-300:]}" for line in printed if "Error: " in line][-50:], text])


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.outcome != "passed":
        told(report.nodeid, report.outcome, errors(report))


def pytest_runtest_logstart(nodeid: str) -> None:
    told(nodeid, "begun", "")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" or report.outcome != "passed":
        told(report.nodeid, report.outcome, errors(report))
