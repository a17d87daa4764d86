"""What is refused: start-up's list, and messages in plugin and emulator, as patterns."""

import ast
import re
import string
from functools import cache

from tests.docs.pages import ROOT
from vllm_npu_prep.startup.refusals import REFUSALS

PACKAGES = (ROOT / "vllm_npu_prep", ROOT / "emulator/ascend_emulator")
ERRORS = {"PrepError", "EmulatorError"}
HOLE = "\0"


@cache
def messages() -> dict[str, re.Pattern]:
    """Features that start-up refuses, and messages of `PrepError` and `EmulatorError`, by place.

    Messages of which nothing but a hole is written there are left out: others made them.
    """
    found = {f"REFUSALS[{id!r}]": _holes(each.feature) for id, each in REFUSALS.items()}
    for path in sorted(path for package in PACKAGES for path in package.rglob("*.py")):
        for function in ast.walk(ast.parse(path.read_text())):
            if isinstance(function, ast.FunctionDef):
                for message in _raised_in(function):
                    place = f"{path.relative_to(ROOT)}:{message.lineno}:{message.col_offset}"
                    found[place] = _text(message)
    return {
        f"{place}: {text.replace(HOLE, '...')}": re.compile(re.escape(text).replace(HOLE, ".+?"))
        for place, text in found.items()
        if re.search(r"[A-Za-z]{2}", text)
    }


def _holes(text: str) -> str:
    """A template of `str.format`."""
    return "".join(
        text + HOLE * (hole is not None) for text, hole, *_ in string.Formatter().parse(text)
    )


def _raised_in(function: ast.FunctionDef) -> list[ast.expr]:
    """The expressions that messages may be: both of a choice, and what a name was given."""
    nodes = list(ast.walk(function))
    calls = [node.exc for node in nodes if isinstance(node, ast.Raise)]
    calls += [node.value for node in nodes if isinstance(node, ast.Return)]  # for the caller
    found = [
        call.args[0]
        for call in calls
        if isinstance(call, ast.Call) and call.args and ast.unparse(call.func) in ERRORS
    ]
    for message in found:  # grows meanwhile
        if isinstance(message, ast.IfExp):
            found += [message.body, message.orelse]
        elif isinstance(message, ast.Name):
            given = [node for node in nodes if isinstance(node, ast.Assign)]
            found += [each.value for each in given if ast.unparse(each.targets[0]) == message.id]
    return found


def _text(message: ast.expr) -> str:
    match message:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=values):
            return "".join(str(v.value) if isinstance(v, ast.Constant) else HOLE for v in values)
    return HOLE
