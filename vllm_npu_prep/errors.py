"""The one exception that users are meant to read."""


class PrepError(Exception):
    """Something that the user has to change: a flag, a file, an environment.

    The message is one line that says what was given, what is allowed and what to do. If start-up
    refuses several things, a line with their number comes first, then one line for each. It is not
    a `ValueError`, so that pydantic doesn't wrap it and commands can print it without a traceback.
    """
