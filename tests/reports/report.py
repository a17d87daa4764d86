"""What a report consists of: requests, calls between steps, and what has to come of them."""

from dataclasses import dataclass, field
from typing import Any

from tests.helpers.prompts import prompts_of
from tests.reports.engines import ENGINES

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
class Part(Ask):
    """A part of a session, which is answered before the next one; `prompt` is None at its end."""

    session: str = "s"


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
    expect
        By name of a request, what is to be found in its `Answer`.
    happened
        What has to happen at least once, or the report is not met: names that the driver counts.
    failed
        Whether it once failed here.
    known
        Whether vLLM still has the fault, so that the scenario has to fail.
    """

    number: str
    title: str
    engine: str
    does: tuple[Ask | Call, ...]
    expect: dict[str, dict[str, Any]] = field(default_factory=dict)
    happened: tuple[str, ...] = ()
    failed: bool = False
    known: bool = False


def report(
    number: str,
    title: str,
    engine: str,
    *does: Ask | Call,
    happened: tuple[str, ...] = (),
    **others: Any,
) -> Report:
    """A `Report`. Where a model drafts, some drafts have to be rejected, too."""
    if ENGINES[engine].drafts not in ("", "ngram"):  # what is looked up may not be found
        happened += ("rejected",)
    return Report(number, title, engine, does, happened=happened, **others)


def words(length: int, seed: int = 1) -> list[int]:
    """A prompt of token ids: the longer one of a seed begins with the shorter one."""
    return prompts_of(seed, [512])[0][:length]


def seeded(seed: int, **others: Any) -> dict[str, Any]:
    """Parameters of a request whose tokens are drawn with this seed."""
    return {"temperature": 1.0, "seed": seed, **others}
