"""Which modules of the plugin import which, and when."""

import ast
from collections.abc import Iterator
from enum import Enum
from functools import cache
from graphlib import CycleError, TopologicalSorter

NAME = "vllm_npu_prep"

Graph = dict[str, set[str]]
"""Modules by name, without the package's, and those that each imports."""


class When(Enum):
    """When a module imports another."""

    IMPORTED = "as it is imported"
    CALLED = "as one of its functions is called"
    ANNOTATED = "for annotations only, under TYPE_CHECKING"


def module_of(path: str) -> str:
    """Name of a file's module, without the package's; empty for the package itself."""
    return path.removesuffix(".py").removesuffix("__init__").removesuffix("/").replace("/", ".")


@cache
def imports(tree: ast.AST) -> tuple[tuple[str, str, When], ...]:
    """Module, name in it (empty for the module itself) and time of each import of a file."""
    return tuple(_imports(tree, When.IMPORTED))


def _imports(tree: ast.AST, when: When) -> Iterator[tuple[str, str, When]]:
    for node in ast.iter_child_nodes(tree):
        then = when
        if isinstance(node, ast.Import):
            yield from ((alias.name, "", when) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((node.module or "", alias.name, when) for alias in node.names)
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            then = When.ANNOTATED
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and when is When.IMPORTED:
            then = When.CALLED
        yield from _imports(node, then)


def imported_by(trees: dict[str, ast.AST], *times: When) -> Graph:
    """Modules of the plugin that each of its modules imports at one of these times."""
    graph: Graph = {}
    for module, tree in trees.items():
        graph[module] = set()
        for dotted, name, when in imports(tree):
            if when not in times or (dotted + ".").partition(".")[0] != NAME:
                continue
            found = dotted.removeprefix(NAME).removeprefix(".")
            inner = f"{found}.{name}".lstrip(".")
            graph[module] |= {inner if inner in trees else found} - {module}
    return graph


def with_packages(graph: Graph) -> Graph:
    """The graph with the packages that are imported before their modules.

    Those that the importing module is in are being imported already, and left out.
    """
    return {
        module: used
        | {
            each[:dot]
            for each in used
            for dot, letter in enumerate(each)
            if letter == "." and not f"{module}.".startswith(each[: dot + 1])
        }
        for module, used in graph.items()
    }


def circle(graph: Graph) -> list[str]:
    """Modules of a circle, one after the other; empty if there is none."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return error.args[1]
    return []
