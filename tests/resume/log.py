"""Results of a long run, one JSON object a line, appended to a file that is committed.

A line is one of four things; the first three refer to each other by the id of the slice, so that
lines of two branches may be merged in any order::

    {"slice": "4f2a91", "run": "4f2a91", "begun": "2026-11-22T15:02:11Z", "commit": "097a18a3c1",
     "dirty": false, "source": "6b1f0c22d9ae", "seed": 20240607, "settings": {"examples": 10000}}
    {"slice": "4f2a91", "unit": "tests/prep/test_state.py::test_rule[3]", "outcome": "passed",
     "seconds": 1.5}
    {"slice": "4f2a91", "ended": "2026-11-22T15:32:40Z", "left": 312, "changed": false}
    {"folded": "4f2a91", "begun": "2026-11-22T15:02:11Z", "commits": ["097a18a3c1"],
     "outcomes": {"passed": 2611, "failed": 1}, "failed": ["tests/..."], ...}

A run has the id of its first slice. The last line is a whole run before the current one.
"""

import json
import os
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

GOOD = {"passed", "skipped", "caught", "equivalent", "agreed", "gone"}
"""Outcomes that are no failure: of tests, of planted bugs and random changes, of random episodes;
and what became of a unit that had failed and was removed."""
ENDLESS = "endless"
"""What is left of a run that has no end."""


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


class Results:
    """What a file of results holds: headers, ends and results of slices by their ids."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.slices: dict[str, dict[str, Any]] = {}
        self.ends: dict[str, dict[str, Any]] = {}
        self.by_slice: dict[str, list[Result]] = {}
        self.folded: list[dict[str, Any]] = []
        self.unreadable = 0  # lines that a killed process was writing
        for line in path.read_text(errors="replace").splitlines() if path.exists() else ():
            try:
                self._take(json.loads(line))
            except json.JSONDecodeError:
                self.unreadable += bool(line.strip())

    def _take(self, entry: dict[str, Any]) -> None:
        if "folded" in entry:
            self.folded.append(entry)
        elif "unit" in entry:
            known = {name: entry.pop(name) for name in ("unit", "outcome", "seconds", "slice")}
            result = Result(**known, version=entry.pop("version", ""), more=entry)
            self.by_slice.setdefault(result.slice, []).append(result)
        elif "ended" in entry:
            self.ends[entry["slice"]] = entry
        else:
            self.slices[entry["slice"]] = entry

    def runs(self) -> list[str]:
        """Ids of the runs that aren't folded, by when they were begun."""
        first = [header for header in self.slices.values() if header["slice"] == header["run"]]
        return [header["run"] for header in sorted(first, key=lambda header: header["begun"])]

    def slices_of(self, run: str) -> list[dict[str, Any]]:
        """Headers of a run's slices, by when they were begun."""
        found = [header for header in self.slices.values() if header["run"] == run]
        return sorted(found, key=lambda header: header["begun"])

    def latest(self, run: str) -> dict[str, Result]:
        """The last result of each unit of a run."""
        return {
            result.unit: result
            for header in self.slices_of(run)
            for result in self.by_slice.get(header["slice"], [])
        }

    def left(self, run: str) -> int | str | None:
        """How many units lacked a result when the last slice ended, or `ENDLESS`.

        None if it isn't known: a slice that was killed has no end.
        """
        return self.ends.get(self.slices_of(run)[-1]["slice"], {}).get("left")

    def fold(self, run: str) -> dict[str, Any]:
        """One line for a whole run."""
        slices, latest = self.slices_of(run), self.latest(run).values()
        return {
            "folded": run,
            "begun": slices[0]["begun"],
            "commits": sorted({header["commit"] for header in slices}),
            "dirty": any(header["dirty"] for header in slices),
            "seed": slices[0]["seed"],
            "settings": slices[0]["settings"],
            "outcomes": dict(Counter(result.outcome for result in latest)),
            "failed": [result.unit for result in latest if result.failed],
            "left": self.left(run),
            "seconds": round(sum(result.seconds for result in latest)),
        }


def dumps(entry: dict[str, Any]) -> str:
    return json.dumps(entry, ensure_ascii=False) + "\n"


def append(path: Path, entry: dict[str, Any]) -> None:
    """Add one line, in one write: a killed process loses that line at most.

    What it leaves of a line is closed first, and stays unreadable.
    """
    with path.open("ab+") as file:
        end = file.seek(0, os.SEEK_END)
        torn = end > 0 and os.pread(file.fileno(), 1, end - 1) != b"\n"
        os.write(file.fileno(), ("\n" * torn + dumps(entry)).encode())


def fold_runs(path: Path) -> None:
    """Make each run of the file one line; git's history keeps the units of earlier ones."""
    results = Results(path)
    if results.slices:
        lines = results.folded + [results.fold(run) for run in results.runs()]
        new = path.with_suffix(".new")
        new.write_text("".join(map(dumps, lines)))
        new.replace(path)
