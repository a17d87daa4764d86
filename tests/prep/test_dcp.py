"""Contexts shared among ranks: upstream's slots and lengths, and each token on exactly one rank."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.v1.attention.backends.utils import get_dcp_local_seq_lens
from vllm.v1.worker import block_table

from tests.helpers.batches import RandomBatch, random_batches, step_batch
from tests.helpers.records import beside_oracle
from tests.helpers.triton_source import Source
from vllm_npu_prep.prep.batch import PreparedStep, prepare_step
from vllm_npu_prep.prep.checks import find_fault
from vllm_npu_prep.prep.dcp import NO_DCP, DCPRank
from vllm_npu_prep.prep.layout import StepLayout
from vllm_npu_prep.prep.oracle import OracleRequest
from vllm_npu_prep.prep.padding import no_padding
from vllm_npu_prep.prep.shape import EngineShape
from vllm_npu_prep.records.contract import dcp_variables

LIMITS = np.array([1 << 31, 1 << 20], np.int64)


@st.composite
def shared_contexts(draw) -> tuple[RandomBatch, int, int]:
    """A batch, a number of ranks and how many neighbours one of them keeps."""
    batch = draw(random_batches())
    sizes = [size for size in (1, 2, 4, 8, 16, 128) if batch.block_size % size == 0]
    return batch, draw(st.integers(2, 4)), draw(st.sampled_from(sizes))


def shared_step(
    batch: RandomBatch, dcp: DCPRank, num_padding_reqs: int = 0, num_padding_tokens: int = 0
) -> PreparedStep:
    """The batch of one rank; a request's first blocks stand for all of its tokens."""
    requests = [only_needed(request, batch.block_size, dcp) for request in batch.requests]
    step = step_batch(requests, batch.block_size, batch.max_model_len, batch.chunked_prefill)
    rows = len(step.tables.token_ids)
    owned = np.zeros((1, rows), np.int32)
    owned[0, : len(requests)] = [len(request.block_ids) for request in requests]
    step.tables = dataclasses.replace(
        step.tables,
        shape=EngineShape(max_logits_per_req=4, dcp=dcp),
        num_blocks=owned,
        num_synced_blocks=owned.copy(),
    )
    padding = no_padding(step.total_num_scheduled_tokens, step.num_reqs)
    padding = dataclasses.replace(
        padding,
        num_reqs_padded=padding.num_reqs_padded + num_padding_reqs,
        num_input_tokens=padding.num_input_tokens + num_padding_tokens,
    )
    return prepare_step(step, padding)


def only_needed(request: OracleRequest, block_size: int, dcp: DCPRank) -> OracleRequest:
    end = request.num_computed_tokens + request.num_scheduled_tokens
    count = -(-end // dcp.tokens_per_block(block_size))
    return dataclasses.replace(request, block_ids=request.block_ids[:count])


@given(shared_contexts())
def test_every_variable_equals_the_oracle(given_dcp):
    batch, world_size, size = given_dcp
    for rank in range(world_size):
        dcp = DCPRank(world_size, rank, size)
        step = shared_step(batch, dcp)
        requests = [only_needed(request, batch.block_size, dcp) for request in batch.requests]
        names, difference = beside_oracle(step, requests)
        assert difference is None
        assert names >= {f"dcp.{name}" for name in dcp_variables(step)}
        assert find_fault(step, LIMITS) is None


def upstream_slots(batch: RandomBatch, step: PreparedStep, dcp: DCPRank) -> list[int]:
    """What the source of vLLM's kernel makes of the same tables."""
    total = step.total_num_scheduled_tokens
    table = torch.from_numpy(step.batch.tables.block_table(0).copy())
    starts = torch.from_numpy(step.query_start_loc.copy())
    positions, slots = torch.from_numpy(step.positions.copy()), torch.full((total,), -9)
    sizes = batch.block_size, dcp.world_size, dcp.rank, dcp.interleave_size, -1, 1024
    given = total, total, starts, positions, table, table.shape[1], slots, *sizes
    Source(block_table, "kernel")[(step.num_reqs + 1,)](*given)
    return slots.tolist()


@settings(max_examples=settings.default.max_examples // 6)
@given(shared_contexts())
def test_slots_and_lengths_of_ranks_are_upstream_s(given_dcp):
    batch, world_size, size = given_dcp
    steps = [shared_step(batch, DCPRank(world_size, r, size)) for r in range(world_size)]
    for rank, step in enumerate(steps):
        dcp = DCPRank(world_size, rank, size)
        slots = step.slot_mapping[0]
        assert slots.tolist() == upstream_slots(batch, step, dcp)
        kept = slots[slots >= 0].tolist()
        assert len(set(kept)) == len(kept)
        for given_lens, lens in (
            (step.dcp_local_seq_lens, step.seq_lens),
            (step.dcp_local_context_lens, step.num_computed_tokens),
        ):
            lengths = torch.from_numpy(lens.copy())
            said = get_dcp_local_seq_lens(lengths, world_size, rank, size)
            assert given_lens.tolist() == said.tolist()
    has_slot = np.stack([step.slot_mapping[0] >= 0 for step in steps])
    assert (has_slot.sum(axis=0) == 1).all()


def small_step(rank: int) -> PreparedStep:
    request = OracleRequest(3, 6, 9, list(range(9)), [5, 7])
    batch = RandomBatch([request], 4, 32, None, None, True)
    return shared_step(batch, DCPRank(2, rank, 2))


def test_slots_of_a_small_step():
    """Positions 3 to 8 in runs of two: 0 1 | 2 3 | 4 5 | 6 7 | 8."""
    assert small_step(0).slot_mapping[0].tolist() == [-1, 22, 23, -1, -1, 28]
    assert small_step(1).slot_mapping[0].tolist() == [21, -1, -1, 22, 23, -1]
    lens = [(s.dcp_local_seq_lens[0], s.dcp_local_context_lens[0]) for s in map(small_step, (0, 1))]
    assert lens == [(5, 2), (4, 1)]


def test_other_engines_carry_nothing():
    layout = StepLayout(64, 8).arrays
    assert {layout[f"dcp_local_{name}_lens"].nbytes for name in ("seq", "context")} == {0}


@pytest.mark.parametrize(("world", "rank", "size"), [(2, 2, 1), (2, -1, 1), (2, 0, 0)])
def test_shards_that_cannot_be_are_refused(world, rank, size):
    with pytest.raises(ValueError, match="ranks count from 0"):
        DCPRank(world, rank, size)


def test_a_block_is_whole_runs():
    tables = small_step(0).batch.tables
    with pytest.raises(ValueError, match="whole runs"):
        dataclasses.replace(tables, shape=EngineShape(dcp=DCPRank(2, 0, 3)))


def test_the_rank_is_asked_for_only_if_contexts_are_shared():
    from vllm_npu_prep.attention.context_parallel import find_dcp

    assert find_dcp(SimpleNamespace(decode_context_parallel_size=1)) == NO_DCP
