"""Results of long runs, one JSON object a line, in files that are committed.

A slice of a run appends its header, then a line for each unit that ended. Both name the slice, so
that lines of two branches may be merged in any order::

    {"slice": "4f2a91", "run": "4f2a91", "begun": "2026-11-22T15:02:11Z", "commit": "097a18a3c1",
     "source": "6b1f0c22d9ae", "seed": 20240607, "settings": {"examples": 10000}}
    {"slice": "4f2a91", "unit": "tests/prep/test_state.py::test_rule[3]", "outcome": "passed",
     "seconds": 1.5}

A run has the id of its first slice. The run that was begun last counts; lines of earlier runs are
passed over, and so are other kinds of lines, which older versions wrote.
"""

import argparse
import fcntl
import json
import os
import secrets
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tests.resume.tree import tree_state

GOOD = {"passed", "skipped", "caught", "equivalent", "agreed", "gone"}
"""Outcomes that are no failure: of tests, of planted bugs and random changes, of random episodes;
and what became of a unit that had failed and was removed."""


@dataclass(frozen=True)
class Result:
    """What came of one unit: a test, a planted bug or the seed of an episode.

    `version` is the unit's own: a result of another version says nothing of it. It is empty for
    units whose version is the tree's. `more` is what else was recorded.
    """

    unit: str
    outcome: str
    seconds: float
    slice: str
    version: str = ""
    more: dict[str, Any] = field(default_factory=dict)

    @property
    def failed(self) -> bool:
        return self.outcome not in GOOD


class Log:
    """The run of a file that was begun last: headers of its slices, and results in their order."""

    def __init__(self, path: Path) -> None:
        self.path = path
        headers, results = [], defaultdict(list)
        for line in path.read_text(errors="replace").splitlines() if path.exists() else ():
            with suppress(json.JSONDecodeError):  # which a killed process was writing
                entry = json.loads(line)
                if "run" in entry:
                    headers.append(entry)
                elif "unit" in entry:
                    known = [entry.pop(name) for name in ("unit", "outcome", "seconds", "slice")]
                    result = Result(*known, version=entry.pop("version", ""), more=entry)
                    results[result.slice].append(result)
        headers.sort(key=lambda header: header["begun"])
        self.run = next((h["run"] for h in reversed(headers) if h["slice"] == h["run"]), "")
        self.slices = {h["slice"]: h for h in headers if h["run"] == self.run}
        self.results: list[Result] = [each for name in self.slices for each in results[name]]

    @property
    def latest(self) -> dict[str, Result]:
        return {result.unit: result for result in self.results}

    def summary(self) -> str:
        """What the run has come to, in a few lines."""
        latest = self.latest.values()
        hours = sum(result.seconds for result in latest) / 3600
        commits = Counter(self.slices[result.slice]["commit"] for result in latest)
        outcomes = Counter(result.outcome for result in latest)
        first = self.slices[self.run]
        lines = [
            f"run {self.run}, begun {first['begun']} with seed {first['seed']}: {hours:.1f} h",
            f"  {len(latest):,} done: "
            + ", ".join(f"{n:,} {name}" for name, n in outcomes.items()),
            "  at commits: " + ", ".join(f"{commit} ({n:,})" for commit, n in commits.items()),
        ]
        for each in latest:
            if each.failed:
                commit = self.slices[each.slice]["commit"]
                lines.append(f"  {each.outcome.upper()} at {commit}: {each.unit}")
        return "\n".join(lines)


