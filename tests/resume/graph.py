"""Which files of the tree lead to which: imports, names of modules and of files in strings."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

ON_PATH = ("emulator", "examples", "benchmarks", "scripts")
"""Folders whose modules are imported by their names alone."""
STARTS_ENGINES = re.compile(r"vllm(\.(entrypoints|engine|v1\.engine|v1\.executor)\b.*|\.LLM)?")
"""Imports, and whole strings, behind which vLLM loads the plugin by its entry points."""
NAMED = re.compile(r"[\w/-]*[./][\w./:-]*\w")
ENTRY_POINT = re.compile(r"= ([\w.]+:\w+)")
DATA = ("tests/", "examples/")
"""Where a folder without code is one that tests name: of golden files, say."""
LISTS = {"tests/mutants/planted.py", "tests/mutants/suites.py"}
"""Their strings name files and tests that they do not run."""


class Graph:
    """Edges between files, each given by its path from the root.

    A conftest leads nowhere: what its fixtures use is an edge of the tests that ask for them. Nor
    do packages lead to the modules that they hold: an import of one module isn't one of all.
    """

    def __init__(self, root: Path, files: Iterable[str]) -> None:
        self.files = {file for file in files if (root / file).is_file()}
        self.modules: dict[str, set[str]] = defaultdict(set)
        self.by_name: dict[str, set[str]] = defaultdict(set)
        code = sorted(file for file in self.files if file.endswith(".py"))
        folders = {parent.as_posix() for file in code for parent in Path(file).parents}
        for file in self.files:
            folder, _, name = file.rpartition("/")
            self.by_name[name].add(file)
            if name.endswith(".py"):
                parts = file.removesuffix(".py").split("/")
                parts = parts[:-1] if parts[-1] in ("__init__", "__main__") else parts
                self.modules[".".join(parts)].add(file)
                if parts[0] in ON_PATH:
                    self.modules[".".join(parts[1:])].add(file)
            elif file.startswith(DATA) and folder not in folders:
                self.by_name[folder.rpartition("/")[2]].add(file)  # by the name of the folder
        setup = (root / "setup.py").read_text() if "setup.py" in self.files else ""
        points = ENTRY_POINT.findall(setup)
        self.plugin = {file for each in points for file in self._module(each.replace(":", "."))}
        self.fixtures: dict[str, dict[str, set[str]]] = {}
        self.edges: dict[str, set[str]] = {}
        for file in sorted(code, key=lambda file: not file.endswith("conftest.py")):
            self._read(file, ast.parse((root / file).read_bytes()))

    def _read(self, file: str, tree: ast.Module) -> None:
        """Note where a file leads; conftests are read first."""
        if file.endswith("conftest.py"):
            self.fixtures[file] = self._fixtures(file, tree)
        elif file not in LISTS:
            nodes = list(ast.walk(tree))
            self.edges[file] = set(self._leads(nodes, file)) - {file}
            if Path(file).name.startswith("test_"):
                asked = {node.arg for node in nodes if isinstance(node, ast.arg)}
                for parent in Path(file).parents:
                    conftest = (parent / "conftest.py").as_posix()
                    of_conftest = self.fixtures.get(conftest, {})
                    self.edges[file] |= {conftest} & set(self.fixtures)
                    self.edges[file].update(*(of_conftest[each] for each in asked & {*of_conftest}))

    def _fixtures(self, file: str, tree: ast.Module) -> dict[str, set[str]]:
        """What each function of a conftest uses."""
        imported = {
            alias.asname or alias.name: self._module(f"{node.module}.{alias.name}")
            for node in tree.body
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
        }
        found = {}
        for node in tree.body:
            if isinstance(node, ast.FunctionDef):
                nodes = list(ast.walk(node))
                found[node.name] = set(self._leads(nodes, file))
                names = {each.id for each in nodes if isinstance(each, ast.Name)}
                found[node.name].update(*(imported[each] for each in names & set(imported)))
        return found

    def _leads(self, nodes: list[ast.AST], file: str) -> Iterator[str]:
        starts = () if file.startswith("vllm_npu_prep/") else self.plugin
        statements = (node.value for node in nodes if isinstance(node, ast.Expr))
        told = {id(each) for each in statements if isinstance(each, ast.Constant)}  # docstrings
        for node in nodes:
            names: list[str] = []
            match node:
                case ast.Import():
                    names = [alias.name for alias in node.names]
                case ast.ImportFrom():
                    package = file.split("/")[: -node.level] if node.level else []
                    module = ".".join([*package, *(node.module or "").split(".")]).strip(".")
                    names = [f"{module}.{alias.name}" for alias in node.names]
                case ast.Constant(value=str(text)) if id(node) not in told:
                    yield from starts if text == "vllm" else ()
                    for each in {text, *NAMED.findall(text)}:
                        yield from self._named(each.partition("::")[0], file)
            for name in names:
                yield from self._module(name)
                yield from starts if STARTS_ENGINES.fullmatch(name) else ()

    def _named(self, text: str, file: str) -> set[str]:
        """Files that a string means: a path, the name of a file, or a module's with a dot."""
        if text in self.files:
            return {text}
        same = self.by_name.get(text.rpartition("/")[2], set())
        beside = {each for each in same if Path(each).parent == Path(file).parent}
        if beside or len(same) == 1 or (same and not Path(text).suffix):
            return beside or same
        return self._module(text.replace(":", ".")) if "." in text else set()

    def _module(self, name: str) -> set[str]:
        """Files of the longest beginning of a name that is a module."""
        while name and name not in self.modules:
            name = name.rpartition(".")[0]
        return self.modules[name] if name else set()

    def distances(self, changed: Iterable[str]) -> dict[str, int]:
        """How many steps lead from each file to one of those that changed."""
        before = defaultdict(set)
        for file, leads in self.edges.items():
            for each in leads:
                before[each].add(file)
        found = dict.fromkeys(changed, 0)
        todo = list(found)
        for file in todo:
            for each in before[file] - set(found):
                found[each] = found[file] + 1
                todo.append(each)
        return found
