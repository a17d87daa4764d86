"""What is kept of the matrix, a JSON object a line in `RESULTS`; three kinds of line::

    {"test": "tests/engine/test_v2.py::test_a[1]", "outcome": "passed", "commit": "4f2a91c0de",
     "package": "1c2d3e4f5a", "release": "0.32.0", "device": "CPU fallback", "runner": "V2",
     "model": "Qwen3ForCausalLM", "features": ["without graphs", "float32"]}
    {"model": "Qwen3ForCausalLM", "release": "0.32.0", "device": "emulated NPU", "runner": "V1",
     "answers": {"float32": {"refused": ["dtype"]}, "LoRA": {}}}
    {"tried": "Model does not support ...", "model": "Qwen3ForCausalLM", "feature": "EAGLE-3",
     "release": "0.32.0", "device": "CPU fallback", "runner": "V1", "commit": "4f2a91c0de",
     "package": "1c2d3e4f5a"}

The first is an engine that a test started; ``package`` is the tree of `vllm_npu_prep` then. Only as
many are kept as fill the cells. The second has what start-up said to a model with each feature. The
third is a feature that was tried alone once, and what the engine said that failed with it.
"""

import json
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.matrix.collect import ROOT

RESULTS = ROOT / "tests" / "results" / "matrix.jsonl"
Table = tuple[str, str, str]
"""Release, device and runner."""
Cell = tuple[Table, str, str]
"""A table, a model of it and a feature."""
ENGINE = ("test", "release", "device", "runner", "model", "features")
"""What tells engines apart: a test may start several, and other ones than it did once."""
KEPT = (*ENGINE, "outcome", "commit", "package")


def table_of(line: dict[str, Any]) -> Table:
    return line["release"], line["device"], line["runner"]


def cells_of(line: dict[str, Any]) -> set[Cell]:
    """Cells that an engine fills."""
    return {(table_of(line), line["model"], feature) for feature in line["features"]}


def lines_of(path: Path) -> list[dict[str, Any]]:
    """Lines of a file; one that a killed process tore is left out."""
    found = []
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            found.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return found


@dataclass
class Matrix:
    """Everything that is known; answers are those of `tests.matrix.asked.answer`, by feature."""

    engines: list[dict[str, Any]] = field(default_factory=list)
    answers: dict[tuple[Table, str], dict[str, dict[str, Any]]] = field(default_factory=dict)
    tried: dict[Cell, dict[str, Any]] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path = RESULTS) -> "Matrix":
        matrix = cls()
        for line in lines_of(path):
            if "test" in line:
                matrix.engines.append(line)
            elif "tried" in line:
                matrix.tried[table_of(line), line["model"], line["feature"]] = line
            else:
                matrix.answers[table_of(line), line["model"]] = line["answers"]
        return matrix

    def write(self, path: Path = RESULTS) -> None:
        """Write them, in an order that doesn't change with how they came about."""
        lines = sorted(self.engines, key=lambda line: (line["test"], json.dumps(line)))
        for (table, model), answers in sorted(self.answers.items()):
            names = dict(zip(("release", "device", "runner"), table))
            lines.append({"model": model, **names, "answers": answers})
        lines += [line for _, line in sorted(self.tried.items())]
        new = path.with_suffix(".new")
        new.write_text("".join(f"{json.dumps(line, ensure_ascii=False)}\n" for line in lines))
        new.replace(path)

    def tables(self) -> dict[Table, list[str]]:
        """Tables that have engines, and their rows: all models of a release."""
        return {
            table: sorted({each["model"] for each in self.engines if each["release"] == table[0]})
            for table in sorted({table_of(line) for line in self.engines})
        }

    def filled(self) -> dict[Cell, str]:
        """How the test of each cell ended, of any if one passed."""
        ended = sorted(self.engines, key=lambda line: line["outcome"] == "passed")
        return {cell: line["outcome"] for line in ended for cell in cells_of(line)}

    def merge(self, collected: list[dict[str, Any]], package: str, tests: Collection[str]) -> None:
        """Take in what was collected, the newest last, and keep as many engines as fill the cells.

        Engines of the package that is checked out come before older ones. Those of tests that are
        none of `tests` any longer are dropped.
        """
        latest = {
            json.dumps([line[name] for name in ENGINE]): {name: line[name] for name in KEPT}
            for line in (*self.engines, *collected)
            if line["test"] in tests
        }
        ended = {(line["test"], table_of(line)): line["outcome"] for line in collected}
        order = sorted(
            latest.values(),
            key=lambda line: (
                line["outcome"] != "passed",
                line["package"] != package,
                line not in self.engines,
                -len(line["features"]),
                line["test"],
            ),
        )
        self.engines, found = [], set[Cell]()
        for line in order:
            if line["outcome"] == "passed":
                is_needed = not cells_of(line) <= found
            else:  # a test may start another engine than it did when it failed
                is_needed = ended.get((line["test"], table_of(line))) != "passed"
            if is_needed:
                self.engines.append(line)
                found |= cells_of(line)
        self.tried = {cell: line for cell, line in self.tried.items() if cell not in found}

    def stale(self, package: str) -> set[str]:
        """Tests whose cells are of another package than this, or that failed."""
        current = ("passed", package)
        return {
            line["test"] for line in self.engines if (line["outcome"], line["package"]) != current
        }
