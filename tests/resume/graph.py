"""Which files of the tree lead to which: by imports, and by full names of modules in strings."""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

ON_PATH = re.compile(r"^(emulator|examples|benchmarks|scripts)\.")
"""Folders whose modules are imported by their names alone."""
TOLD = re.compile(
    r'^ *r?"""(?s:.*?)"""|(?P<data>"""(?s:.*?)""")|(?<!\S)#.*',
    re.MULTILINE,
)
"""Docstrings and comments, which lead nowhere; what other long strings hold does."""
IMPORTED = re.compile(r"^ *(?:from|import) ([\w.]+)(?: import (\([^)]*\)|.*))?", re.MULTILINE)
NAMED = re.compile(r"\b(?:vllm_npu_prep|tests)(?:\.\w+)+")
PLUGIN = {"vllm_npu_prep/platform.py", "vllm_npu_prep/worker.py"}
"""What vLLM loads: whatever imports vLLM leads there."""
LEAD_NOWHERE = (
    "tests/conftest.py",  # what it imports is no matter of every test
    "tests/compat/test_releases.py",  # environments that take half an hour are for make test-all
)


class Graph:
    """Edges between files, each given by its path from the root.

    Packages do not lead to the modules that they hold: an import of one module isn't one of all.
    """

    def __init__(self, root: Path, files: Iterable[str]) -> None:
        self.files = {file for file in files if (root / file).is_file()}
        code = {file for file in self.files if file.endswith(".py")}
        self.modules = {
            ON_PATH.sub("", re.sub(r"(/__init__)?\.py$", "", file).replace("/", ".")): file
            for file in sorted(code)
        }
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
        named, imported = NAMED.findall(text), IMPORTED.findall(text)
        for module, names in imported:
            named += [f"{module}.{name}" for name in re.findall(r"\w+", names) or [""]]
        for name in named:
            yield from self._module(ON_PATH.sub("", name))
        if not file.startswith("vllm_npu_prep/") and any(
            f"{module}.".startswith("vllm.") for module, _ in imported
        ):
            yield from PLUGIN & self.files

    def _module(self, name: str) -> set[str]:
        """The file of the longest beginning of a name that is a module."""
        while name and name not in self.modules:
            name = name.rpartition(".")[0]
        return {self.modules[name]} if name else set()

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
