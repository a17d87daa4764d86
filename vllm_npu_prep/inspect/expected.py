"""Compares what a scenario file expects of its step with what was prepared."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from vllm_npu_prep.inspect.explain import StepTable, explain_json, print_folded
from vllm_npu_prep.inspect.view import StepView
from vllm_npu_prep.wording import counted

NOTHING = "nothing"


@dataclass(frozen=True)
class Mismatch:
    """A value that is not what the file expects."""

    place: str  # the variable and where in it, ``block_table[0][2]``
    expected: Any  # the values as JSON; `NOTHING` where one has no such place
    prepared: Any

    def __str__(self) -> str:
        return f"{self.place}: expected {self.expected}, prepared {self.prepared}"


def mismatches(view: StepView, expected: dict[str, Any]) -> list[Mismatch]:
    """Return what differs from what the file expects; variables that it doesn't name may differ."""
    prepared = explain_json(view)
    return [
        mismatch
        for name, value in expected.items()
        for mismatch in _compare(name, value, prepared.get(name, NOTHING))
    ]


def _compare(place: str, expected: Any, prepared: Any) -> Iterator[Mismatch]:
    if isinstance(expected, dict) and isinstance(prepared, dict):
        for key in dict.fromkeys([*expected, *prepared]):
            yield from _compare(
                f"{place}.{key}", expected.get(key, NOTHING), prepared.get(key, NOTHING)
            )
    elif isinstance(expected, list) and isinstance(prepared, list):
        if len(expected) != len(prepared):
            yield Mismatch(
                place, counted(len(expected), "element"), counted(len(prepared), "element")
            )
        for index, (one, other) in enumerate(zip(expected, prepared)):
            yield from _compare(f"{place}[{index}]", one, other)
    elif type(expected) is not type(prepared) or expected != prepared:  # true is not 1
        yield Mismatch(place, _plain(expected), _plain(prepared))


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return counted(len(value), "key")
    return counted(len(value), "element") if isinstance(value, list) else value


def expected_line(found: list[Mismatch], expected: dict[str, Any]) -> str:
    number = counted(len(expected), "variable")
    if not found:
        return f"expected: the step agrees in {number}"
    names = dict.fromkeys(each.place.partition("[")[0].partition(".")[0] for each in found)
    return f"expected: the step differs in {len(names)} of {number}: {', '.join(names)}"


def expected_text(found: list[Mismatch], expected: dict[str, Any], console: Console) -> None:
    console.print(expected_line(found, expected), markup=False, highlight=False, soft_wrap=True)
    if found:
        rows: list[list[object]] = [[each.place, each.expected, each.prepared] for each in found]
        print_folded(console, StepTable("differences", ["where", "expected", "prepared"], rows))
