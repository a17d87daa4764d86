"""Records steps of a running engine: a range as they come, or the last ones on request.

An error here is one line in the log and never reaches the engine.
"""

import contextlib
import json
import logging
import os
import platform
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from hashlib import blake2b
from importlib import metadata
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from vllm_npu_prep import __version__
from vllm_npu_prep.errors import PrepError
from vllm_npu_prep.files import write_whole
from vllm_npu_prep.observe.step_snapshot import (
    Recorded,
    StepSnapshot,
    recorded_groups,
    warm_up,
)
from vllm_npu_prep.prep.batch import BatchTables, PreparedStep
from vllm_npu_prep.prep.embeds import NO_PLACEHOLDERS, Placeholders
from vllm_npu_prep.ranks import is_one_of_several, rank_across_engines
from vllm_npu_prep.records.record import FORMAT
from vllm_npu_prep.records.step_choices import SUFFIX as CHOICES
from vllm_npu_prep.records.step_choices import choices_to_bytes
from vllm_npu_prep.records.step_samples import SUFFIX as SAMPLES
from vllm_npu_prep.records.step_samples import RequestSamples, to_bytes
from vllm_npu_prep.wording import counted, runs_of

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import NewRequestData

    from vllm_npu_prep.config import RecordConfig
    from vllm_npu_prep.runner.preparer import Builders

logger = logging.getLogger(f"vllm.{__name__}")  # vLLM configures loggers below its own only

MANIFEST = "manifest.json"
MOST_TRANSFERS = 1 << 16
"""For how many of the last requests with K and V from or for another engine the id is kept."""


class Written(NamedTuple):
    """The result of a request to write the last steps; as text, one line."""

    folder: Path  # of this run
    steps: int  # number of steps written
    why: str  # the reason for writing them, or why there are none

    def __str__(self) -> str:
        if not self.steps:
            return f"{self.why}; those of this run are in {self.folder}"
        verb = "is" if self.steps == 1 else "are"
        return f"{counted(self.steps, 'step')} {verb} in {self.folder} ({self.why})"


class Sampled(NamedTuple):
    """What a step sampled, as the runner returns it; `to_bytes` gives what is in the file."""

    token_ids: list[list[int]]  # of each request
    from_trace: Collection[int]  # rows of the batch
    masks: Any  # vLLM's ``SamplingMaskLists``; None if the engine returns none

    @property
    def nbytes(self) -> int:
        return 0 if self.masks is None else int(self.masks.token_ids.nbytes)

    def to_bytes(self) -> bytes:
        return to_bytes(
            [
                RequestSamples(
                    token_ids=tokens, from_trace=row in self.from_trace, kept=self._kept(row)
                )
                for row, tokens in enumerate(self.token_ids)
            ]
        )

    def _kept(self, row: int) -> list[list[tuple[int, int]]] | None:
        if self.masks is None:
            return None
        kept = self.masks.slice_request(row, len(self.token_ids[row])).to_nested_list()
        kept = kept[: len(self.token_ids[row])]
        return [[(run.start, len(run)) for run in runs_of(tokens)] for tokens in kept]


def _nbytes(arrays: dict[str, np.ndarray]) -> int:
    return sum(array.nbytes for array in arrays.values())


