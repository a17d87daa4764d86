"""Every field of vLLM's configuration, and what ``fields.txt`` says about it."""

import dataclasses
import sys
import typing
from dataclasses import dataclass
from pathlib import Path

from vllm_npu_prep.compat.releases import is_since

LIST = Path(__file__).with_name("fields.txt")
SINCE = "# since vLLM "
"""Begins the fields that only this release and later ones have."""
VERDICTS = ("supported", "vllm", "settled", "refused", "irrelevant")
"""What the list says of a field; its head explains them."""


def fields_of(root: type) -> dict[str, bool]:
    """Fields of a configuration class and of those that it is made of: ``Class.field``.

    Returns
    -------
    dict
        Whether a user can give the field, for each; others are derived.
    """
    found: dict[str, bool] = {}
    _collect(root, found, set())
    return found


def _collect(cls: type, found: dict[str, bool], seen: set[type]) -> None:
    seen.add(cls)
    fields = dataclasses.fields(cls)
    found |= {
        f"{cls.__name__}.{each.name}": each.init and not each.name.startswith("_")
        for each in fields
    }
    for each in fields:
        for part in _classes(_resolved(cls, each.type)):
            of_config = part.__module__.startswith("vllm.config.")
            if of_config and dataclasses.is_dataclass(part) and part not in seen:
                _collect(part, found, seen)


def _resolved(cls: type, hint: object) -> object:
    """A type, from a string too: vLLM imports some for type checkers only."""
    import vllm.config

    if not isinstance(hint, str):
        return hint
    names = {**vars(typing), **vars(vllm.config), **vars(sys.modules[cls.__module__])}
    try:
        return eval(hint, names)
    except NameError:
        return None


def _classes(hint: object) -> list[type]:
    if typing.get_args(hint):
        return [part for arg in typing.get_args(hint) for part in _classes(arg)]
    return [hint] if isinstance(hint, type) else []


@dataclass(frozen=True)
class Verdict:
    """A line of the list."""

    field: str
    verdict: str
    words: str  # what shows it, ids of refusals, or why it has no effect
    since: str = ""  # the release of vLLM that brought it, unless all have it

    @property
    def is_there(self) -> bool:
        """Whether the installed vLLM has the field."""
        return not self.since or is_since(self.since)


def verdicts() -> list[Verdict]:
    """The list, line by line."""
    found, since = [], ""
    for line in LIST.read_text().splitlines():
        if line.startswith(SINCE):
            since = line.removeprefix(SINCE)
        elif line and line[0] != "#":
            field, _, rest = line.partition(" ")
            found.append(Verdict(field, *_parts(rest), since))
    return found


def _parts(rest: str) -> tuple[str, str]:
    verdict, _, words = rest.strip().partition(":")
    return verdict, words.strip()
