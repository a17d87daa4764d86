"""The command itself: exit codes, signals, messages, and what it says when it can't build."""

import os
import signal
import subprocess
import sys

import pytest

from ascend_emulator import build
from ascend_emulator.errors import EmulatorError
from ascend_emulator.options import bytes_of, check_driver
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


def test_sizes_are_binary():
    assert bytes_of("512M") == 512 << 20
    assert bytes_of("8g") == bytes_of("8GiB") == 8 << 30
    with pytest.raises(EmulatorError, match="is not a size"):
        bytes_of("0")


def test_drivers_have_versions_that_torch_npu_can_compare():
    spellings = "25.5.1 24.1.RC3 24.1.rc3 25.2.0.1 25.0.RC1.1 25.0.RC1.alpha2 26.0.T3 26.1.0.b083"
    for version in spellings.split():
        assert check_driver(version) == version
    for version in ("", "25", "25.5", "25.5.x", "v25.5.1", "25.5.1-beta"):
        with pytest.raises(EmulatorError, match="is not a version of a driver"):
            check_driver(version)


def installed(**versions):
    """Like ``importlib.metadata.version``."""

    def version(name):
        if name not in versions:
            raise build.importlib.metadata.PackageNotFoundError(name)
        return versions[name]

    return version


VERSION = "importlib.metadata.version"


@pytest.mark.parametrize(
    ("attribute", "value", "message"),
    [
        ("platform.machine", lambda: "riscv64", "runs on Linux on x86_64 or aarch64"),
        (VERSION, installed(), "torch is not installed: pip install torch"),
        (
            VERSION,
            installed(torch="2.13.0"),
            r"pip install --no-deps --target \S+npu-emulator torch_npu==2\.13\.0$",
        ),
        (VERSION, installed(torch="2.12.0", torch_npu="2.12.0"), "made for torch_npu 2.13.0"),
        (
            VERSION,
            installed(torch="2.14.0", torch_npu="2.13.0"),
            "needs torch 2.13.0, but 2.14.0 is installed",
        ),
        ("shutil.which", lambda name, path=None: None, "install g\\+\\+ and binutils"),
    ],
)
def test_what_is_missing_is_said_in_one_line(monkeypatch, attribute, value, message):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(build.importlib.metadata, "version", lambda name: "2.13.0")
    monkeypatch.setattr(f"ascend_emulator.build.{attribute}", value)
    with pytest.raises(EmulatorError, match=message):
        build.ensure_built()


def test_a_cache_that_cannot_be_written_is_said_in_one_line(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    target = build.Target("g++", tmp_path, tmp_path, ("2.13.0", "2.13.0"))
    monkeypatch.setattr(build, "_find_target", lambda: target)
    with pytest.raises(
        EmulatorError, match=r"file/ascend_emulator: Not a directory; set XDG_CACHE"
    ):
        build.ensure_built()


def test_a_cuda_build_of_torch_is_refused_in_one_line(tmp_path, monkeypatch):
    """torch_npu would end the process from inside of its library."""
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libtorch_cuda.so").touch()
    monkeypatch.setattr(build, "_package_folder", lambda package: tmp_path)
    monkeypatch.setattr(build, "_version", lambda package: build.SUPPORTED_TORCH_NPU[0])
    with pytest.raises(EmulatorError, match=r"is a CUDA build.*PIP_FIND_LINKS"):
        build.ensure_built()
