"""What a report consists of: requests, calls between steps, and what has to come of them."""

from dataclasses import dataclass, field
from typing import Any

from tests.helpers.prompts import prompts_of

TRANSFORMERS = "transformers"
"""Each token of a greedy request is the best one by transformers, behind those before it and by the
request's parameters, and log-probabilities are transformers'."""
ALONE = "alone"
"""Each greedy request, and each with a seed, gets what it gets alone on the same engine, without
the calls: tokens, log-probabilities, why and where it ends."""

When = int | str | tuple[str, int]
"""A number of steps since the beginning; the name of a request that has ended; a request and how
many tokens it has said."""


@dataclass(frozen=True)
class Ask:
    """A request. `params` are of its sampling, greedy without. `form` is "json" or "regex", of
    `tests.helpers.grammars`. `refused` is a part of the error with which it is not accepted."""

    name: str
    prompt: Any  # token ids, or a `tests.helpers.vision.Request`
    tokens: int = 12
    at: When = 0
    params: dict[str, Any] = field(default_factory=dict)
    form: str = ""
    id: str = ""  # by which the engine knows it, if that isn't its name
    adapter: int = 0
    adapter_name: str = ""
    weights: int = 0  # number of the adapter whose weights it has, if that is another one
    priority: int = 0
    salt: str | None = None
    refused: str = ""


@dataclass(frozen=True)
class Part:
    """A part of a session, which is answered before the next one; `prompt` is None at its end."""

    name: str
    session: str
    prompt: list[int] | None
    tokens: int = 12
    at: When = 0
    params: dict[str, Any] = field(default_factory=dict)
    form: str = ""


@dataclass(frozen=True)
class Call:
    """A call of the engine's life cycle, by its name in `tests.reports.driver.CALLS`."""

    name: str
    at: When
    given: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Report:
    """A public report, by repository and number.

    Attributes
    ----------
    engine
        Its name in `tests.reports.engines.ENGINES`.
    oracle
        `TRANSFORMERS` or `ALONE`.
    expect
        By name of a request, what is to be found in its `Answer`.
    happened
        What has to happen at least once, or the report is not met: names that the driver counts.
    failed
        Whether it once failed here.
    known
        An open report of vLLM's own fault, for which the scenario has to fail.
    """

    number: str
    title: str
    engine: str
    does: tuple[Ask | Part | Call, ...]
    oracle: str = TRANSFORMERS
    expect: dict[str, dict[str, Any]] = field(default_factory=dict)
    happened: tuple[str, ...] = ()
    failed: bool = False
    known: str = ""


def words(length: int, seed: int = 1) -> list[int]:
    """A prompt of token ids: the longer one of a seed begins with the shorter one."""
    return prompts_of(seed, [512])[0][:length]
