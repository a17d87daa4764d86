"""Every place of the package where one operator or constant can be changed, and each such change.

A change is one token of the source: nothing else of the file moves, so that a change can be told by
the lines before and after it.
"""

import ast
import functools
import hashlib
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "vllm_npu_prep"
POOLS = {
    "steps": ("prep", "attention", "attention/kernels", "runner", "runner/v1"),
    "scheduling": ("scheduling",),
    "served": (
        "runner",
        "runner/v1",
        "runner/v2",
        "attention",
        "attention/kernels",
        "scheduling",
        "ops",
    ),
}
"""Folders of the package from which changes are drawn. A new folder gets a pool of its own, so that
the draws of others stay as they are."""

COMPARED = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
    ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
}
COMPUTED = {
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "+"),
    ast.Div: ("/", "*"),
    ast.FloorDiv: ("//", "*"),
    ast.Mod: ("%", "//"),
    ast.BitAnd: ("&", "|"),
    ast.BitOr: ("|", "&"),
    ast.LShift: ("<<", ">>"),
    ast.RShift: (">>", "<<"),
}
EXTREMES = {"min": "max", "max": "min"}
CONFUSED = (ast.Name, ast.Attribute, ast.Subscript)
"""Arguments that are swapped: a literal in the wrong place would be found by any call."""


@dataclass(frozen=True)
class Site:
    """One change: bytes of a file that another text replaces, and how it is named.

    `nth` of several changes of one function that look the same, from 1.
    """

    path: str
    function: str
    kind: str
    before: str
    after: str
    nth: int
    start: int
    end: int
    text: str

    @property
    def key(self) -> str:
        """What the change is known by: it stays the same while other code moves."""
        again = f" ({self.nth})" if self.nth > 1 else ""
        return f"{self.path} {self.function}: {self.before}  ->  {self.after}{again}"

    def planted(self) -> tuple[str, str]:
        """Text that is in the file exactly once, with the change and without: without first."""
        source = (PACKAGE / self.path).read_bytes()
        changed = source[: self.start] + self.text.encode() + source[self.end :]
        first, last = self.start, source.find(b"\n", self.end) + 1 or len(source)
        while first > 0:
            first = source.rfind(b"\n", 0, first - 1) + 1 if first > 1 else 0
            if source.count(source[first:last]) == 1:
                break
        grown = len(changed) - len(source)
        return source[first:last].decode(), changed[first : last + grown].decode()


