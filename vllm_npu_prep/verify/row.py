"""A row of ``verify-device``, its outcome, what it is given to run with, and how it compares."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import torch

from vllm_npu_prep.device import Device

ROW_SECONDS = 120.0
"""Time limit of a row in seconds, unless it has its own; a first call may load or compile
kernels."""

Record = tuple[str, str]
"""Family and name of something to try on hardware first, as docs/changing/operators.md lists
them."""


class Verdict(StrEnum):
    """How the result of a row is to be taken."""

    SAME = "same"
    DIFFERS = "DIFFERS"
    FAILED = "FAILED"  # it raised an error
    DEAD = "DEAD"  # its process ended, or had to be ended
    LEFT_OUT = "left out"  # it can't be run here

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

    def as_json(self) -> dict[str, str]:
        return asdict(self)


class NotHereError(Exception):
    """Says why a row can't be run on this device; the row is then left out."""


@dataclass(frozen=True)
class Bench:
    """Where a row runs: this process's device, and its rank among the processes that run the row.

    All processes of the command share the folder, which is deleted afterwards.
    """

    device: Device
    folder: Path
    rank: int = 0
    num_ranks: int = 1

    @property
    def rendezvous(self) -> str:
        """``init_method`` by which the ranks of a row's team find each other."""
        return f"file://{self.folder}/team-of-{self.num_ranks}"

    def random(
        self, *shape: int, dtype: torch.dtype = torch.float32, seed: int = 0
    ) -> torch.Tensor:
        """Return normally distributed numbers on the host, the same in every run."""
        generator = torch.Generator().manual_seed(1 + seed)
        return torch.randn(*shape, generator=generator).to(dtype)

    def put(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self.device.device)


@dataclass(frozen=True)
class Row:
    """One operator in one form that the plugin uses.

    Attributes
    ----------
    name
        A unique name; ``--only`` takes it, or its beginning.
    what
        The operator and the form, in a few words.
    run
        Runs the operator and compares. An exception of any kind is an outcome, too.
    covers
        The records that this row tries.
    ranks
        How many processes run it together, each with a device of its own.
    instead
        What a user can do without the operator. If it is given, an error is no failure, and the row
        is left out.
    """

    name: str
    what: str
    run: Callable[[Bench], Outcome]
    covers: tuple[Record, ...] = ()
    ranks: int = 1
    seconds: float = ROW_SECONDS
    instead: str = ""

    @property
    def group(self) -> str:
        return self.name.partition("-")[0]


TOLERANCE: Mapping[torch.dtype, float] = {
    torch.float16: 4e-3,
    torch.bfloat16: 2e-2,
    torch.float32: 1e-5,
}
"""Absolute and relative difference that rounding of inputs near 1 may make."""


def tolerance_of(dtype: torch.dtype) -> float:
    return TOLERANCE.get(dtype, 0.0)


def compare(
    got: torch.Tensor,
    expected: torch.Tensor,
    given: str,
    *,
    tolerance: float | None = None,
    readings: Mapping[str, Callable[[], torch.Tensor]] | None = None,
    where: tuple[str, ...] = ("token", "head", "element"),
) -> Outcome:
    """Compare a result of the device with the formula's, which is on the host.

    Parameters
    ----------
    given
        The call's sizes, for the outcome.
    tolerance
        Absolute and relative difference that is allowed; None allows `TOLERANCE` of the dtype of
        `got`, which is 0 for integers.
    readings
        Functions that return other results, by what they would mean. A wrong result that equals one
        of them is named so.
    where
        Names of the dimensions.
    """
    if tolerance is None:
        tolerance = tolerance_of(got.dtype)
    if got.shape != expected.shape:
        return Outcome(given, f"shape {[*expected.shape]}", f"{[*got.shape]}", Verdict.DIFFERS)
    found = got.detach().cpu()
    if found.dtype == expected.dtype and torch.equal(found, expected):
        return Outcome(given, _allowed(tolerance), "equal", Verdict.SAME)
    excess = _excess(found, expected, tolerance)
    if not excess.numel():
        return Outcome(given, "nothing", "nothing", Verdict.SAME)
    worst = int(excess.argmax())
    place = torch.unravel_index(torch.tensor(worst), expected.shape)
    names = (*where, *("index",) * (len(place) - len(where)))
    at = ", ".join(f"{name} {int(index)}" for name, index in zip(names, place))
    if excess.flatten()[worst] <= 0:
        away = (found.double() - expected.double()).nan_to_num(nan=0.0).abs().max()
        close = f"{away:.1e} away at most" if away else "equal"
        return Outcome(given, _allowed(tolerance), close, Verdict.SAME)
    wrong = int((excess > 0).sum())
    text = f"{_shown(found.flatten()[worst])}; {wrong:,} of {excess.numel():,} differ"
    for reading, make in (readings or {}).items():
        other = make()
        if other.shape == found.shape and (_excess(found, other, tolerance) <= 0).all():
            text += f"; as {reading}"
            break
    wanted = f"{_shown(expected.flatten()[worst])} at {at} (within {tolerance:g})"
    return Outcome(given, wanted, text, Verdict.DIFFERS)


def _excess(found: torch.Tensor, expected: torch.Tensor, tolerance: float) -> torch.Tensor:
    """Return how far each element is beyond what is allowed; above 0 is wrong, and so is NaN."""
    a, b = found.double(), expected.double()
    difference = (a - b).abs() - tolerance * (1 + b.abs())
    difference = torch.where(a == b, -1.0, difference)  # infinities, too
    return difference.nan_to_num(nan=float("inf"))


def _allowed(tolerance: float) -> str:
    return f"the formula within {tolerance:g}" if tolerance else "the same bits"


def _shown(value: torch.Tensor) -> str:
    return f"{value.item():.4g}"


def worst_of(outcomes: list[Outcome], given: str) -> Outcome:
    """Return one outcome for several parts of a row: the first that is bad, else the first."""
    for part in outcomes:
        if part.verdict.is_bad:
            return part
    first = outcomes[0]
    return Outcome(given, first.expected, first.got, first.verdict)


def same_or_not(given: str, expected: Any, got: Any) -> Outcome:
    verdict = Verdict.SAME if expected == got else Verdict.DIFFERS
    return Outcome(given, str(expected), str(got), verdict)
