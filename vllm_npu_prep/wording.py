"""The wording of messages, and the parsing of texts on command lines."""

import argparse
import textwrap
from collections.abc import Iterable


def counted(number: int, noun: str, plural: str | None = None) -> str:
    """Return a number with its noun: ``1 step``, ``1,200 steps``.

    `plural` is needed only if the plural is not formed by adding an ``s``.
    """
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def runs_of(numbers: Iterable[int]) -> list[range]:
    """Return numbers as runs of which each is one more than the number before it."""
    runs: list[range] = []
    for number in numbers:
        if runs and number == runs[-1].stop:
            runs[-1] = range(runs[-1].start, number + 1)
        else:
            runs.append(range(number, number + 1))
    return runs


def wrapped(text: str, width: int) -> list[str]:
    """Break a text into lines at spaces only: names have hyphens, and may be wide."""
    lines = textwrap.wrap(text, max(width, 1), break_long_words=False, break_on_hyphens=False)
    return lines or [""]


def seconds(text: str) -> float:
    """Parse a number of seconds of a command line, which has to be above 0 and below a million."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < 1e6:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds above 0")
    return number
