"""Publishes counts of a worker's steps on the server's ``/metrics``.

Workers prepare steps in other processes than the one that answers ``/metrics``, and vLLM's messages
between them have no room for an out-of-tree runner's counts. So they share a folder: a worker keeps
its counts in mapped files in the format of prometheus_client's multiprocess mode, and the server
reads these when it is asked. With several API servers vLLM itself works that way, and its folder
(``PROMETHEUS_MULTIPROC_DIR``) is taken; otherwise the main process makes one.

Counting adds to eight bytes of memory: no lock, no system call, and the last count is visible at
once, even while the engine idles. prometheus_client's `Counter` and `Histogram` write the same
files, but take 43 microseconds for the counts of a step, where this takes 0.7; and they write to
files only where ``PROMETHEUS_MULTIPROC_DIR`` was set before their import, which changes vLLM's
metrics.
"""

import atexit
import os
import shutil
import tempfile
from bisect import bisect_left
from pathlib import Path
from time import perf_counter
from typing import Any, TypeAlias

from prometheus_client import REGISTRY
from prometheus_client.mmap_dict import MmapedDict, mmap_key
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.utils import INF, floatToGoString
from vllm.config import VllmConfig
from vllm.logger import init_logger

from vllm_npu_prep.graph.counts import EAGER
from vllm_npu_prep.prep.batch import PreparedStep
from vllm_npu_prep.prep.state import AttentionState

logger = init_logger(f"vllm.{__name__}")  # vLLM configures loggers below its own only

FOLDER_ENV_VAR = "NPU_PREP_METRICS_DIR"
"""The environment variable that the main process sets for its children; it is not for users."""

SHARED_ENV_VAR = "PROMETHEUS_MULTIPROC_DIR"
FILE_BYTES = 1 << 16
"""The initial size of the files; a hundred values fill a third."""

PREFIX = "vllm:npu_prep_"
COUNTERS = {
    "steps": "Steps by attention state.",
    "graph_steps": "Steps that replayed graphs, by kind of graph.",
    "eager_steps": "Steps that ran without a graph, by reason.",
    "tokens": "Scheduled tokens of all steps.",
    "padding_tokens": "Tokens of padding that steps got to fit a graph.",
    "staging_waits": "Steps that waited for an earlier copy to the device.",
}
PREPARE_TIME = "prepare_time_seconds"
PREPARE_TIME_HELP = "Time that the host takes to prepare the inputs of a step."
BOUNDS = (
    *(25e-6, 50e-6, 75e-6, 100e-6, 150e-6, 200e-6, 300e-6, 500e-6, 750e-6),
    *(1e-3, 2e-3, 5e-3, 10e-3, 50e-3),
    INF,
)
"""The upper bounds of the histogram's buckets, in seconds."""

Values: TypeAlias = "memoryview[float]"
"""All counts of a file, float64. One object holds all of them: each object that a step touches was
evicted from the processor's cache since the last one.
"""

_made_by_this_process: list[str] = []
_exposed: set[str] = set()


def share_folder() -> None:
    """Make the folder in which workers count, and tell child processes its path.

    It is called in the main process, which removes the folder at its end. An inherited folder
    belongs to another server.
    """
    if SHARED_ENV_VAR in os.environ:
        return
    if _made_by_this_process:
        os.environ.setdefault(FOLDER_ENV_VAR, _made_by_this_process[0])
        return
    try:
        folder = tempfile.mkdtemp(prefix="vllm-npu-prep-")
    except OSError as error:
        os.environ.pop(FOLDER_ENV_VAR, None)
        logger.warning("Metrics of steps are off: %s.", error)
        return
    _made_by_this_process.append(folder)
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    os.environ[FOLDER_ENV_VAR] = folder


def expose() -> None:
    """Let the registry of the process that answers ``/metrics`` read the folder.

    Where there are several API servers, vLLM's own registry reads it.
    """
    folder = os.environ.get(FOLDER_ENV_VAR)
    if folder is None or SHARED_ENV_VAR in os.environ or folder in _exposed:
        return
    _exposed.add(folder)
    MultiProcessCollector(REGISTRY, folder)


