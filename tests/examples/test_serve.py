"""examples/serve.py: what it asks, what it refuses, and that it ends with an answer."""

import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
import serve

from tests.helpers.waiting import LIMIT
from tests.server.process import ROOT, free_port


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (["--model", "other"], "--speculate eagle has a drafter for the demo model only"),
        (["--vision"], "--vision: the model that sees has no drafter for eagle"),
    ],
)
def test_drafters_of_the_demo_model_are_for_no_other(monkeypatch, capsys, flags, why):
    monkeypatch.setattr(sys, "argv", ["serve.py", *flags, "--speculate", "eagle"])
    with pytest.raises(SystemExit):
        serve.arguments()
    assert why in capsys.readouterr().err


def test_once_it_prints_the_answer_of_a_real_model_and_exits(real_model):
    command = [sys.executable, "examples/serve.py", "--once", "--port", str(free_port())]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT)
    assert run.returncode == 0, run.stderr[-3000:]
    assert "user:      What is the capital of France?\n" in run.stdout
    assert "assistant: The capital of France is Paris.\n" in run.stdout
