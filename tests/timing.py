"""Where the time of a run of the suite goes, file by file.

    python -m tests.timing RUN.xml [--write] [--json] [--tests N]

Reads what pytest's ``--junitxml`` wrote. ``--write`` puts the table into tests/README.md, between
two comments; ``--tests`` lists the most expensive tests instead. `make timing` measures and writes.
"""

import argparse
import json
import os
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest
from _pytest.junitxml import xml_key  # as pytest's fixture record_testsuite_property does

from tests.resume.tree import ROOT, tree_state

PAGE = ROOT / "tests" / "README.md"
BEGIN = "<!-- timing: written by make timing -->"
END = "<!-- timing: end -->"
SMALL = 1.0
"""Seconds below which a file has no row of its own."""


@dataclass(frozen=True)
class Timing:
    """A measured run.

    Attributes
    ----------
    date, commit, processes, caches
        Of the run; ``not recorded`` where the file doesn't say it.
    wall
        Seconds from begin to end.
    failed
        Tests that failed or had an error.
    tests
        Seconds of each test by id: set up, call and teardown. What several tests share is in the
        first of them.
    """

    date: str
    commit: str
    processes: str
    caches: str
    wall: float
    failed: int
    tests: dict[str, float]

    def files(self) -> list[tuple[str, int, float]]:
        """Name, number of tests and seconds of each file, the most expensive first."""
        seconds: Counter = Counter()
        number: Counter = Counter()
        for test, spent in self.tests.items():
            name = test.partition("::")[0]
            seconds[name] += spent
            number[name] += 1
        return [(name, number[name], spent) for name, spent in seconds.most_common()]

    def slowest(self, number: int) -> list[tuple[str, float]]:
        """Id and seconds of the most expensive tests."""
        return Counter(self.tests).most_common(number)


def note_run(config: pytest.Config, processes: int) -> None:
    """Say in the file of ``--junitxml``, if one is written, how many processes run which commit."""
    xml = config.stash.get(xml_key, None)
    if xml is not None:  # where several run, the last word counts
        xml.add_global_property("processes", str(processes))
        xml.add_global_property("commit", tree_state().commit)
        xml.add_global_property("caches", caches())


def caches() -> str:
    """``cold`` where a first run makes models and vLLM inspects each model class, else ``warm``."""
    vllm = Path(os.environ.get("VLLM_CACHE_ROOT", Path.home() / ".cache" / "vllm"))
    made = [ROOT / ".cache" / "tiny-qwen3", *(vllm / "modelinfos").glob("*-BloomForCausalLM.json")]
    return "warm" if len(made) == 2 and made[0].exists() else "cold"


def read(path: Path, root: Path = ROOT) -> Timing:
    """Read a file of ``--junitxml``."""
    suite = ElementTree.parse(path).getroot().find("testsuite")
    if suite is None:
        raise ValueError(f"{path} has no test suite: is it of pytest's --junitxml?")
    said = {item.get("name"): item.get("value", "") for item in suite.iterfind("properties/*")}
    seconds: Counter = Counter()
    for case in suite.iterfind("testcase"):
        test = id_of(case.get("classname", ""), case.get("name", ""), root)
        seconds[test] += float(case.get("time", 0))
    return Timing(
        date=suite.get("timestamp", "not recorded")[:10],
        commit=said.get("commit", "not recorded"),
        processes=said.get("processes", "not recorded"),
        caches=said.get("caches", "not recorded"),
        wall=float(suite.get("time", 0)),
        failed=int(suite.get("failures", 0)) + int(suite.get("errors", 0)),
        tests=dict(seconds),
    )


def id_of(classname: str, name: str, root: Path) -> str:
    """``tests/a/test_b.py::C::test_d`` of the class ``tests.a.test_b.C`` and the test's name."""
    parts = classname.split(".")
    for end in range(len(parts), 0, -1):
        file = Path(*parts[:end]).with_suffix(".py")
        if (root / file).is_file():
            return "::".join([file.as_posix(), *parts[end:], name])
    return f"{classname}::{name}"


def table(timing: Timing) -> str:
    """The section of tests/README.md."""
    total = sum(timing.tests.values())
    lines = [
        f"`make test` on {timing.date}, commit {timing.commit}: **{timing.wall / 60:.1f} minutes** "
        f"in {timing.processes} processes, {len(timing.tests):,} tests, {total:,.0f} s of tests; "
        f"caches: {timing.caches}.",
        "",
        "| file | tests | seconds | share |",
        "| --- | ---: | ---: | ---: |",
    ]
    small = [row for row in timing.files() if row[2] < SMALL]
    rows = [(f"`{name}`", *rest) for name, *rest in timing.files() if rest[1] >= SMALL]
    if small:
        name = f"{len(small)} files of less than {SMALL:.0f} s each"
        rows.append((name, sum(row[1] for row in small), sum(row[2] for row in small)))
    for name, tests, seconds in rows:
        lines.append(f"| {name} | {tests:,} | {seconds:,.1f} | {seconds / total:.1%} |")
    return "\n".join(lines)


def put(text: str, section: str) -> str:
    """A page's text with another section between the two comments.

    Raises
    ------
    ValueError
        If the page doesn't have each of the two comments once, in this order.
    """
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise ValueError(f"the page needs the comments {BEGIN!r} and {END!r} once, in this order")
    head, tail = text.partition(BEGIN)[0], text.partition(END)[2]
    return f"{head}{BEGIN}\n{section}\n{END}{tail}"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.timing", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("xml", type=Path, metavar="RUN.xml", help="of pytest's --junitxml")
    parser.add_argument("--write", action="store_true", help=f"into {PAGE.relative_to(ROOT)}")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    parser.add_argument("--tests", type=int, metavar="N", help="the most expensive tests")
    for name in ("processes", "commit", "caches"):
        parser.add_argument(f"--{name}", help="of the run, if the file doesn't say it")
    args = parser.parse_args()
    timing = read(args.xml)
    given = {name: getattr(args, name) for name in ("processes", "commit", "caches")}
    given = {name: value for name, value in given.items() if value is not None}
    timing = Timing(**{**asdict(timing), **given})
    if args.json:
        print(json.dumps(asdict(timing), indent=2))
    elif args.tests:
        for test, seconds in timing.slowest(args.tests):
            print(f"{seconds:8.1f} s  {test}")
    else:
        print(table(timing))
    if args.write:
        if timing.failed:
            print(f"not written: {timing.failed} tests failed", file=sys.stderr)
            return 1
        PAGE.write_text(put(PAGE.read_text(), table(timing)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