class StepMetrics:
    """Counts of one engine, kept by its first rank: all of its ranks prepare the same steps.

    Parameters
    ----------
    vllm_config
        Its model's name and data-parallel rank become labels, as they do in vLLM's metrics.
    """

    def __init__(self, vllm_config: VllmConfig) -> None:
        self._labels: dict[str, Any] = {
            "model_name": vllm_config.model_config.served_model_name,
            "engine": str(vllm_config.parallel_config.data_parallel_index),
        }
        folder = os.environ.get(SHARED_ENV_VAR) or os.environ.get(FOLDER_ENV_VAR)
        self._files: dict[str, MmapedDict] = {}
        if folder is not None and vllm_config.parallel_config.rank == 0:
            try:
                self._files = {kind: _open(folder, kind) for kind in ("counter", "histogram")}
            except OSError as error:
                logger.warning("Metrics of steps are off: %s.", error)
        self._counts: Values  # views of the two files, which `_value` makes
        self._times: Values
        self._states = [self._counter("steps", attn_state=s.name) for s in AttentionState]
        self._kinds: dict[str, int] = {}
        self._tokens, self._padding = self._counter("tokens"), self._counter("padding_tokens")
        self._waits, self._num_waits = self._counter("staging_waits"), 0
        self._sum = self._value("histogram", PREPARE_TIME, "_sum", PREPARE_TIME_HELP, {})
        self._buckets = [self._bucket(bound) for bound in BOUNDS]

    def add(
        self,
        step: PreparedStep,
        kind: str,  # how it runs (`StepCounts.kind`)
        num_waits: int,  # waits of the staging ring so far
        started: float,  # `perf_counter` when its preparation began
    ) -> None:
        """Count a step that was just prepared; runs without requests are not steps."""
        batch = step.batch
        if not batch.num_reqs:
            return
        num_tokens = batch.total_num_scheduled_tokens
        index = self._kinds.get(kind)
        if index is None:
            index = self._kinds[kind] = self._kind(kind)
        counts, times = self._counts, self._times
        counts[index] += 1
        counts[self._states[step.attn_state]] += 1
        counts[self._tokens] += num_tokens
        counts[self._padding] += step.padding.num_input_tokens - num_tokens
        if num_waits != self._num_waits:
            counts[self._waits] += num_waits - self._num_waits
            self._num_waits = num_waits
        seconds = perf_counter() - started
        times[self._sum] += seconds
        times[self._buckets[bisect_left(BOUNDS, seconds)]] += 1

    def close(self) -> None:
        """Close the files, whose counts stay for the server. No step comes after it.

        A runner that something holds after its engine's end would keep four descriptors open.
        """
        self._counts = self._times = memoryview(bytearray(8)).cast("d")
        for file in self._files.values():
            file.close()
        self._files = {}

    def _kind(self, kind: str) -> int:
        if kind.startswith(EAGER):
            return self._counter("eager_steps", reason=kind.removeprefix(EAGER))
        return self._counter("graph_steps", graph=kind)

    def _counter(self, name: str, **labels: str) -> int:
        return self._value("counter", name, "_total", COUNTERS[name], labels)

    def _bucket(self, bound: float) -> int:
        labels = {"le": floatToGoString(bound)}
        return self._value("histogram", PREPARE_TIME, "_bucket", PREPARE_TIME_HELP, labels)

    def _value(self, kind: str, name: str, suffix: str, text: str, labels: dict[str, str]) -> int:
        """Return the index of a value in the file of its kind.

        A new value is made, which may enlarge the file and replace `_counts` or `_times`.
        """
        if kind not in self._files:
            self._counts = self._times = memoryview(bytearray(8)).cast("d")
            return 0
        labels = self._labels | labels
        name, file = PREFIX + name, self._files[kind]
        key = mmap_key(name, name + suffix, list(labels), list(labels.values()), text)
        file.read_value(key)  # creates the value
        values = memoryview(file._m).cast("d")
        if kind == "counter":
            self._counts = values
        else:
            self._times = values
        return file._positions[key] // values.itemsize


def _open(folder: str, kind: str) -> MmapedDict:
    """Open a file of the folder; its name tells prometheus_client what kind of values it has.

    It appears at full size: a truncated file would fail the server's whole scrape, and on a full
    disk, writing to mapped memory would kill the process.
    """
    path = Path(folder, f"{kind}_npu-prep-{os.getpid()}.db")
    if not path.exists():
        new = path.with_suffix(".new")
        try:
            with new.open("wb") as file:
                os.posix_fallocate(file.fileno(), 0, FILE_BYTES)
            new.rename(path)
        finally:
            new.unlink(missing_ok=True)
    return MmapedDict(str(path))
