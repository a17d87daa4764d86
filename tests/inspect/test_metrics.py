"""Counts of steps: what they hold, who finds them, and what goes wrong around them."""

import os
import subprocess
import sys
from pathlib import Path
from time import perf_counter
from types import SimpleNamespace

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.multiprocess import MultiProcessCollector

from vllm_npu_prep.observe import metrics
from vllm_npu_prep.observe.metrics import FOLDER_ENV_VAR, SHARED_ENV_VAR, StepMetrics
from vllm_npu_prep.prep.state import AttentionState

CONFIG = SimpleNamespace(
    model_config=SimpleNamespace(served_model_name="m"),
    parallel_config=SimpleNamespace(data_parallel_index=3, rank=0),
)
OWN = "engine=3 model_name=m"


def step(state: AttentionState, num_tokens: int, padded: int, num_reqs: int = 1) -> SimpleNamespace:
    return SimpleNamespace(
        attn_state=state,
        batch=SimpleNamespace(num_reqs=num_reqs, total_num_scheduled_tokens=num_tokens),
        padding=SimpleNamespace(num_input_tokens=padded),
    )


DECODE = step(AttentionState.DecodeOnly, 5, 8)


def scraped(folder: Path) -> dict[str, float]:
    """Samples that differ from zero, as a server's registry reads them."""
    registry = CollectorRegistry()
    MultiProcessCollector(registry, str(folder))
    samples = {}
    for sample in (sample for family in registry.collect() for sample in family.samples):
        labels = " ".join(f"{key}={value}" for key, value in sorted(sample.labels.items()))
        samples[f"{sample.name.removeprefix('vllm:npu_prep_')} {labels}"] = sample.value
    return {name: value for name, value in samples.items() if value}


@pytest.fixture(params=[FOLDER_ENV_VAR, SHARED_ENV_VAR])
def folder(request, tmp_path, monkeypatch):
    """A folder that a worker counts in: ours, or vLLM's of several API servers."""
    monkeypatch.delenv(FOLDER_ENV_VAR, raising=False)
    monkeypatch.delenv(SHARED_ENV_VAR, raising=False)
    monkeypatch.setenv(request.param, str(tmp_path))
    return tmp_path


def test_an_ended_engine_keeps_its_counts_and_no_descriptor(folder):
    """Whoever holds its runner still."""
    before = len(os.listdir("/proc/self/fd"))
    counts = StepMetrics(CONFIG)
    counts.add(DECODE, "full graph", 0, perf_counter())
    assert len(os.listdir("/proc/self/fd")) == before + 4
    counts.close()
    counts.close()
    assert len(os.listdir("/proc/self/fd")) == before
    assert scraped(folder)[f"tokens_total {OWN}"] == 5


def test_other_ranks_of_an_engine_count_for_themselves_only(folder):
    parallel = SimpleNamespace(data_parallel_index=3, rank=1)
    config = SimpleNamespace(model_config=CONFIG.model_config, parallel_config=parallel)
    StepMetrics(config).add(DECODE, "full graph", 0, perf_counter())
    assert not scraped(folder)


def test_a_step_is_counted_once_in_each_way(folder):
    counts = StepMetrics(CONFIG)
    counts.add(DECODE, "full graph", 0, perf_counter())
    counts.add(DECODE, "full graph", 2, perf_counter())
    counts.add(step(AttentionState.ChunkedPrefill, 9, 9), "eager: too large", 2, perf_counter())
    counts.add(step(AttentionState.DecodeOnly, 0, 8, num_reqs=0), "full graph", 3, perf_counter())
    counts.add(step(AttentionState.DecodeOnly, 1, 1), "full graph", 3, perf_counter() - 60)
    found = scraped(folder)
    assert found.pop(f"prepare_time_seconds_sum {OWN}") == pytest.approx(60, abs=1)
    assert {name: value for name, value in found.items() if "bucket" not in name} == {
        f"steps_total attn_state=DecodeOnly {OWN}": 3,
        f"steps_total attn_state=ChunkedPrefill {OWN}": 1,
        f"graph_steps_total {OWN.replace(' ', ' graph=full graph ')}": 3,
        f"eager_steps_total {OWN} reason=too large": 1,
        f"tokens_total {OWN}": 20,
        f"padding_tokens_total {OWN}": 6,
        f"staging_waits_total {OWN}": 3,
        f"prepare_time_seconds_count {OWN}": 4,
    }
    bucket = "prepare_time_seconds_bucket {} {}".format(*OWN.split()[:1], "le={} " + OWN.split()[1])
    assert (found[bucket.format("0.05")], found[bucket.format("+Inf")]) == (3, 4)


