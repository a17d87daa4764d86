"""Which classes the plugin's expressions are objects of: what mypy knows, by their places.

mypy is called as a library, of which only the pinned version is promised to be like this. Its
``--export-ref-info`` needs less of it, but leaves out unions and what `getattr` looks at.
"""

import ast
import io
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from mypy import build
from mypy.config_parser import parse_config_file
from mypy.inspections import find_by_location
from mypy.modulefinder import BuildSource
from mypy.nodes import Expression, MypyFile, RefExpr, TypeInfo
from mypy.options import Options
from mypy.types import (
    FunctionLike,
    Instance,
    LiteralType,
    TupleType,
    Type,
    TypeType,
    TypeVarType,
    UnionType,
    get_proper_type,
)

from tests.compat.source import modules

ROOT = Path(__file__).parents[2]
SETTINGS = ROOT / "pyproject.toml"
CACHE = Path(os.environ.get("MYPY_CACHE_DIR", ROOT / ".mypy_cache"))
"""Where ``make lint`` has put what mypy knows of vLLM."""


class Types:
    """Types of a package's expressions, found as ``make lint`` finds them."""

    def __init__(self, package: str, folder: Path) -> None:
        options, said = Options(), io.StringIO()
        parse_config_file(options, lambda: None, str(SETTINGS), said, said)
        options.python_executable = sys.executable
        options.export_types = options.preserve_asts = True
        options.cache_dir = str(CACHE)
        sources = [  # with their texts: mypy forgets expressions of files that haven't changed
            BuildSource(str(path), name, path.read_text())
            for name, path in modules(package, folder)
        ]
        self._result = build.build(sources, options)

    def owners(self, module: str, node: ast.expr) -> Iterator[str]:
        """Full names of the module or the classes whose member an attribute of `node` may be."""
        match self._at(module, node):
            case RefExpr(node=MypyFile(fullname=name) | TypeInfo(fullname=name)):
                yield name
            case Expression() as found:
                yield from _classes(self._result.types.get(found))

    def constructed(self, module: str, function: ast.expr) -> str | None:
        """Full name of the class that a call makes an object of."""
        match self._at(module, function):
            case RefExpr(node=TypeInfo(fullname=name)):
                return name
            case Expression() as found:
                called = get_proper_type(self._result.types.get(found))
                if isinstance(called, FunctionLike) and called.is_type_obj():
                    return called.type_object().fullname
        return None

    def _at(self, module: str, node: ast.expr) -> Expression | None:
        tree = self._result.files[module]
        end = node.end_lineno, node.end_col_offset
        return find_by_location(tree, node.lineno, node.col_offset, *end)


def _classes(of: Type | None) -> Iterator[str]:
    match get_proper_type(of):
        case Instance(type=cls):
            yield cls.fullname
        case UnionType(items=items):
            for each in items:
                yield from _classes(each)
        case TypeType(item=inside) | TypeVarType(upper_bound=inside):
            yield from _classes(inside)
        case TupleType(partial_fallback=inside) | LiteralType(fallback=inside):
            yield from _classes(inside)
        case FunctionLike() as function if function.is_type_obj():
            yield function.type_object().fullname