class Slice(Log, AbstractContextManager):
    """A slice of a long run: it takes what has no result yet, until its time is up.

    A slice goes on with the run that was begun last, whatever was committed meanwhile: a run of
    hours would never end if each commit began it anew. Each result names its slice, and with it the
    commit. Units that failed are run again, first, as soon as any file has changed, or with
    ``--retry``. A run keeps its seed; one that begins takes `seed` if the options have none.
    """

    def __init__(
        self,
        path: Path,
        options: argparse.Namespace,
        seed: int = 0,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        path.parent.mkdir(exist_ok=True)
        self._lock = path.with_suffix(".lock").open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise SystemExit(f"another process is adding to {path.name}: wait for it") from None
        super().__init__(path)
        self.deadline = time.time() + 60 * options.minutes
        self.id, self.retry, self.interrupted = secrets.token_hex(3), options.retry, False
        chosen = getattr(options, "seed", None)
        if options.fresh or not self.run:
            self.run, self.slices, self.results = self.id, {}, []
            self.seed = seed if chosen is None else chosen
        else:
            self.seed = self.slices[self.run]["seed"]
        if chosen not in (None, self.seed):
            raise SystemExit(
                f"the run of {path.name} was begun with seed {self.seed}, not {chosen}: leave the"
                " seed away to go on with it, or begin another run (FRESH=1)"
            )
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        self.slices[self.id] = {"slice": self.id, "run": self.run, "begun": now}
        self.slices[self.id] |= tree_state()._asdict()
        self.slices[self.id] |= {"seed": self.seed, "settings": dict(settings or {})}
        append(path, self.slices[self.id])

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._lock.close()

    @property
    def seconds_left(self) -> float:
        return self.deadline - time.time()

    @property
    def played(self) -> list[Result]:
        """Results of this slice."""
        return [result for result in self.results if result.slice == self.id]

    def again(self, result: Result) -> bool:
        """Whether a unit that has a result is to be run again: it failed, and things changed."""
        source = self.slices[result.slice]["source"]
        changed = self.retry or source != self.slices[self.id]["source"]
        return result.failed and result.slice != self.id and changed

    def pending(self, units: Mapping[str, str]) -> list[str]:
        """Units to run, given with their versions: those that failed, then those without result.

        A failed unit that is none any longer is recorded as gone.
        """
        latest = self.latest
        for unit, result in latest.items():
            if result.failed and unit not in units:
                self.record(unit, "gone", 0)
        known = {unit for unit in units if unit in latest and latest[unit].version == units[unit]}
        failed = [unit for unit in units if unit in known and self.again(latest[unit])]
        return failed + [unit for unit in units if unit not in known]

    def record(self, unit: str, outcome: str, seconds: float, **more: Any) -> Result:
        """Append what came of a unit; `version` among `more` is the unit's own."""
        entry = {"slice": self.id, "unit": unit, "outcome": outcome, "seconds": round(seconds, 2)}
        append(self.path, entry | more)
        version = more.pop("version", "")
        self.results.append(Result(unit, outcome, seconds, self.id, version, more))
        return self.results[-1]

    def play(self, units: Iterable[str], one: Callable[[str], object]) -> None:
        """Run units one after another, by `one`, which records each, until the time is up."""
        try:
            for number, unit in enumerate(units, 1):
                if self.seconds_left <= 0:
                    break
                one(unit)
                last = self.results[-1]
                outcome = last.outcome.upper() if last.failed else last.outcome
                by = f", {last.more['by']}" if last.more.get("by") else ""
                left = f"{max(self.seconds_left, 0) / 60:.0f} min left"
                print(f"{number}: {outcome} ({unit}{by}; {last.seconds:.0f} s), {left}", flush=True)
        except KeyboardInterrupt:
            self.interrupted = True
            print("\ninterrupted: the unit under way is lost, the others are recorded")

    def finish(self, left: int | None, command: str) -> int:
        """Say what is done, failed and left, and the `command` that goes on: the exit code.

        It is 1 while units of the run have failed. `left` is how many have no result, None where
        that isn't known, or where there are always more.
        """
        if tree_state().source != self.slices[self.id]["source"]:
            print("files were changed while this slice ran: its results may mix two states")
        print(self.summary())
        failed = sum(result.failed for result in self.latest.values())
        if left == 0:
            print(f"  complete, {failed} failed; another run: {command} FRESH=1")
        else:
            print(f"  {'more' if left is None else left} left; go on with: {command}")
        return 130 if self.interrupted else int(failed > 0)


def append(path: Path, entry: Mapping[str, Any]) -> None:
    """Add one line, in one write: a killed process loses that line at most.

    What it leaves of a line is closed first, and stays unreadable.
    """
    with path.open("ab+") as file:
        end = file.seek(0, os.SEEK_END)
        torn = end > 0 and os.pread(file.fileno(), 1, end - 1) != b"\n"
        line = json.dumps(entry, ensure_ascii=False)
        os.write(file.fileno(), f"{chr(10) * torn}{line}\n".encode())


def slice_parser(module: str, about: str | None, seed: str = "") -> argparse.ArgumentParser:
    """What every long run is told; `about` is the docstring of its module, `seed` what one does."""
    parser = argparse.ArgumentParser(prog=f"python -m {module}", description=about)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    told = "no unit is begun after these; those under way come to their end"
    parser.add_argument("--minutes", type=float, default=30, help=told)
    told = "begin a new run instead of going on with the last one"
    parser.add_argument("--fresh", action="store_true", help=told)
    told = "run failed units again, though nothing changed"
    parser.add_argument("--retry", action="store_true", help=told)
    if seed:
        parser.add_argument("--seed", type=int, help=seed)
    return parser
