"""The records of a real model that come with the repository can be explained, checked, replayed."""

import json
import sys
from pathlib import Path

import pytest

from tests.helpers.archives import unpack
from tests.helpers.examples import EXAMPLES
from vllm_npu_prep.cli import main
from vllm_npu_prep.inspect.run import read_run
from vllm_npu_prep.inspect.view import view_of_record
from vllm_npu_prep.records.record_file import record_files

sys.path.insert(0, str(EXAMPLES))
import smollm2_steps

ARCHIVE = EXAMPLES / "smollm2-steps.tar.xz"


@pytest.fixture(scope="module")
def steps(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("unpacked")
    unpack(ARCHIVE, folder)
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
