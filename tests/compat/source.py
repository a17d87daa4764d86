"""Packages read as text: what their names mean, which members classes have, what signatures are.

Nothing is imported. A release that can't be imported can be read, in a second, and attributes that
only instances have are found where they are assigned.
"""

import ast
import functools
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

AT_THE_TOP = re.compile(r"^(?:class|def|async def) (\w+)", re.MULTILINE)


@dataclass(frozen=True, eq=False)
class Module:
    """A file of a package."""

    name: str
    path: Path

    def __str__(self) -> str:
        return ": module"

    @functools.cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.path.read_text())

    @functools.cached_property
    def bindings(self) -> dict[str, ast.AST]:
        """What binds each name at the top, under conditions too."""
        return _bindings(self.tree.body)


@dataclass(frozen=True, eq=False)
class Import:
    """A name that an import of a module binds."""

    module: str
    name: str | None = None


@dataclass(frozen=True, eq=False)
class Function:
    """A function or method."""

    module: Module
    node: ast.FunctionDef | ast.AsyncFunctionDef
    owner: "Class | None" = None

    @property
    def decorators(self) -> set[str]:
        return {ast.unparse(each).split("(")[0].split(".")[-1] for each in self.node.decorator_list}

    @property
    def is_property(self) -> bool:
        return any("property" in name for name in self.decorators)

    def __str__(self) -> str:
        """Names and defaults of its parameters, and what it says to return."""
        returns = f" -> {ast.unparse(self.node.returns)}" if self.node.returns else ""
        if self.is_property:
            return f": property{returns}"
        given = self.node.args
        bare = [ast.arg(each.arg) for each in given.args]
        arguments = ast.arguments(
            posonlyargs=[ast.arg(each.arg) for each in given.posonlyargs],
            args=bare,
            vararg=given.vararg and ast.arg(given.vararg.arg),
            kwonlyargs=[ast.arg(each.arg) for each in given.kwonlyargs],
            kw_defaults=given.kw_defaults,
            kwarg=given.kwarg and ast.arg(given.kwarg.arg),
            defaults=given.defaults,
        )
        kind = "async " if isinstance(self.node, ast.AsyncFunctionDef) else ""
        kind += "".join(
            f"{each} " for each in ("staticmethod", "classmethod") if each in self.decorators
        )
        return f": {kind}({ast.unparse(arguments)}){returns}"


@dataclass(frozen=True, eq=False)
class Value:
    """A variable of a module, an attribute of a class or of its instances."""

    module: Module
    annotation: ast.expr | None = None
    value: ast.expr | None = None
    method: Function | None = None
    """Whose body assigns it, where an instance has it."""

    def __str__(self) -> str:
        """Its type, as far as somebody wrote it down."""
        if self.annotation is not None:
            return f": {ast.unparse(self.annotation)}"
        if isinstance(self.value, ast.Call) and isinstance(
            self.value.func, ast.Name | ast.Attribute
        ):
            return f" = {ast.unparse(self.value.func)}(...)"
        return ""


@dataclass(frozen=True, eq=False)
class Class:
    """A class."""

    module: Module
    node: ast.ClassDef
    prefix: str = ""

    @property
    def name(self) -> str:
        return f"{self.module.name}.{self.prefix}{self.node.name}"

    def __str__(self) -> str:
        return ": class"

    @functools.cached_property
    def members(self) -> "dict[str, Definition]":
        """What its own body and its own methods define."""
        found: dict[str, Definition] = {}
        for name, node in _bindings(self.node.body).items():
            if isinstance(node, ast.ClassDef):
                found[name] = Class(self.module, node, f"{self.prefix}{self.node.name}.")
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                found[name] = Function(self.module, node, self)
            elif isinstance(node, ast.AnnAssign):
                found[name] = Value(self.module, node.annotation, node.value)
            elif isinstance(node, ast.Assign):
                found[name] = Value(self.module, None, node.value)
        for method in [each for each in found.values() if isinstance(each, Function)]:
            for name, value in _assigned_to_self(method):
                known = found.get(name, Value(self.module))
                if isinstance(known, Value) and not (known.annotation or known.value):
                    found[name] = value
        return found


