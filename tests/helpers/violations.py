"""What the full check says of a planted fault."""

from vllm_npu_prep.observe.violation import StepCheckError


def names(error: StepCheckError, rule: str, req_id: str | None, values: str) -> bool:
    """Whether an error is one line that names the rule, the request and the values.

    Parameters
    ----------
    error
        What ended the step.
    rule
        Of `vllm_npu_prep.observe`.
    req_id
        The request; None where a rule is not of one.
    values
        What has to be in the line: what was found, and what is allowed.
    """
    said = str(error)
    assert error.rule == rule, said
    assert said.startswith(f'step check "{rule}": ') and "\n" not in said
    assert req_id is None or f"request {req_id}" in said, said
    assert values in said, said
    return True


def ending(
    given: object,
    allowed: object,
    request: str | None = None,
    token: int | None = None,
    group: int | None = None,
) -> str:
    """The end of a message, from the place of the fault on."""
    where = {"request": request, "token": token, "KV-cache group": group}
    place = ", ".join(f"{name} {value}" for name, value in where.items() if value is not None)
    return f": {place}{': ' if place else ''}given {given}, allowed {allowed}"
