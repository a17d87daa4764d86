"""Where the time of a run of the suite goes, file by file.

    python -m tests.timing RUN.xml [--write] [--tests N]

Reads what pytest's ``--junitxml`` wrote. ``--write`` puts the table into tests/README.md, between
two comments; ``--tests`` lists the most expensive tests instead. `make timing` measures and writes.
"""

import argparse
import os
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path

import pytest
from _pytest.junitxml import xml_key  # as pytest's fixture record_testsuite_property does

from tests.resume.tree import ROOT, tree_state

PAGE = ROOT / "tests" / "README.md"
BEGIN = "<!-- timing: written by make timing -->"
END = "<!-- timing: end -->"
SMALL = 1.0
"""Seconds below which a file has no row of its own."""


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


def seconds_of(suite: ElementTree.Element) -> Counter[str]:
    """Seconds of each test by id: set up, call and teardown. Fixtures count for the first one."""
    seconds: Counter[str] = Counter()
    for case in suite.iterfind("testcase"):
        parts, name = case.get("classname", "").split("."), case.get("name", "")
        for end in range(len(parts), 0, -1):  # tests.a.test_b.C is class C of tests/a/test_b.py
            file = Path(*parts[:end]).with_suffix(".py").as_posix()
            if (ROOT / file).is_file():
                name = "::".join([file, *parts[end:], name])
                break
        seconds[name] += float(case.get("time", 0))
    return seconds


def table(suite: ElementTree.Element) -> str:
    """The section of tests/README.md."""
    said = {item.get("name"): item.get("value") for item in suite.iterfind("properties/*")}
    seconds, tests, number = Counter[str](), seconds_of(suite), Counter[str]()
    for test, spent in tests.items():
        file = test.partition("::")[0]
        seconds[file] += spent
        number[file] += 1
    small = [file for file, spent in seconds.items() if spent < SMALL]
    rows = [(f"`{f}`", number[f], spent) for f, spent in seconds.most_common() if spent >= SMALL]
    if small:
        name = f"{len(small)} files of less than {SMALL:.0f} s each"
        rows.append((name, sum(number[f] for f in small), sum(seconds[f] for f in small)))
    total, minutes = sum(tests.values()), float(suite.get("time", 0)) / 60
    lines = [
        f"`make test` on {suite.get('timestamp', '')[:10]}, commit {said.get('commit')}: "
        f"**{minutes:.1f} minutes** in {said.get('processes')} processes, {len(tests):,} tests, "
        f"{total:,.0f} s of tests; caches: {said.get('caches')}.",
        "",
        "| file | tests | seconds | share |",
        "| --- | ---: | ---: | ---: |",
        *(f"| {name} | {n:,} | {s:,.1f} | {s / total:.1%} |" for name, n, s in rows),
    ]
    return "\n".join(lines)


def put(text: str, section: str) -> str:
    """A page's text with another section between the two comments."""
    head, begin, rest = text.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not (begin and end) or BEGIN in rest or END in tail:
        raise ValueError(f"the page needs the comments {BEGIN!r} and {END!r} once, in this order")
    return f"{head}{BEGIN}\n{section}\n{END}{tail}"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.timing", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("xml", type=Path, metavar="RUN.xml", help="of pytest's --junitxml")
    parser.add_argument("--write", action="store_true", help=f"into {PAGE.relative_to(ROOT)}")
    parser.add_argument("--tests", type=int, metavar="N", help="the most expensive tests")
    args = parser.parse_args()
    suite = ElementTree.parse(args.xml).getroot().find("testsuite")
    if suite is None:
        sys.exit(f"{args.xml} has no test suite: is it of pytest's --junitxml?")
    if args.tests:
        for test, seconds in seconds_of(suite).most_common(args.tests):
            print(f"{seconds:8.1f} s  {test}")
        return
    print(table(suite))
    if args.write and suite.get("failures") == suite.get("errors") == "0":
        PAGE.write_text(put(PAGE.read_text(), table(suite)))
    elif args.write:
        sys.exit("not written: tests failed")


if __name__ == "__main__":
    main()
