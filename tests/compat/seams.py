"""The seams: every name of vLLM that the plugin relies on, and what became of it in a release."""

import ast
import functools
import importlib.util
import re
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from tests.compat.inference import Inference, Instance, Scope, Super, Type, own_nodes
from tests.compat.source import Class, Definition, Function, Module, Sources, absolute

PLUGIN = "vllm_npu_prep"
UPSTREAM = "vllm"
PATCHED = "torch"
"""Of this package, a seam is what the plugin assigns."""
FULL_NAME = re.compile(rf"{UPSTREAM}(\.\w+)+")


@dataclass(frozen=True, order=True)
class Seam:
    """A name of vLLM: a member of a class or of a module."""

    owner: str
    name: str

    def __str__(self) -> str:
        return f"{self.owner}.{self.name}"


def installed(*packages: str) -> Sources:
    """Packages of this environment: vLLM, torch and the plugin; none is imported."""
    folders = {}
    for name in packages or (UPSTREAM, PATCHED, PLUGIN):
        spec = importlib.util.find_spec(name)
        assert spec is not None and spec.origin is not None, f"{name} is not installed"
        folders[name] = Path(spec.origin).parent
    return Sources(folders)


class Uses:
    """What the plugin's text uses of vLLM.

    Imports, members of what has a known type, members of upstream's classes that the plugin's own
    inherit, override or assign, constructors, and names in strings.
    """

    def __init__(self, sources: Sources) -> None:
        self.sources = sources.only(UPSTREAM, PLUGIN)
        self.patched = sources.only(PATCHED)  # apart: types of torch would lead through half of it
        self.inference = Inference(self.sources)
        self.files: dict[Seam, set[str]] = defaultdict(set)
        """Files of the plugin by seam."""
        self.definitions: dict[Seam, Definition] = {}
        for module in self.sources.modules(PLUGIN):
            self.file = self.sources.file(module)
            self._read(module)

    @functools.cached_property
    def mentions(self) -> dict[str, set[str]]:
        """Files of the plugin by names in them: attributes, arguments, definitions, strings."""
        found: dict[str, set[str]] = defaultdict(set)
        for module in self.sources.modules(PLUGIN):
            for node in ast.walk(module.tree):
                for attribute in ("attr", "name", "arg", "id", "value"):
                    name = getattr(node, attribute, None)
                    if isinstance(name, str):
                        found[name.rpartition(".")[2]].add(self.sources.file(module))
        return found

    def _read(self, module: Module) -> None:
        for node in ast.walk(module.tree):
            if isinstance(node, ast.ImportFrom):
                source = self.sources.module(absolute(module, node))
                for alias in node.names:
                    self._member(source, alias.name)
            elif isinstance(node, ast.Import):
                for alias in node.names:
                    self._named(alias.name)
        self._body(module.tree, Scope(module))

    def _body(self, body: ast.AST, scope: Scope) -> None:
        """Statements of a module, class or function, and then those of what is defined there."""
        constants = _constants(scope.module.tree) | _constants(body)
        for node in own_nodes(body):
            if isinstance(node, ast.Attribute):
                self._member(self.inference.infer(node.value, scope), node.attr)
                if isinstance(node.ctx, ast.Store):
                    self._patched(ast.unparse(node))
            elif isinstance(node, ast.Call):
                self._call(node, scope)
            elif isinstance(node, ast.Constant | ast.JoinedStr):
                self._named(_folded(node, constants))
            elif isinstance(node, ast.ClassDef):
                self._class(self.sources.class_of(scope.module, node), scope)
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                is_method = isinstance(body, ast.ClassDef)
                function = Function(scope.module, node, scope.cls if is_method else None)
                self._body(node, self.inference.scope(function, None if is_method else scope))

    def _class(self, cls: Class, outer: Scope) -> None:
        for name in cls.members:
            self._member(Super(cls), name)
        self._body(cls.node, Scope(cls.module, cls, outer))

    def _call(self, node: ast.Call, scope: Scope) -> None:
        called = self.inference.infer(node.func, scope)
        names = [each for each in node.args[1:2] if isinstance(each, ast.Constant)]
        if ast.unparse(node.func) in ("getattr", "hasattr", "setattr") and names:
            self._member(self.inference.infer(node.args[0], scope), str(names[0].value))
        if isinstance(called, Class):
            self._member(Instance(called), "__init__")
            for keyword in node.keywords:
                if keyword.arg is not None and is_record(called):
                    self._member(Instance(called), keyword.arg)

    def _named(self, name: str | None) -> None:
        """A full name in a string or an import."""
        if name is not None and FULL_NAME.fullmatch(name):
            owner, _, last = name.rpartition(".")
            self._member(self.sources.find(owner), last)

    def _patched(self, name: str) -> None:
        """An assignment that may be to a name of torch."""
        if name.startswith(f"{PATCHED}."):
            owner, _, last = name.rpartition(".")
            module, definition = self.patched.module(owner), self.patched.find(name)
            if module is not None and definition is not None:
                self._add(Seam(owner, last), definition)

    def _member(self, of: Type | None, name: str) -> None:
        """Count a member of something as used, if it is upstream's."""
        owner: Module | Class | None = None
        definition = self.inference.member(of, name)
        if isinstance(of, Module):
            owner = of
        elif isinstance(of, Class | Instance | Super):
            cls = of if isinstance(of, Class) else of.of
            mro = self.sources.mro(cls)[isinstance(of, Super) :]
            for owner in mro:
                if is_upstream(owner.module) and self.sources.member(owner, name):
                    break
                if name in owner.members:
                    return  # the plugin's own
        if definition is None and isinstance(of, Instance):
            self._narrowed(of.of, name)
        if definition is None or owner is None:
            return
        self._count(owner, name, definition)

    def _narrowed(self, cls: Class, name: str) -> None:
        """A member that classes below have: somebody asked which of them it is."""
        for each in cls.module.bindings:
            below = self.sources.resolve(cls.module, each)
            is_below = isinstance(below, Class) and cls in self.sources.mro(below)
            if is_below and name in below.members:
                self._count(below, name, below.members[name])

    def _count(self, owner: Module | Class, name: str, definition: Definition) -> None:
        module = owner if isinstance(owner, Module) else owner.module
        if is_upstream(module):
            self._add(Seam(owner.name, name), definition)

    def _add(self, seam: Seam, definition: Definition) -> None:
        self.files[seam].add(self.file)
        self.definitions[seam] = definition


def is_upstream(module: Module) -> bool:
    """Whether it is vLLM's."""
    return module.name.split(".")[0] == UPSTREAM


def is_record(cls: Class) -> bool:
    """Whether a class's fields are its constructor's parameters."""
    decorators = {
        ast.unparse(each).split("(")[0].split(".")[-1] for each in cls.node.decorator_list
    }
    bases = {ast.unparse(each).split(".")[-1] for each in cls.node.bases}
    return bool(decorators & {"dataclass", "config"} or bases & {"NamedTuple", "Struct"})


@functools.cache
def _constants(body: ast.AST) -> dict[str, str]:
    """Names of strings."""
    return {
        target.id: node.value.value
        for node in own_nodes(body)
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        for target in node.targets
        if isinstance(target, ast.Name) and isinstance(node.value.value, str)
    }


def _folded(node: ast.Constant | ast.JoinedStr, constants: dict[str, str]) -> str | None:
    """A string, put together where its parts are known."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    parts = []
    for each in node.values:
        if isinstance(each, ast.FormattedValue):
            each = ast.Constant(constants.get(ast.unparse(each.value)))
        parts.append(each.value if isinstance(each, ast.Constant) else None)
    return "".join(map(str, parts)) if None not in parts else None
