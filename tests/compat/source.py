"""Packages read as text by griffe: what their names mean and which members their classes have.

Nothing is imported, so a release that can't be imported can be read. Two things griffe does
otherwise: its loader reads all modules of a package, and this one those that names lead to, 150 of
vLLM's 2,600; and of attributes that instances have, it knows those of ``__init__`` only.
"""

import ast
import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import griffe

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
UNKNOWN = (KeyError, griffe.AliasResolutionError, griffe.CyclicAliasError)


class InstanceAttributes(griffe.Extension):
    """What methods other than ``__init__``, the only one that griffe reads, assign to `self`."""

    def on_class_members(self, *, node: Any, cls: griffe.Class, **_: Any) -> None:
        for method in node.body:
            if isinstance(method, FUNCTIONS) and method.args.args:
                for name, annotation, value in _assigned(method):
                    if name not in cls.members:
                        attribute = griffe.Attribute(
                            name,
                            annotation=griffe.safe_get_annotation(annotation, parent=cls),
                            value=griffe.safe_get_expression(value, parent=cls),
                        )
                        cls.set_member(name, attribute)


def _assigned(
    method: ast.FunctionDef | ast.AsyncFunctionDef,
) -> Iterator[tuple[str, ast.expr | None, ast.expr | None]]:
    """Name, annotation and value of what a method assigns to its first parameter."""
    for node in ast.walk(method):
        match node:
            case ast.AnnAssign():
                targets = [(node.target, node.annotation, node.value)]
            case ast.Assign(targets=[ast.Tuple(elts=elements)]):
                targets = [(each, None, None) for each in elements]
            case ast.Assign():
                targets = [(each, None, node.value) for each in node.targets]
            case _:
                continue
        for target, annotation, value in targets:
            match target:
                case ast.Attribute(value=ast.Name(id=owner)) if owner == method.args.args[0].arg:
                    yield target.attr, annotation, value


class Sources(griffe.ModulesCollection):
    """Packages by name, each a folder, whose modules are read when a name leads to them.

    Nothing outside of them is known.
    """

    def __init__(self, packages: Mapping[str, Path]) -> None:
        super().__init__()
        self.packages = packages
        self._extensions = griffe.Extensions(InstanceAttributes())
        self._modules: dict[str, griffe.Module | None] = {}
        self._mros: dict[str, list[griffe.Class]] = {}

    def get_member(self, key: str | Sequence[str]) -> Any:
        """What griffe asks for, by its full name, to follow imports and base classes."""
        parts = key.split(".") if isinstance(key, str) else key
        for end in range(1, len(parts) + 1):
            if self.module(".".join(parts[:end])) is None:
                break
        try:
            return super().get_member(parts)
        except KeyError:
            return self._imported_with_all(".".join(parts[:-1]), parts[-1])

    def _imported_with_all(self, module: str, name: str) -> Any:
        """What ``from ... import *`` at the top of a module gives it, which griffe leaves out."""
        found = self.module(module)
        aliases = found.members.values() if found is not None and name[0] != "_" else ()
        for alias in list(aliases):
            if alias.is_alias and alias.wildcard:
                with contextlib.suppress(*UNKNOWN):
                    return self.get_member(f"{alias.wildcard}.{name}")
        raise KeyError(name)

    def module(self, name: str) -> griffe.Module | None:
        if name not in self._modules:
            path = self.path_of(name)
            self._modules[name] = None if path is None else self._read(name, path)
        return self._modules[name]

    def path_of(self, name: str) -> Path | None:
        package, *parts = name.split(".")
        if package not in self.packages:
            return None
        base = self.packages[package].joinpath(*parts)
        paths = [base / "__init__.py", *([base.with_suffix(".py")] if parts else [])]
        return next(filter(Path.is_file, paths), None)

    def _read(self, name: str, path: Path) -> griffe.Module | None:
        above, _, last = name.rpartition(".")
        parent = self.module(above) if above else None
        if above and parent is None:
            return None
        found = griffe.visit(
            last,
            path,
            path.read_text(),
            extensions=self._extensions,
            parent=parent,
            modules_collection=self,
        )
        if parent is None:
            self.members[name] = found
        elif last not in parent.members or _target(parent.members[last]) == name:
            parent.set_member(last, found)
        return found

    def find(self, name: str) -> griffe.Object | None:
        """What a full name means: a module, or something in one, inherited members too."""
        if (module := self.module(name)) is not None:
            return module
        above, _, last = name.rpartition(".")
        owner = self.find(above) if above else None
        return self.member(owner, last) if owner is not None else None

    def member(self, of: griffe.Object, name: str) -> griffe.Object | None:
        """A member of a module or class, inherited ones too."""
        for owner in self.mro(of) if isinstance(of, griffe.Class) else [of]:
            try:
                path = f"{owner.path}.{name}"
                found = owner.members[name] if name in owner.members else self.get_member(path)
                return found.final_target if found.is_alias else found
            except UNKNOWN:
                continue
        return None

    def mro(self, of: griffe.Class) -> list[griffe.Class]:
        """The class and those of its bases that are known here, in Python's order."""
        if of.path not in self._mros:
            try:
                self._mros[of.path] = [of, *of.mro()]
            except ValueError:  # no order that Python would take
                self._mros[of.path] = [of]
        return self._mros[of.path]


def modules(package: str, folder: Path) -> Iterator[tuple[str, Path]]:
    """Full names and files of a package's modules."""
    for path in sorted(folder.rglob("*.py")):
        parts = path.relative_to(folder).with_suffix("").parts
        yield ".".join((package, *parts)).removesuffix(".__init__"), path


def signature(of: griffe.Object) -> str:
    """Names and defaults of parameters and what is returned, or a type where somebody wrote one."""
    if isinstance(of, griffe.Function):
        parameters = (
            griffe.Parameter(p.name, kind=p.kind, default=p.default) for p in of.parameters
        )
        bare = griffe.Function("", parameters=griffe.Parameters(*parameters), returns=of.returns)
        kinds = [each for each in ("async", "staticmethod", "classmethod") if each in of.labels]
        return f": {' '.join([*kinds, bare.signature()])}"
    if isinstance(of, griffe.Attribute):
        if "property" in of.labels:
            return f": property -> {of.annotation}" if of.annotation else ": property"
        if of.annotation is not None:
            return f": {of.annotation}"
        is_call = isinstance(of.value, griffe.ExprCall)
        return f" = {of.value.function}(...)" if is_call else ""
    return f": {of.kind.value}"


def _target(member: griffe.Object | griffe.Alias) -> str:
    return member.target_path if isinstance(member, griffe.Alias) else ""
