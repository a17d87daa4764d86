"""The device's block tables stay those of the host, whatever happens to rows in between."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from vllm.v1.worker.block_table import MultiGroupBlockTable

from vllm_npu_prep.attention.device_block_tables import DeviceBlockTables
from vllm_npu_prep.prep.arrays import NO_PREVIOUS_ROW
from vllm_npu_prep.prep.batch import BatchTables, StepBatch, prepare_step
from vllm_npu_prep.prep.layout import StepLayout, largest_step
from vllm_npu_prep.prep.padding import Padding
from vllm_npu_prep.prep.shape import EngineShape

ROWS = 6
BLOCK_SIZES = [4, 2]
WIDTHS = [8, 20]


def device_block_tables(blocks_per_chunk: int = 1) -> DeviceBlockTables:
    upstream = MultiGroupBlockTable(
        max_num_reqs=ROWS,
        max_num_batched_tokens=64,
        pin_memory=False,
        device=torch.device("cpu"),
        block_sizes=BLOCK_SIZES,
        max_num_blocks=WIDTHS,
    )
    return DeviceBlockTables(upstream, ROWS, torch.device("cpu"), blocks_per_chunk)


class Host:
    """Block tables with the rest of what a step reads, and a device that gets what is sent."""

    def __init__(self, blocks_per_chunk: int = 1) -> None:
        self.tables = device_block_tables(blocks_per_chunk)
        rows = np.ones(ROWS, np.int32)
        self.batch = BatchTables(
            num_computed_tokens=rows * 0,
            num_prompt_tokens=rows,
            num_tokens=rows,
            token_ids=np.zeros((ROWS, 8), np.int32),
            block_table_flat=self.tables.block_table_flat_np,
            max_num_blocks=self.tables.max_num_blocks,
            block_sizes=np.array(BLOCK_SIZES, np.int32),
            num_blocks=self.tables.num_blocks,
            num_synced_blocks=self.tables.num_synced_blocks,
            num_device_blocks=self.tables.num_device_blocks,
            shape=EngineShape(2),
        )
        self.next_block = 1
        self.sent: list[int] = []

    def new_blocks(self, counts: list[int]) -> tuple[list[int], ...]:
        blocks = []
        for count in counts:
            blocks.append(list(range(self.next_block, self.next_block + count)))
            self.next_block += count
        return tuple(blocks)

    def step(self, num_reqs: int, num_reqs_padded: int) -> None:
        """Prepare a step of one token for each request, and let the device have it."""
        shape, num_entries = self.batch.shape, len(self.tables.block_table_flat)
        layout = StepLayout(num_reqs_padded, num_reqs_padded, shape)
        nbytes = largest_step(shape, num_reqs_padded, ROWS, num_entries)
        arrays = layout.views(np.zeros(nbytes, np.uint8))
        ones = np.ones(num_reqs, np.int32)
        batch = StepBatch(self.batch, ones, ones * 0, num_reqs)
        prepared = prepare_step(batch, Padding(num_reqs_padded, num_reqs_padded, 1), layout, arrays)
        count = prepared.num_block_changes
        indices, ids = arrays.variable_int64[:count], arrays.variable_int32[2 * count : 3 * count]
        assert len(set(indices.tolist())) == count, "an entry is written twice in one launch"
        self.tables.block_table_flat.numpy()[indices] = ids
        self.sent.append(count)

    def assert_device_is_right(self, num_reqs: int, num_reqs_padded: int) -> None:
        rows = self.tables.device_rows(num_reqs_padded)
        for table, device, owned in zip(self.tables.block_tables, rows, self.tables.num_blocks):
            for row in range(num_reqs):
                expected = table.block_table.np[row, : owned[row]].tolist()
                assert device[row, : owned[row]].tolist() == expected
            assert not device[num_reqs:].any(), "rows of padding are not the null block"


row = st.integers(0, ROWS - 1)
counts = st.lists(st.integers(0, 3), min_size=2, max_size=2)
operations = st.one_of(
    st.tuples(st.just("add"), row, counts),
    st.tuples(st.just("append"), row, counts),
    st.tuples(st.just("clear"), row),
    st.tuples(st.just("move"), row, row),
    st.tuples(st.just("swap"), row, row),
    st.tuples(st.just("dummy run")),
    st.tuples(st.just("step"), st.integers(1, ROWS), st.integers(0, 2)),
)


@given(st.lists(operations, max_size=40), st.sampled_from([1, 12]))
def test_device_rows_equal_host_rows_after_any_operations(steps, blocks_per_chunk):
    host = Host(blocks_per_chunk)
    tables = host.tables
    assert not (tables.max_num_blocks % blocks_per_chunk).any(), "rows of whole chunks"
    assert (tables.max_num_blocks >= [table.max_num_blocks_per_req for table in tables]).all()
    for name, *arguments in [*steps, ("step", ROWS - 1, 1)]:
        if name == "add":
            tables.add_row(host.new_blocks(arguments[1]), arguments[0])
        elif name == "append":
            if (tables.num_blocks[:, arguments[0]] + 3 <= 8).all():
                tables.append_row(host.new_blocks(arguments[1]), arguments[0])
        elif name == "clear":
            tables.clear_row(*arguments)
        elif name == "move" and arguments[0] != arguments[1]:
            tables.move_row(*arguments)
        elif name == "swap":
            tables.swap_row(*arguments)
        elif name == "dummy run":  # copies whole rows, then clears some: the device is unknown
            tables.commit_block_table(ROWS)
            tables.block_table_flat.fill_(77)
        elif name == "step":
            num_reqs, padding = arguments
            host.step(num_reqs, min(num_reqs + padding, ROWS))
            host.assert_device_is_right(num_reqs, min(num_reqs + padding, ROWS))


def test_only_what_is_new_is_sent():
    host = Host()
    for index in range(3):
        host.tables.add_row(host.new_blocks([2, 4]), index)
    host.step(3, 3)  # everything: three rows of six entries
    host.step(3, 3)  # nothing is new
    host.tables.append_row(host.new_blocks([1, 0]), 1)
    host.step(3, 3)  # one entry
    host.tables.swap_row(0, 2)
    host.step(3, 3)  # two rows
    host.tables.add_row(host.new_blocks([1, 2]), 1)
    host.step(3, 3)  # a row that went to another request
    host.assert_device_is_right(3, 3)
    assert host.sent == [18, 0, 1, 12, 3]


def test_tables_of_all_groups_share_one_tensor_on_either_side():
    tables = device_block_tables()
    for table in tables.block_tables:
        buffer = table.block_table
        assert buffer.gpu.untyped_storage().data_ptr() == tables.block_table_flat.data_ptr()
        assert buffer.cpu.untyped_storage().data_ptr() == tables.block_table_flat_cpu.data_ptr()
        assert buffer.np.ctypes.data == buffer.cpu.data_ptr()


@given(st.permutations(range(ROWS)), st.lists(st.booleans(), min_size=ROWS, max_size=ROWS))
def test_previous_rows_follow_their_requests(order, left_out):
    tables = device_block_tables()
    tables.mark_rows(np.array(left_out))
    requests = list(range(ROWS))  # request r was in row r
    for target, request in enumerate(order):
        source = requests.index(request)
        if source != target:
            tables.swap_row(source, target)
            requests[source], requests[target] = requests[target], requests[source]
    expected = [NO_PREVIOUS_ROW if left_out[r] else r for r in requests]
    assert tables.previous_rows.tolist() == expected
    tables.clear_row(0)
    tables.move_row(ROWS - 1, 0)
    assert tables.previous_rows[0] == expected[-1]
    tables.add_row(([], []), ROWS - 1)
    assert tables.previous_rows[ROWS - 1] == NO_PREVIOUS_ROW


def test_a_model_without_a_cache_has_rows_but_no_tables():
    upstream = MultiGroupBlockTable(
        max_num_reqs=ROWS,
        max_num_batched_tokens=64,
        pin_memory=False,
        device=torch.device("cpu"),
        block_sizes=[],
        max_num_blocks=[],
    )
    tables = DeviceBlockTables(upstream, ROWS, torch.device("cpu"))
    for row in (0, 1):
        tables.add_row((), row)
    tables.mark_rows(np.zeros(2, bool))
    tables.swap_row(0, 1)
    tables.clear_row(2)
    tables.commit_block_table(2)
    assert tables.previous_rows[:2].tolist() == [1, 0]
    assert tables.device_rows(2) == ()
    lengths = np.full(ROWS, 3, np.int32)
    batch = BatchTables(
        num_computed_tokens=lengths * 0,
        num_prompt_tokens=lengths,
        num_tokens=lengths,
        token_ids=np.arange(8 * ROWS, dtype=np.int32).reshape(ROWS, 8),
        block_table_flat=tables.block_table_flat_np,
        max_num_blocks=tables.max_num_blocks,
        block_sizes=np.empty(0, np.int32),
        num_blocks=tables.num_blocks,
        num_synced_blocks=tables.num_synced_blocks,
        num_device_blocks=tables.num_device_blocks,
        shape=EngineShape(0),
    )
    step = prepare_step(StepBatch(batch, lengths[:2], 0 * lengths, 6), Padding(8, 2))
    assert step.input_ids.tolist() == [0, 1, 2, 8, 9, 10]
    assert step.arrays.slot_mapping.shape == (0, 8)
    assert step.num_block_changes == 0
