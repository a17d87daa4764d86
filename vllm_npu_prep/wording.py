"""Words of messages and of command lines."""

import argparse


def counted(number: int, noun: str, plural: str | None = None) -> str:
    """A number of things: ``1 step``, ``1,200 steps``.

    Parameters
    ----------
    number
        How many.
    noun
        The noun in the singular.
    plural
        Its plural, if that is not formed by adding an ``s``.
    """
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def seconds(text: str) -> float:
    """A number of seconds above 0, of a command line.

    Parameters
    ----------
    text
        What was given.

    Raises
    ------
    argparse.ArgumentTypeError
        If it is none, or more than a million.
    """
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < 1e6:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds above 0")
    return number
