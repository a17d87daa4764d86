"""Virtual requests equal upstream's, and their block tables are gathered from the device's."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.utils import make_local_attention_virtual_batches
from vllm.v1.kv_cache_interface import ChunkedLocalAttentionSpec, FullAttentionSpec
from vllm.v1.worker.utils import AttentionGroup

from tests.conftest import EXAMPLES
from tests.helpers.batches import LOCAL_GROUPS, local_step, random_batches
from vllm_npu_prep.attention.backend import AscendAttentionBackend
from vllm_npu_prep.attention.local_block_tables import LocalBlockTables, find_local_groups
from vllm_npu_prep.device.cpu import CPUDevice
from vllm_npu_prep.errors import PrepError
from vllm_npu_prep.prep.batch import PreparedStep
from vllm_npu_prep.prep.local_attention import NO_LOCAL_GROUPS, LocalGroups

SHAPE = {"num_kv_heads": 2, "head_size": 8, "dtype": torch.float32}


def tables_of(step: PreparedStep) -> dict[int, torch.Tensor]:
    """Block tables of the step's virtual requests, by group."""
    tables, rows = step.batch.tables, step.arrays.chunk_local_table_rows
    entries = torch.from_numpy(tables.block_table_flat)
    local_tables = LocalBlockTables(CPUDevice(), entries, tables.shape.local, step.num_input_tokens)
    return local_tables.gather(torch.from_numpy(rows.reshape(-1)))


@settings(max_examples=min(EXAMPLES, 200))
@given(random_batches(), st.integers(1, 5))
def test_virtual_requests_equal_upstreams(batch, blocks_per_chunk):
    batch = dataclasses.replace(batch, capture_sizes=None)
    step = local_step(batch, blocks_per_chunk)
    tables = tables_of(step)
    for group in LOCAL_GROUPS:
        starts = torch.from_numpy(step.query_start_loc.copy())
        common = CommonAttentionMetadata(
            query_start_loc=starts,
            query_start_loc_cpu=starts,
            seq_lens=torch.from_numpy(step.seq_lens.copy()),
            num_reqs=step.num_reqs,
            num_actual_tokens=step.total_num_scheduled_tokens,
            max_query_len=step.max_query_len,
            max_seq_len=step.max_seq_len,
            block_table_tensor=torch.from_numpy(
                step.batch.tables.block_table(group)[: step.num_reqs].copy()
            ),
            slot_mapping=torch.from_numpy(step.slot_mapping[group]),
        )
        chunk_size = batch.block_size * blocks_per_chunk
        theirs, _ = make_local_attention_virtual_batches(chunk_size, common, batch.block_size)
        local, count = step.local, theirs.num_reqs
        assert local.num_reqs == count
        assert local.max_query_len == theirs.max_query_len
        assert local.max_seq_len == theirs.max_seq_len
        ours = step.arrays.chunk_local_query_start_loc[: count + 1].tolist()
        assert ours == theirs.query_start_loc.tolist()
        seq_lens = step.arrays.chunk_local_seq_lens[:count]
        assert seq_lens.tolist() == theirs.seq_lens.tolist()
        blocks = -(-seq_lens // batch.block_size)  # what lies behind, nobody reads
        for row, owned in enumerate(blocks):
            expected = theirs.block_table_tensor[row, :owned].tolist()
            assert tables[group][row, :owned].tolist() == expected


def test_tables_of_a_layout_stay_at_their_address():
    entries = torch.arange(24, dtype=torch.int32)
    tables = LocalBlockTables(CPUDevice(), entries, LocalGroups(8, 2, (0, 3)), 5)
    first = tables.gather(torch.tensor([3, 0, 11, 11], dtype=torch.int32))
    assert {group: table.tolist() for group, table in first.items()} == {
        0: [[6, 7], [0, 1]],
        3: [[22, 23], [22, 23]],
    }
    places = {group: table.data_ptr() for group, table in first.items()}
    entries[7] = 99
    second = tables.gather(torch.tensor([3, 3, 3, 3], dtype=torch.int32))
    assert {group: table.data_ptr() for group, table in second.items()} == places
    assert second[3].tolist() == [[6, 99], [6, 99]]


def groups(*specs) -> list[list[AttentionGroup]]:
    """One attention group in each KV-cache group."""
    return [
        [AttentionGroup(AscendAttentionBackend, [f"layer {index}"], spec, index)]
        for index, spec in enumerate(specs)
    ]


def test_groups_with_chunks_are_found():
    full = FullAttentionSpec(**SHAPE, block_size=4)
    chunks = ChunkedLocalAttentionSpec(**SHAPE, block_size=4, attention_chunk_size=12)
    as_full = dataclasses.replace(full, attention_chunk_size=12)
    assert find_local_groups(groups(full, full)) == NO_LOCAL_GROUPS
    assert find_local_groups(groups(chunks, full, chunks)) == LocalGroups(12, 3, (0, 2))
    (one,), (other,) = groups(as_full, full)
    assert find_local_groups([[one, other]]) == LocalGroups(12, 3, (0,))


@pytest.mark.parametrize(("block_size", "chunk_size"), [(5, 12), (4, 16), (8, 12)])
def test_chunks_that_differ_or_cut_blocks_are_refused(block_size, chunk_size):
    chunks = ChunkedLocalAttentionSpec(**SHAPE, block_size=4, attention_chunk_size=12)
    other = ChunkedLocalAttentionSpec(
        **SHAPE, block_size=block_size, attention_chunk_size=chunk_size
    )
    with pytest.raises(PrepError, match="--block-size"):
        find_local_groups(groups(chunks, other))
    if chunk_size % block_size:
        with pytest.raises(PrepError, match="--block-size"):
            find_local_groups(groups(other))
