"""The worked examples: facts of the reference documents."""

import json
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[1] / "worked_examples"
NAMES = ("all-prefill", "chunked-prefill", "decode-only", "mixed-200-tokens")


def path_of(name: str) -> Path:
    return FOLDER / f"{name}.json"


def load(name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Scenario and expected variables."""
    data = json.loads(path_of(name).read_text())
    return data["scenario"], data["expected"]


def first_masked(rows: list[list[int]]) -> list[int]:
    """First masked column of each row, the width where there is none."""
    return [row.index(1) if 1 in row else len(row) for row in rows]
