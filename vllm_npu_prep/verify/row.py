"""What rows of ``verify-device`` are made of: random numbers, one call and its formula, `compare`.

A call that replaces torch's own is a `Probe`, which an engine runs at start-up, too.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from vllm_npu_prep.device import Device
from vllm_npu_prep.verify.outcome import Outcome, TorchOutcome, Verdict, worst_of

ROW_SECONDS = 120.0
"""Time limit of a row in seconds, unless it has its own; a first call may load or compile
kernels."""

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
"""The dtypes that rows are run with, by the ends of the rows' names."""

FILLER = 30.0
"""What rows of a cache hold that no request may read: large, so that reading one shows, and finite,
because kernels may multiply masked rows by 0."""

Put = Callable[[torch.Tensor], torch.Tensor]
Results = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class RowContext:
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

    def put(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self.device.device)


@dataclass(frozen=True)
class Row:
    """One operator in one form that the plugin uses.

    Attributes
    ----------
    run
        Runs the operator and compares. An exception of any kind is an outcome, too.
    instead
        What a user can do without the operator. If it is given, an error is no failure, and the row
        is left out.
    key
        Of a recorded call, by which the table of an engine finds it.
    first
        Makes a recorded call by torch's own form, before `run`.
    """

    name: str  # a unique name; --only takes it, or its beginning
    what: str  # the operator and the form, in a few words
    run: Callable[[RowContext], Outcome]
    ranks: int = 1  # how many processes run it together, each with a device of its own
    seconds: float = ROW_SECONDS
    instead: str = ""
    key: str = ""
    first: Callable[[RowContext], TorchOutcome] | None = None

    @property
    def group(self) -> str:
        return self.name.partition("-")[0]


TOLERANCE: Mapping[torch.dtype, float] = {
    torch.float16: 4e-3,
    torch.bfloat16: 2e-2,
    torch.float32: 1e-5,
}
"""Absolute and relative difference that rounding of inputs near 1 may make."""

PART = 1 << 20
"""So many elements are compared at once: memory of whole results in float64 takes seconds."""


def compare(
    got: torch.Tensor,
    expected: torch.Tensor,
    given: str,  # the call's sizes, for the outcome
    *,
    tolerance: float | None = None,
    readings: Mapping[str, Callable[[], torch.Tensor]] | None = None,
    where: tuple[str, ...] = ("token", "head", "element"),  # names of the dimensions
) -> Outcome:
    """Compare a result of the device with the formula's, which is on the host.

    Parameters
    ----------
    tolerance
        Absolute and relative difference that is allowed; None allows `TOLERANCE` of the dtype of
        `got`, which is 0 for integers.
    readings
        Functions that return other results, by what they would mean. A wrong result that equals one
        of them is named so.
    """
    if tolerance is None:
        tolerance = TOLERANCE.get(got.dtype, 0.0)
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
        parts = zip(found.flatten().split(PART), expected.flatten().split(PART))
        away = max((a.double() - b.double()).nan_to_num(nan=0.0).abs().max() for a, b in parts)
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
    """Return how far each element is beyond what is allowed; above 0 is wrong.

    NaN is wrong unless it is expected, as where memory is filled with it.
    """
    parts = zip(found.flatten().split(PART), expected.flatten().split(PART))
    excess = [_excess_of_part(a, b, tolerance) for a, b in parts]
    return torch.cat(excess).view(found.shape)


def _excess_of_part(found: torch.Tensor, expected: torch.Tensor, tolerance: float) -> torch.Tensor:
    a, b = found.double(), expected.double()
    difference = (a - b).abs() - tolerance * (1 + b.abs())
    is_equal = (a == b) | (a.isnan() & b.isnan())  # infinities, too
    difference = torch.where(is_equal, -1.0, difference)
    return difference.nan_to_num(nan=float("inf"))


def _allowed(tolerance: float) -> str:
    return f"the formula within {tolerance:g}" if tolerance else "the same bits"


def _shown(value: torch.Tensor) -> str:
    return f"{value.item():.4g}"


@dataclass(frozen=True)
class Probe:
    """One call of an operator on a few numbers, and the formula that it is held against."""

    # Takes a function that puts a tensor on the device, and returns results on the device
    call: Callable[[Put], Results]
    expected: Callable[[], Results]  # returns the same results by a formula, in float64 on the host

    def run(self, given: str, put: Put) -> Outcome:
        """Call the operator, and compare each of its results."""
        results = zip(self.call(put), self.expected(), strict=True)
        return worst_of(
            [compare(got, wanted, given, where=("row",)) for got, wanted in results], given
        )


def row_of_probe(
    name: str,
    operator: str,
    probe_of: Callable[[torch.dtype], Probe],
    dtype: torch.dtype,
) -> Row:
    """Return a row that makes a probe and runs it."""

    def run(context: RowContext) -> Outcome:
        return probe_of(dtype).run(f"{operator}, {dtype}", context.put)

    return Row(name, operator, run)


def normal(
    generator: torch.Generator, *shape: int, dtype: torch.dtype, scale: float = 1.0
) -> torch.Tensor:
    """Draw normally distributed numbers on the host."""
    return (torch.randn(*shape, generator=generator) * scale).to(dtype)


def uniform(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Return numbers between -2 and 2 without a pattern that a wrong operator could keep."""
    generator = torch.Generator().manual_seed(seed)
    return torch.empty(shape).uniform_(-2, 2, generator=generator).to(dtype)
