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
    found: list[ast.expr] = []
    for node in ast.walk(function):
        match node:
            case ast.Raise(exc=ast.Call(func=ast.Name(id=error), args=[message, *_])) if (
                error in ERRORS
            ):
                found.append(message)
    for message in found:  # grows meanwhile
        if isinstance(message, ast.IfExp):
            found += [message.body, message.orelse]
        elif isinstance(message, ast.Name):
            found += [
                node.value
                for node in ast.walk(function)
                if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == message.id
            ]
    return found


def _text(message: ast.expr) -> str:
    match message:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=values):
            return "".join(str(v.value) if isinstance(v, ast.Constant) else HOLE for v in values)
    return HOLE
