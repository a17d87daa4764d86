"""The seams: every name of vLLM that the plugin relies on, by what its text says."""

import ast
import importlib.util
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

import griffe

from tests.compat.source import Sources, modules, signature
from tests.compat.types import Types

PLUGIN = "vllm_npu_prep"
UPSTREAM = "vllm"
PATCHED = "torch"
"""Of this package, a seam is what the plugin assigns."""
UNKNOWN = "?"
"""Stands for a part of a string that only the running program knows."""
FULL_NAME = re.compile(rf"{UPSTREAM}(\.[\w{UNKNOWN}]+)+")
LOOKED_UP = re.compile(r'(\w+) = [\w.]+\.(?:get|import_module)\("([\w.]+)"\)')
"""A variable that holds a module which a string names: ``entry = sys.modules.get("a.b")``."""
NOT_NAMES = re.compile(rf"{UPSTREAM}\.({PLUGIN}|{re.escape(UNKNOWN)}$|platform_plugins$)")
"""Loggers of the plugin, and a group of entry points."""


def installed() -> dict[str, Path]:
    """Folders of vLLM, torch and the plugin in this environment; none is imported."""
    folders = {}
    for name in (UPSTREAM, PATCHED, PLUGIN):
        spec = importlib.util.find_spec(name)
        assert spec is not None and spec.origin is not None, f"{name} is not installed"
        folders[name] = Path(spec.origin).parent
    return folders


class Uses:
    """What the plugin's text uses of vLLM.

    Imports, members of what mypy knows to be upstream's, members of upstream's classes that the
    plugin's own inherit, override or assign, constructors, and names in strings.
    """

    @classmethod
    def of_environment(cls) -> "Uses":
        """The plugin beside the vLLM that is installed."""
        packages = installed()
        return cls(Sources(packages), Types(PLUGIN, packages[PLUGIN]))

    def __init__(self, sources: Sources, types: Types) -> None:
        self.sources = sources
        self.types = types
        self.files: dict[str, set[str]] = defaultdict(set)
        """Files of the plugin by seam: the full name of a member of a class or of a module."""
        self.signatures: dict[str, str] = {}
        self.unknown: dict[str, set[str]] = defaultdict(set)
        """Files of the plugin by strings that look like full names and name nothing in vLLM."""
        for self._module, path in modules(PLUGIN, sources.packages[PLUGIN]):
            self._file = path.relative_to(sources.packages[PLUGIN]).as_posix()
            self._read(path.read_text())

    def _read(self, text: str) -> None:
        tree, self._by_name = ast.parse(text), dict(LOOKED_UP.findall(text))
        texts = dict(_texts(tree))
        for node in ast.walk(tree):
            match node:
                case ast.Import(names=names):
                    for alias in names:
                        self._named(alias.name)
                case ast.ImportFrom(names=names):
                    for alias in names:
                        self._named(f"{node.module}.{alias.name}")
                case ast.Attribute(value=of, attr=name):
                    self._members(of, name)
                    if isinstance(node.ctx, ast.Store):
                        self._patched(ast.unparse(node))
                case ast.ClassDef():
                    self._overrides(node)
                case ast.Call(
                    func=ast.Name("getattr" | "hasattr" | "setattr" | "instead_of"),
                    args=[of, name, *_],
                ):
                    if isinstance(name, ast.Constant):
                        self._members(of, str(name.value))
                case ast.Call(
                    func=ast.Attribute(attr="override_triton_kernels"), args=[ast.Dict(keys=keys)]
                ):
                    for key in filter(None, keys):
                        self._replaced(_put_together(key, {}) if key not in texts else texts[key])
                case ast.Call(func=function):
                    self._constructed(function, [each.arg for each in node.keywords])
                case ast.Constant(value=str(text)):
                    self._named(text)
                case ast.JoinedStr():
                    self._named(texts[node])

    def _named(self, name: str) -> None:
        """A full name in a string or an import."""
        if FULL_NAME.fullmatch(name):
            owner, _, last = name.rpartition(".")
            found = self.sources.find(owner)
            self._member(found, last)
            # A member that can't be followed is another package's.
            is_there = self.sources.find(name) or (found is not None and last in found.members)
            if not is_there and not NOT_NAMES.match(name):
                self.unknown[name].add(self._file)

    def _replaced(self, kernel: str) -> None:
        """A kernel of vLLM, which has to be named in full."""
        if not FULL_NAME.fullmatch(kernel):
            self.unknown[kernel].add(self._file)

    def _patched(self, name: str) -> None:
        """An assignment that may be to a name of torch."""
        if name.startswith(f"{PATCHED}.") and self.sources.module(name.rpartition(".")[0]):
            found = self.sources.find(name)
            if found is not None:
                self._add(name, found)

    def _members(self, of: ast.expr, name: str) -> None:
        """A member of whatever an expression is."""
        written = ast.unparse(of)
        # Annotations aren't expressions to mypy: there, a name is what the module says it is.
        owners = {self._by_name.get(written, f"{self._module}.{written}")}
        for owner in owners.union(self.types.owners(self._module, of)):
            found = self.sources.find(owner)
            self._member(found, name)
            if isinstance(found, griffe.Class) and self.sources.member(found, name) is None:
                self._narrowed(found, name)

    def _narrowed(self, cls: griffe.Class, name: str) -> None:
        """A member that classes below have: `getattr` asks which of them it is."""
        for below in cls.module.members.values():
            is_class = isinstance(below, griffe.Class) and name in below.members
            if is_class and cls in self.sources.mro(below):
                self._member(below, name)

    def _overrides(self, node: ast.ClassDef) -> None:
        """Members of a class of the plugin that hide upstream's."""
        cls = self.sources.find(f"{self._module}.{node.name}")
        if isinstance(cls, griffe.Class):
            for name in cls.members:
                self._inherited(self.sources.mro(cls)[1:], name)

    def _constructed(self, function: ast.expr, keywords: list[str | None]) -> None:
        """A constructor's parameters; those of a record are its fields."""
        cls = self.sources.find(self.types.constructed(self._module, function) or "")
        if isinstance(cls, griffe.Class):
            self._member(cls, "__init__")
            for keyword in filter(None, keywords if is_record(cls) else []):
                self._member(cls, keyword)

    def _member(self, of: griffe.Object | None, name: str) -> None:
        """Count a member as used, if it is upstream's."""
        if isinstance(of, griffe.Class):
            self._inherited(self.sources.mro(of), name)
        elif isinstance(of, griffe.Module) and is_upstream(of):
            found = self.sources.member(of, name)
            if found is not None:
                self._add(f"{of.path}.{name}", found)

    def _inherited(self, mro: list[griffe.Class], name: str) -> None:
        """Count a member of a class, of which the plugin's bases come first."""
        for owner in mro:
            found = self.sources.member(owner, name) if is_upstream(owner) else None
            if found is not None and is_upstream(found):
                self._add(f"{owner.path}.{name}", found)
                return
            if name in owner.members:
                return  # the plugin's own

    def _add(self, seam: str, found: griffe.Object) -> None:
        self.files[seam].add(self._file)
        self.signatures[seam] = signature(found)


