"""``vllm-npu-prep emulate`` hands over to the emulator's own command, where that is installed."""

import subprocess
import sys

import pytest

from tests.helpers.emulator import why_no_emulator
from vllm_npu_prep import cli

EMULATE = [sys.executable, "-m", "vllm_npu_prep.cli", "emulate"]


def test_without_the_emulator_it_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "ascend_emulator", None)  # as if it weren't installed
    assert cli.main(["emulate", "--quiet", "--", "true"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("vllm-npu-prep: error: ") and "pip install ./emulator" in line


@pytest.mark.skipif(bool(why_no_emulator()), reason=why_no_emulator())
def test_options_command_and_exit_code_are_passed_on():
    done = subprocess.run(
        [*EMULATE, "--soc", "Ascend910_9391", "--", "sh", "-c", "exit 7"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 7
    assert "1 emulated Ascend910_9391" in done.stderr


def test_its_help_and_its_errors_are_those_of_the_emulator():
    done = subprocess.run([*EMULATE, "--help"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("usage: ascend-emulator") and "--hazards" in done.stdout
    done = subprocess.run([*EMULATE, "--memory", "lots", "--", "true"], capture_output=True)
    assert done.returncode == 2 and b"is not a size" in done.stderr
