"""Calls that proven code makes are taken by the references of the release that it runs on."""

import json
import re

import pytest

from ascend_emulator import profiles
from ascend_emulator.calls import arguments_of
from ascend_emulator.operators import (
    OLD_NAMES,
    REFERENCES,
    check_placement,
    custom,
)
from tests.peer.facts import read

FUNCTIONS = {(r.name, r.overload): r.function for r in (*REFERENCES, *OLD_NAMES)} | {
    (name, ""): function for name, function in custom.REFERENCES.items()
}


def profiles_of(fact):
    """Those of its CANN; `docs` demands more than kernels do."""
    names = [
        p.name for p in profiles.PROFILES.values() if p.cann == fact["cann"] and not p.documentation
    ]
    assert names, f"no profile is of CANN {fact['cann']}: {fact}"
    return names


def refusal_of(fact):
    """The first refusal of a call, with its profile; empty if all profiles take it."""
    operator, overload = fact["operator"], fact.get("overload", "")
    function, arguments = FUNCTIONS[operator, overload], arguments_of(fact)
    on_host = {
        name: bool(value.get("host"))
        for name, value in fact["arguments"].items()
        if isinstance(value, dict)
    }
    for profile in profiles_of(fact):
        with profiles.using(profile):
            try:
                check_placement(operator, on_host, overload)
                function(**arguments)
            except (RuntimeError, TypeError, ValueError, IndexError) as error:
                return f"{profile}: {error}"
    return ""


@pytest.mark.parametrize("operator", sorted({fact["operator"] for fact in read()}))
def test_proven_calls_are_accepted(operator):
    facts = [fact for fact in read() if fact["operator"] == operator]
    refused = [
        f"{refusal}\n  {json.dumps(fact)}"
        for fact in facts
        if (refusal := refusal_of(fact)) and "issue" not in fact
    ]
    assert not refused, "\n".join(["proven calls are refused:", *refused])


def test_calls_with_an_issue_are_those_that_are_refused():
    excused = [fact for fact in read() if "issue" in fact]
    assert excused and all(re.search(r"#\d+", fact["issue"]) for fact in excused)
    assert all(refusal_of(fact) for fact in excused)
