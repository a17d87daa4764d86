"""Where the time of a run of the suite goes, file by file: writes the table of tests/README.md.

    python -m tests.timing RUN.xml

Reads what pytest's ``--junitxml`` wrote, of the family xunit1, as `make timing` calls it.
"""

import re
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter

from tests.resume.tree import ROOT, tree_state

PAGE = ROOT / "tests" / "README.md"
SECTION = re.compile(r"(<!-- timing: .+ -->\n)(?:.*\n)*(<!-- timing: end -->)")
SMALL = 1.0
"""Seconds below which a file has no row of its own."""


def table(suite: ElementTree.Element, commit: str) -> str:
    """The section of tests/README.md. A test's fixtures count for the first one that asks."""
    seconds: Counter[str] = Counter()
    tests = {(case.get("file", ""), case.get("name")) for case in suite.iterfind("testcase")}
    number = Counter(file for file, _ in tests)
    for case in suite.iterfind("testcase"):
        seconds[case.get("file", "")] += float(case.get("time", 0))
    small = [file for file, spent in seconds.items() if spent < SMALL]
    rows = [(f"`{f}`", number[f], spent) for f, spent in seconds.most_common() if f not in small]
    name = f"{len(small)} files of less than {SMALL:.0f} s each"
    rows.append((name, sum(number[f] for f in small), sum(seconds[f] for f in small)))
    minutes = float(suite.get("time", 0)) / 60
    return "\n".join(
        [
            f"`make test` on {suite.get('timestamp', '')[:10]}, commit {commit}: **{minutes:.1f} "
            f"minutes**, {len(tests):,} tests, {seconds.total():,.0f} s of tests.",
            "",
            "| file | tests | seconds | share |",
            "| --- | ---: | ---: | ---: |",
            *(f"| {f} | {n:,} | {s:,.1f} | {s / seconds.total():.1%} |" for f, n, s in rows),
        ]
    )


def main(path: str) -> None:
    """Write the table, unless tests failed."""
    (suite,) = ElementTree.parse(path).getroot()
    if suite.get("failures") != "0" or suite.get("errors") != "0":
        sys.exit("not written: tests failed")
    said = table(suite, tree_state().commit)
    page, written = SECTION.subn(lambda found: f"{found[1]}{said}\n{found[2]}", PAGE.read_text())
    if written != 1:
        sys.exit(f"{PAGE} needs the two comments between which the table stands, once")
    PAGE.write_text(page)


if __name__ == "__main__":
    main(*sys.argv[1:])
