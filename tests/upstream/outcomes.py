"""What came of vLLM's tests, and the ledger of those that don't pass."""

import json
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent

REASONS = {
    "refused": r"is not supported by vllm_npu_prep|are not supported by vllm_npu_prep",
    "gpu": (
        r"Torch not compiled with CUDA|No CUDA GPUs|NVIDIA driver|CUDA driver|'_C'|_moe_C|"
        r"'_OpNamespace' '_C|libcudart|Invalid device string: 'cuda|torch.cuda|triton"
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


def reason_of(text: str) -> str:
    """Return the reason that an error's text names, or "unknown"."""
    fitting = (name for name, pattern in REASONS.items() if re.search(pattern, text))
    return next(fitting, "unknown")


def last_line(text: str) -> str:
    """Return the line of an error that says most: the last one that pytest marks."""
    marked = [line[1:].strip() for line in text.splitlines() if line.startswith("E ")]
    marked = [line for line in marked if line and "errors.pydantic.dev" not in line]
    line = (marked or text.strip().splitlines() or ["it says nothing"])[-1]
    return line.replace(" | ", " / ")[:160].strip()


def read(path: Path) -> dict[str, tuple[Counter[str], list[Failure]]]:
    """Return for each file how many of its tests ended how, and those that failed.

    A test that was begun and did not end has killed its process, or took too long.
    """
    latest: dict[str, tuple[str, str]] = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        entry = json.loads(line)
        if latest.get(entry["test"], ("", ""))[0] != "failed":  # its teardown makes it no other one
            latest[entry["test"]] = entry["outcome"], entry["text"]
    came: dict[str, tuple[Counter[str], list[Failure]]] = {}
    for test, (outcome, text) in latest.items():
        counts, failures = came.setdefault(test.partition("::")[0], (Counter(), []))
        counts["failed" if outcome == "begun" else outcome] += 1
        if outcome == "begun":
            failures.append(Failure(test, "unknown", UNENDED))
        elif outcome == "failed":
            failures.append(Failure(test, reason_of(text), last_line(text)))
    return came


class Ledger:
    """Tests of a release that are known not to pass: a line each, with the reason and the error."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lines: dict[str, tuple[str, str]] = {}
        for line in path.read_text().splitlines() if path.exists() else ():
            if line and not line.startswith("#"):
                reason, rest = line.split(" | ", 1)
                test, said = rest.rsplit(" | ", 1)
                self.lines[test] = reason, said

    def of_file(self, file: str) -> set[str]:
        """Return the known tests of a file."""
        return {test for test in self.lines if test.partition("::")[0] == file}

    def new(self, failures: list[Failure]) -> list[Failure]:
        """Return failures that the ledger does not know."""
        return [each for each in failures if each.test not in self.lines]

    def add(self, failures: list[Failure]) -> None:
        """Take failures whose reason is known, and write the ledger."""
        for each in self.new(failures):
            if each.reason in REASONS:
                self.lines[each.test] = each.reason, each.said
        self.write()

    def remove(self, tests: set[str]) -> None:
        """Forget tests that pass now, or are gone."""
        for test in tests:
            del self.lines[test]
        self.write()

    def write(self) -> None:
        head = "# reason | test | the last line of its error; python -m tests.upstream tells how\n"
        rows = sorted(self.lines.items())
        body = "".join(f"{reason} | {test} | {said}\n" for test, (reason, said) in rows)
        self.path.write_text(head + body)


def ledger_of(version: str, runner: str) -> Ledger:
    return Ledger(FOLDER / f"ledger-{version}-{runner}.txt")
