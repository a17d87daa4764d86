"""Every field of vLLM's configuration is supported, refused or without effect here."""

import dataclasses
import re
import sys
import typing
from pathlib import Path

import pytest
import vllm.config
from vllm.config import VllmConfig

from tests.docs.pages import ROOT
from vllm_npu_prep.compat.releases import is_since
from vllm_npu_prep.startup.refusals import REFUSALS

LIST = Path(__file__).with_name("fields.txt")
NAME = LIST.relative_to(ROOT)
SINCE = "# since vLLM "
"""Begins the fields that only this release and later ones have."""
VERDICTS = ("supported", "vllm", "settled", "refused", "irrelevant")
"""What the list says of a field; its head explains them."""


def resolved(cls: type, hint: object) -> object:
    """A field's type, from a string too: vLLM imports some for type checkers only."""
    if not isinstance(hint, str):
        return hint
    try:
        return eval(hint, vars(typing) | vars(vllm.config) | vars(sys.modules[cls.__module__]))
    except NameError:
        return None


def classes_in(hint: object) -> list[type]:
    if typing.get_args(hint):
        return [part for arg in typing.get_args(hint) for part in classes_in(arg)]
    return [hint] if isinstance(hint, type) else []


def fields_of(cls: type, seen: set[type]) -> dict[str, bool]:
    """Fields of a configuration class and of those that it is made of: ``Class.field``.

    For each, whether a user can give it; others are derived.
    """
    seen.add(cls)
    fields = dataclasses.fields(cls)
    found = {
        f"{cls.__name__}.{each.name}": each.init and not each.name.startswith("_")
        for each in fields
    }
    for part in (part for each in fields for part in classes_in(resolved(cls, each.type))):
        of_config = part.__module__.startswith("vllm.config.") and dataclasses.is_dataclass(part)
        if of_config and part not in seen:
            found |= fields_of(part, seen)
    return found


class Verdict(typing.NamedTuple):
    """A line of the list."""

    field: str
    verdict: str
    words: str  # what shows it, ids of refusals, or why it has no effect
    is_there: bool  # in the installed vLLM


def verdicts() -> list[Verdict]:
    """The list, line by line."""
    found, is_there = [], True
    for line in LIST.read_text().splitlines():
        if line.startswith(SINCE):
            is_there = is_since(line.removeprefix(SINCE))
        elif line and line[0] != "#":
            field, rest = line.split(maxsplit=1)
            verdict, _, words = rest.partition(":")
            found.append(Verdict(field, verdict, words.strip(), is_there))
    return found


@pytest.fixture(scope="module")
def fields() -> dict[str, bool]:
    return fields_of(VllmConfig, set())


def test_every_field_of_vllms_configuration_is_listed(fields):
    """Read what a new one does, and refuse it in `startup/subjects` if steps don't respect it."""
    assert fields.keys() == {each.field for each in verdicts() if each.is_there}


def test_a_new_field_is_seen_however_deep(fields):
    inner = dataclasses.make_dataclass("InnerConfig", [("surprise", int, 0)])
    inner.__module__ = "vllm.config.inner"
    outer = dataclasses.make_dataclass(
        "OuterConfig", [("inner", inner | None, None)], bases=(VllmConfig,)
    )
    outer.__module__ = "vllm.config.outer"
    new = fields_of(outer, set()).keys() - fields.keys()
    assert {"OuterConfig.inner", "InnerConfig.surprise"} <= new


def test_lines_stand_once_and_have_a_verdict_with_words():
    listed = verdicts()
    assert len({each.field for each in listed}) == len(listed)
    for each in listed:
        assert each.verdict in VERDICTS and each.words, each


def test_refused_fields_name_refusals():
    for each in verdicts():
        ids = re.findall(r"\(([a-z0-9-]+)\)", each.words) if each.verdict == "irrelevant" else []
        if each.verdict == "refused" and each.words != "vllm":
            ids = each.words.split(", ")
        assert set(ids) <= set(REFUSALS), each


def test_what_shows_a_supported_field_names_it():
    """The test that the line names, or the helper by which tests give it: by the field's name, or
    by the word in brackets."""
    for each in verdicts():
        if each.verdict == "supported":
            path, _, word = each.words.partition(" ")
            name = word.strip("()") or each.field.partition(".")[2]
            assert re.search(rf"\b{name}\b", (ROOT / path).read_text()), each
        for path in re.findall(r"tests/[\w/.]+\.py", each.words):
            assert (ROOT / path).exists(), each


def test_fields_of_users_are_not_taken_for_derived_ones(fields):
    """What a user can give has an effect, is refused, or its line says why it has none."""
    for each in verdicts():
        assert not each.is_there or each.words != "derived" or not fields[each.field], each
