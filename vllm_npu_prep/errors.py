"""The one exception that users are meant to read."""


class PrepError(Exception):
    """Something that the user has to change: a flag, a file, an environment.

    The message is one line that says what was given, what is allowed and what to do; where start-up
    refuses several things, a line with their number comes before one for each. Not a
    `ValueError`, so that pydantic passes it on unwrapped, and commands can print it without a
    traceback.
    """