class StepRecorder:
    """Notes each step that the runner prepares, and writes the records.

    Each run writes into a folder of its own, made with its first file:
    ``DIR/<date>-<time>-<process>``, with ``-rank<n>`` appended if there are several ranks.

    Parameters
    ----------
    config
        The ``record`` key of the plugin's options.
    recorded
        Settings that all records share.
    manifest
        Versions and settings of the engine, for `MANIFEST`.
    suffix
        What is appended to the folder's name.
    asked_by
        What writes the last steps, in the line that says so at start-up.

    Raises
    ------
    PrepError
        If ``dir`` can't be made.
    """

    def __init__(
        self,
        config: "RecordConfig",
        tables: BatchTables,
        recorded: Recorded,
        manifest: dict[str, Any] | None = None,
        suffix: str = "",
        asked_by: str = "`vllm-npu-prep record` or dump_steps",
    ) -> None:
        self.config, self.tables, self.recorded = config, tables, recorded
        self.manifest = manifest or {}
        self._last, self._ring_most = config.last, config.max_bytes
        self._req_ids: list[str] = []
        started = time.strftime("%Y%m%d-%H%M%S")
        self.folder = config.make_folder() / f"{started}-{os.getpid()}{suffix}"
        self.steps = 0  # steps that were noted so far
        self._waits = 0  # waits of the staging ring before the next step
        self._span = config.span
        self._ring: deque[StepSnapshot] = deque()
        self._ring_bytes = self._file_bytes = 0
        self._past_blocks = np.empty(0, np.int32)  # all tables before the first step of the ring
        self._last_written = -1
        self._why_stopped = ""
        # A step may fail in the thread that waits for its output.
        self._lock = threading.Lock()
        self._salt = os.urandom(16)
        self._transfers: dict[str, str] = {}  # request -> the id that two engines have of it
        # What is known of steps of the ring after they were noted
        self._sampled: dict[int, Sampled] = {}
        self._choices: dict[int, dict[str, np.ndarray]] = {}
        # Where experts are that move (`StepSnapshot.experts`), as it changes
        self.experts: Callable[[], Mapping[str, Any] | None] = lambda: None
        if self._span is None:
            logger.info(
                "Recording the last %s; %s writes them to %s.",
                counted(config.last, "step"),
                asked_by,
                self.folder.parent,
            )

    def warm_up(self, step: PreparedStep) -> None:
        """Load or compile code, so that the first step needn't wait; any `step` will do."""
        warm_up(step)

    # ----------------------------------------------------------------- each step

    def note_transfers(self, requests: "Iterable[NewRequestData]") -> None:
        """Note which new requests have K and V that another engine has, too.

        Their hashed names are made of the transfer's id, so that both engines' records have the
        same ones.
        """
        for request in requests:
            extra = getattr(request.sampling_params, "extra_args", None) or {}
            transfer = (extra.get("kv_transfer_params") or {}).get("transfer_id")
            if transfer:
                self._transfers[request.req_id] = str(transfer)
                if len(self._transfers) > MOST_TRANSFERS:
                    del self._transfers[next(iter(self._transfers))]

    def keep(
        self,
        step: PreparedStep,
        kind: str,
        req_ids: list[str],
        placeholders: Placeholders = NO_PLACEHOLDERS,
        modalities: Sequence[str] = (),
        rows_with_embeds: Sequence[int] = (),
        *,
        started: float | None = None,
        waits: int = 0,
    ) -> None:
        """Note a step that was just prepared, which `StepSnapshot.of_step` copies.

        Its preparation began when `perf_counter` was `started`; without that, the record has no
        times. `waits` are those of the staging ring so far.
        """
        number, times = self.steps, None
        self.steps = number + 1
        if started is not None:
            times = started, perf_counter() - started, waits - self._waits
            self._waits = waits
        if self._why_stopped or (self._span is not None and number not in self._span):
            return
        with self._noting():
            if not self._past_blocks.size:
                self._past_blocks = self.tables.device_block_table_flat()
            if req_ids != self._req_ids:  # copying in every step would touch every name
                self._req_ids = list(req_ids)
            snapshot = StepSnapshot.of_step(
                number,
                step,
                kind,
                self._req_ids,
                placeholders,
                modalities,
                rows_with_embeds,
                times,
            )
            snapshot.experts = self.experts()
            self._ring.append(snapshot)
            self._ring_bytes += snapshot.nbytes
            if self._span is None:
                while len(self._ring) > self._last or self._ring_bytes > self._ring_most:
                    self._forget_oldest()
            else:
                self._write_new("asked for")
                self._ring.clear()
                if number == self._span[-1]:
                    self._stop(f"steps {self.config.steps} are in {self.folder}", logging.INFO)

    @contextlib.contextmanager
    def _noting(self) -> Iterator[None]:
        """Keep other threads from the ring; an error stops the recorder, and not the engine."""
        with self._lock:
            try:
                yield
            except Exception as error:
                self._stop(f"{type(error).__name__}: {error}")

    def _forget_oldest(self) -> None:
        oldest = self._ring.popleft()
        sampled = self._sampled.pop(oldest.number, None)
        self._ring_bytes -= oldest.nbytes + (sampled.nbytes if sampled else 0)
        self._ring_bytes -= _nbytes(self._choices.pop(oldest.number, {}))
        oldest.advance(self._past_blocks)

    # ----------------------------------------------------------------- files

    def dump(self, reason: str) -> Written:
        """Write the steps of the ring that are not on disk yet."""
        count = 0
        with self._noting():
            count = self._write_new(reason)
        if not count:
            return Written(self.folder, 0, self._why_stopped or "no new step to write")
        answer = Written(self.folder, count, reason)
        logger.warning("Recording: %s.", answer)
        return answer

    def _write_new(self, reason: str) -> int:
        """Write every step of the ring that is not on disk yet; return their number."""
        if not self._ring or self._ring[-1].number <= self._last_written:
            return 0
        self._begin_folder(reason)
        blocks, count = self._past_blocks, 0
        if self._span is None:  # the ring keeps its steps
            blocks = blocks.copy()
        for snapshot in self._ring:
            snapshot.advance(blocks)
            if snapshot.number > self._last_written:
                self._write(snapshot, blocks)
                if self._why_stopped:
                    break
                self._last_written = snapshot.number
                count += 1
        return count

    def _write(self, snapshot: StepSnapshot, blocks: np.ndarray) -> None:
        names = [self._name(req_id) for req_id in snapshot.req_ids]
        content = snapshot.record(self.recorded, names, blocks).to_bytes()
        self._file_bytes += len(content)
        if self._span is not None and self._file_bytes > self.config.max_bytes:
            self._stop(f"step {snapshot.number} would exceed max_bytes {self.config.max_bytes:,}")
            return
        try:
            write_whole(self._path(snapshot.number), content)
            if snapshot.number in self._sampled:
                self._write_sampled(snapshot.number, self._sampled[snapshot.number])
            if snapshot.number in self._choices:
                self._write_choices(snapshot.number, self._choices[snapshot.number])
        except PrepError as error:
            self._stop(str(error))

    def note_sampled(self, number: int, sampled: Sampled) -> None:
        """Note what a step sampled, which is known after the step was noted, and maybe written.

        With asynchronous scheduling another thread calls this.
        """
        if self._span is not None and number not in self._span:
            return
        with self._noting():
            if number <= self._last_written:
                self._write_sampled(number, sampled)
            elif self._ring and number >= self._ring[0].number:
                self._ring_bytes += sampled.nbytes
                self._sampled[number] = sampled

    def takes_choices(self, number: int) -> bool:
        """Whether what indexers choose in this step is kept or written."""
        return not self._why_stopped and (self._span is None or number in self._span)

    def note_choices(self, number: int, chosen: dict[str, np.ndarray]) -> None:
        """Note the positions that each layer's indexer chose in a step, after it was noted.

        Older steps are forgotten to make room.
        """
        if not self.takes_choices(number):
            return
        with self._noting():
            if number <= self._last_written:
                self._write_choices(number, chosen)
            elif self._ring and number >= self._ring[0].number:
                self._ring_bytes += _nbytes(chosen) - _nbytes(self._choices.get(number, {}))
                self._choices[number] = chosen
                while self._ring and self._ring_bytes > self._ring_most:
                    self._forget_oldest()

    def _write_sampled(self, number: int, sampled: Sampled) -> None:
        self._write_beside(number, SAMPLES, sampled.to_bytes())

    def _write_choices(self, number: int, chosen: dict[str, np.ndarray]) -> None:
        self._write_beside(number, CHOICES, choices_to_bytes(chosen))

    def _write_beside(self, number: int, suffix: str, content: bytes) -> None:
        self._file_bytes += len(content)
        if self._span is not None and self._file_bytes > self.config.max_bytes:
            what = suffix.split(".")[1]
            self._stop(f"{what} of step {number} exceed max_bytes {self.config.max_bytes:,}")
            return
        write_whole(self._path(number).with_suffix(suffix), content)

    def _path(self, number: int) -> Path:
        return self.folder / f"step-{number:06d}.npz"

    def _begin_folder(self, reason: str) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        content = {"format": FORMAT, "steps": self.config.steps, "reason": reason}
        content |= {"request_ids": self.config.request_ids, "clock": time.time() - perf_counter()}
        content |= self.manifest
        if not (self.folder / MANIFEST).exists():
            write_whole(self.folder / MANIFEST, json.dumps(content, indent=1).encode())

    def _name(self, req_id: str) -> str:
        if self.config.request_ids == "plain":
            return "".join(c if c.isprintable() else "?" for c in req_id)
        transfer = self._transfers.get(req_id)
        named, key = (req_id, self._salt) if transfer is None else (transfer, b"transfer")
        return blake2b(named.encode(), key=key, digest_size=8).hexdigest()

    def _stop(self, why: str, level: int = logging.WARNING) -> None:
        if not self._why_stopped:
            self._why_stopped = "Recording stopped: " + " ".join(why.split())
            self._ring, self._past_blocks = deque(), np.empty(0, np.int32)
            logger.log(level, "%s", self._why_stopped)


