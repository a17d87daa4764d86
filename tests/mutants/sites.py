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
from itertools import accumulate, chain, pairwise
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
        "ops/npu",
        "ops/triton",
    ),
}
"""Folders of the package from which changes are drawn. A new folder gets a pool of its own, so that
the draws of others stay as they are."""

OPERATORS = {
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
    ast.And: ("and", "or"),
    ast.Or: ("or", "and"),
}
CONFUSED = (ast.Name, ast.Attribute, ast.Subscript)
"""Arguments that are swapped: a literal in the wrong place would be found by any call."""


@dataclass(frozen=True)
class Site:
    """One change: bytes of a file that another text replaces, and how it is named.

    `nth` of several changes of one function that look the same, from 1.
    """

    path: str
    function: str
    before: str
    after: str
    start: int
    end: int
    text: str
    nth: int = 1

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


class _File:
    """Changes of a file, each a place in its bytes and the text to put there."""

    def __init__(self, source: bytes) -> None:
        self.source = source
        self.lines = list(accumulate(map(len, source.splitlines(keepends=True)), initial=0))

    def start(self, node: ast.expr) -> int:
        return self.lines[node.lineno - 1] + node.col_offset

    def end(self, node: ast.expr) -> int:
        return self.lines[node.end_lineno - 1] + node.end_col_offset

    def text(self, node: ast.expr) -> str:
        return self.source[self.start(node) : self.end(node)].decode()

    def walk(self, node: ast.AST, names: str = "") -> Iterator[tuple[str, int, int, str]]:
        """Changes in a node, each with the names of the functions and classes around it.

        Decorators, annotations and imports have none, nor texts of errors, which have own tests.
        """
        inside = ast.iter_child_nodes(node)
        match node:
            case ast.Raise() | ast.Assert() | ast.JoinedStr() | ast.Import() | ast.ImportFrom():
                return
            case ast.If(test=ast.Name("TYPE_CHECKING")):
                return
            case ast.AnnAssign(value=value):
                inside = iter([value] if value else [])
            case ast.FunctionDef(name=name, args=args, body=body):
                names = f"{names}.{name}".lstrip(".")
                inside = chain(args.defaults, filter(None, args.kw_defaults), body)
            case ast.ClassDef(name=name, body=body):
                names, inside = f"{names}.{name}".lstrip("."), iter(body)
        for change in self.changes(node):
            yield names, *change
        for each in inside:
            yield from self.walk(each, names)

    def changes(self, node: ast.AST) -> Iterator[tuple[int, int, str]]:
        match node:
            case ast.Compare(left=left, ops=operators, comparators=others):
                for operator, a, b in zip(operators, [left, *others], others):
                    yield from self.between(a, b, *OPERATORS[type(operator)])
            case ast.BinOp(left=left, op=operator, right=right) if type(operator) in OPERATORS:
                if not isinstance(left, ast.Constant | ast.JoinedStr):
                    yield from self.between(left, right, *OPERATORS[type(operator)])
            case ast.AugAssign(target=left, op=operator, value=right):
                if type(operator) in OPERATORS:
                    old, new = OPERATORS[type(operator)]
                    yield from self.between(left, right, f"{old}=", f"{new}=")
            case ast.BoolOp(op=operator, values=values):
                for a, b in pairwise(values):
                    yield from self.between(a, b, *OPERATORS[type(operator)])
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                yield self.start(node), self.start(operand), ""
            case ast.Constant(value=bool(value)):
                yield self.start(node), self.end(node), str(not value)
            case ast.Constant(value=int(value)):
                for other in (value + 1, value - 1)[: 1 + (value > 0)]:
                    yield self.start(node), self.end(node), str(other)
            case ast.Call(func=ast.Name("min" | "max" as name) as function):
                other = "max" if name == "min" else "min"
                yield self.start(function), self.end(function), other
            case ast.Call(args=arguments):
                for a, b in pairwise(arguments):
                    one, two = self.text(a), self.text(b)
                    if isinstance(a, CONFUSED) and isinstance(b, CONFUSED) and one != two:
                        between = self.source[self.end(a) : self.start(b)].decode()
                        if "\n" not in one + two:
                            yield self.start(a), self.end(b), f"{two}{between}{one}"

    def between(
        self, left: ast.expr, right: ast.expr, old: str, new: str
    ) -> Iterator[tuple[int, int, str]]:
        """Replace an operator that stands between two expressions, and maybe comments."""
        start = self.end(left)
        told = self.source[start : self.start(right)]
        told = re.sub(rb"#[^\n]*", lambda found: b" " * len(found[0]), told)
        word = r"\s+".join(map(re.escape, old.split()))
        found = re.search((rf"\b{word}\b" if old[0].isalpha() else word).encode(), told)
        if found is not None:
            yield start + found.start(), start + found.end(), new


@functools.cache
def sites_of(path: str, source: bytes) -> list[Site]:
    same, sites = Counter[str](), []
    for names, start, end, text in _File(source).walk(ast.parse(source)):
        first, last = source.rfind(b"\n", 0, start) + 1, source.find(b"\n", end)
        after = source[first:start] + text.encode() + source[end:last]
        told = [" ".join(each.decode().split()) for each in (source[first:last], after)]
        site = Site(path, names, *told, start, end, text)
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