Definition = Module | Class | Function | Value


def _bindings(body: list[ast.stmt]) -> dict[str, ast.AST]:
    found: dict[str, ast.AST] = {}

    def bind(name: str, node: ast.AST) -> None:
        # A fallback (`Name = None`) says less than what it stands in for.
        if name not in found or not isinstance(node, ast.Assign):
            found[name] = node

    for node in body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            bind(node.name, node)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            for alias in node.names:
                bind(alias.asname or alias.name.split(".")[0], node)
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                for name in ast.walk(target):
                    if isinstance(name, ast.Name):
                        bind(name.id, node)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            bind(node.target.id, node)
        else:
            for inner in ("body", "orelse", "handlers", "finalbody"):
                for part in getattr(node, inner, ()):
                    inside = part.body if isinstance(part, ast.ExceptHandler) else [part]
                    for name, each in _bindings(inside).items():
                        bind(name, each)
    return found


def _assigned_to_self(method: Function) -> Iterator[tuple[str, Value]]:
    if not method.node.args.args:
        return
    first = method.node.args.args[0].arg

    def name_of(target: ast.AST) -> str | None:
        is_member = isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name)
        return target.attr if is_member and target.value.id == first else None

    for node in ast.walk(method.node):
        if isinstance(node, ast.AnnAssign) and (name := name_of(node.target)):
            yield name, Value(method.module, node.annotation, node.value, method)
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                if name := name_of(target):
                    yield name, Value(method.module, None, node.value, method)
                elif isinstance(target, ast.Tuple | ast.List):
                    for name in filter(None, map(name_of, target.elts)):
                        yield name, Value(method.module, None, None, method)


