"""A slice of a long run: it takes what has no result yet, until its time is up."""

import argparse
import fcntl
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tests.resume.log import ENDLESS, Result, Results, append, fold_runs
from tests.resume.tree import TreeState, tree_state

LONGEST = 30
"""Minutes within which a slice may begin units."""


class SliceError(SystemExit):
    """A slice that can't begin, said in the one line that the command prints."""


def minutes(text: str) -> float:
    """Read the length of a slice."""
    value = float(text)
    if not 0 < value <= LONGEST:
        raise argparse.ArgumentTypeError(f"{text} is not above 0 and at most {LONGEST} minutes")
    return value


def slice_parser(module: str, about: str | None) -> argparse.ArgumentParser:
    """What every long run is told; `about` is the docstring of its module."""
    parser = argparse.ArgumentParser(prog=f"python -m {module}", description=about)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    told = f"no unit is begun after these, at most {LONGEST}; those under way come to their end"
    parser.add_argument("--minutes", type=minutes, default=LONGEST, help=told)
    told = "begin a new run instead of going on with the last one"
    parser.add_argument("--fresh", action="store_true", help=told)
    told = "run failed units again, though nothing changed"
    parser.add_argument("--retry", action="store_true", help=told)
    return parser


class Slice(AbstractContextManager):
    """One slice, and the run that it belongs to, in a file of results.

    A slice goes on with the run that was begun last, whatever was committed meanwhile: a run of
    hours would never end if each commit began it anew. Each result names its slice, and with it the
    commit. Units that failed are run again, first, as soon as any file has changed, or with
    `retry`. A run keeps its seed; one that begins takes `default_seed` if it is given none.
    """

    def __init__(
        self,
        path: Path,
        length: float,
        *,
        seed: int | None = None,
        default_seed: int = 0,
        settings: dict[str, Any] | None = None,
        fresh: bool = False,
        retry: bool = False,
        look: Callable[[], TreeState] = tree_state,
    ) -> None:
        self.path, self.look, self.retry = path, look, retry
        path.parent.mkdir(exist_ok=True)
        self._lock = path.with_suffix(".lock").open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._lock.close()
            raise SliceError(
                f"another process is adding to {path.name}: wait until it ends, or stop it"
            ) from None
        self.deadline = time.time() + 60 * length
        self.state = look()
        runs = Results(path).runs()
        self.id = secrets.token_hex(3)
        if fresh or not runs:
            self.run, self.seed = self.id, default_seed if seed is None else seed
            fold_runs(path)
        else:
            self.run = runs[-1]
            self.seed = Results(path).slices[self.run]["seed"]
            if seed not in (None, self.seed):
                self._lock.close()
                raise SliceError(
                    f"the run of {path.name} was begun with seed {self.seed}, not {seed}: leave the"
                    " seed away to go on with it, or begin another run (FRESH=1)"
                )
        header = {"slice": self.id, "run": self.run, "begun": now(), **self.state._asdict()}
        append(path, header | {"seed": self.seed, "settings": settings or {}})
        self.before = Results(path)
        self.latest = self.before.latest(self.run)
        self.played: list[Result] = []

    def __exit__(self, *_: object) -> None:
        self._lock.close()

    @property
    def seconds_left(self) -> float:
        return self.deadline - time.time()

    def again(self, result: Result) -> bool:
        """Whether a unit that has a result is to be run again: it failed, and things changed."""
        if not result.failed or result.slice == self.id:
            return False
        return self.retry or self.before.slices[result.slice]["source"] != self.state.source

    def pending(self, units: Mapping[str, str]) -> list[str]:
        """Units to run, given with their versions: those that failed, then those without result.

        A failed unit that is none any longer is recorded as gone.
        """
        for unit in [unit for unit, result in self.latest.items() if result.failed]:
            if unit not in units:
                self.record(unit, "gone", 0)
        known = {
            unit: result
            for unit, result in self.latest.items()
            if units.get(unit) == result.version
        }
        failed = [unit for unit in units if unit in known and self.again(known[unit])]
        return failed + [unit for unit in units if unit not in known]

    def record(self, unit: str, outcome: str, seconds: float, **more: Any) -> Result:
        """Append what came of a unit; `version` among `more` is the unit's own."""
        version = more.pop("version", "")
        entry = {"slice": self.id, "unit": unit, "outcome": outcome, "seconds": round(seconds, 2)}
        append(self.path, entry | ({"version": version} if version else {}) | more)
        result = Result(unit, outcome, seconds, self.id, version, more)
        self.latest[unit] = result
        self.played.append(result)
        return result

    def play(self, units: Iterable[str], one: Callable[[str], None], total: int | None) -> bool:
        """Run units one after another until the time is up; False if interrupted by Ctrl-C.

        `one` runs a unit and records it. `total` is the number of units, None if they don't end.
        """
        try:
            for number, unit in enumerate(units, 1):
                if self.seconds_left <= 0:
                    break
                one(unit)
                last = self.played[-1]
                place = str(number) if total is None else f"{number} of {total}"
                outcome = last.outcome.upper() if last.failed else last.outcome
                by = f", {last.more['by']}" if last.more.get("by") else ""
                time_left = f"{max(self.seconds_left, 0) / 60:.0f} min left"
                said = f"{place}: {outcome} ({unit}{by}; {last.seconds:.0f} s), {time_left}"
                print(said, flush=True)
        except KeyboardInterrupt:
            print("\ninterrupted: the unit under way is lost, the others are recorded")
            return False
        return True

    def finish(self, left: int | str | None, command: str) -> int:
        """Close the slice, say what is done, failed and left, and the `command` that goes on.

        Exit code 1 while units of the run have failed. `left` is how many have no result: `ENDLESS`
        if there are always more, None if that isn't known.
        """
        changed = self.look().source != self.state.source
        append(self.path, {"slice": self.id, "ended": now(), "left": left, "changed": changed})
        if changed:
            print("files were changed while this slice ran: its results may mix two states")
        print(summary(Results(self.path), self.run, command))
        return int(any(result.failed for result in self.latest.values()))


def now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def summary(results: Results, run: str, command: str) -> str:
    """What a run has come to, in a few lines."""
    slices, latest = results.slices_of(run), results.latest(run)
    left, failed = results.left(run), [result for result in latest.values() if result.failed]
    hours = sum(result.seconds for result in latest.values()) / 3600
    commits = Counter(results.slices[result.slice]["commit"] for result in latest.values())
    outcomes = Counter(result.outcome for result in latest.values())
    seeds = f"seed {slices[0]['seed']}"
    lines = [
        f"run {run}, begun {slices[0]['begun']} with {seeds}: {len(slices)} slices, {hours:.1f} h",
        f"  {len(latest):,} done: " + ", ".join(f"{n:,} {name}" for name, n in outcomes.items()),
        "  at commits: " + ", ".join(f"{commit} ({n:,})" for commit, n in commits.items()),
    ]
    if any(header["dirty"] for header in slices):
        lines.append("  some of them with files that were not committed")
    for result in failed:
        commit = results.slices[result.slice]["commit"]
        lines.append(f"  {result.outcome.upper()} at {commit}: {result.unit}")
    if left == 0:
        lines.append("  complete" + (f", {len(failed)} failed" if failed else ""))
        lines.append(f"  another run: {command} FRESH=1")
    else:
        what = "what is left is not known; " if left is None else f"unfinished, {left} left; "
        lines.append(f"  {what * (left != ENDLESS)}go on with: {command}")
    if results.unreadable:
        lines.append(f"  {results.unreadable} torn lines in {results.path.name} were passed over")
    return "\n".join(lines)
