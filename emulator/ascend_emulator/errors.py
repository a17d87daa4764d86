"""The one exception that users are meant to read."""


class EmulatorError(Exception):
    """Something that the user has to change: an option, an installation, a reference.

    The message is one line that says what was given, what is allowed and what to do; the command
    prints it without a traceback and exits with code 2.
    """