@dataclass
class Sources:
    """Packages by name, each a folder.

    Nothing outside of these is known: a class of another package has no members here.
    """

    packages: dict[str, Path]
    _modules: dict[str, Module | None] = field(default_factory=dict)
    _classes: dict[ast.ClassDef, Class] = field(default_factory=dict)
    _mros: dict[Class, list[Class]] = field(default_factory=dict)
    _places: dict[str, dict[str, list[str]]] = field(default_factory=dict)
    _resolving: set[tuple[str, str]] = field(default_factory=set)

    def only(self, *packages: str) -> "Sources":
        """Some of the packages."""
        return Sources({name: self.packages[name] for name in packages})

    def modules(self, package: str) -> Iterator[Module]:
        """Every module of a package."""
        root = self.packages[package]
        for path in sorted(root.rglob("*.py")):
            parts = path.relative_to(root).with_suffix("").parts
            module = self.module(".".join((package, *parts)).removesuffix(".__init__"))
            assert module is not None
            yield module

    def file(self, module: Module) -> str:
        """Path of a module in its package."""
        return module.path.relative_to(self.packages[module.name.split(".")[0]]).as_posix()

    def module(self, name: str) -> Module | None:
        """The module of that dotted name."""
        if name not in self._modules:
            package, *parts = name.split(".")
            found = None
            if package in self.packages:
                base = self.packages[package].joinpath(*parts)
                for path in (base / "__init__.py", base.with_suffix(".py")):
                    if path.is_file() and (parts or path.name == "__init__.py"):
                        found = Module(name, path)
                        break
            self._modules[name] = found
        return self._modules[name]

    def resolve(self, module: Module, name: str) -> Definition | None:
        """What a name means in a module."""
        if (module.name, name) in self._resolving:
            return None
        self._resolving.add((module.name, name))
        try:
            node = module.bindings.get(name)
            if isinstance(node, ast.ClassDef):
                return self.class_of(module, node)
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                return Function(module, node)
            if isinstance(node, ast.AnnAssign):
                return Value(module, node.annotation, node.value)
            if isinstance(node, ast.Assign):
                simple = len(node.targets) == 1 and isinstance(node.targets[0], ast.Name)
                return Value(module, None, node.value if simple else None)
            if node is not None:
                return self.imported(module, node, name)
            for star in module.tree.body:
                if isinstance(star, ast.ImportFrom) and star.names[0].name == "*":
                    source = self.module(absolute(module, star))
                    if source and (found := self.resolve(source, name)):
                        return found
            return self.module(f"{module.name}.{name}")
        finally:
            self._resolving.discard((module.name, name))

    def class_of(self, module: Module, node: ast.ClassDef) -> Class:
        """The class that a statement defines, always the same object."""
        return self._classes.setdefault(node, Class(module, node))

    def imported(self, module: Module, node: ast.AST, name: str) -> Definition | None:
        """What an import statement of a module binds to a name."""
        assert isinstance(node, ast.Import | ast.ImportFrom)
        alias = next(a for a in node.names if (a.asname or a.name.split(".")[0]) == name)
        if isinstance(node, ast.Import):
            return self.module(alias.name if alias.asname else name)
        source = self.module(absolute(module, node))
        return self.resolve(source, alias.name) if source else None

    def find(self, dotted: str) -> Definition | None:
        """What a full name means: a module, or something in one."""
        parts = dotted.split(".")
        for cut in range(len(parts), 0, -1):
            found: Definition | None = self.module(".".join(parts[:cut]))
            if found is not None:
                for name in parts[cut:]:
                    found = self.member(found, name) if found is not None else None
                return found
        return None

    def member(self, of: Definition, name: str) -> Definition | None:
        """Member of a module or class, inherited ones too."""
        if isinstance(of, Module):
            return self.resolve(of, name)
        if isinstance(of, Class):
            return next((c.members[name] for c in self.mro(of) if name in c.members), None)
        if isinstance(of, Value) and of.value is not None and isinstance(of.value, ast.Name):
            alias = self.resolve(of.module, of.value.id)
            return self.member(alias, name) if alias else None
        return None

    def bases(self, of: Class) -> list[Class]:
        """Its bases that are known here."""
        found = []
        for base in of.node.bases:
            if isinstance(base, ast.Subscript):
                base = base.value
            each = self.named(of.module, base)
            if isinstance(each, Class):
                found.append(each)
        return found

    def named(self, module: Module, expression: ast.expr) -> Definition | None:
        """What a name, or names with dots, mean in a module."""
        if isinstance(expression, ast.Name):
            return self.resolve(module, expression.id)
        if isinstance(expression, ast.Attribute):
            of = self.named(module, expression.value)
            return self.member(of, expression.attr) if of is not None else None
        return None

    def mro(self, of: Class) -> list[Class]:
        """The class and its known bases, nearest first; a shared base comes last."""
        if of not in self._mros:
            order = [of]
            for base in self.bases(of):
                order += self.mro(base)
            self._mros[of] = [c for i, c in enumerate(order) if c not in order[i + 1 :]]
        return self._mros[of]

    def places_of(self, package: str, name: str) -> list[str]:
        """Full names of a package's classes and functions of a name, at the top of files."""
        if package not in self._places:
            places = self._places[package] = defaultdict(list)
            for module in self.modules(package):
                for found in AT_THE_TOP.findall(module.path.read_text()):
                    places[found].append(f"{module.name}.{found}")
        return self._places[package][name]


def absolute(module: Module, node: ast.ImportFrom) -> str:
    """The full name of the module that an import names, relative or not."""
    if not node.level:
        return node.module or ""
    parts = module.name.split(".")
    if module.path.name != "__init__.py":
        parts = parts[:-1]
    parts = parts[: len(parts) - (node.level - 1)]
    return ".".join([*parts, *([node.module] if node.module else [])])
