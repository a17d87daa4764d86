"""A recorded run: its steps, requests and ranks, as the page of a run shows them.

Everything is derived from the records (`vllm_npu_prep.records.record_file.read_outline`) and, where
there is one, the run's ``manifest.json``:

- A **step** has its state, how it ran, its tokens and padding, the KV blocks that its requests own,
  and the times that the recorder noted.
- A **request** has spans: neighbouring steps that computed the same number of its tokens. What it
  does in the next step tells how many drafts were accepted, and whether it was preempted:
  ``num_computed_tokens`` then differs from what its last step left. A preempted request of which
  all is still in the cache looks like one that waited.
- **Ranks** of a run are folders beside each other, whose names end with ``-rank<n>``.
- **Engines** of which one computes prompts and another one decodes are shown together: each has its
  own steps, and a request that both have has one name.
"""

import json
import math
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, TypeVar

import numpy as np

from vllm_npu_prep.errors import PrepError
from vllm_npu_prep.records.record_file import RECORD_SUFFIX, read_outline

T = TypeVar("T")
R = TypeVar("R")

MANIFEST = "manifest.json"
MAX_MANIFEST_BYTES = 1 << 20
MARKED_BLOCKS = 1 << 24
"""Block numbers up to this are counted by marking each in an array."""

SHARED_OUT = 1024
"""The number of records from which on several processes read them."""

MOST_PROCESSES = 8

UNKNOWN, MORE = "?", "+"
DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"
"""Accepted drafts of a step as one character; `MORE` beyond the last digit, `UNKNOWN` in a step
after which the records don't show the request.
"""


@dataclass
class Span:
    """Steps that computed the same number of a request's tokens, and in which it went on."""

    first: int  # index of the first step
    steps: int
    stride: int  # from each to the next: 1, or more where batches take turns (pipeline stages)
    in_prompt: bool  # whether they computed tokens of the prompt
    computed: int  # tokens computed before the first step
    scheduled: int  # tokens of each step
    drafts: int  # how many of these were drafts
    accepted: list[str] = field(
        default_factory=list
    )  # for each step, of `DIGITS`; if it has drafts

    @property
    def last(self) -> int:
        return self.first + (self.steps - 1) * self.stride


@dataclass
class RequestRow:
    """What the steps of a rank did for a request."""

    name: str  # as recorded, a hash unless real names were asked for
    num_prompt_tokens: int
    spans: list[Span] = field(default_factory=list)
    # Step index, and tokens that were computed before the request came in: prefix-cache hits
    hits: list[tuple[int, int]] = field(default_factory=list)
    preemptions: list[int] = field(default_factory=list)  # indices of the steps of its return
    next_computed: int = 0  # tokens computed after the last step, if every draft is accepted

    def add(self, index: int, computed: int, scheduled: int, drafts: int, begins: bool) -> None:
        """Enter the request's next step.

        A request that is new here is new if `begins`: then the records hold the steps before.
        """
        span = self.spans[-1] if self.spans else None
        in_prompt = computed < self.num_prompt_tokens
        rejected, self.next_computed = self.next_computed - computed, computed + scheduled
        is_back = span is not None and not 0 <= rejected <= span.drafts
        if is_back:
            self.preemptions.append(index)
        if computed and (is_back or (span is None and begins)):
            self.hits.append((index, computed))
        if span is not None and begins and not is_back:  # it goes on
            if span.drafts:
                span.accepted[-1] = _digit(span.drafts - rejected)
            stride = index - span.last
            alike = (span.in_prompt, span.scheduled, span.drafts) == (in_prompt, scheduled, drafts)
            if alike and (stride == span.stride or (span.steps == 1 and stride <= 8)):
                span.stride, span.steps = stride, span.steps + 1
                span.accepted += [UNKNOWN] * (drafts > 0)
                return
        accepted = [UNKNOWN] * (drafts > 0)
        self.spans.append(Span(index, 1, 1, in_prompt, computed, scheduled, drafts, accepted))


def _digit(accepted: int) -> str:
    return DIGITS[accepted] if accepted < len(DIGITS) else MORE


RequestStep: TypeAlias = tuple[str, int, int, int, int]
"""A request in a step: its name, and its prompt tokens, computed tokens, scheduled tokens and
drafts."""


