"""What is refused: start-up's list, and messages in plugin and emulator, as templates."""

import ast
import re
import string
from dataclasses import dataclass
from pathlib import Path

from tests.docs.pages import ROOT
from vllm_npu_prep.startup.refusals import REFUSALS

PACKAGES = (ROOT / "vllm_npu_prep", ROOT / "emulator/ascend_emulator")
ERRORS = {"PrepError", "EmulatorError"}


@dataclass(frozen=True)
class Message:
    """A message with holes."""

    place: str
    template: tuple[str | None, ...]  # None: a hole

    def says(self, text: str) -> bool:
        """Whether `text` could be this message."""
        parts = (".+?" if part is None else re.escape(part) for part in self.template)
        return re.fullmatch("".join(parts), text) is not None

    def __str__(self) -> str:
        return f"{self.place}: " + "".join(
            "..." if part is None else part for part in self.template
        )


def messages() -> list[Message]:
    """Features that start-up refuses, and every message of a `PrepError` or an `EmulatorError`.

    Messages of which nothing but a hole is written there are left out: others made them.
    """
    found = [Message(f"REFUSALS[{id!r}]", _holes(each.feature)) for id, each in REFUSALS.items()]
    for path in sorted(path for package in PACKAGES for path in package.rglob("*.py")):
        tree = ast.parse(path.read_text())
        for function in ast.walk(tree):
            if isinstance(function, ast.FunctionDef):
                found += _of_function(function, path)
    return [each for each in dict.fromkeys(found) if any(_words(part) for part in each.template)]


def _holes(text: str) -> tuple[str | None, ...]:
    """A template of `str.format`."""
    parts = [(text or None, hole) for text, hole, *_ in string.Formatter().parse(text)]
    return tuple(
        each
        for text, hole in parts
        for each in ([text] if text else []) + [None] * (hole is not None)
    )


def _words(part: str | None) -> bool:
    return part is not None and re.search(r"[A-Za-z]{2}", part) is not None


def _of_function(function: ast.FunctionDef, path: Path) -> list[Message]:
    messages: list[ast.expr] = []
    for node in ast.walk(function):
        match node:
            case ast.Raise(exc=ast.Call(func=ast.Name(id=error), args=[message, *_])) if (
                error in ERRORS
            ):
                messages.append(message)
    place = path.relative_to(ROOT).as_posix()
    texts = [each for message in messages for each in _alternatives(message, function)]
    return [Message(f"{place}:{message.lineno}", _template(message)) for message in texts]


def _alternatives(message: ast.expr, function: ast.FunctionDef) -> list[ast.expr]:
    """The expressions that a message may be: both of a choice, and what a name was given."""
    if isinstance(message, ast.IfExp):
        return [message.body, message.orelse]
    if isinstance(message, ast.Name):
        return [
            node.value
            for node in ast.walk(function)
            if isinstance(node, ast.Assign)
            and isinstance(node.targets[0], ast.Name)
            and node.targets[0].id == message.id
        ]
    return [message]


def _template(message: ast.expr) -> tuple[str | None, ...]:
    match message:
        case ast.Constant(value=str(text)):
            return (text,)
        case ast.JoinedStr(values=values):
            texts = (v.value if isinstance(v, ast.Constant) else None for v in values)
            return tuple(str(text) if text is not None else None for text in texts)
    return (None,)
