"""The error for a step that breaks a rule, and the one form of its message."""

from typing import Any


class StepCheckError(RuntimeError):
    """The error that a prepared step breaks a rule: it would compute or write something wrong."""

    def __init__(self, message: str, rule: str, request: str | None, token: int | None) -> None:
        super().__init__(message)
        self.rule = rule  # its short name
        self.request = request  # id; None if the rule is about the whole step
        self.token = token  # of the step; None if the rule is about a whole request


def given_allowed(
    rule: str,
    text: str,
    given: object,
    allowed: object,
    *,
    request: str | None = None,
    token: int | None = None,
    position: int | None = None,
    group: int | None = None,
) -> StepCheckError:
    """Return the error in one line: rule, request, token, what was given and what is allowed."""
    names = {"request": request, "token": token, "position": position, "KV-cache group": group}
    where = ", ".join(f"{name} {value}" for name, value in names.items() if value is not None)
    place = f"{where}: " if where else ""
    message = f'step check "{rule}": {text}: {place}given {given}, allowed {allowed}'
    return StepCheckError(message, rule, request, token)


def expect(rule: str, given: object, allowed: object, **where: Any) -> None:
    """Raise `given_allowed` of the place unless the given value is the allowed one."""
    if given != allowed:
        raise given_allowed(rule, f"{rule} as prepared", given, allowed, **where)
