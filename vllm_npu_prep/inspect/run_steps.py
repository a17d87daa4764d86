"""Pages of a run's steps, in a folder beside the page of the run: one links to the other.

The page of a run holds no step's arrays, which is why 10,000 steps open at once. They are in a file
for each step, which the browser reads when it is opened.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias
from urllib.parse import quote

from vllm_npu_prep.errors import PrepError
from vllm_npu_prep.files import write_whole
from vllm_npu_prep.inspect.page import StepLinks, explain_html
from vllm_npu_prep.inspect.run import RankRun, Run, in_processes
from vllm_npu_prep.inspect.view import view_of_record
from vllm_npu_prep.records.record_file import RECORD_SUFFIX

MOST_UNASKED = 500
"""The most steps, those of all ranks together, whose pages are written though nobody asked for
them: some 25 MB, and some 25 s of processor time.
"""
SHARED_OUT = 64
"""The number of pages from which on several processes write them."""

Page: TypeAlias = tuple[Path, Path, StepLinks]
"""The record, the page and the links of a step."""


@dataclass(frozen=True)
class StepPages:
    """Which steps of a run have a page, and where these are."""

    html: Path  # the page of the run
    steps: tuple[int, int] | None = None  # the first and the one after the last; None for all

    @property
    def folder(self) -> Path:
        return self.html.with_name(f"{self.html.stem}-steps")

    def indices(self, run: Run, rank: RankRun) -> list[int]:
        """Return the steps of a rank that have a page, by their places in `Run.numbers`."""
        first, end = self.steps or (0, run.numbers[-1] + 1)
        return [index for index in rank.index if first <= run.numbers[index] < end]

    def ending(self, rank: RankRun) -> str:
        """Return what follows a step's number in the name of its page."""
        engine = "-" + re.sub(r"[^\w.]+", "-", rank.engine) if rank.engine else ""
        return engine + (".html" if rank.rank is None else f"-rank{rank.rank}.html")

    def name(self, rank: RankRun, number: int) -> str:
        return f"step-{number}{self.ending(rank)}"

    def write(self, run: Run) -> int:
        """Write the pages; return their number.

        Raises
        ------
        PrepError
            If no step was chosen, a record can't be read or a page can't be written.
        """
        todo = list(self._todo(run))
        if not todo:
            first, last = run.numbers[0], run.numbers[-1]
            raise PrepError(
                f"--step-pages {':'.join(map(str, self.steps or ()))}: the run has no such step; "
                f"it has steps {first} to {last}"
            )
        try:
            self.folder.mkdir(exist_ok=True)
        except OSError as error:
            raise PrepError(f"{self.folder}: can't be made: {error.strerror or error}") from None
        for _ in in_processes(_write, todo, SHARED_OUT):
            pass
        return len(todo)

    def _todo(self, run: Run) -> Iterator[Page]:
        back = quote(self.html.name)
        for place, rank in enumerate(run.ranks):
            numbers = [run.numbers[index] for index in self.indices(run, rank)]
            pages = ["", *(self.name(rank, number) for number in numbers), ""]
            behind = f"&rank={place}" if len(run.ranks) > 1 else ""
            for at, number in enumerate(numbers, 1):
                links = StepLinks(f"../{back}#step={number}{behind}", pages[at - 1], pages[at + 1])
                record = rank.folder / f"step-{number:06d}{RECORD_SUFFIX}"
                yield record, self.folder / pages[at], links


def _write(todo: Page) -> None:
    record, page, links = todo
    write_whole(page, explain_html(view_of_record(record), links=links).encode())
