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
"""

import json
import os
import re
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from vllm_npu_prep.errors import PrepError
from vllm_npu_prep.records.record import StepRecord
from vllm_npu_prep.records.record_file import RECORD_SUFFIX, read_outline

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
    """Steps that computed the same number of a request's tokens, and in which it went on.

    Attributes
    ----------
    first
        Index of the first step.
    steps
        Number of steps.
    stride
        Distance from each of them to the next: 1, or more where batches take turns (pipeline
        stages).
    in_prompt
        Whether they computed tokens of the prompt.
    computed
        Tokens computed before the first step.
    scheduled
        Tokens of each step.
    drafts
        How many of these were drafts.
    accepted
        A character for each step, of `DIGITS`; empty without drafts.
    """

    first: int
    steps: int
    stride: int
    in_prompt: bool
    computed: int
    scheduled: int
    drafts: int
    accepted: str = ""

    @property
    def last(self) -> int:
        return self.first + (self.steps - 1) * self.stride


@dataclass
class RequestRow:
    """What the steps of a rank did for a request.

    Attributes
    ----------
    name
        As recorded, a hash unless real names were asked for.
    spans
        Its steps.
    hits
        Step index, and tokens that were computed before the request came in: prefix-cache hits.
    preemptions
        Indices of the steps in which it came back.
    """

    name: str
    num_prompt_tokens: int
    spans: list[Span] = field(default_factory=list)
    hits: list[tuple[int, int]] = field(default_factory=list)
    preemptions: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._computed = 0  # tokens computed after the last step, if every draft is accepted
        self._accepted: list[str] = []  # accepted drafts of the last span

    def add(self, index: int, computed: int, scheduled: int, drafts: int, begins: bool) -> None:
        """Enter the request's next step.

        Parameters
        ----------
        index
            Index of the step.
        computed, scheduled, drafts
            The request's counts in it.
        begins
            Whether the records hold the steps before, so that a request that is new here is new.
        """
        span = self.spans[-1] if self.spans else None
        in_prompt = computed < self.num_prompt_tokens
        goes_on = False
        if span is None:
            if begins and computed:
                self.hits.append((index, computed))
        else:
            rejected = self._computed - computed
            if not 0 <= rejected <= span.drafts:
                self.preemptions.append(index)
                if computed:
                    self.hits.append((index, computed))
            elif begins:
                goes_on = True
                if span.drafts:
                    self._accepted[-1] = _digit(span.drafts - rejected)
        self._computed = computed + scheduled
        if span is not None:
            stride = index - span.last
            alike = (span.in_prompt, span.scheduled, span.drafts) == (in_prompt, scheduled, drafts)
            if goes_on and alike and (stride == span.stride or (span.steps == 1 and stride <= 8)):
                span.stride, span.steps = stride, span.steps + 1
                if drafts:
                    self._accepted.append(UNKNOWN)
                return
            self.finish()
        self.spans.append(Span(index, 1, 1, in_prompt, computed, scheduled, drafts))
        self._accepted = [UNKNOWN] if drafts else []

    def finish(self) -> None:
        """Write the accepted drafts of the last span into it."""
        if self.spans:
            self.spans[-1].accepted = "".join(self._accepted)


def _digit(accepted: int) -> str:
    return DIGITS[accepted] if accepted < len(DIGITS) else MORE


@dataclass(frozen=True)
class Step:
    """What a rank did in a step.

    Attributes
    ----------
    number
        Number of the step since start-up.
    state, kind, tokens, padding, padding_requests
        See `RankRun`.
    blocks
        Blocks that requests own, for each KV-cache group with a block table.
    times
        When its preparation began, how long it took, and its waits; None if unknown.
    of_requests
        Name, prompt tokens, computed tokens, scheduled tokens and drafts of each request.
    """

    number: int
    state: str
    kind: str
    tokens: int
    padding: int
    padding_requests: int
    blocks: list[int]
    times: tuple[float, float, int] | None
    of_requests: list[tuple[str, int, int, int, int]]

    @classmethod
    def of(cls, outline: StepRecord) -> "Step":
        settings, batch, times = outline.settings, outline.batch, outline.settings.times
        ends = np.cumsum(batch.num_blocks.sum(axis=1))[:-1]
        return cls(
            number=settings.step,
            state=outline.attn_state,
            kind=settings.kind,
            tokens=settings.total_num_scheduled_tokens,
            padding=settings.num_input_tokens - settings.total_num_scheduled_tokens,
            padding_requests=settings.num_reqs_padded - settings.num_reqs,
            blocks=[_distinct(ids) for ids in np.split(batch.block_ids, ends)]
            if len(batch.num_blocks)
            else [],
            times=None if times is None else (times.started, times.prepared, times.waits),
            of_requests=list(
                zip(
                    settings.req_ids,
                    batch.num_prompt_tokens.tolist(),
                    batch.num_computed_tokens.tolist(),
                    batch.num_scheduled_tokens.tolist(),
                    batch.num_draft_tokens.tolist(),
                )
            ),
        )

    @classmethod
    def read(cls, file: Path) -> "Step":
        """Read the step of a file.

        Raises
        ------
        PrepError
            One line: what is wrong with the file.
        """
        step = cls.of(read_outline(file))
        if file.stem != f"step-{step.number:06d}":
            raise PrepError(f"{file}: is the record of step {step.number}")
        return step


def _steps(files: list[Path]) -> Iterator[Step]:
    if len(files) < SHARED_OUT:
        yield from map(Step.read, files)
        return
    with ProcessPoolExecutor(min(os.cpu_count() or 1, MOST_PROCESSES)) as pool:
        yield from pool.map(Step.read, files, chunksize=SHARED_OUT // 16)


@dataclass
class RankRun:
    """The steps of a rank.

    Attributes
    ----------
    rank
        Its number; None if the folder's name has none.
    folder
        Its folder.
    config
        What the manifest says of the engine; empty without one.
    index
        Index of each of its steps among the run's step numbers.
    states, kinds
        Attention state and kind of each step (`vllm_npu_prep.graph.counts.StepCounts.kind`).
    requests, padding_requests, tokens, padding
        Requests and rows of padding, scheduled tokens and tokens of padding of each step.
    drafts
        Drafts of each step.
    blocks
        For each KV-cache group with a block table: blocks that the requests of each step own, a
        shared one counted once.
    times
        Of each step: when its preparation began and how long it took, in seconds, and its waits;
        None where the record has no times.
    rows
        The requests, in the order of their first steps.
    """

    rank: int | None
    folder: Path
    config: dict[str, Any]
    index: list[int] = field(default_factory=list)
    states: list[str] = field(default_factory=list)
    kinds: list[str] = field(default_factory=list)
    requests: list[int] = field(default_factory=list)
    padding_requests: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    padding: list[int] = field(default_factory=list)
    drafts: list[int] = field(default_factory=list)
    blocks: list[list[int]] = field(default_factory=list)
    times: list[tuple[float, float, int] | None] = field(default_factory=list)
    rows: list[RequestRow] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._by_name: dict[str, RequestRow] = {}
        self._last_number = -1

    def add(self, index: int, step: Step) -> None:
        """Enter the next step.

        Raises
        ------
        PrepError
            If it has other KV-cache groups than the steps before it.
        """
        if not self.index:
            self.blocks = [[] for _ in step.blocks]
        if len(self.blocks) != len(step.blocks):
            raise PrepError(
                f"{self.folder}: step {step.number} has {len(step.blocks)} block tables, and the "
                f"steps before it {len(self.blocks)}; give the folder of one run"
            )
        self.index.append(index)
        self.states.append(step.state)
        self.kinds.append(step.kind)
        self.requests.append(len(step.of_requests))
        self.padding_requests.append(step.padding_requests)
        self.tokens.append(step.tokens)
        self.padding.append(step.padding)
        self.drafts.append(sum(request[-1] for request in step.of_requests))
        for counts, count in zip(self.blocks, step.blocks):
            counts.append(count)
        self.times.append(step.times)
        begins = step.number in (0, self._last_number + 1)
        self._last_number = step.number
        for name, prompt, computed, scheduled, drafts in step.of_requests:
            row = self._by_name.get(name)
            if row is None:
                row = self._by_name[name] = RequestRow(name, prompt)
                self.rows.append(row)
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
    """A recorded run.

    Attributes
    ----------
    name
        For a heading.
    numbers
        Steps that at least one rank has, in order.
    ranks
        In the order of their numbers.
    older
        Runs in the same folder that are not shown, in words.
    """

    name: str
    numbers: list[int]
    ranks: list[RankRun]
    older: list[str]


def read_run(path: Path) -> Run:
    """Read the records of a run.

    Parameters
    ----------
    path
        Folder of a rank, or a folder of such folders; of several runs in it, the last is read.

    Raises
    ------
    PrepError
        One line: there are no records, or what is wrong with a file.
    """
    runs = _runs(path)
    if not runs:
        raise PrepError(
            f"{path}: no step-*{RECORD_SUFFIX} here; give the folder of a run, or the folder that "
            '"npu_prep.record.dir" named'
        )
    *older, folders = runs
    files = {folder: _numbered(folder) for folder in folders}
    numbers = sorted({number for of_rank in files.values() for number in of_rank})
    index_of = {number: index for index, number in enumerate(numbers)}
    ranks = []
    for folder in folders:
        rank = RankRun(_rank_of(folder), folder, engine_config(folder))
        for step in _steps(list(files[folder].values())):
            rank.add(index_of[step.number], step)
        for row in rank.rows:
            row.finish()
        ranks.append(rank)
    name = folders[0].name if len(folders) == 1 else folders[0].parent.name
    return Run(name or str(path), numbers, ranks, [each[0].name for each in older])


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
    """Return what the manifest says of the engine; empty without a manifest.

    Raises
    ------
    PrepError
        If the manifest is there, and isn't one.
    """
    path = folder / MANIFEST
    try:
        if path.stat().st_size > MAX_MANIFEST_BYTES:
            raise ValueError(f"larger than {MAX_MANIFEST_BYTES:,} bytes")
        config = json.loads(path.read_text()).get("config", {})
        if not isinstance(config, dict):
            raise ValueError("config is no object")
        return config
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        raise PrepError(
            f"{path}: not the manifest of a run ({' '.join(str(error).split())[:200]}); remove the "
            "file to see the steps without it"
        ) from None
