"""The recorder: what it keeps, what it writes, and that nothing of it reaches the engine."""

import errno
import json
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest

from tests.helpers.batches import step_batch
from tests.helpers.records import EAGER
from vllm_npu_prep.config import RecordConfig
from vllm_npu_prep.errors import PrepError
from vllm_npu_prep.observe import recorder as recorder_module
from vllm_npu_prep.observe.recorder import Sampled, StepRecorder
from vllm_npu_prep.observe.step_snapshot import Recorded
from vllm_npu_prep.prep.batch import prepare_step
from vllm_npu_prep.prep.layout import StepLayout
from vllm_npu_prep.prep.mask import MaskForm
from vllm_npu_prep.prep.oracle import OracleRequest
from vllm_npu_prep.prep.padding import Padding
from vllm_npu_prep.records.comparison import core_difference, oracle_difference
from vllm_npu_prep.records.record_file import read_record, record_files
from vllm_npu_prep.records.settings import LayerGroup
from vllm_npu_prep.records.step_samples import SUFFIX, read_samples

NUM_REQS, MODEL_LEN, BLOCK_SIZE = 6, 96, 4


class Decodes:
    """Requests that grow by a token a step, in one staging buffer, and change rows now and then."""

    def __init__(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        blocks = np.arange(1, 1 + NUM_REQS * MODEL_LEN // BLOCK_SIZE).reshape(NUM_REQS, -1)
        requests = [
            OracleRequest(
                num_computed_tokens=length,
                num_scheduled_tokens=1,
                num_prompt_tokens=length,
                token_ids=rng.integers(2, 500, MODEL_LEN).tolist(),
                block_ids=own,  # those past `num_blocks` are stale
            )
            for length, own in zip(rng.integers(1, 20, NUM_REQS).tolist(), blocks.tolist())
        ]
        self.batch = step_batch(requests, BLOCK_SIZE, MODEL_LEN, extra_columns=0)
        self.tables = self.batch.tables
        self.tables.num_tokens[:NUM_REQS] = self.tables.num_computed_tokens[:NUM_REQS] + 1
        self.table = self.tables.block_table(0)[:NUM_REQS]
        self.layout = StepLayout(NUM_REQS, NUM_REQS)
        buffer = np.zeros(-(-self.layout.nbytes(0, self.table.size) // 64) * 64, np.uint8)
        self.arrays = self.layout.views(buffer)
        self.steps: list[dict[str, list]] = []

    def step(self):
        """Prepare the next step, and note what it was."""
        tables = self.tables
        lengths = [tables.num_computed_tokens, tables.num_tokens]
        for each in lengths:
            each[:NUM_REQS] += bool(self.steps)
        if len(self.steps) % 5 == 3:  # two requests change places: their rows are sent again
            for array in (*lengths, tables.num_prompt_tokens, tables.token_ids, self.table):
                array[[0, 4]] = array[[4, 0]]
            tables.num_synced_blocks[0, [0, 4]] = 0
        owned = tables.num_blocks[0, :NUM_REQS]
        owned[:] = -(-tables.num_tokens[:NUM_REQS] // BLOCK_SIZE)
        step = prepare_step(self.batch, Padding(NUM_REQS, NUM_REQS), self.layout, self.arrays)
        is_owned = np.arange(self.table.shape[1]) < owned[:, None]
        self.steps.append(
            {
                "block_table": np.where(is_owned, self.table, 0).tolist(),
                "input_ids": step.input_ids.tolist(),
                "slot_mapping": step.slot_mapping[0].tolist(),
                "seq_lens": step.seq_lens.tolist(),
            }
        )
        return step

    def record(self, recorder: StepRecorder, count: int) -> None:
        for _ in range(count):
            recorder.keep(self.step(), EAGER, [f"request {row}" for row in range(NUM_REQS)])


@pytest.fixture
def make(tmp_path, seed):
    """A recorder of `Decodes`."""

    def recorder(steps: str, **options) -> tuple[StepRecorder, Decodes]:
        decodes = Decodes(seed)
        config = RecordConfig(dir=str(tmp_path / "records"), steps=steps, **options)
        recorded = Recorded((LayerGroup(group=0),), MaskForm.DENSE, 1)
        manifest = {"versions": {"vllm": "0"}}
        return StepRecorder(config, decodes.tables, recorded, manifest), decodes

    return recorder


def check(folder: Path, decodes: Decodes, numbers: Sequence[int]) -> None:
    """Files of these steps, and what is in them."""
    files = record_files(folder)
    assert [file.name for file in files] == [f"step-{number:06d}.npz" for number in numbers]
    for file, number in zip(files, numbers):
        record = read_record(file)
        for name, expected in decodes.steps[number].items():
            assert record.prepared[name].tolist() == expected, (name, number)
        assert core_difference(record) is None and oracle_difference(record) is None
    assert not list(folder.glob(".*"))


def test_a_span_of_steps_is_written_as_it_comes(make, caplog):
    recorder, decodes = make("4:9")
    decodes.record(recorder, 6)
    check(recorder.folder, decodes, range(4, 6))
    with caplog.at_level(logging.INFO, logger=recorder_module.logger.name):
        decodes.record(recorder, 20)
    check(recorder.folder, decodes, range(4, 9))
    assert caplog.messages == [f"Recording stopped: steps 4:9 are in {recorder.folder}"]
    told = {"steps": "4:9", "reason": "asked for", "request_ids": "hashed"}
    manifest = json.loads((recorder.folder / "manifest.json").read_text())
    assert isinstance(manifest.pop("clock"), float)
    assert manifest == {"format": 2, **told, "versions": {"vllm": "0"}}


def test_the_ring_holds_tables_as_they_were_at_each_step(make):
    recorder, decodes = make("last 7")
    decodes.record(recorder, 31)
    assert not recorder.folder.exists()
    assert str(recorder.dump("asked for")).startswith("7 steps are in ")
    check(recorder.folder, decodes, range(24, 31))
    assert str(recorder.dump("asked for")).startswith("no new step")
    decodes.record(recorder, 9)
    assert str(recorder.dump("asked for")).startswith("7 steps are in ")
    check(recorder.folder, decodes, [*range(24, 31), *range(33, 40)])


def test_memory_of_the_ring_is_bounded(make):
    recorder, decodes = make("last 100000", max_bytes=1 << 16)
    decodes.record(recorder, 70)
    kept = sum(each.nbytes for each in recorder._ring)
    assert (1 << 16) * 0.8 < kept <= 1 << 16
    held = len(recorder._ring)
    assert 5 < held < 70
    recorder.dump("asked for")
    check(recorder.folder, decodes, range(70 - held, 70))


def test_files_take_no_more_than_max_bytes(make, caplog):
    recorder, decodes = make("0:50", max_bytes=1 << 16)
    decodes.record(recorder, 50)
    files = record_files(recorder.folder)
    sizes = [file.stat().st_size for file in files]
    assert (1 << 16) - 2 * max(sizes) < sum(sizes) <= 1 << 16
    check(recorder.folder, decodes, range(len(files)))
    line = f"Recording stopped: step {len(files)} would exceed max_bytes 65,536"
    assert caplog.messages == [line]


@pytest.mark.parametrize("steps", ["0:50", "last 5"])
def test_a_full_disk_stops_recording_with_one_line(make, caplog, monkeypatch, steps):
    recorder, decodes = make(steps)
    decodes.record(recorder, 2)
    recorder.dump("asked for")
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    fsync = Mock(side_effect=[None, full])
    monkeypatch.setattr(os, "fsync", fsync)
    caplog.clear()
    for _ in range(2):
        decodes.record(recorder, 3)
        recorder.dump("asked for")
    assert fsync.call_count == 2
    file = recorder.folder / "step-000003.npz"
    assert [line for line in caplog.messages if "stopped" in line] == [
        f"Recording stopped: {file}: can't be written: No space left on device"
    ]
    check(recorder.folder, decodes, range(3))  # and nothing half written


@pytest.mark.parametrize("place", ["of_step", "record"])
def test_a_bug_in_the_recorder_is_one_line_in_the_log(make, caplog, monkeypatch, place):
    recorder, decodes = make("1:50")
    broken = Mock(side_effect=RuntimeError("a bug\nin two lines"))
    monkeypatch.setattr(recorder_module.StepSnapshot, place, broken)
    decodes.record(recorder, 5)
    recorder.dump("asked for")
    assert caplog.messages == ["Recording stopped: RuntimeError: a bug in two lines"]


def test_a_folder_that_cannot_be_made_is_refused_at_start_up(tmp_path):
    (tmp_path / "file").write_text("")
    config = RecordConfig(dir=str(tmp_path / "file" / "records"))
    with pytest.raises(PrepError, match=r"npu_prep.record.dir.*Not a directory"):
        StepRecorder(config, Decodes(0).tables, Recorded((), MaskForm.DENSE, 1))


def test_names_are_hashed_alike_within_a_run_only(make):
    names = []
    for _ in range(2):
        recorder, decodes = make("0:2")
        decodes.record(recorder, 2)
        first, second = (read_record(f).settings.req_ids for f in record_files(recorder.folder)[:2])
        assert first == second and len(set(first)) == NUM_REQS
        recorder.folder.rename(recorder.folder.with_name(f"run {len(names)}"))
        names.append(first)
    assert not set(names[0]) & set(names[1])
    recorder, decodes = make("0:1", request_ids="plain")
    recorder.keep(decodes.step(), EAGER, [f"a\nb{row}" for row in range(NUM_REQS)])
    (file,) = record_files(recorder.folder)
    assert read_record(file).settings.req_ids[1] == "a?b1"


@pytest.mark.parametrize("steps", ["last 3", "1:4"])
def test_samples_are_written_beside_steps_whenever_they_come(make, steps):
    """Some come after their step was written, and some after it was forgotten."""
    recorder, decodes = make(steps)

    def note(number: int) -> None:
        token_ids = [[number + row] for row in range(NUM_REQS)]
        recorder.note_sampled(number, Sampled(token_ids, [1], None))

    decodes.record(recorder, 2)
    note(0)
    decodes.record(recorder, 3)
    for number in (1, 2):
        note(number)
    recorder.dump("a test")
    for number in (3, 4):
        note(number)
    written = sorted(recorder.folder.glob(f"*{SUFFIX}"))
    kept = [2, 3, 4] if steps.startswith("last") else [1, 2, 3]
    assert [path.name for path in written] == [f"step-{number:06d}{SUFFIX}" for number in kept]
    for number, file in zip(kept, record_files(recorder.folder), strict=True):
        samples = read_samples(file, NUM_REQS)
        assert [each.token_ids for each in samples] == [[number + row] for row in range(NUM_REQS)]
        assert [each.from_trace for each in samples] == [row == 1 for row in range(NUM_REQS)]


@pytest.mark.parametrize(
    "content", ["", "{}", "[]", '[{"token_ids": [-1]}]', '[{"token_ids": [1], "a": 2}]']
)
def test_a_file_of_samples_that_was_changed_is_one_line(tmp_path, content):
    record = tmp_path / "step-000001.npz"
    assert read_samples(record, 1) == []
    record.with_suffix(SUFFIX).write_text(content)
    with pytest.raises(PrepError, match="not samples of requests") as error:
        read_samples(record, 1)
    assert "\n" not in str(error.value)