def make_recorder(
    vllm_config: "VllmConfig",
    tables: BatchTables,
    builders: "Builders",
    num_blocks: int,  # blocks of the KV cache, for the manifest
) -> StepRecorder | None:
    """Return the recorder of a runner whose KV cache is allocated; None if none is configured."""
    from vllm_npu_prep.attention.families import KERNEL_FAMILIES
    from vllm_npu_prep.config import decisions_of, parse_config

    config = parse_config(vllm_config.additional_config).record
    if config is None:
        return None
    decisions, parallel = decisions_of(vllm_config), vllm_config.parallel_config
    facts = engine_facts(vllm_config, num_blocks)
    facts |= {"attention": decisions.attention, "mask": decisions.mask_form.value}
    suffix = f"-rank{rank_across_engines(parallel)}" if is_one_of_several(parallel) else ""
    return StepRecorder(
        config,
        tables,
        Recorded(
            recorded_groups(builders),
            decisions.mask_form,
            KERNEL_FAMILIES[decisions.attention].mask_itemsize,
        ),
        {"versions": installed_versions(), "config": facts},
        suffix,
    )


def installed_versions() -> dict[str, str]:
    versions = {"python": platform.python_version(), "vllm_npu_prep": __version__}
    for name in ("vllm", "vllm-ascend", "torch", "torch_npu", "numpy", "numba"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return versions


def engine_facts(vllm_config: "VllmConfig", num_blocks: int) -> dict[str, Any]:
    """Return the parts of an engine's config that decide how steps are prepared."""
    scheduler, compilation = vllm_config.scheduler_config, vllm_config.compilation_config
    speculative = vllm_config.speculative_config
    return {
        "model": vllm_config.model_config.model,
        "dtype": str(vllm_config.model_config.dtype).removeprefix("torch."),
        "max_model_len": vllm_config.model_config.max_model_len,
        "max_num_seqs": scheduler.max_num_seqs,
        "max_num_batched_tokens": scheduler.max_num_batched_tokens,
        "async_scheduling": bool(scheduler.async_scheduling),
        "enable_chunked_prefill": scheduler.enable_chunked_prefill,
        "num_blocks": num_blocks,
        "enable_prefix_caching": vllm_config.cache_config.enable_prefix_caching,
        "speculative_method": speculative.method if speculative else None,
        "num_speculative_tokens": speculative.num_speculative_tokens if speculative else 0,
        "cudagraph_mode": compilation.cudagraph_mode.name if compilation.cudagraph_mode else None,
        "cudagraph_capture_sizes": compilation.cudagraph_capture_sizes,
        "device_type": vllm_config.device_config.device_type,
    }
