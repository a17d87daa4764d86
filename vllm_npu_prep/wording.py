"""Words of messages."""


def counted(number: int, noun: str, plural: str | None = None) -> str:
    """A number of things: ``1 step``, ``1,200 steps``.

    Parameters
    ----------
    number
        How many.
    noun
        What one of them is called.
    plural
        What others than one are called, where that is more than an ``s`` at the end.
    """
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"
