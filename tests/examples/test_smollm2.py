"""SmolLM2 is made from a wheel, or one line says why it can't be."""

import errno
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

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


@pytest.mark.parametrize(
    ("said", "why"),
    [("WARNING: slow\nERROR: No matching distribution", "No matching distribution"), ("", "no re")],
)
def test_a_download_that_fails_says_what_pip_said(folders, monkeypatch, said, why):
    done = SimpleNamespace(returncode=1, stderr=said)
    monkeypatch.setattr(subprocess, "run", lambda *args, **kwargs: done)
    with pytest.raises(smollm2.NoModelError, match=rf"can't download .*\({why}.* put it into"):
        smollm2.make(folders.model)


def test_a_missing_package_is_named(folders, monkeypatch):
    monkeypatch.setattr(smollm2, "find_spec", lambda name: None)
    with pytest.raises(smollm2.NoModelError, match="gguf is not installed; run: make install"):
        smollm2.make(folders.model)


def test_a_full_disk_is_one_line_and_leaves_nothing(folders, monkeypatch, capfd):
    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device", "model.safetensors")

    monkeypatch.setattr(smollm2, "fetch", lambda folder: folders.wheel)
    monkeypatch.setattr(smollm2.zipfile, "ZipFile", full)
    with pytest.raises(smollm2.NoModelError, match="could not be made, see above"):
        smollm2.make(folders.model)
    assert capfd.readouterr().err == "SmolLM2: model.safetensors: No space left on device\n"
    assert list(folders.model.parent.iterdir()) == [smollm2.WHEELS]


def test_the_demo_model_takes_its_place(folders, monkeypatch, capsys):
    folders.wheel.write_bytes(b"half of it")
    monkeypatch.setattr(demo, "SMOLLM2", folders.model)
    monkeypatch.setattr(tiny_model, "make", lambda folder: folder)
    assert demo.chat_model() == (demo.MODEL, demo.TINY_QUESTION)
    assert capsys.readouterr().out.endswith(
        "The demo model, which was trained here, takes its place.\n"
    )
