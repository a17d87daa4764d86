"""Turns errors of pydantic into messages for the author of a file or a flag."""

import json
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

SHOWN_CHARACTERS = 40

Context = Mapping[str, Any]


def _number(bound: Any) -> str:
    return f"{bound:,}" if isinstance(bound, int) else str(bound)


def _entries(number: int) -> str:
    return f"{number} entr{'y' if number == 1 else 'ies'}"


def _characters(number: int) -> str:
    return f"{number} character{'' if number == 1 else 's'}"


WORDS: dict[str, str | Callable[[Context], str]] = {
    "missing": "missing",
    "extra_forbidden": "unknown key",
    "string_type": "must be text",
    "bool_type": "must be true or false",
    "int_type": "must be a whole number",
    "int_from_float": "must be a whole number",
    "int_parsing_size": "must be a whole number of fewer digits",
    "float_type": "must be a number",
    "finite_number": "must be a finite number",
    "list_type": "must be a list",
    "tuple_type": "must be a list",
    "dict_type": "must be an object",
    "model_type": "must be an object",
    "none_required": "must be null",
    "value_error": lambda context: str(context["error"]),
    "literal_error": lambda context: f"must be {context['expected'].replace(chr(39), chr(34))}",
    "greater_than": lambda context: f"must be more than {_number(context['gt'])}",
    "greater_than_equal": lambda context: f"must be at least {_number(context['ge'])}",
    "less_than": lambda context: f"must be less than {_number(context['lt'])}",
    "less_than_equal": lambda context: f"must be at most {_number(context['le'])}",
    "too_short": lambda context: f"must have at least {_entries(context['min_length'])}",
    "too_long": lambda context: f"must have at most {_entries(context['max_length'])}",
    "string_too_short": lambda context: (
        "must not be empty"
        if context["min_length"] == 1
        else f"must have at least {_characters(context['min_length'])}"
    ),
    "string_too_long": lambda context: f"must have at most {_characters(context['max_length'])}",
}
"""Our message for each type of error of pydantic's reference that the models here can raise."""


def reason_of(detail: "ErrorDetails") -> str:
    """Say what is wrong with a value, without naming Python's types or the model's classes.

    Parameters
    ----------
    detail
        One of `pydantic.ValidationError.errors`.

    Returns
    -------
    str
        Such as ``must be at least 1``. For a type of error that is not among `WORDS` it is
        pydantic's own message.
    """
    words = WORDS.get(detail["type"])
    if words is None:
        message = detail["msg"].removeprefix("Value error, ")
        return message[:1].lower() + message[1:]
    return words if isinstance(words, str) else words(detail.get("ctx", {}))


def described(detail: "ErrorDetails") -> str:
    """Return `reason_of` with the value, which is left out for a missing or unknown key."""
    reason = reason_of(detail)
    if detail["type"] in ("missing", "extra_forbidden"):
        return reason
    return f"{reason}, not {shown(detail['input'])}"


def shown(value: object) -> str:
    """Return a value as JSON, as it stands in the file or the flag; shortened if it is long."""
    try:
        text = json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        text = ascii(value)
    return text if len(text) <= SHOWN_CHARACTERS else text[: SHOWN_CHARACTERS - 3] + "..."
