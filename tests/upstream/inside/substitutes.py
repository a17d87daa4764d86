"""A plugin for pytest in vLLM's own tests: this plugin's schedulers, and what comes of each test.

Where it is loaded, vLLM's tests are the package ``tests``: it imports none of this project's.
"""

import gc
import json
import os
from pathlib import Path
from typing import Any

import pytest

OUTCOMES = Path(os.environ["NPU_PREP_UPSTREAM_OUTCOMES"])

SCHEDULERS = "tests/v1/core/test_"
"""Begins the names of files that make schedulers alone, but for those that end in `ENGINES`."""
ENGINES = "_e2e.py"


def pytest_configure() -> None:
    """Let tests make this plugin's schedulers where they ask vLLM's modules for vLLM's own."""
    if "NPU_PREP_UPSTREAM_ALONE" in os.environ:
        return
    from vllm.v1.core.sched import async_scheduler, scheduler

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


def pytest_collection_finish() -> None:
    """Leave what imports made out of garbage collection: a scheduler's blocks set it off often."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def settings_that_only_runners_lack(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Let schedulers be made with settings that start-up refuses for what a runner lacks.

    Their connectors are vLLM's own: this plugin's wait until ranks have told of their planes.
    """
    file = request.node.nodeid.partition("::")[0]
    is_alone = "NPU_PREP_UPSTREAM_ALONE" in os.environ
    if file.startswith(SCHEDULERS) and not file.endswith(ENGINES) and not is_alone:
        monkeypatch.setattr("vllm_npu_prep.platform.refuse_unsupported", lambda *given: None)
        monkeypatch.setattr("vllm_npu_prep.platform._settle_connector", lambda *given: [])


def told(test: str, outcome: str, text: str) -> None:
    with OUTCOMES.open("a") as file:
        file.write(json.dumps({"test": test, "outcome": outcome, "text": text}) + "\n")


def errors(report: pytest.CollectReport | pytest.TestReport) -> str:
    """Return the error, after those that the engine and the server have printed."""
    printed = [*report.capstderr.splitlines(), *report.capstdout.splitlines()]
    named = [f"E {line[-300:]}" for line in printed if "Error: " in line]
    return "\n".join([*named[-50:], report.longreprtext[-6000:]])


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.outcome != "passed":
        told(report.nodeid, report.outcome, errors(report))


def pytest_runtest_logstart(nodeid: str) -> None:
    told(nodeid, "begun", "")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" or report.outcome != "passed":
        told(report.nodeid, report.outcome, errors(report))