class Step(NamedTuple):
    """What a rank did in a step."""

    number: int  # since start-up
    state: str  # name of its attention state
    kind: str  # `vllm_npu_prep.graph.counts.StepCounts.kind`
    requests: int
    padding_requests: int
    tokens: int
    padding: int
    drafts: int
    # Blocks that its requests own, a shared one once, for each KV-cache group with a block table
    blocks: list[int]
    # When its preparation began and how long it took, in seconds, and its waits
    times: tuple[float, float, int] | None

    @classmethod
    def read(cls, file: Path) -> tuple["Step", list[RequestStep]]:
        """Read the step of a file, and its requests.

        Raises
        ------
        PrepError
            One line: what is wrong with the file.
        """
        outline = read_outline(file)
        settings, batch, times = outline.settings, outline.batch, outline.settings.times
        if file.stem != f"step-{settings.step:06d}":
            raise PrepError(f"{file}: is the record of step {settings.step}")
        ends = np.cumsum(batch.num_blocks.sum(axis=1))
        owned = np.split(batch.block_ids, ends)[: len(batch.num_blocks)]
        step = cls(
            number=settings.step,
            state=outline.attn_state,
            kind=settings.kind,
            requests=settings.num_reqs,
            padding_requests=settings.num_reqs_padded - settings.num_reqs,
            tokens=settings.total_num_scheduled_tokens,
            padding=settings.num_input_tokens - settings.total_num_scheduled_tokens,
            drafts=int(batch.num_draft_tokens.sum()),
            blocks=[_distinct(ids) for ids in owned],
            times=None if times is None else (times.started, times.prepared, times.waits),
        )
        counts = batch.num_prompt_tokens, batch.num_computed_tokens, batch.num_scheduled_tokens
        columns = (each.tolist() for each in (*counts, batch.num_draft_tokens))
        return step, list(zip(settings.req_ids, *columns))


