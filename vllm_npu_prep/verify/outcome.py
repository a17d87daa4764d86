"""What a row of ``verify-device`` found, and what a whole run found; nothing here needs torch."""

from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any


class Verdict(StrEnum):
    """How the result of a row is to be taken."""

    SAME = "same"
    DIFFERS = "DIFFERS"
    FAILED = "FAILED"  # it raised an error
    DEAD = "DEAD"  # its process ended, or had to be ended
    LEFT_OUT = "left out"  # it can't be run here
    RAN = "ran"  # it gave an answer, and no formula says which is right
    SLOWER = "slower"  # its answer is right, and torch's own form gives it sooner

    @property
    def is_bad(self) -> bool:
        """Whether the device is not what the plugin takes it for."""
        return self in (Verdict.DIFFERS, Verdict.FAILED, Verdict.DEAD)


@dataclass(frozen=True)
class Outcome:
    """What a row found: the call's sizes, the formula's result, the device's, and the verdict."""

    given: str
    expected: str
    got: str
    verdict: Verdict
    microseconds: float | None = None  # the device's time for a call, if it was measured

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class TorchOutcome:
    """What torch's own form of a call gave.

    Attributes
    ----------
    torch_got
        Empty if it is right, else what is wrong with it; None if there is no such form.
    torch_microseconds
        The device's time for it.
    """

    torch_got: str | None = None
    torch_microseconds: float | None = None


class NotHereError(Exception):
    """Says why a row can't be run on this device; the row is then left out."""


@dataclass
class Result:
    """The outcome of one row, as it is reported."""

    name: str
    what: str
    given: str
    expected: str
    got: str
    verdict: Verdict
    seconds: float
    microseconds: float | None = None
    torch_got: str | None = None  # see `TorchOutcome`
    torch_microseconds: float | None = None

    def __post_init__(self) -> None:
        self.verdict = Verdict(self.verdict)  # a line of JSON has its text


@dataclass
class RunResults:
    """What all processes have reported.

    The versions are those of CANN and the driver, as torch_npu knows them; the results are in the
    order of the rows. Rows of calls have keys, by their names, and an engine that makes the calls.
    """

    device: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    results: list[Result] = field(default_factory=list)
    engine: dict[str, Any] = field(default_factory=dict)
    keys: dict[str, str] = field(default_factory=dict)


def worst_of(outcomes: list[Outcome], given: str) -> Outcome:
    """Return one outcome for several parts of a row: the first that is bad, else the first."""
    for part in outcomes:
        if part.verdict.is_bad:
            return part
    first = outcomes[0]
    return Outcome(given, first.expected, first.got, first.verdict)


def first_line_of(error: Exception) -> str:
    """Return an error's type and its first line; errors of CANN fill pages."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"