class _Finder(ast.NodeVisitor):
    """Walks over a file and notes its changes."""

    def __init__(self, path: str, source: bytes) -> None:
        self.path, self.source = path, source
        self.lines = [0]
        for line in source.splitlines(keepends=True):
            self.lines.append(self.lines[-1] + len(line))
        self.names: list[str] = []
        self.found: list[Site] = []

    # ------------------------------------------------------------- places

    def _start(self, node: ast.AST) -> int:
        return self.lines[node.lineno - 1] + node.col_offset  # type: ignore[attr-defined]

    def _end(self, node: ast.AST) -> int:
        return self.lines[node.end_lineno - 1] + node.end_col_offset  # type: ignore[attr-defined]

    def _text(self, node: ast.AST) -> str:
        return self.source[self._start(node) : self._end(node)].decode()

    def _note(self, kind: str, start: int, end: int, text: str) -> None:
        first = self.source.rfind(b"\n", 0, start) + 1
        last = self.source.find(b"\n", end)
        before = self.source[first:last].decode()
        after = (self.source[first:start] + text.encode() + self.source[end:last]).decode()
        joined = (" ".join(each.split()) for each in (before, after))
        function = ".".join(self.names)
        self.found.append(Site(self.path, function, kind, *joined, 1, start, end, text))

    def _between(self, kind: str, left: ast.AST, right: ast.AST, old: str, new: str) -> None:
        """Replace an operator that stands between two expressions."""
        start, end = self._end(left), self._start(right)
        words = old.split()
        word = r"\s+".join(map(re.escape, words))
        pattern = rf"\b{word}\b" if words[0].isalpha() else word
        found = re.search(pattern.encode(), re.sub(rb"#[^\n]*", _blank, self.source[start:end]))
        if found is not None:
            self._note(kind, start + found.start(), start + found.end(), new)

    # ------------------------------------------------------------- what is walked over

    def _visit_definition(self, node: ast.FunctionDef | ast.ClassDef) -> None:
        """Without decorators, bases and annotations."""
        self.names.append(node.name)
        if isinstance(node, ast.FunctionDef):
            for default in [*node.args.defaults, *node.args.kw_defaults]:
                if default is not None:
                    self.visit(default)
        for statement in node.body:
            self.visit(statement)
        self.names.pop()

    visit_FunctionDef = visit_ClassDef = _visit_definition  # noqa: N815

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_Raise(self, node: ast.Raise) -> None:
        """Texts of errors have tests of their own."""

    visit_Assert = visit_JoinedStr = visit_Import = visit_ImportFrom = visit_Raise  # noqa: N815

    def visit_If(self, node: ast.If) -> None:
        if not (isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"):
            self.generic_visit(node)

    # ------------------------------------------------------------- changes

    def visit_Compare(self, node: ast.Compare) -> None:
        left = node.left
        for operator, right in zip(node.ops, node.comparators):
            self._between("comparison", left, right, *COMPARED[type(operator)])
            left = right
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        if type(node.op) in COMPUTED and not isinstance(node.left, ast.Constant | ast.JoinedStr):
            self._between("arithmetic", node.left, node.right, *COMPUTED[type(node.op)])
        self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        if type(node.op) in COMPUTED:
            old, new = COMPUTED[type(node.op)]
            self._between("arithmetic", node.target, node.value, f"{old}=", f"{new}=")
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        words = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
        for left, right in zip(node.values, node.values[1:]):
            self._between("boolean", left, right, *words)
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Not):
            self._note("dropped not", self._start(node), self._start(node.operand), "")
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        start, end = self._start(node), self._end(node)
        if isinstance(node.value, bool):
            self._note("constant", start, end, str(not node.value))
        elif isinstance(node.value, int):
            self._note("off by one", start, end, str(node.value + 1))
            if node.value > 0:
                self._note("off by one", start, end, str(node.value - 1))

    def visit_Call(self, node: ast.Call) -> None:
        is_extreme = isinstance(node.func, ast.Name) and node.func.id in EXTREMES
        for left, right in [] if is_extreme else zip(node.args, node.args[1:]):
            named = isinstance(left, CONFUSED) and isinstance(right, CONFUSED)
            texts = self._text(left), self._text(right)
            if named and texts[0] != texts[1] and "\n" not in "".join(texts):
                between = self.source[self._end(left) : self._start(right)].decode()
                swapped = texts[1] + between + texts[0]
                self._note("swapped arguments", self._start(left), self._end(right), swapped)
        if is_extreme:
            self._note(
                "extreme",
                self._start(node.func),
                self._end(node.func),
                EXTREMES[self._text(node.func)],
            )
        self.generic_visit(node)


def _blank(found: re.Match[bytes]) -> bytes:
    """A comment as spaces."""
    return b" " * len(found[0])


@functools.cache
def sites_of(path: str, source: bytes) -> list[Site]:
    """All changes of a file."""
    finder = _Finder(path, source)
    finder.visit(ast.parse(source))
    same, sites = Counter[str](), []
    for site in finder.found:
        same[site.key] += 1
        sites.append(replace(site, nth=same[site.key]))
    return sites


def every_site(*pools: str) -> Iterator[Site]:
    """All changes of some pools' folders; of all of them, if none is named."""
    for folder in dict.fromkeys(chain(*(POOLS[pool] for pool in pools or POOLS))):
        for path in sorted((PACKAGE / folder).glob("*.py")):
            yield from sites_of(path.relative_to(PACKAGE).as_posix(), path.read_bytes())


def draw(seed: int, count: int, pool: str = "steps") -> list[Site]:
    """Changes of a pool drawn at random; the first ones of a longer draw.

    Each change has a place of its own in the order, which other code does not move.
    """

    def place(site: Site) -> bytes:
        return hashlib.sha256(f"{seed} {site.key}".encode()).digest()

    return sorted(every_site(pool), key=place)[:count]
