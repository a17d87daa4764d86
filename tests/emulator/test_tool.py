"""The command itself: exit codes, signals, messages, and what it says when it can't build."""

import importlib.metadata
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ascend_emulator import build
from ascend_emulator.errors import EmulatorError
from ascend_emulator.run import main
from tests.helpers.emulator import import_path
from tests.helpers.waiting import LIMIT

TOOL = [sys.executable, "-m", "ascend_emulator"]


def tool(*arguments, **keywords):
    return subprocess.run([*TOOL, *arguments], capture_output=True, text=True, **keywords)


def test_the_banner_states_the_limits():
    done = tool("--", "sh", "-c", "exit 7")
    assert done.returncode == 7
    for limit in ("numerics", "speed", "HCCL", "custom operators", "reading of the documentation"):
        assert limit in done.stderr
    assert "used no device" in done.stderr
    assert tool("--quiet", "--", "true").stderr == ""


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("", "no command given"),
        ("--memory lots -- true", "is not a size"),
        ("--soc Ascend910C1 -- true", "(did you mean Ascend910B1?); use one of Asc"),
        ("--soc Foo -- true", "'Foo' is not a chip of this emulator; use one of Ascend310B1, "),
        ("--profile 9 -- true", "'9' is not a profile; use one of 9.1, 8.5, docs"),
        ("--fault slow -- true", "'slow' is not a fault; use some of: uniform-average ("),
        ("--devices 0 -- true", "not between"),
        ("--driver new -- true", "'new' is not a version of a driver; write for example 25"),
        ("--streams 1 -- true", "--streams 1 is not between 2 and 32768"),
        ("--streams 40000 -- true", "--streams 40000 is not between 2 and 32768"),
        ("--hccl-streams -1 -- true", "--hccl-streams -1 is not between 0 and"),
        ("-- no-such-command", "no such command"),
    ],
)
def test_bad_input_gets_one_line(words, message, capsys, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])  # where torch_npu is comes to it
    assert main(words.split()) == 2
    said = capsys.readouterr().err
    assert message in said and said.count("\n") == 1


def test_signals_reach_the_command():
    script = "trap 'exit 9' TERM; echo ready; while :; do sleep 0.1; done"
    process = subprocess.Popen(
        [*TOOL, "--quiet", "--", "sh", "-c", script], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGTERM)
    assert process.wait(LIMIT) == 9


def test_the_hook_leaves_another_sitecustomize_alone(tmp_path):
    (tmp_path / "sitecustomize.py").write_text("import os; os.environ['THEIRS'] = '1'\n")
    environment = os.environ | {"PYTHONPATH": import_path(tmp_path)}
    command = (sys.executable, "-c", "import os; print(os.environ['THEIRS'])")
    assert tool("--quiet", "--", *command, env=environment).stdout == "1\n"


def installed(**versions):
    """Like ``importlib.metadata.version``."""

    def version(name):
        if name not in versions:
            raise importlib.metadata.PackageNotFoundError(name)
        return versions[name]

    return {"importlib.metadata.version": version}


NO_TORCH_NPU = r"pip install --no-deps --target \S+npu-emulator torch_npu==2\.13\.0$"
TARGET = build.Target("g++", Path(), Path(), ("2.13.0", "2.13.0"))
NO_CACHE = r"file/ascend_emulator: Not a directory; set XDG_CACHE"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"platform.machine": lambda: "riscv64"}, "runs on Linux on x86_64 or aarch64"),
        (installed(), "torch is not installed: pip install torch"),
        (installed(torch="2.13.0"), NO_TORCH_NPU),
        (
            installed(torch="2.12.0", torch_npu="2.12.0"),
            "made for torch_npu 2.13.0 or .* but 2.12.0",
        ),
        (installed(torch="2.14.0", torch_npu="2.13.0"), "needs torch 2.13.0, but 2.14.0 is"),
        ({"shutil.which": lambda name, path=None: None}, "install g\\+\\+ and binutils"),
        ({"_find_target": lambda: TARGET}, NO_CACHE),
        # torch_npu would end the process from inside of its library
        ({"_package_folder": lambda package: Path()}, r"is a CUDA build.*PIP_FIND_LINKS"),
    ],
)
def test_what_is_missing_is_said_in_one_line(monkeypatch, tmp_path, changes, message):
    (tmp_path / "file").touch()
    (tmp_path / "version.py").write_text("cuda: Optional[str] = '12.8'\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    for name, value in (installed(torch="2.13.0", torch_npu="2.13.0") | changes).items():
        monkeypatch.setattr(f"ascend_emulator.build.{name}", value)
    with pytest.raises(EmulatorError, match=message):
        build.ensure_built()
