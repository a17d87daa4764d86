"""What is kept of the matrix, a JSON object a line in `RESULTS`; four kinds of line::

    {"test": "tests/engine/test_v2.py::test_a[1]", "outcome": "passed", "commit": "4f2a91c0de",
     "package": "1c2d3e4f5a", "release": "0.32.0", "device": "CPU fallback", "runner": "V2",
     "model": "Qwen3ForCausalLM", "features": ["without graphs", "float32"]}
    {"model": "Qwen3ForCausalLM", "device": "CPU fallback", "config": {"hidden_size": 64}}
    {"model": "Qwen3ForCausalLM", "release": "0.32.0", "device": "emulated NPU", "runner": "V1",
     "answers": {"float32": {"refused": ["dtype"]}, "LoRA": {}}}
    {"tried": "Model does not support ...", "model": "Qwen3ForCausalLM", "feature": "EAGLE-3",
     "release": "0.32.0", "device": "CPU fallback", "runner": "V1", "commit": "4f2a91c0de",
     "package": "1c2d3e4f5a"}

The first is an engine that a test started; ``package`` is the tree of `vllm_npu_prep` then. Only as
many are kept as fill the cells. The second has the model, for start-up to be asked; the third has
what it said to a model with each feature. The fourth is a feature that was tried alone once, and
what the engine said that failed with it.
"""

import ast
import functools
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.matrix.cells import MTP
from tests.matrix.collect import ROOT

RESULTS = ROOT / "tests" / "results" / "matrix.jsonl"
Table = tuple[str, str, str]
"""Release, device and runner."""
Cell = tuple[Table, str, str]
"""A table, a model of it and a feature."""


def table_of(line: dict[str, Any]) -> Table:
    return line["release"], line["device"], line["runner"]


def cells_of(line: dict[str, Any]) -> Iterator[Cell]:
    """Cells that an engine fills."""
    return ((table_of(line), line["model"], feature) for feature in line["features"])


@dataclass
class Matrix:
    """Everything that is known: lines of engines, the newest last, and what is beside them.

    Of configs those with MTP layers are kept, if an engine used them; answers are those of
    `tests.matrix.asked.answer`, by feature.
    """

    engines: list[dict[str, Any]] = field(default_factory=list)
    configs: dict[tuple[str, str], dict[str, Any]] = field(default_factory=dict)
    answers: dict[tuple[Table, str], dict[str, dict[str, Any]]] = field(default_factory=dict)
    tried: dict[Cell, dict[str, Any]] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path = RESULTS) -> "Matrix":
        """The results that are committed."""
        matrix = cls()
        for line in map(json.loads, path.read_text().splitlines() if path.exists() else ()):
            if "test" in line:
                matrix.engines.append(line)
            elif "tried" in line:
                matrix.tried[table_of(line), line["model"], line["feature"]] = line
            elif "config" in line:
                matrix.configs[line["model"], line["device"]] = line["config"]
            else:
                matrix.answers[table_of(line), line["model"]] = line["answers"]
        return matrix

    def write(self, path: Path = RESULTS) -> None:
        """Write them, in an order that doesn't change with how they came about."""
        lines = [
            *sorted(self.engines, key=lambda line: (line["test"], json.dumps(line))),
            *(
                {"model": model, "device": device, "config": config}
                for (model, device), config in sorted(self.configs.items())
            ),
            *(
                {
                    "model": model,
                    **dict(zip(("release", "device", "runner"), table)),
                    "answers": answers,
                }
                for (table, model), answers in sorted(self.answers.items())
            ),
            *(line for _, line in sorted(self.tried.items(), key=lambda each: each[0])),
        ]
        new = path.with_suffix(".new")
        new.write_text("".join(f"{json.dumps(line, ensure_ascii=False)}\n" for line in lines))
        new.replace(path)

    def tables(self) -> list[Table]:
        """Tables that have engines."""
        return sorted({table_of(line) for line in self.engines})

    def models(self, table: Table) -> list[str]:
        """Rows of a table: all models of its release."""
        return sorted({line["model"] for line in self.engines if line["release"] == table[0]})

    def filled(self) -> dict[Cell, dict[str, Any]]:
        """The line that fills each cell: an engine whose test passed, before one that failed."""
        found: dict[Cell, dict[str, Any]] = {}
        for line in sorted(
            self.engines,
            key=lambda line: (line["outcome"] != "passed", -len(line["features"]), line["test"]),
        ):
            for cell in cells_of(line):
                found.setdefault(cell, line)
        return found

    def merge(self, collected: Iterable[dict[str, Any]], package: str) -> None:
        """Take in what was collected, the newest last, and keep as many engines as fill the cells.

        Engines of the package that is checked out come before older ones.
        """
        latest: dict[str, dict[str, Any]] = {}
        collected = list(collected)
        # A test may start another engine than it did when it failed
        ended = {(each["test"], table_of(each)): each["outcome"] for each in collected}
        for line in (*self.engines, *collected):
            config = line.get("config")
            line = {name: value for name, value in line.items() if name != "config"}
            if config and "quantization_config" not in config:
                key = line["model"], line["device"]
                if MTP in line["features"]:  # what lacks such layers is refused with MTP
                    self.configs[key] = config
                named = config.get("architectures") == [line["model"]]
                known = self.configs.get(key)
                if known is None or (named and known.get("architectures") != [line["model"]]):
                    self.configs[key] = config
            names = ("test", "release", "device", "runner", "model", "features")
            latest[json.dumps([line[name] for name in names])] = line
        exist = [
            line
            for line in latest.values()
            if exists(line["test"])
            and (
                line["outcome"] == "passed" or ended.get((line["test"], table_of(line))) != "passed"
            )
        ]
        kept_before = {json.dumps(line) for line in self.engines}
        order = sorted(
            exist,
            key=lambda line: (
                line["outcome"] != "passed",
                line["package"] != package,
                json.dumps(line) not in kept_before,
                -len(line["features"]),
                line["test"],
            ),
        )
        self.engines, found = [], set()
        for line in order:
            cells = set(cells_of(line))
            if line["outcome"] != "passed" or cells - found:
                self.engines.append(line)
                found |= cells
        self.tried = {cell: line for cell, line in self.tried.items() if cell not in found}
        used = {line["model"] for line in self.engines}
        self.configs = {key: config for key, config in self.configs.items() if key[0] in used}

    def stale(self, package: str) -> set[str]:
        """Tests whose cells are of another package than this, or that failed."""
        return {
            line["test"]
            for line in self.engines
            if line["package"] != package or line["outcome"] != "passed"
        }


@functools.cache
def _functions(file: Path) -> set[str]:
    """Tests of a file by name; those of classes come with the class."""
    if not file.exists():
        return set()
    found = set()
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.ClassDef):
            found |= {f"{node.name}::{each.name}" for each in node.body if hasattr(each, "name")}
    return found


def exists(test: str) -> bool:
    """Whether there is a test's function. Which combinations it has, only its collection tells."""
    file, _, rest = test.partition("::")
    return rest.partition("[")[0] in _functions(ROOT / file)


def collected_in(path: Path) -> list[dict[str, Any]]:
    """Lines that the plugin wrote; one that a killed process tore is left out."""
    found = []
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            found.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return found
