"""Profiles: which release's kernels stand behind an operator, and whose word decides.

A profile is read once in a process, from ``NPU_EMULATOR_PROFILE``; `using` replaces it for a block
of code, as tests of the references do.
"""

import functools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from ascend_emulator.errors import EmulatorError

PROFILE = "NPU_EMULATOR_PROFILE"
SOC = "NPU_EMULATOR_SOC"


@dataclass(frozen=True)
class Profile:
    """One profile.

    Attributes
    ----------
    name
        The name that ``--profile`` takes.
    release
        CANN release whose published sources decide which kernel is called and what it demands.
    cann
        Version that the runtime reports unless ``--cann`` is given.
    documentation
        Whether everything is demanded that the documentation demands, enforced by code or not.
    """

    name: str
    release: str
    cann: str
    documentation: bool = False


PROFILES = {
    profile.name: profile
    for profile in (
        Profile("9.1", "9.1", "9.1.0"),
        Profile("8.5", "8.5", "8.5.0"),
        Profile("docs", "9.1", "9.1.0", documentation=True),
    )
}
"""Profiles by name; the first one is the default."""
DEFAULT = next(iter(PROFILES))


def find(name: str) -> Profile:
    """Return the profile of a name.

    Raises
    ------
    EmulatorError
        If there is no profile of this name; it lists the profiles.
    """
    if name not in PROFILES:
        raise EmulatorError(
            f"--profile {name!r} is not a profile; use one of {', '.join(PROFILES)}"
        )
    return PROFILES[name]


_replaced: ContextVar[Profile | None] = ContextVar("profile", default=None)


def current() -> Profile:
    """Return the profile of this process, or of the `using` block around the call."""
    return _replaced.get() or _of_process()


@functools.cache
def _of_process() -> Profile:
    return find(os.environ.get(PROFILE) or DEFAULT)


@contextmanager
def using(name: str) -> Iterator[Profile]:
    """Replace the profile for a block of code, in this thread."""
    token = _replaced.set(find(name))
    try:
        yield current()
    finally:
        _replaced.reset(token)


@functools.cache
def cube_cores() -> int:
    """Return the number of the chip's cube cores, as `native/runtime/device.cpp` reports it."""
    return 8 if os.environ.get(SOC, "").startswith("Ascend310") else 24
