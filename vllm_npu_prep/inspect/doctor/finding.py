"""One line of the doctor's report, and short functions that make one."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum


class Status(StrEnum):
    OK = "ok"
    WARNING = "warning"
    FAILURE = "failure"


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    name: str  # what was looked at
    status: Status  # a failure keeps the plugin from working as configured; a warning might
    found: str  # what is there
    do: str = ""  # what to do about it; empty only if all is well


def ok(name: str, found: str) -> Finding:
    return Finding(name, Status.OK, found)


def warning(name: str, found: str, do: str) -> Finding:
    return Finding(name, Status.WARNING, found, do)


def failure(name: str, found: str, do: str) -> Finding:
    return Finding(name, Status.FAILURE, found, do)


def bad_if(matters: bool) -> Callable[[str, str, str], Finding]:
    return failure if matters else warning