def in_processes(work: Callable[[T], R], items: list[T], shared_out: int) -> Iterator[R]:
    """Do something with each of some items, in several processes from `shared_out` items on."""
    if len(items) < shared_out:
        yield from map(work, items)
        return
    with ProcessPoolExecutor(min(len(os.sched_getaffinity(0)), MOST_PROCESSES)) as pool:
        yield from pool.map(work, items, chunksize=max(shared_out // 16, 16))


@dataclass
class RankRun:
    """The steps of a rank, and what they did for its requests."""

    rank: int | None  # None if the folder's name has none
    folder: Path
    config: dict[str, Any]  # what the manifest says of the engine; empty without one
    engine: str = ""  # its name, if there are several
    steps: list[Step] = field(default_factory=list)
    index: list[int] = field(default_factory=list)  # of each among the run's step numbers
    requests: dict[str, RequestRow] = field(default_factory=dict)  # by name, as they came

    @property
    def title(self) -> str:
        """The rank among those of the page; empty if it is the only one."""
        own = "" if self.rank is None else f"rank {self.rank}"
        return ", ".join(part for part in (self.engine, own) if part)

    @property
    def rows(self) -> list[RequestRow]:
        return list(self.requests.values())

    @property
    def times(self) -> list[tuple[float, float, int]]:
        """The times of steps that have them."""
        return [step.times for step in self.steps if step.times is not None]

    def add(self, index: int, step: Step, requests: list[RequestStep]) -> None:
        """Enter the next step.

        Raises
        ------
        PrepError
            If it has other KV-cache groups than the steps before it.
        """
        begins = step.number == 0
        if self.steps:
            before = self.steps[-1]
            begins = step.number == before.number + 1
            if len(before.blocks) != len(step.blocks):
                raise PrepError(
                    f"{self.folder}: step {step.number} has {len(step.blocks)} block tables, and "
                    f"the steps before it {len(before.blocks)}; give the folder of one run"
                )
        self.index.append(index)
        self.steps.append(step)
        for name, prompt, computed, scheduled, drafts in requests:
            row = self.requests.get(name)
            if row is None:
                row = self.requests[name] = RequestRow(name, prompt)
            row.add(index, computed, scheduled, drafts, begins)


def _distinct(ids: np.ndarray) -> int:
    """Count the blocks that a list names, without the null block."""
    if not len(ids):
        return 0
    if int(ids.max()) > MARKED_BLOCKS:
        return int(np.count_nonzero(np.unique(ids)))
    marks = np.zeros(int(ids.max()) + 1, np.bool_)
    marks[ids] = True
    return int(np.count_nonzero(marks[1:]))


@dataclass
class Run:
    """A recorded run."""

    name: str  # for a heading
    numbers: list[int]  # steps that at least one rank has, in order
    ranks: list[RankRun]  # engine by engine, in the order of their numbers
    older: list[str]  # runs in the same folder that are not shown

    @property
    def engines(self) -> dict[str, list[RankRun]]:
        """The ranks of each engine."""
        found: dict[str, list[RankRun]] = {}
        for rank in self.ranks:
            found.setdefault(rank.engine, []).append(rank)
        return found

    @property
    def shared_requests(self) -> set[str]:
        """The names of requests that several engines have."""
        names = [set(ranks[0].requests) for ranks in self.engines.values()]
        counts = Counter(name for of_engine in names for name in of_engine)
        return {name for name, count in counts.items() if count > 1}


def read_run(*paths: Path) -> Run:
    """Read the records of a run, or those of several engines that share requests.

    Parameters
    ----------
    paths
        For each engine the folder of a rank, or a folder of such folders; of several runs in it,
        the last is read.

    Raises
    ------
    PrepError
        One line: there are no records, or what is wrong with a file.
    """
    found: list[tuple[str, Path]] = []  # engine and folder
    older = []
    for engine, path in zip(_engine_names(paths), paths, strict=True):
        runs = _runs(path)
        if not runs:
            raise PrepError(
                f"{path}: no step-*{RECORD_SUFFIX} here; give the folder of a run, or the folder "
                'that "npu_prep.record.dir" named'
            )
        found += [(engine, folder) for folder in runs[-1]]
        older += [each[0].name for each in runs[:-1]]
    files = {folder: _numbered(folder) for _, folder in found}
    numbers = sorted({number for of_rank in files.values() for number in of_rank})
    index_of = {number: index for index, number in enumerate(numbers)}
    manifests = {folder: _manifest(folder) for folder in files}
    have_clocks = all(manifest["clock"] for manifest in manifests.values())
    ranks = []
    for engine, folder in found:
        rank = RankRun(_rank_of(folder), folder, manifests[folder]["config"], engine)
        clock = manifests[folder]["clock"] if engine and have_clocks else 0.0
        for step, requests in in_processes(Step.read, [*files[folder].values()], SHARED_OUT):
            if step.times is not None:
                step = step._replace(times=(step.times[0] + clock, *step.times[1:]))
            rank.add(index_of[step.number], step, requests)
        ranks.append(rank)
    folders = [folder for _, folder in found]
    name = folders[0].name if len(folders) == 1 else folders[0].parent.name
    if len(paths) > 1:
        name = " and ".join(dict.fromkeys(engine for engine, _ in found))
    return Run(name or str(paths[0]), numbers, ranks, older)


def _engine_names(paths: Sequence[Path]) -> list[str]:
    """Return what tells the folders of engines apart; an empty name for a single one."""
    if len(paths) == 1:
        return [""]
    whole = [path.resolve() for path in paths]
    if len(set(whole)) < len(whole):
        raise PrepError("the same folder is given twice: give the folder of each engine once")
    above = os.path.commonpath(whole)
    return [os.path.relpath(path, above) for path in whole]


def _runs(path: Path) -> list[list[Path]]:
    """Return the folders of ranks, run by run in the order in which they started."""
    if next(path.glob(f"step-*{RECORD_SUFFIX}"), None) is not None:
        return [[path.resolve()]]
    found = sorted({file.parent.resolve() for file in path.glob(f"*/step-*{RECORD_SUFFIX}")})
    runs: list[list[Path]] = []
    for folder in found:  # names begin with date and time
        rank = _rank_of(folder)
        taken = {_rank_of(other) for other in runs[-1]} if runs else {rank}
        if rank in taken or None in taken or rank is None:
            runs.append([])
        runs[-1].append(folder)
    return [sorted(run, key=lambda folder: _rank_of(folder) or 0) for run in runs]


def _rank_of(folder: Path) -> int | None:
    found = re.search(r"-rank(\d{1,9})$", folder.name)
    return int(found[1]) if found else None


def _numbered(folder: Path) -> dict[int, Path]:
    found = {}
    for file in folder.glob(f"step-*{RECORD_SUFFIX}"):
        number = file.stem.removeprefix("step-")
        if not (number.isascii() and number.isdecimal()):
            raise PrepError(f"{file}: not the name of a record, step-<number>{RECORD_SUFFIX}")
        found[int(number)] = file
    return dict(sorted(found.items()))


def engine_config(folder: Path) -> dict[str, Any]:
    """Return what the manifest says of the engine; empty without a manifest."""
    return _manifest(folder)["config"]


def _manifest(folder: Path) -> dict[str, Any]:
    """Return ``config`` and ``clock`` of the manifest: empty and 0 without them.

    Raises
    ------
    PrepError
        If the manifest is there, and isn't one.
    """
    path = folder / MANIFEST
    try:
        if path.stat().st_size > MAX_MANIFEST_BYTES:
            raise ValueError(f"larger than {MAX_MANIFEST_BYTES:,} bytes")
        content = json.loads(path.read_text())
        config, clock = content.get("config", {}), content.get("clock", 0.0)
        if not isinstance(config, dict):
            raise ValueError("config is no object")
        if not isinstance(clock, float) or not math.isfinite(clock):
            raise ValueError("clock is no number")
        return {"config": config, "clock": clock}
    except FileNotFoundError:
        return {"config": {}, "clock": 0.0}
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        raise PrepError(
            f"{path}: not the manifest of a run ({' '.join(str(error).split())[:200]}); remove the "
            "file to see the steps without it"
        ) from None
