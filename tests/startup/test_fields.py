"""Every field of vLLM's configuration is supported, refused or without effect here."""

import dataclasses
import re

import pytest

from tests.docs.pages import ROOT
from tests.startup.fields import LIST, VERDICTS, Verdict, fields_of, verdicts
from vllm_npu_prep.startup.refusals import REFUSALS

NAME = LIST.relative_to(ROOT)


@pytest.fixture(scope="module")
def fields() -> dict[str, bool]:
    from vllm.config import VllmConfig

    return fields_of(VllmConfig)


def missing(fields: dict[str, bool], listed: list[Verdict]) -> list[str]:
    """What a field that is not in the list asks its reader to do."""
    known = {each.field for each in listed if each.is_there}
    return [
        f"{field} is new in vLLM: read what it does, and add a line to {NAME}; refuse it in "
        "vllm_npu_prep/startup/subjects/ if steps don't respect it"
        for field in fields
        if field not in known
    ]


def gone(fields: dict[str, bool], listed: list[Verdict]) -> list[str]:
    return [
        f"{each.field} is gone from vLLM: delete its line in {NAME}"
        for each in listed
        if each.is_there and each.field not in fields
    ]


def test_every_field_of_vllms_configuration_is_listed(fields):
    assert not missing(fields, verdicts())


def test_no_field_is_listed_that_is_gone(fields):
    assert not gone(fields, verdicts())


def test_a_new_field_is_seen_however_deep(fields):
    from vllm.config import VllmConfig

    inner = dataclasses.make_dataclass("InnerConfig", [("surprise", int, 0)])
    inner.__module__ = "vllm.config.inner"
    outer = dataclasses.make_dataclass(
        "OuterConfig", [("inner", inner | None, None)], bases=(VllmConfig,)
    )
    outer.__module__ = "vllm.config.outer"
    new = fields_of(outer).keys() - fields.keys()
    assert {"OuterConfig.inner", "InnerConfig.surprise"} <= new
    lines = missing({"InnerConfig.surprise": True}, verdicts())
    assert len(lines) == 1 and lines[0].startswith("InnerConfig.surprise is new in vLLM: read")
    assert gone({}, verdicts()[:1])[0].endswith("delete its line in tests/startup/fields.txt")


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
