"""Golden outputs of explain: ``python -m tests.helpers.golden`` writes them anew."""

import contextlib
import io
import os
from pathlib import Path
from unittest import mock

from tests.helpers import worked_examples
from vllm_npu_prep.cli import main

FOLDER = Path(__file__).parents[1] / "golden"
WIDTH = 100


def explain_output(*args: str, width: int = WIDTH, **environment: str) -> str:
    """What the command prints on a terminal of a width."""
    out = io.StringIO()
    settings = {"COLUMNS": str(width), "NO_COLOR": "1", **environment}
    with mock.patch.dict(os.environ, settings), contextlib.redirect_stdout(out):
        assert main(["explain", *args]) == 0
    return out.getvalue()


def golden_path(name: str) -> Path:
    return FOLDER / f"{name}.txt"


if __name__ == "__main__":
    for name in worked_examples.NAMES:
        golden_path(name).write_text(explain_output(str(worked_examples.path_of(name))))
