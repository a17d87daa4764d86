"""The error for a step that breaks a rule, and the one form of its message."""


class StepCheckError(RuntimeError):
    """The error that a prepared step breaks a rule: it would compute or write something wrong.

    Attributes
    ----------
    rule
        Short name of the rule.
    request
        Id of the request, None if the rule is about the whole step.
    token
        Token of the step, None if the rule is about a whole request.
    """

    def __init__(self, message: str, rule: str, request: str | None, token: int | None) -> None:
        super().__init__(message)
        self.rule, self.request, self.token = rule, request, token


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
    where = [f"request {request}"] if request is not None else []
    where += [f"token {token}"] if token is not None else []
    where += [f"position {position}"] if position is not None else []
    where += [f"KV-cache group {group}"] if group is not None else []
    place = f"{', '.join(where)}: " if where else ""
    message = f'step check "{rule}": {text}: {place}given {given}, allowed {allowed}'
    return StepCheckError(message, rule, request, token)


def expect(
    rule: str,
    given: object,
    allowed: object,
    *,
    request: str | None = None,
    token: int | None = None,
    group: int | None = None,
) -> None:
    """Raise unless the given value is the allowed one.

    Raises
    ------
    StepCheckError
        With the rule's name.
    """
    if given != allowed:
        raise given_allowed(
            rule, f"{rule} as prepared", given, allowed, request=request, token=token, group=group
        )