def test_more_reasons_than_a_file_starts_with_room_for(folder):
    """The file grows under the counts; those that were there before go on counting."""
    counts = StepMetrics(CONFIG)
    for index in range(600):
        counts.add(DECODE, f"eager: reason {index}", 0, perf_counter())
    counts.add(DECODE, "eager: reason 0", 0, perf_counter())
    found = scraped(folder)
    assert max(file.stat().st_size for file in folder.iterdir()) > metrics.FILE_BYTES
    assert found[f"eager_steps_total {OWN} reason=reason 0"] == 2
    assert found[f"eager_steps_total {OWN} reason=reason 599"] == 1
    assert found[f"steps_total attn_state=DecodeOnly {OWN}"] == 601


def test_two_engines_of_a_process_add_up(folder):
    for _ in range(2):
        StepMetrics(CONFIG).add(DECODE, "full graph", 1, 0.0)
    assert scraped(folder)[f"tokens_total {OWN}"] == 10
    assert scraped(folder)[f"staging_waits_total {OWN}"] == 2


@pytest.mark.parametrize("where", ["/proc/nowhere", None, "a full disk"])
def test_without_a_place_for_them_steps_go_on_uncounted(where, monkeypatch, tmp_path):
    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(SHARED_ENV_VAR, raising=False)
    monkeypatch.delenv(FOLDER_ENV_VAR, raising=False)
    if where == "a full disk":
        monkeypatch.setattr(os, "posix_fallocate", full)
    if where:
        monkeypatch.setenv(FOLDER_ENV_VAR, where if where[0] == "/" else str(tmp_path))
    StepMetrics(CONFIG).add(DECODE, "full graph", 1, perf_counter())
    assert scraped(tmp_path) == {}


def test_a_server_takes_a_folder_of_its_own_and_clears_it_away(tmp_path):
    """A server started by another one inherits the other's folder, which is not its own."""
    code = (
        "import os, sys\n"
        "from prometheus_client import REGISTRY, generate_latest\n"
        "from vllm_npu_prep.observe import metrics\n"
        "metrics.share_folder()\n"
        "metrics.share_folder()\n"
        "folder = os.environ[metrics.FOLDER_ENV_VAR]\n"
        "open(os.path.join(folder, 'a'), 'w').close()\n"
        "metrics.expose()\n"
        "metrics.expose()\n"
        "from tests.inspect.test_metrics import CONFIG, DECODE, StepMetrics\n"
        "StepMetrics(CONFIG).add(DECODE, 'full graph', 0, 0.0)\n"
        "print(generate_latest(REGISTRY).decode().count('steps_total{attn_state=\"DecodeOnly\"'))\n"
        "print(folder)"
    )
    environment = {**os.environ, FOLDER_ENV_VAR: str(tmp_path), "TMPDIR": str(tmp_path)}
    environment.pop(SHARED_ENV_VAR, None)
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, env=environment)
    assert ran.returncode == 0, ran.stderr.decode()
    exposed, folder = ran.stdout.decode().split()[-2:]
    assert exposed == "1"  # registered once
    assert Path(folder).parent == tmp_path
    assert list(tmp_path.iterdir()) == []
