"""A step from a batch to arrays on the device and metadata, without an engine."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from vllm.v1.worker.block_table import MultiGroupBlockTable

from vllm_npu_prep.attention.block_tables import DeviceBlockTables
from vllm_npu_prep.device.cpu import CPUDevice
from vllm_npu_prep.prep.arrays import PAD_SLOT_ID
from vllm_npu_prep.prep.batch import BatchTables, StepBatch, prepare_step
from vllm_npu_prep.prep.padding import Padding, full_padding, no_padding
from vllm_npu_prep.prep.shape import EngineShape
from vllm_npu_prep.runner.preparer import Preparer

ROWS = 4
BLOCK_SIZES = [4, 2]


class Builder:
    """Notes what it is asked to build."""

    attention_chunk_size = None

    def __init__(self, causal: bool = True) -> None:
        self.causal = causal

    def build_step(self, step, group, staged, block_table, masks):
        return SimpleNamespace(step=step, group=group, block_table=block_table)


class Engine:
    """Tables and a preparer, as a runner has them: two groups with blocks, one without."""

    def __init__(self, max_logits_per_req: int = 1) -> None:
        self.blocks = DeviceBlockTables(
            MultiGroupBlockTable(
                max_num_reqs=ROWS,
                max_num_batched_tokens=64,
                pin_memory=False,
                device=torch.device("cpu"),
                block_sizes=BLOCK_SIZES,
                max_num_blocks=[4, 8],
            ),
            ROWS,
            torch.device("cpu"),
        )
        self.computed = np.zeros(ROWS, np.int32)
        self.token_ids = np.zeros((ROWS, 16), np.int32)
        self.tables = BatchTables(
            num_computed_tokens=self.computed,
            num_prompt_tokens=np.ones(ROWS, np.int32),
            num_tokens=np.ones(ROWS, np.int32),
            token_ids=self.token_ids,
            block_table_flat=self.blocks.block_table_flat_np,
            max_num_blocks=self.blocks.max_num_blocks,
            block_sizes=np.array(BLOCK_SIZES, np.int32),
            num_blocks=self.blocks.num_blocks,
            num_synced_blocks=self.blocks.num_synced_blocks,
            num_device_blocks=self.blocks.num_device_blocks,
            shape=EngineShape(len(BLOCK_SIZES), max_logits_per_req),
        )
        self.preparer = Preparer(
            CPUDevice(),
            self.tables,
            self.blocks,
            [(0, Builder(), ["a", "b"]), (1, Builder(), ["c"]), (2, Builder(False), ["d"])],
            max_num_tokens=32,
        )

    def add(self, row: int, token_ids: list[int], *block_ids: list[int]) -> None:
        self.token_ids[row, : len(token_ids)] = token_ids
        self.blocks.add_row(block_ids, row)

    def step(self, *counts: int, padding: Padding | None = None, samples=None):
        """Prepare and send one, as `_prepare_inputs` does."""
        preparer, scheduled = self.preparer, np.array(counts, np.int32)
        total, rows = int(scheduled.sum()), 0 if samples is None else len(samples)
        previous = self.blocks.previous_rows
        batch = StepBatch(self.tables, scheduled, preparer.no_drafts, total, previous, rows)
        padding = padding or no_padding(total, len(counts))
        layout = preparer.layout(padding)
        staged = preparer.staging.acquire(layout)
        step = prepare_step(batch, padding, layout, staged.np)
        preparer.staging.send(step, samples)
        return step, staged


@pytest.fixture
def engine():
    engine = Engine()
    engine.add(0, [11, 12, 13], [3], [5, 6])
    engine.add(1, [21, 22], [2], [4])
    return engine


def test_a_step_arrives_with_its_new_blocks(engine):
    _, staged = engine.step(3, 2)
    assert staged.device.input_ids.tolist() == [11, 12, 13, 21, 22]
    assert staged.device.positions.tolist() == [0, 1, 2, 0, 1]
    slots = [slots.tolist() for slots in staged.device.slot_mapping]
    assert slots == [[12, 13, 14, 8, 9], [10, 11, 12, 8, 9]]
    for group, table in enumerate(engine.blocks.device_rows(2)):
        assert table.tolist() == engine.tables.block_table(group)[:2].tolist()
    engine.computed[:2] = 3, 2
    engine.blocks.append_row(([], [7]), 1)
    step, _ = engine.step(1, 1)
    assert step.num_block_changes == 1
    assert engine.blocks.device_rows(2)[1][1, :2].tolist() == [4, 7]


def test_samples_on_the_device_find_rows_of_their_requests(engine):
    engine.step(3, 2)
    engine.blocks.mark_rows(np.zeros(2, bool))
    engine.blocks.swap_row(0, 1)
    engine.computed[:2] = 2, 3
    _, staged = engine.step(1, 1, samples=torch.tensor([91, 92], dtype=torch.int32))
    assert staged.device.input_ids.tolist() == [92, 91]


def test_groups_have_tables_and_layers_share_metadata(engine):
    metadata = engine.preparer.build_metadata(*engine.step(3, 2))
    assert metadata["a"] is metadata["b"]
    assert [metadata[name].group for name in "acd"] == [0, 1, 2]
    tables = engine.blocks.device_rows(2)
    assert metadata["a"].block_table is tables[0]
    assert metadata["c"].block_table is tables[1]
    assert metadata["d"].block_table is None, "encoder-only layers have no cache"


def test_slots_are_told_by_group_and_layer_and_kept(engine):
    _, staged = engine.step(3, 2)
    by_group, by_layer = engine.preparer.slot_mappings(staged)
    assert set(by_group) == {0, 1} and set(by_layer) == {"a", "b", "c"}
    assert by_layer["b"] is by_group[0] is staged.device.slot_mappings[0]
    _, again = engine.step(3, 2)
    assert engine.preparer.slot_mappings(again)[1] is by_layer
    _, other = engine.step(3, 1)
    assert len(engine.preparer.slot_mappings(other)[0][1]) == 4


@pytest.mark.parametrize("padding", [full_padding(4, 4, 1), full_padding(4, 2, 0)])
def test_padding_alone_writes_no_slot_and_reads_block_0(engine, padding):
    engine.step(3, 2)
    step, staged, metadata = engine.preparer.prepare_padding_only(padding)
    assert step.num_reqs == 0 and set(metadata) == set("abcd")
    for slots in staged.device.slot_mapping:
        assert (slots == PAD_SLOT_ID).all()
    query_lens = staged.device.query_start_loc.diff()
    assert staged.device.seq_lens.tolist() == query_lens.tolist(), "rows without keys"
    assert staged.device.is_padding.all()
    for table in engine.blocks.device_rows(padding.num_reqs_padded):
        assert not table.any()
    engine.computed[:2] = 3, 2
    _, staged = engine.step(1, 1)
    for group, table in enumerate(engine.blocks.device_rows(2)):
        assert table.tolist() == engine.tables.block_table(group)[:2].tolist()


def test_layouts_have_places_for_the_drafts_of_an_engine():
    preparer = Engine(max_logits_per_req=3).preparer
    layout = preparer.layout(no_padding(9, 2))
    assert (layout.max_logits, layout.max_drafts, layout.shape.num_groups) == (6, 4, 2)
    assert preparer.layout(no_padding(9, 2)) is layout