def is_upstream(of: griffe.Object) -> bool:
    """Whether it is vLLM's."""
    return of.path.split(".")[0] == UPSTREAM


def is_record(cls: griffe.Class) -> bool:
    """Whether a class's fields are its constructor's parameters."""
    decorators = {str(each.value).split("(")[0].split(".")[-1] for each in cls.decorators}
    bases = {str(each).split(".")[-1] for each in cls.bases}
    return bool(decorators & {"dataclass", "config"} or bases & {"NamedTuple", "Struct"})


def _texts(
    scope: ast.AST, known: Mapping[str, str] | None = None
) -> Iterator[tuple[ast.JoinedStr, str]]:
    """Strings that are put together, each with what is known of it.

    Variables are those of a scope (a module, a class or a function) and of the scopes around it.
    One that gets two values in a scope has none that is known.
    """
    here: dict[str, str] = {}
    known, inner = dict(known or {}), []
    left = list(ast.iter_child_nodes(scope))
    while left:
        node = left.pop(0)
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                inner.append(node)
                continue
            case ast.JoinedStr():
                yield node, _put_together(node, known)
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                text = _put_together(value, known)
                known[name] = here[name] = UNKNOWN if here.get(name, text) != text else text
        left[:0] = ast.iter_child_nodes(node)
    for each in inner:
        yield from _texts(each, known)


def _put_together(node: ast.expr, known: Mapping[str, str]) -> str:
    """A string, with `UNKNOWN` for whatever isn't known of it."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=parts):
            return "".join(_put_together(each, known) for each in parts)
        case ast.FormattedValue(value=ast.Name(id=name)):
            return known.get(name, UNKNOWN)
    return UNKNOWN
