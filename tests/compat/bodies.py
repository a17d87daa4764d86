"""Upstream's functions whose rules the plugin repeats or relies on: has one been rewritten?

A seam tells whether a name and its parameters are there. That isn't enough where a few lines of
ours stand for upstream's: these functions are compared by a digest of their code, without comments
and docstrings. `bodies.txt` holds digest and name of each, and what to look at when it changes.
``python -m tests.compat --write`` renews the digests; do that after the look.
"""

import ast
import functools
import hashlib
import importlib.util
from dataclasses import dataclass
from pathlib import Path

FILE = Path(__file__).with_name("bodies.txt")
RUN = {
    "scheduling/": "pytest tests/scheduling and python -m tests.scheduling",
    "quantization/": "pytest tests/quantization",
    "compat/multimodal": "pytest tests/engine/test_multimodal.py",
    "": "pytest tests/ops tests/v2 tests/prep",
}
"""What to run for the code that relies on a function, by what its place contains."""
HEAD = """\
# Functions of vLLM {version} whose rules the plugin repeats or relies on: a digest of the code, the
# name, and after "in" what to look at when the code changes. Digests by `make seams`.
"""


@dataclass(frozen=True)
class Body:
    """A function of vLLM, and the digest of its code when somebody last looked at `look_at`."""

    module: str
    name: str
    look_at: str
    digest: str

    def __str__(self) -> str:
        return f"{self.digest} {self.module}:{self.name} in {self.look_at}"


def read(path: Path = FILE) -> list[Body]:
    """Bodies that a file lists."""
    found = []
    for line in path.read_text().splitlines():
        if line and not line.startswith("#"):
            said, _, look_at = line.partition(" in ")
            digest, _, name = said.partition(" ")
            module, _, qualname = name.partition(":")
            found.append(Body(module, qualname, look_at, digest))
    return found


def write(version: str, path: Path = FILE) -> int:
    """Renew the digests of the file; returns how many there are."""
    bodies = [
        Body(each.module, each.name, each.look_at, digest_of(each) or "gone") for each in read(path)
    ]
    path.write_text(HEAD.format(version=version) + "".join(f"{each}\n" for each in bodies))
    return len(bodies)


def changed(bodies: list[Body], texts: dict[str, str] | None = None) -> list[str]:
    """A line for each function whose code isn't what it was.

    `texts` stands for the text of some modules.
    """
    lines = []
    for body in bodies:
        now = digest_of(body, texts)
        if now != body.digest:
            what = "gone" if now is None else "rewritten"
            runs = next(said for part, said in RUN.items() if part in body.look_at)
            lines.append(
                f"{what:9} {body.module}:{body.name}; look at {body.look_at}, run {runs}, "
                "then make seams"
            )
    return lines


def digest_of(
    body: Body, texts: dict[str, str] | None = None, folder: Path | None = None
) -> str | None:
    """Digest of a function's code in the installed vLLM; None if it isn't there.

    `folder` holds another release's package.
    """
    text = (texts or {}).get(body.module) or text_of(body.module, folder)
    node: ast.AST | None = _parsed(text) if text is not None else None
    for part in body.name.split("."):
        node = next(
            (
                each
                for each in getattr(node, "body", ())
                if isinstance(each, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
                and each.name == part
            ),
            None,
        )
    if node is None:
        return None
    for each in ast.walk(node):
        if isinstance(each, ast.FunctionDef) and ast.get_docstring(each) is not None:
            each.body = each.body[1:]
    return hashlib.sha256(ast.unparse(node).encode()).hexdigest()[:12]


@functools.cache
def _parsed(text: str) -> ast.Module:
    """A module that holds several functions is read once."""
    return ast.parse(text)


def text_of(module: str, folder: Path | None = None) -> str | None:
    """Text of a module, which is not imported; `folder` is its package, if it isn't installed."""
    if folder is None:
        package = importlib.util.find_spec(module.partition(".")[0])
        assert package is not None and package.origin is not None
        folder = Path(package.origin).parent
    path = folder.parent.joinpath(*module.split(".")).with_suffix(".py")
    return path.read_text() if path.exists() else None
