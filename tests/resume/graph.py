"""Which files of the tree lead to which: imports, names of modules and of files in strings."""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

ON_PATH = ("emulator.", "examples.", "benchmarks.", "scripts.")
"""Folders whose modules are imported by their names alone."""
TOLD = re.compile(
    r'^ *r?"""(?s:.*?)"""|(?P<data>"""(?s:.*?)""")|(?<!\S)#.*',
    re.MULTILINE,
)
"""Docstrings and comments, which lead nowhere; what other long strings hold does."""
IMPORTED = re.compile(r"^ *(?:from|import) ([\w.]+)(?: import (\([^)]*\)|.*))?", re.MULTILINE)
NAMED = re.compile(r"[\w/-]*[./][\w./:-]*\w")
STRING = re.compile(r'"([^"\n]*)"')
ENTRY_POINT = re.compile(r"= ([\w.]+):\w+")
DATA = ("tests/", "examples/")
"""Where a folder without code is one that tests name: of golden files, say."""
LEAD_NOWHERE = (
    "tests/conftest.py",  # what it imports is no matter of every test
    "tests/compat/test_releases.py",  # environments that take half an hour are for make test-all
    "tests/mutants/planted.py",  # names what it does not run, and so does the next
    "tests/mutants/suites.py",
)


class Graph:
    """Edges between files, each given by its path from the root.

    Packages do not lead to the modules that they hold: an import of one module isn't one of all.
    What imports vLLM leads to the plugin's entry points, which vLLM loads.
    """

    def __init__(self, root: Path, files: Iterable[str]) -> None:
        self.files = {file for file in files if (root / file).is_file()}
        self.modules: dict[str, set[str]] = defaultdict(set)
        self.by_name: dict[str, set[str]] = defaultdict(set)
        code = {file for file in self.files if file.endswith(".py")}
        folders = {parent.as_posix() for file in code for parent in Path(file).parents}
        for file in self.files:
            folder, _, name = file.rpartition("/")
            self.by_name[name].add(file)
            if file in code:
                parts = file.removesuffix(".py").split("/")
                parts = parts[:-1] if parts[-1] in ("__init__", "__main__") else parts
                self.modules[".".join(parts)].add(file)
            elif file.startswith(DATA) and folder not in folders:
                self.by_name[folder.rpartition("/")[2]].add(file)  # by the name of the folder
        setup = (root / "setup.py").read_text() if "setup.py" in self.files else ""
        self.plugin = {file for name in ENTRY_POINT.findall(setup) for file in self._module(name)}
        self.edges = {
            file: set(self._leads(file, (root / file).read_text())) - {file}
            for file in code
            if file not in LEAD_NOWHERE
        }

    def _leads(self, file: str, text: str) -> Iterator[str]:
        if Path(file).name.startswith("test_"):
            conftests = {f"{parent.as_posix()}/conftest.py" for parent in Path(file).parents}
            yield from conftests & self.files
        text = TOLD.sub(lambda found: found["data"] or "", text)
        words = {*NAMED.findall(text), *STRING.findall(text)}
        for module, names in IMPORTED.findall(text):
            for name in re.findall(r"\w+", names) or [""]:
                for folder in ("", *ON_PATH):
                    yield from self._module(f"{folder}{module}.{name}")
            words |= {"vllm"} & {module.partition(".")[0]}
        for word in words:
            yield from self._named(word.partition("::")[0], file)
        if "vllm" in words and not file.startswith("vllm_npu_prep/"):
            yield from self.plugin

    def _named(self, text: str, file: str) -> set[str]:
        """Files that a string means: a path, the name of a file, or a module's with a dot."""
        if text in self.files:
            return {text}
        same = self.by_name.get(text.rpartition("/")[2], set())
        beside = {each for each in same if Path(each).parent == Path(file).parent}
        if beside or len(same) == 1 or (same and not Path(text).suffix):
            return beside or same
        name = text.replace(":", ".")
        return self._module(name) | self._module(f"emulator.{name}") if "." in text else set()

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
