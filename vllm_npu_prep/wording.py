"""Words of messages."""


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
