"""What came of vLLM's tests, and the ledger of those that don't pass."""

import json
import re
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

FOLDER = Path(__file__).parent

REASONS = {
    "refused": r"is not supported by vllm_npu_prep|are not supported by vllm_npu_prep",
    "gpu": (
        r"Unsupported platform|Torch not compiled with CUDA|No CUDA GPUs|NVIDIA driver|CUDA driver|"
        r"'_C'|_moe_C|'_OpNamespace' '_C|libcudart|Invalid device string: 'cuda|torch.cuda|triton|"
        r"Cannot access accelerator device when none is available|"
        r"^TypeError: 'function' object is not subscriptable"  # what launches a kernel of Triton
    ),
    "hub": (
        r"Invalid repository ID or local directory|LocalEntryNotFoundError|offline mode is enabled|"
        r"couldn't connect to|OfflineModeIsEnabled|Cannot reach|NameResolutionError|"
        r"Temporary failure in name resolution|Cannot find an appropriate cached snapshot"
    ),
    "stand-in": r"attention heads \(9\) must be divisible by tensor parallel size",
}
"""Why a test can't pass here, by what its error says; the first that fits is taken. A stand-in is
the model that has the name of another one (`tests.upstream.prepare`)."""

BY_HAND = ("upstream", "stand-in", "internals")
"""Why a test can't pass, found out by somebody: it fails with vLLM alone on this machine, too; it
expects figures of a model for which another one stands in; it makes or looks into objects of vLLM
in a way that no rule promises, such as a scheduler without ``__init__``."""


UNENDED = "it did not end"


@dataclass(frozen=True)
class Failure:
    """A test that did not pass, or a file that was not collected."""

    test: str
    reason: str  # a key of `REASONS`, or "unknown"
    said: str  # the last line of its error


def reason_of(text: str) -> tuple[str, str]:
    """Return the reason that an error names, or "unknown", and the line that says most.

    This is the last line that names the reason, or the last one, of those that pytest marks.
    """
    marked = [line[1:].strip() for line in text.splitlines() if line.startswith("E ")]
    marked = [line for line in marked if line and "errors.pydantic.dev" not in line]
    lines = (marked or text.strip().splitlines() or ["it says nothing"])[::-1]
    named = (
        (name, line) for name, rule in REASONS.items() for line in lines if re.search(rule, line)
    )
    reason, said = next(named, ("unknown", lines[0]))
    return reason, said.replace(" | ", " / ")[:160].strip()


@dataclass
class Came:
    """What came of a file's tests: how many ended how, those that passed, and those that failed."""

    counts: Counter[str] = field(default_factory=Counter)
    passed: list[str] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)


def read(path: Path) -> dict[str, Came]:
    """Return what came of the tests of each file.

    A test that was begun and did not end has killed its process, or took too long.
    """
    latest: dict[str, tuple[str, str]] = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        entry = json.loads(line)
        if latest.get(entry["test"], ("", ""))[0] != "failed":  # its teardown makes it no other one
            latest[entry["test"]] = entry["outcome"], entry["text"]
    files: dict[str, Came] = defaultdict(Came)
    for test, (outcome, text) in latest.items():
        came = files[test.partition("::")[0]]
        came.counts["failed" if outcome == "begun" else outcome] += 1
        if outcome == "passed":
            came.passed.append(test)
        elif outcome == "begun":
            came.failures.append(Failure(test, "unknown", UNENDED))
        elif outcome == "failed":
            came.failures.append(Failure(test, *reason_of(text)))
    return dict(files)


class Ledger:
    """Tests of a release that are known not to pass: a line each, with the reason and the error.

    A line whose test ends in a star stands for all tests whose names begin so: those of a file, of
    a class, or of a function with its parameters.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lines: dict[str, tuple[str, str]] = {}
        for line in path.read_text().splitlines() if path.exists() else ():
            if line and not line.startswith("#"):
                reason, rest = line.split(" | ", 1)
                test, said = rest.rsplit(" | ", 1)
                self.lines[test] = reason, said

    def new(self, came: Came) -> list[Failure]:
        """Return failures that the ledger does not know."""
        return [each for each in came.failures if not any(covers(x, each.test) for x in self.lines)]

    def stale(self, file: str, came: Came) -> list[str]:
        """Return the lines of a file of which no test failed."""
        lines = (line for line in self.lines if line.rstrip("*").partition("::")[0] == file)
        failed = [each.test for each in came.failures]
        return [line for line in lines if not any(covers(line, test) for test in failed)]

    def add(self, came: Came) -> None:
        """Take failures with a known reason, in one line for a file, a class or a function."""
        for each in self.new(came):
            if each.reason in REASONS:
                line = next(filter(partial(fits, came, each.reason), wider(each.test)), each.test)
                self.lines.setdefault(line, (each.reason, each.said))
        self.write()

    def remove(self, lines: list[str]) -> None:
        """Forget lines whose tests pass now, or are gone."""
        for line in lines:
            del self.lines[line]
        self.write()

    def write(self) -> None:
        head = "# reason | test | the last line of its error; python -m tests.upstream tells how\n"
        rows = sorted(self.lines.items())
        body = "".join(f"{reason} | {test} | {said}\n" for test, (reason, said) in rows)
        self.path.write_text(head + body)


def covers(line: str, test: str) -> bool:
    """Whether a line of the ledger stands for a test."""
    return test.startswith(line[:-1]) if line.endswith("*") else test == line


def wider(test: str) -> list[str]:
    """Return the lines that stand for a test and others: of its file, its class, its function."""
    name = test.partition("[")[0]
    ends = [match.start() for match in re.finditer("::", name)]
    return [*(f"{name[:end]}::*" for end in ends), f"{name}[*"]


def fits(came: Came, reason: str, line: str) -> bool:
    """Whether a line stands for several tests, of which all fail for this reason."""
    reasons = [each.reason for each in came.failures if covers(line, each.test)]
    right = any(covers(line, test) for test in came.passed)
    return len(reasons) > 1 and set(reasons) == {reason} and not right


def ledger_of(version: str, runner: str) -> Ledger:
    return Ledger(FOLDER / f"ledger-{version}-{runner}.txt")
