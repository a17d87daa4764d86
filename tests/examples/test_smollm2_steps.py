"""The records of a real model that come with the repository can be explained, checked, replayed."""

import json
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest

from tests.helpers.examples import EXAMPLES
from vllm_npu_prep.cli import main
from vllm_npu_prep.inspect.run import read_run
from vllm_npu_prep.inspect.view import view_of_record
from vllm_npu_prep.prep.checks import find_fault
from vllm_npu_prep.records.record_file import read_record, record_files

sys.path.insert(0, str(EXAMPLES))
import smollm2_steps

ARCHIVE = EXAMPLES / "smollm2-steps.tar.xz"


@pytest.fixture(scope="module")
def steps(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(folder, filter="data")
    return folder / smollm2_steps.FOLDER


def test_they_are_small_and_name_no_machine(steps):
    assert ARCHIVE.stat().st_size < 200_000
    config = json.loads((steps / "manifest.json").read_text())["config"]
    assert config["model"] == str(smollm2_steps.MODEL) and not smollm2_steps.MODEL.is_absolute()


def test_every_step_is_prepared_again_the_same(steps, capsys):
    assert main(["replay", str(steps)]) == 0
    told = capsys.readouterr().out
    assert told.startswith(
        f"{smollm2_steps.STEPS} steps: core and oracle prepare what was recorded"
    )


def test_every_step_passes_the_check_of_engines(steps):
    vocab_size, num_blocks, block_size = 49152, 40, 16
    limits = np.array([vocab_size, num_blocks * block_size], np.int64)
    for file in record_files(steps):
        assert find_fault(read_record(file).prepare(), limits) is None, file.name


def test_words_of_each_step_are_shown(steps):
    views = [view_of_record(file) for file in record_files(steps)]
    assert all(text for view in views for text in view.input_texts)
    first = "".join(views[0].input_texts)
    assert "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n" in first
    assert " Paris" in views[6].input_texts


def test_the_run_has_what_its_page_promises(steps, tmp_path):
    (rank,) = read_run(steps).ranks
    assert sum(len(row.preemptions) for row in rank.rows) == 5
    assert any(row.hits for row in rank.rows)
    assert any(
        span.drafts and set(span.accepted) & set("123") for r in rank.rows for span in r.spans
    )
    page = tmp_path / "run.html"
    assert main(["explain", str(steps), "--html", str(page), "--no-step-pages"]) == 0
    assert page.stat().st_size < 100_000


def test_what_is_packed_can_be_read(steps, tmp_path, monkeypatch):
    """The script packs a run as it packed this one: of three steps, to which it adds words."""
    run, model, out = tmp_path / "run", tmp_path / "model", tmp_path / "again.tar.xz"
    run.mkdir(), model.mkdir()
    for name in ("manifest.json", "step-000004.npz", "step-000005.npz", "step-000006.npz"):
        (run / name).write_bytes((steps / name).read_bytes())
    (model / "tokenizer.json").write_bytes((steps / "tokenizer.json").read_bytes())
    monkeypatch.setattr(smollm2_steps, "MODEL", model)
    smollm2_steps.pack(run, out)
    with tarfile.open(out) as archive:
        archive.extractall(tmp_path, filter="data")
    again = tmp_path / smollm2_steps.FOLDER
    assert (again / "step-000006.npz").read_bytes() == (steps / "step-000006.npz").read_bytes()
    assert view_of_record(again / "step-000006.npz").input_texts[0] == " Paris"
